"""Common parts of the modules that hand masks and positions to attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .masks import PADDING_IF_THAT_IS_ALL, view
from .replacement import enable


class Encoder:
    """Mixin of encoders. All attention inside must be ours: stock attention would misread the mask (B, 1, 1, Nk), or expect
    causality in it.

    ``attention``: our attention class, or several; the stock class is the last base of each.
    ``mask_function``: the encoder asks transformers for masks by its config, which becomes a view that names this function.
    None: the encoder makes its masks itself.
    """

    attention: type | tuple[type, ...]
    mask_function: str | None = PADDING_IF_THAT_IS_ALL

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # transformers looks up by class what output_hidden_states and the like may record, and enters it when a model is made.
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(cls), getattr(cls, "_can_record_outputs", None))

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        """Make a model of an enabled model's class; it is enabled, too. Its config may be that of the enabled model."""
        super().__init__(getattr(config, "stock", config), *args, **kwargs)  # type: ignore[call-arg]
        self.__class__ = type(self).__bases__[-1]
        enable(self, prove=False)

    def on_enable(self: Any) -> None:
        if self.mask_function:
            self.config = view(self.config, self.mask_function)

    def on_disable(self: Any) -> None:
        if self.mask_function:
            self.config = getattr(self.config, "stock", self.config)  # unless it was replaced meanwhile

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False, as the stock class does: weights are saved and loaded under the names of published checkpoints."""
        return False

    @classmethod
    def _can_set_attn_implementation(cls: Any) -> bool:
        """Return what the stock class does, which looks into its source file."""
        return cls.__bases__[-1]._can_set_attn_implementation()  # type: ignore[no-any-return]

    @classmethod
    def _can_set_experts_implementation(cls: Any) -> bool:
        """Return what the stock class does, which looks into its source file."""
        return cls.__bases__[-1]._can_set_experts_implementation()  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._require_our_attention()
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def _require_our_attention(self: Any) -> None:
        ours = self.attention if isinstance(self.attention, tuple) else (self.attention,)
        stock = tuple(each.__bases__[-1] for each in ours)
        strange = [name for name, each in self.named_modules() if isinstance(each, stock) and not isinstance(each, ours)]
        if strange:
            raise ValueError(
                f"this {type(self).__name__} is enabled, but of its attention {', '.join(strange)} is not: enable or disable "
                "the model as a whole (a class of your own in place of stock attention cannot be enabled)"
            )
