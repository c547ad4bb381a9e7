"""Replacement of configurations that do not fit a GPU: a smaller one takes their place, in this call and in all later ones."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from triton.runtime.errors import OutOfResources

from .tile_config import TileConfig

Launcher = TypeVar("Launcher", bound=Callable[..., Any])


@dataclass(frozen=True)
class Selection:
    """A selected configuration, and the kind of call that it is selected for."""

    kernel: str
    kind: tuple[Any, ...]
    config: TileConfig


_replacements: dict[Selection, Selection] = {}


class DoesNotFit(Exception):
    """A launch failed for lack of shared memory or other resources of a multiprocessor."""

    def __init__(self, place: Selection, cause: OutOfResources) -> None:
        super().__init__(place, cause)
        self.place, self.cause = place, cause


def current(place: Selection) -> Selection:
    """Return the place with its own configuration, or with the smaller one that has replaced it."""
    while _replacements and place in _replacements:  # to hash a place takes longer than to ask whether there are any
        place = _replacements[place]
    return place


def until_it_fits(launcher: Launcher) -> Launcher:
    """Wrap a launcher: whenever a selected configuration does not fit, it starts again with a smaller one, and warns.

    The wrapped launcher raises OutOfResources if not even the smallest configuration fits.
    """

    @functools.wraps(launcher)
    def run(*arguments: Any, **options: Any) -> Any:
        while True:
            try:
                return launcher(*arguments, **options)
            except DoesNotFit as error:
                place, smaller = error.place, error.place.config.smaller()
                if smaller is None:
                    raise error.cause from None
                text = f"{place.kernel}: {place.config} does not fit this GPU ({error.cause}); {smaller} is used instead"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                _replacements[place] = replace(place, config=smaller)

    return run  # type: ignore[return-value]
