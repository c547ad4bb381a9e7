"""The operator inside models of other libraries."""

from functools import partial
from typing import TYPE_CHECKING

from .._core.removed import refuse

if not TYPE_CHECKING:
    __getattr__ = partial(refuse, __name__)
