"""Classes in place of a library's attention classes: called as those are, with a forward of ours behind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from .comparison import Sample
from .enabled import ATTRIBUTE, enabled_class
from .libraries import NAMES
from .replacement import HARMLESS, Ours, Replacement

MASKS = ("attention_mask", "mask", "attn_mask")
BATCH, LENGTHS = 2, (7, 19)
"""Sequences of a comparison, and their lengths; the last one is ``longest`` of the class."""
SHORT = 64
"""Up to this length there are two sequences, with and without padding, and further modules of a class are also compared."""
FEWEST = 1 << 19
"""Scores of a call on a CPU from which on ours is no slower than the stock forward, which gets all smaller calls. Measured with
the packages of docs/enable.md, 1 and 8 sequences of 32 to 512 positions: below it was faster, by up to a factor of two."""


class InPlace(Ours):
    """Mixin of classes in place of a library's: ``forward`` is ours. It gets each argument by our name for it, and the small
    forms of what other layers pass on.

    A call with an argument that our forward has no parameter for is the stock forward's, unless it has its default or is in
    ``HARMLESS``. forward, ``serves`` and ``pairs`` get only the arguments that they name, or all if they have ``**kwargs``.
    """

    if TYPE_CHECKING:
        forward: Callable[..., Any]
        config: Any

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the stock class."""

    mask_hides = False
    """Whether a boolean mask of the stock forward is True of what is hidden, not of what is seen."""
    fewest = FEWEST

    @property
    def longest(self: Any) -> int:
        """The largest length that is compared: more than windows and tables have rows, if that is not too many."""
        return 40

    def example(self: Any, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        """Return arguments of the stock forward, on torch's default device. real: (B, N), bool, True of what is no padding."""
        raise NotImplementedError

    def serves(self: Any, **given: Any) -> bool:
        """Return whether ours computes a call; its arguments are as other layers passed them on."""
        return True

    def passed_on(self: Any, result: Any, given: dict[str, Any]) -> Any:
        """Return what ours returns, as the next layer gets it. given: arguments by our names, as other layers passed them on."""
        return result

    def pairs(self: Any, *args: Any, **given: Any) -> int:
        """Return how many scores the stock forward computes."""
        states = next(iter(given.values()))
        others, cache = given.get("key_value_states", given.get("key")), cast(Any, given.get("cache"))
        queries = states.shape[1:-1].numel()
        keys = queries if others is None else others.shape[1]
        if hasattr(cache, "get_seq_length"):
            keys += int(cache.get_seq_length(getattr(self, "layer_idx", 0) or 0))
        return int(states.shape[0] * num_heads(self) * queries * self.keys_per_query(keys))

    @staticmethod
    def num_positions(given: dict[str, Any]) -> int:
        """Return the number of positions of the first argument: states (B, ..., C), or a number."""
        states = next(iter(given.values()))
        return states if isinstance(states, int) else states.shape[1:-1].numel()  # type: ignore[no-any-return]

    @staticmethod
    def one_sequence(arguments: dict[str, Any], pairs: int) -> None:
        """A call that is too large to be compared is not compared in part."""

    def keys_per_query(self: Any, keys: int) -> int:
        """Return how many keys' scores the stock forward computes for a query: all but in windows and blocks."""
        return keys

    @classmethod
    def visible(cls, mask: torch.Tensor) -> torch.Tensor:
        """Return a mask of the stock forward as a boolean one, True of what a query sees."""
        if mask.is_floating_point() and mask.dim() > 2:  # it is added; (B, N) has 1 and 0
            return mask > torch.finfo(mask.dtype).min / 2
        return mask == 0 if cls.mask_hides else mask != 0

    @classmethod
    def counted(cls, mask: torch.Tensor) -> torch.Tensor | None:
        """Return which positions of the output are compared (B, N, 1), those that see a key by the stock mask; None: all."""
        visible = cls.visible(mask)
        if mask.dim() == 2:
            return visible[..., None]
        if mask.dim() < 4:
            return None
        visible = visible.any(-1).any(1).flatten(1)  # (B, H, N, keys) or (B, H, blocks, size, keys)
        return visible[..., None] if visible.shape[-1] > 1 else None

    @classmethod
    def candidates(cls, module: Any, model: Any) -> Iterator[tuple[str, Callable[[], Replacement]]]:
        """Yield descriptions of replacements for a module, and functions that return them: here one. model: its shadow."""
        yield "", lambda: getattr(enabled_class(type(module), cls, None), ATTRIBUTE)

    @classmethod
    def prepare_model(cls, model: Any) -> None:
        """Give a shadow, which the comparison runs on, this class, and prepare it."""
        model.__class__ = enabled_class(type(model), cls, None)
        model.prepare()
        model.without_dropout()

    @classmethod
    def replacement(cls, stock: Any, _: Any) -> Replacement:
        """Return ours in place of a stock class, whose arguments have the same names but for those in NAMES."""
        any_name = inspect.Parameter.VAR_KEYWORD
        own = [name for name, item in inspect.signature(cls.forward).parameters.items() if item.kind is not any_name][1:]
        parameters = inspect.signature(stock.forward).parameters
        names = {theirs: name for name in own for theirs in NAMES.get(name, (name,))}
        ignores_more = any(item.kind is any_name for item in parameters.values())
        harmless = (HARMLESS if ignores_more else HARMLESS & parameters.keys()) - names.keys()
        mask = next((name for name in parameters if name in MASKS), "")
        return Replacement(stock, cls, cls.forward, names, harmless=harmless, mask=mask)

    def prepare(self: Any) -> None:
        """Change a shadow: what the module has kept of earlier calls."""

    def without_dropout(self: Any) -> None:
        """Switch dropout of a shadow off where it is neither torch's function nor its module."""

    def samples(self: Any, is_light: bool) -> Iterator[Sample]:
        """Yield arguments for a comparison. is_light: another module of the class was compared."""
        for length in sorted({*LENGTHS, self.longest}):
            if is_light and length > SHORT:
                return
            is_short = length <= SHORT
            for name in ("without a mask", "with padding") if is_short else ("with padding",):
                batch = BATCH if is_short else 1
                given = self.example(batch, length, padded(batch, length) if name == "with padding" else None)
                count = self.num_positions(given)
                yield Sample(f"{count} positions, {name}", given, (count, count))

    def at_length(self, length: int, parent: Any) -> dict[str, Any]:
        """Return arguments of the stock forward for one sequence, to count memory. parent: the module around this one."""
        return self.example(1, length, None)


def padded(batch: int, length: int) -> torch.Tensor:
    """Which positions of sequences are real (B, N), bool: at least half of each one's, and one."""
    return torch.arange(length) < torch.randint(max(length // 2, 1), length + 1, (batch,))[:, None]


HEADS = ("num_heads", "num_attention_heads", "n_heads", "h", "heads")


def num_heads(module: Any, default: int = 1) -> int:
    """Return the number of heads of an attention module, as it or its config has it."""
    counts = (getattr(owner, name, None) for owner in (module, getattr(module, "config", None)) for name in HEADS)
    return next((count for count in counts if isinstance(count, int)), default)
