"""Common parts of the modules that pass masks and positions to attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..compact import STOCK_READS
from ..enable import enable_in
from ..replacement import PassesOn
from .masks import PADDING_IF_THAT_IS_ALL, view

_ASKED: list[bool] = []
STOCK_READS.append(lambda: bool(_ASKED))


def with_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that passes on what stock attention takes if weights are asked for as output_attentions."""

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("output_attentions")
        if asked is None:
            asked = getattr(getattr(self, "config", None), "output_attentions", False)
        if not asked:
            return forward(self, *args, **kwargs)
        _ASKED.append(True)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _ASKED.pop()

    return run


class Encoder(PassesOn):
    """Mixin of encoders that pass on small masks: by a function that their config names, or, without one, their own."""

    mask_function: str | None = PADDING_IF_THAT_IS_ALL

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "stock_class" in vars(cls):
            cls.forward = with_weights(cls.forward)  # type: ignore[attr-defined]

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        """Make a model of an enabled model's class, and enable it. Its config may be that of the enabled model."""
        super().__init__(getattr(config, "stock", config), *args, **kwargs)  # type: ignore[call-arg]
        self.__class__ = self.stock_class
        enable_in(self, (), True, ("transformers",), structures=False)

    def on_enable(self: Any) -> None:
        if self.mask_function and hasattr(self, "config"):
            self.config = view(self.config, self.mask_function)

    def on_disable(self: Any) -> None:
        if self.mask_function and hasattr(self, "config"):
            self.config = getattr(self.config, "stock", self.config)  # unless it was replaced meanwhile
