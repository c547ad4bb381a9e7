"""Small models of Hugging Face transformers, stock and enabled, and their outputs and gradients side by side."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench import families
from bench.families import FAMILIES
from tests.conftest import forget_warnings
from tests.enable import stock
from tests.tolerance import assert_near
from triton_relattn.integrations.transformers import disable, door, enable
from triton_relattn.testing import dropout_mask

LENGTH = 37
"""Frames or tokens: unlike any width of the small models, no multiple of a chunk, longer than all windows and tables."""
WHOLE, PADDED = [LENGTH, LENGTH], [LENGTH, 22]
SHARPER: dict[str, dict[str, Any]] = {"gemma4": {"attention_logit_cap": 3.0}}
"""Settings that expose errors in a family's attention: a softcap low enough to change the logits."""
T5 = ("t5", "mt5", "umt5", "switch_transformers", "pop2piano", "pix2struct")
THROUGH_THE_DOOR = {*T5, "longt5", "wav2vec2_bert", "wav2vec2_conformer", "seamless_m4t"}
"""Folders of families that keep their classes: their configs name our attention implementation."""
WAVLM = ("wavlm", "wavlm_stable")
SEQ2SEQ = ["t5", "mt5", "umt5", "switch_transformers", "longt5"]
"""Models that read with an encoder and write with a decoder; the other writers do both at once."""
WRITERS = [name for name, family in FAMILIES.items() if family.writer]
CAUSAL = ("inkling", "bloom", "mpt", "falcon", "longt5", *T5)
Results = dict[str, torch.Tensor]
Given = dict[str, Any] | tuple[Any, ...]
"""Arguments by name, or by place."""


def build(name: str, dtype: torch.dtype = torch.float32, layers: int = 2, **changes: Any) -> Any:
    """A small model of a family, with no zero parameters. Older versions of transformers lack some families."""
    folder = FAMILIES[name].folder
    pytest.importorskip(f"transformers.models.{folder}", reason="not in this version of transformers")
    if folder in THROUGH_THE_DOOR and not any(f".{folder}." in kind.__module__ for kind in door.SERVED):
        pytest.skip("not served in this version of transformers")
    torch.manual_seed(0)
    model: nn.Module = FAMILIES[name].build(small=True, layers=layers, **{**SHARPER.get(name, {}), **changes})
    return in_dtype(varied(model), dtype)


def small_t5() -> Any:
    """A model of a library, as the command line takes it."""
    return build("t5")


def subject(
    name: str, dtype: torch.dtype = torch.float32, lengths: list[int] = PADDED, **changes: Any
) -> tuple[Any, dict[str, Any]]:
    """A model of a family, or "toy", which belongs to no library, with inputs long enough for the operator to run."""
    if name != "toy":
        model = build(name, dtype, **changes)
        return model, arguments(name, model, lengths)
    torch.manual_seed(0)
    toy = nn.Sequential(*(stock.Block(stock.ShawAttention()) for _ in range(2)))
    return toy.to(dtype).eval(), {"input": torch.randn(16, 128, 32, dtype=dtype)}


def writer(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A small model of a family with a language-modelling head that never emits an end token."""
    family = FAMILIES[name]
    assert family.writer
    model = build(name, dtype, make=family.find(family.writer), **changes)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


def in_dtype(model: nn.Module, dtype: torch.dtype) -> Any:
    """The model with its parameters in dtype, except those that transformers keeps in float32."""
    model.to(dtype)
    in_float32 = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if dtype.itemsize < 4:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if any(part in name for part in in_float32) and tensor.is_floating_point():
                tensor.data = tensor.data.float()
    return model


def varied(model: nn.Module) -> Any:
    """The model with all its parameters changed at random."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def arguments(name: str, model: nn.Module, lengths: list[int], length: int = LENGTH) -> dict[str, Any]:
    """Return arguments for the model's forward, in the dtype of its parameters."""
    torch.manual_seed(1)
    return in_precision(FAMILIES[name].make(model, length, lengths), next(model.parameters()).dtype)


def in_precision(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in given.items()}


def real(lengths: list[int], length: int = LENGTH) -> torch.Tensor:
    """(B, length, 1), True at positions that are not padding."""
    return (torch.arange(length) < torch.tensor(lengths)[:, None])[..., None]


def padding_first(count: int, length: int = LENGTH) -> torch.Tensor:
    """(2, length), 0 at the first `count` tokens of the first sequence, 1 elsewhere."""
    return (torch.arange(length) >= torch.tensor([[count], [0]])).long()


def counting(name: str, lengths: list[int], length: int = LENGTH) -> torch.Tensor | None:
    """The positions to compare: those that are not padding, in families whose output at padding may differ.

    In causal models, queries that see no key are compared too if padding comes last: those of an all-padding sequence.
    """
    return real(lengths, length) if not FAMILIES[name].padding_matters or (name in CAUSAL and 0 in lengths) else None


def counted(out: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """The output (B, frames, C) with zeros where positions are not compared. A frame counts if all positions it covers do."""
    if counts is None or counts.shape[-1] > 1:
        return out if counts is None else out.where(counts, 0.0)
    size = -(-counts.shape[1] // out.shape[1])
    padded = nn.functional.pad(counts, (0, 0, 0, out.shape[1] * size - counts.shape[1]))
    return out.where(padded.unflatten(1, (out.shape[1], size)).all(2), 0.0)


def exactly(model: Any) -> AbstractContextManager[Any]:
    """What a float64 model is computed in: casts of its library to float32 would round."""
    parameters = getattr(model, "parameters", lambda: ())()
    return in_float64() if next(iter(parameters), torch.zeros(0)).dtype == torch.float64 else nullcontext()


def forward(model: Callable[..., Any], given: Given) -> torch.Tensor:
    copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in by_key(given).items()}
    return families.output(model(**copies) if isinstance(given, dict) else model(*copies.values()))


def output(model: Callable[..., Any], given: Given) -> torch.Tensor:
    with torch.no_grad(), exactly(model):
        return forward(model, given)


def calls_within(model: Any, given: Given, paths: Iterable[str]) -> dict[Any, dict[str, Any]]:
    """The arguments, by their names, that a model passes to one module of each class at these paths."""
    parts, found = {type(part): part for part in map(model.get_submodule, paths)}.values(), dict[Any, dict[str, Any]]()

    def note(part: nn.Module, args: Any, kwargs: Any) -> None:
        found[part] = {**dict(zip(inspect.signature(part.forward).parameters, args, strict=False)), **kwargs}

    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
    output(model, given)
    for hook in hooks:
        hook.remove()
    return found


def assert_odd_calls_are_stock(model: Any, given: Given, switch: Callable[[Any], dict[str, str]]) -> None:
    """Of what a model passes to a module, one argument is left out, a boolean mask has numbers, or another argument is named
    before the states: once switch(model) has enabled it, the results are the same, wherever the stock forward has any."""
    paths = [path for path, kind in switch(model).items() if not kind.endswith("Bias")]  # ours is in parts
    disable(model)
    calls = list[tuple[nn.Module, dict[str, Any], Any]]()
    for part, passed in (within := calls_within(model, given, paths)).items():
        _, *others = passed
        masks = [(name, value) for name, value in passed.items() if getattr(value, "dtype", None) == torch.bool]
        numbers = ({**passed, name: value} for name, mask in masks for value in (mask.long(), mask.double() - 1))
        for call in (dict(reversed(passed.items())), *({**passed, other: None} for other in others), *numbers):
            with suppress(Exception):
                calls.append((part, call, output(part, copy.deepcopy(call))))  # a cache grows
    switch(model)
    assert {part for part, *_ in calls} == within.keys() != set()
    for part, call, expected in calls:
        for _ in ("compared", "not compared"):
            assert_near("output", output(part, copy.deepcopy(call)), expected)


def by_key(given: Given) -> dict[Any, Any]:
    """Arguments by their names or places."""
    return given if isinstance(given, dict) else dict(enumerate(given))


class Sizes(TorchDispatchMode):
    """Shapes of all tensors that a call allocates, except inside the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.operators.add(str(func))
        if not func.is_view:  # an expanded mask takes no memory
            returned = made if isinstance(made, (tuple, list)) else [made]
            self.shapes += [tuple(tensor.shape) for tensor in returned if isinstance(tensor, torch.Tensor)]
        return made

    @property
    def ours(self) -> bool:
        """Whether the operator ran. Its output may equal the stock model's bit for bit."""
        return any("triton_relattn" in operator for operator in self.operators)

    def squares(self, length: int) -> list[tuple[int, ...]]:
        return [shape for shape in self.shapes if sum(size >= length - 1 for size in shape) > 1]


def runs_the_operator(model: nn.Module, given: Given) -> bool:
    with Sizes() as sizes:
        output(model, given)
    return sizes.ours


def assert_as_stock(
    module: nn.Module, *given: Any, is_ours: bool | None = None, counts: torch.Tensor | None = None, **arguments: Any
) -> None:
    """A module computes what its stock class does, and bit for bit if the stock forward runs. is_ours: whether the operator must
    run; counts: the positions to compare."""
    plain = copy.deepcopy(module)
    disable(plain)
    outs = []
    for part in (module, plain):
        torch.manual_seed(3)
        with torch.no_grad(), Sizes() as sizes:
            outs.append(part(*given, **arguments))
        assert part is plain or is_ours is None or sizes.ours == is_ours
    ours, expected = (out if type(out) is tuple else (families.output(out),) for out in outs)
    assert type(outs[0]) is type(outs[1]) and len(ours) == len(expected)
    for found, right in zip(ours, expected, strict=True):
        assert type(found) is type(right)
        if right is not None:
            assert is_ours is not False or torch.equal(found, right)
            assert_near("out", counted(found, counts), counted(right, counts))


def classes(model: nn.Module) -> list[tuple[str, type]]:
    """The names of all modules, and their classes."""
    return [(name, type(module)) for name, module in model.named_modules()]


def held(model: nn.Module) -> list[Any]:
    """All that a model holds: to compare before and after."""
    return [(type(part), dict(vars(part))) for part in model.modules()]


def attentions(model: nn.Module, enabled: dict[str, str]) -> list[nn.Module]:
    """The attention of a model that was enabled."""
    return [model.get_submodule(path) for path, kind in enabled.items() if "Attention" in kind]


def through_a_file(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "a copy": copy.deepcopy,
    "a file": through_a_file,
    "a pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def through_the_door(model: Any) -> None:
    """Name our attention implementation in the configs, also of a stack that is no whole model."""
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = "triton_relattn"


@contextmanager
def planted(model: nn.Module, fault: Callable[..., Any]) -> Iterator[None]:
    """Compute fault(function, *args) in place of the function that computes a model's attention."""
    kinds = (type(part) for part in model.modules() if "Attention" in type(part).__name__)
    replacement = next((kind._triton_relattn for kind in kinds if hasattr(kind, "_triton_relattn")), None)
    owner, name = (replacement, "function") if replacement else (door, "fused_relative_attention")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, partial(fault, getattr(owner, name)))
        yield


def fails(*_: Any, **__: Any) -> Any:
    """A fault for planted()."""
    raise IndexError("planted")


def times(factor: Callable[..., Any]) -> Callable[..., Any]:
    """A fault for planted(): the output is multiplied by factor(output, *args)."""

    def fault(true: Any, *args: Any, **kwargs: Any) -> Any:
        result = true(*args, **kwargs)
        out, *more = result if isinstance(result, tuple) else (result,)
        out = out * factor(out, *args)
        return (out, *more) if isinstance(result, tuple) else out

    return fault


@contextmanager
def said() -> Iterator[list[str]]:
    """The warnings of the package, also those that are given once per process."""
    forget_warnings()
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught if "triton_relattn" in str(warning.message)]


def parts(model: Any) -> list[nn.Module]:
    """The module itself, or the modules that an object such as a pipeline holds."""
    if isinstance(model, nn.Module):
        return [model]
    values = {**vars(model), **getattr(model, "components", {})}.values()
    return [value for value in values if isinstance(value, nn.Module)]


def results(
    model: Any, given: Given = (), counts: torch.Tensor | None = None, seed: int = 2, run: Callable[..., Any] = forward
) -> Results:
    """The output of run(model, given), and gradients of parameters and of inputs in the model's dtype, for a random one of the
    output. Both are zero at positions that are not compared."""
    named = [(f"{n or ''}{name}", weight) for n, part in enumerate(parts(model)) for name, weight in part.named_parameters()]
    weights = dict(named)
    dtype = next(iter(weights.values())).dtype
    torch.manual_seed(seed)
    np.random.seed(seed)
    inputs = {
        key: value.detach().clone().requires_grad_()
        if getattr(value, "dtype", None) == dtype and "mask" not in str(key)
        else value
        for key, value in by_key(given).items()
    }
    leaves = {**{f"input {key}": value for key, value in inputs.items() if getattr(value, "requires_grad", False)}, **weights}
    for leaf in leaves.values():
        leaf.grad = None
    with exactly(parts(model)[0]):
        out = run(model, inputs if isinstance(given, dict) else tuple(inputs.values()))
        if not out.requires_grad:
            return {"out": out}
        d_out = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(out.dtype)
        out.backward(counted(d_out, counts))
    gradients = {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}
    return {"out": counted(out.detach(), counts), **gradients}


def both(model: nn.Module, given: Given, counts: torch.Tensor | None = None) -> tuple[Results, Results]:
    """Results of the enabled model, which runs the operator, and of the same model before."""
    stock = results(model, given, counts)
    assert enable(model)
    with Sizes() as sizes:
        ours = results(model, given, counts)
    assert sizes.ours
    disable(model)
    return ours, stock


def assert_same(ours: Results, stock: Results) -> None:
    """Compare relative to each tensor's largest value; gradients that cancel to zero, relative to the largest gradient."""
    assert ours.keys() == stock.keys()
    assert len(stock) > 4, "no gradients"
    largest = max(float(result.abs().max()) for name, result in stock.items() if name != "out")
    for name, expected in stock.items():
        assert expected.isfinite().all(), f"{name} of the stock model is not finite"
        assert_near(name, ours[name], expected, smallest=largest / 100)


@contextmanager
def in_float64() -> Iterator[None]:
    """Keep transformers' casts to float32 from rounding float64 tensors, so that every family computes in float64."""
    to, to_float, softmax, zeros_like = torch.Tensor.to, torch.Tensor.float, nn.functional.softmax, torch.zeros_like
    make = torch.tensor

    def leave(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rounds = tensor.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values())
        return tensor if rounds else to(tensor, *args, **kwargs)

    def leave_softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        return softmax(tensor, dim, dtype=None if tensor.dtype == torch.float64 else dtype, **kwargs)

    def leave_zeros(tensor: torch.Tensor, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        return zeros_like(tensor, dtype=None if tensor.dtype == torch.float64 and dtype == torch.float32 else dtype, **kwargs)

    def make_double(data: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        called_by_transformers = sys._getframe(1).f_globals["__name__"].startswith("transformers.")
        return make(data, dtype=torch.float64 if called_by_transformers and dtype == torch.float32 else dtype, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", make_double)  # used for DeBERTa's scale
        patch.setattr(torch, "zeros_like", leave_zeros)
        patch.setattr(torch.Tensor, "to", leave)
        patch.setattr(torch.Tensor, "float", lambda tensor: tensor if tensor.dtype == torch.float64 else to_float(tensor))
        patch.setattr(nn.functional, "softmax", leave_softmax)
        yield


@contextmanager
def operators_dropout(heads: int, one_by_one: bool = False) -> Iterator[None]:
    """Make stock attention drop the same probabilities as the operator. one_by_one: as if each sequence were a separate call."""
    original = nn.functional.dropout

    def dropout(states: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        square = states.dim() > 2 and states.shape[-1] == states.shape[-2]
        if not (square and training and p > 0):
            return original(states, p, training, inplace)
        probabilities = states if states.dim() == 4 else states.unflatten(0, (-1, heads))
        batch, _, queries, keys = probabilities.shape
        keep = [dropout_mask(count, heads, queries, keys, p) for count in ([1] * batch if one_by_one else [batch])]
        return (probabilities * torch.cat(keep) / (1 - p)).view_as(states)

    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
        """scaled_dot_product_attention computed explicitly, because its own dropout cannot be patched."""
        assert not is_causal
        logits = (query.shape[-1] ** -0.5 if scale is None else scale) * query @ key.mT
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, torch.finfo(logits.dtype).min)
        elif attn_mask is not None:
            logits = logits + attn_mask
        return dropout(logits.softmax(-1), dropout_p, dropout_p > 0) @ value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "dropout", dropout)
        patch.setattr(nn.functional, "scaled_dot_product_attention", attend)
        yield
