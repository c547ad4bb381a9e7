"""The comparison of a stock forward with ours before enable replaces a class: on a shadow of the module with random weights, in
float64 on the CPU, outputs and gradients, in eval and in training mode.

Nothing is compared with another module's results, or with those of another process: a setting that cannot be described, a class
that was defined a minute ago, a library's next version are compared as they are.
"""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import math
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .shadow import shadow, widths

if TYPE_CHECKING:
    from .replacement import Replacement, Sample
    from .structure.kind import Kind, Reading

Results = dict[str, torch.Tensor]
Forward = Callable[[Any, dict[str, Any]], Any]
T = TypeVar("T")
OUTPUT, GRADIENT = "the output", "the gradient of "
LIMIT = 2.0**-30
"""The largest difference that passes in float64, as a share of a tensor's largest number: 64 times finer than float32's rounding,
so that no user of float32 sees it, and 2**23 times float64's, of which our modules make 2**9 at most."""
FLOAT32_LIMIT = 2.0**-10
"""The same for outputs in float32: 2**14 roundings, far from what a wrong term makes of random weights."""
SCRIPTED_LIMIT = 2.0**-18
"""The same for classes with scripted functions, which round single numbers to float32 (DeBERTa before transformers 5.23)."""
MOST_WEIGHTS = 1 << 24
"""Weights of a module up to which they are float64; of larger ones a copy in float64 takes time and memory."""
_RANDOM_STATE = threading.RLock()


class Differs(Exception):
    """Ours computes something else; the message says what differs, and by how much.

    difference: as a share of the largest number; infinite if results cannot be compared.
    """

    def __init__(self, message: str, difference: float = math.inf) -> None:
        super().__init__(message)
        self.difference = difference


class Refused(Exception):
    """A module has relative attention, and is left as it is; the message says why."""


def compared(kind: type[Kind], module: nn.Module, known: Reading | None = None) -> tuple[Reading, float]:
    """Return the reading of a module with which ours computes what its class does, and the largest difference.

    Args:
        known: a reading of another module of this class: it is tried first, with fewer samples.

    Raises:
        Refused: there is none, or the stock forward cannot be run.
    """
    return apart(lambda: _compared(kind, module, known))


def _compared(kind: type[Kind], module: nn.Module, known: Reading | None) -> tuple[Reading, float]:
    model, plain = with_random_weights(module), with_own_buffers(module)
    for made in (model, plain):
        if made is not None:
            kind.prepare(made)
            for number, each in enumerate(each for each in made.modules() if isinstance(each, nn.Dropout)):
                each.p = 0.05 * (number % 15 + 1)  # so that none is taken for another
    if known is not None:
        try:
            return known, _difference(kind(type(model), known), model, plain, is_light=True)
        except Exception:  # of this module another reading may be the right one
            pass
    nearest: tuple[int, float, str] | None = None
    for unobserved in kind.readings(module):
        agreed: list[float] = []
        try:
            reading = _observed(kind, unobserved, model)
            return reading, _difference(kind(type(model), reading), model, plain, agreed=agreed)
        except Refused:
            raise
        except Differs as found:
            difference, said = found.difference, str(found)
        except Exception as error:  # a stock forward may raise anything
            difference, said = math.inf, f"{type(error).__name__}: {first_line(error)}"
        if nearest is None or (-len(agreed), difference) < nearest[:2]:
            nearest = -len(agreed), difference, f"{said} (read as {kind.words(unobserved)})"
    raise Refused("it computes something else, or takes other arguments. " + (nearest or (0, 0.0, ""))[2])


def compared_class(of: Replacement, module: nn.Module, is_light: bool) -> float:
    """Compare what a module of a library's class computes with ours, and return the largest difference.

    is_light: with fewer samples, as another module of its class was compared.

    Raises:
        Refused: it computes something else, or cannot be run.
    """

    def compare() -> float:
        model, plain = with_random_weights(module), with_own_buffers(module)
        for made in (model, plain):
            if made is not None:
                of.prepare(made)
        try:
            return _difference(of, model, plain, is_light)
        except Exception as error:  # a stock forward may raise anything
            said = str(error) if isinstance(error, Differs) else f"{type(error).__name__}: {first_line(error)}"
            raise Refused(f"it computes something else, or takes other arguments. {said}") from error

    return apart(compare)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def with_random_weights(module: nn.Module, device: str = "cpu", changes_buffers: bool = True) -> Any:
    """Return a shadow whose weights are random, so that none is zero, in float64; in float32 if there are many. On the device
    "meta" they are in float32, and have no values.

    Quantised projections, which have no floating-point weights, are linear layers of the same widths. changes_buffers: a buffer
    that has no effect, as a mask of ones, must not be taken for one that is not used; one that has ones and zeros must keep them.
    """
    count = sum(each.numel() for each in module.parameters())
    dtype = torch.float64 if count <= MOST_WEIGHTS and device == "cpu" else torch.float32
    generator = torch.Generator().manual_seed(0)
    deviations: dict[int, float] = {}  # with which attention is neither even nor all on one key

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        if not (is_parameter or tensor.is_floating_point()):
            return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device, copy=True)
        if not (is_parameter or tensor.is_meta or changes_buffers):
            return tensor.detach().to(device, dtype, copy=True)
        new = torch.empty(tensor.shape, dtype=dtype, device=device)
        if device == "meta":
            return nn.Parameter(new) if is_parameter else new
        new.normal_(generator=generator)
        if is_parameter:
            return nn.Parameter(new.mul_(deviations.get(id(tensor), 0.5)))
        return new if tensor.is_meta else new.mul_(0.1).add_(tensor.detach().to("cpu", dtype))

    def replace(each: nn.Module) -> nn.Module | None:
        found = widths(each)
        if found is None:
            return None
        for weight in each.parameters(recurse=False):
            if weight.dim() > 1:
                deviations[id(weight)] = math.prod(weight.shape[1:]) ** -0.5
        if isinstance(each, nn.Sequential) or any(_is_plain(weight) for weight in each.parameters()):
            return None
        bias = getattr(each, "bias", None)
        has_bias = (bias() if callable(bias) else bias) is not None
        linear = nn.Linear(*found, bias=has_bias, dtype=dtype, device="meta")
        deviations[id(linear.weight)] = found[0] ** -0.5
        return shadow(linear, convert)  # type: ignore[no-any-return]

    with torch.no_grad():
        model = shadow(module, convert, replace=replace)
    for each in model.modules():
        if "_old_forward" in vars(each):  # accelerate's hooks load the weights of the module itself
            vars(each).pop("forward")
    return model


def with_own_buffers(module: nn.Module) -> Any:
    """Return the same with the module's own buffers; None if that is no other."""
    has_any = any(each.is_floating_point() for each in module.buffers())
    return with_random_weights(module, changes_buffers=False) if has_any else None


def _is_plain(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.is_floating_point()


def _observed(kind: type[Kind], reading: Reading, model: Any) -> Reading:
    """Return the reading, with what runs of the stock forward show: which children drop what, and what it returns.

    Raises:
        Refused: what it computes depends on calls before.
    """
    stock, sample = type(model), next(kind.examples(model, reading))
    run, dropped, probabilities = _again(model), dict[str, torch.Size](), list[float]()
    for name, child in run.named_children():
        if isinstance(child, nn.Dropout):
            child.register_forward_pre_hook(lambda _, given, name=name: dropped.__setitem__(name, given[0].shape))
    for training in (True, False):
        run.train(training)
        before = _attributes(run)
        with (
            torch.no_grad(),
            _in_precision_of(model),
            Dropout(lambda each: _are_weights(each.shape, sample) and are_shares(each)) as dropout,
        ):
            found = [stock.forward(run, **_arguments(sample, model)) for _ in range(2)]
        returned = _returned(found[0], sample)
        probabilities += dropout.noted
        changed = {name: value for name, value in _attributes(run).items() if not _is_same(value, before.get(name))}
        counted = [name for name, value in changed.items() if isinstance(value, (bool, int, float, str))]
        if counted or not torch.equal(*(next(values(each)) for each in found)):
            left = counted or list(changed) or ["something"]
            raise Refused(f"its forward changes {', '.join(left)}, on which what it computes next may depend")
    uncalled = [name for name, child in run.named_children() if isinstance(child, nn.Dropout) and name not in dropped]
    # Torch's fused attention takes the probability of one that is not called.
    weights = [name for name, shape in dropped.items() if _are_weights(shape, sample)] or uncalled
    if not weights:
        weights = [name for name, value in vars(run).items() if type(value) is float and value in probabilities]
    size = next(values(found[0])).numel()
    others = [name for name, shape in dropped.items() if name not in weights and shape.numel() == size]
    channels, heads = kind.size_of(model, reading)
    return dataclasses.replace(
        reading,
        drops=next(iter(weights), None),
        drops_out=next(iter(others), None),
        returns=returned,
        channels=channels,
        heads=heads,
    )


OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that torch's own class has."""


class _Version(int):
    """How often a buffer was changed in place."""


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module and its children by name, and how often buffers were changed."""
    found: dict[str, Any] = {}
    for path, each in model.named_modules():
        prefix = f"{path}." if path else ""
        found |= {prefix + name: value for name, value in vars(each).items() if name not in OF_MODULES}
        found |= {prefix + name: _Version(value._version) for name, value in each._buffers.items() if value is not None}
    return found


def _is_same(value: Any, before: Any) -> bool:
    return value is before or (isinstance(value, (bool, int, float, str)) and type(value) is type(before) and value == before)


def _again(model: Any) -> Any:
    """Return a shadow with the same parameters, and with buffers of its own."""
    return shadow(model, lambda tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone())


def _are_weights(shape: torch.Size, sample: Sample) -> bool:
    """Return whether a tensor of this shape has a number for each pair of a query and a key."""
    return len(shape) >= 3 and shape[-2:] == sample.pairs


def are_shares(tensor: torch.Tensor) -> bool:
    """Return whether no number is negative, and no row's sum is more than one, as of attention weights and not of scores."""
    sums = tensor.detach().sum(-1, dtype=torch.float32)
    return not bool((tensor < 0).any()) and not bool((sums > 1.05).any())


def _difference(of: Replacement, model: Any, plain: Any, is_light: bool = False, agreed: list[float] | None = None) -> float:
    """Compare all samples, and return the largest difference; agreed: receives that of each one, as far as they agree.

    plain: as of with_own_buffers, for one sample.

    Raises:
        Differs: one is too large.
    """
    agreed = [] if agreed is None else agreed
    samples = list(of.samples(model, is_light))
    is_single = _dtype_of(model) == torch.float32
    limit = FLOAT32_LIMIT if is_single else SCRIPTED_LIMIT if is_scripted(of.stock) else LIMIT
    for sample, gradients, training in _light(samples) if is_light else _runs(samples):
        agreed.append(_compare(of, model, sample, gradients, training, limit))
    if plain is not None:
        agreed.append(_compare(of, plain, samples[-1], False, False, limit))
    if not is_light and not is_single:
        single = shadow(model, lambda tensor: _cast(tensor, torch.float32))
        for sample in {each.pairs: each for each in samples}.values():  # one of each shape
            named = sample._replace(name=f"{sample.name}, in float32")
            _compare(of, single, named, False, False, FLOAT32_LIMIT)
    return max(agreed)


def is_scripted(stock: type[nn.Module]) -> bool:
    """Return whether a class's file has scripted functions, whose casts to float32 stay in float64."""
    module = sys.modules.get(stock.__module__)
    return module is not None and any(isinstance(each, torch.jit.ScriptFunction) for each in vars(module).values())


def _arguments(sample: Sample, model: nn.Module) -> dict[str, Any]:
    """Return a sample's arguments, which a forward may write to, in the dtype of the model."""
    dtype = _dtype_of(model)
    return {name: _cast(each, dtype) for name, each in copied(sample.given).items()}


def _in_precision_of(model: nn.Module) -> Any:
    """Let forwards of a model in float64 compute in float64 alone."""
    return promoted() if _dtype_of(model) == torch.float64 else nullcontext()


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((each.dtype for each in model.parameters()), torch.float64)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if hasattr(value, "cast"):  # a small form
        return value.cast(dtype)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    found = value.detach().to(dtype)
    return nn.Parameter(found) if isinstance(value, nn.Parameter) else found


def _runs(samples: list[Sample]) -> Iterator[tuple[Sample, bool, bool]]:
    """Yield each sample, whether to compare gradients, and whether in training mode.

    Outputs come first, so that a wrong reading is found out soon. Gradients, which take most of the time, follow with all samples
    of the first shape and one of the second; training mode with those of the first, one of them with gradients.
    """
    first, *others = dict.fromkeys(each.pairs for each in samples)
    of_first = [each for each in samples if each.pairs == first]
    of_second = [each for each in samples if each.pairs in others[:1]]
    yield from ((each, False, False) for each in samples)
    yield from ((each, True, False) for each in of_first + of_second[:1])
    yield from ((each, number == 0, True) for number, each in enumerate(of_first))


def _light(samples: list[Sample]) -> Iterator[tuple[Sample, bool, bool]]:
    """Yield the same for a further module of a class: a sample of each shape, one of them with gradients, one in training."""
    first, *others = {each.pairs: each for each in samples}.values()
    yield from ((each, False, False) for each in others)
    smallest = min(samples, key=lambda each: math.prod(each.pairs))
    yield smallest, True, False
    yield first, False, True


def _compare(of: Replacement, model: Any, sample: Sample, gradients: bool, training: bool, limit: float) -> float:
    """Return the difference of a sample's outputs and gradients.

    Raises:
        Differs: it is above the limit.
    """
    model.train(training)
    name = f"{sample.name}, in {'training' if training else 'eval'} mode"
    found = []
    for is_ours in (False, True):

        def forward(run: Any, given: dict[str, Any], is_ours: bool = is_ours) -> Any:
            return of.results(of.by_ours(run, given) if is_ours else of.by_stock(run, (), given))

        with Dropout(lambda each: of.are_weights(model, each.shape, sample.pairs) and are_shares(each)) as dropout:
            found.append((*_results(forward, model, sample, gradients, of.constants), dropout.noted))
    (expected, returned, dropped), (ours, our_returned, our_dropped) = found
    if of.lacks_weights and len(returned) == len(our_returned) and (returned, our_returned) != ((), ()):
        lacking = {number for number, each in enumerate(our_returned, 1) if number > 1 and each == "None"}
        expected = {key: each for key, each in expected.items() if key not in {f"output {number}" for number in lacking}}
        returned = tuple("None" if number in lacking else each for number, each in enumerate(returned, 1))
    if returned != our_returned:
        raise Differs(f"{name}: it returns {_in_words(returned)}, ours {_in_words(our_returned)}")
    if dropped != our_dropped:
        raise Differs(f"{name}: it drops weights with p = {dropped or 0}, ours with p = {our_dropped or 0}")
    return difference_of(name, ours, expected, limit)


def _results(
    forward: Forward, model: nn.Module, sample: Sample, gradients: bool, constants: Collection[str]
) -> tuple[Results, tuple[str, ...]]:
    """Return outputs, and gradients of the first one with respect to parameters and inputs; and what is returned."""
    given = _arguments(sample, model)
    leaves = {**dict(model.named_parameters()), **differentiable(given, constants)} if gradients else {}
    with _in_precision_of(model), torch.set_grad_enabled(gradients):
        returned = forward(_again(model), given)
        out, *others = values(returned)
        kept = out if sample.counts is None else out.where(sample.counts, 0.0)
        results = with_gradients(kept, leaves) if leaves else {OUTPUT: kept.detach()}
    for number, each in enumerate(others, 2):
        if _is_result(each, sample):
            results[f"output {number}"] = each.detach()
    return results, _returned(returned, sample)


def _returned(found: Any, sample: Sample) -> tuple[str, ...]:
    """Return what is in the tuple that a forward returns; nothing for a tensor. Attention weights, which ours does not compute,
    are "None".

    Raises:
        Refused: it returns something else.
    """
    if isinstance(found, torch.Tensor):
        return ()
    if type(found) is not tuple or not found or not isinstance(found[0], torch.Tensor):
        raise Refused(f"its forward returns a {type(found).__name__}, neither a tensor nor a tuple that begins with one")
    return tuple("tensor" if _is_result(each, sample) else "None" if _is_result(each) else str(each) for each in found)


def _is_result(value: Any, sample: Sample | None = None) -> bool:
    """Return whether a value is a tensor, and, for a sample, other than attention weights, of which each row sums to one."""
    if not isinstance(value, torch.Tensor):
        return False
    if sample is None or not _are_weights(value.shape, sample) or not value.is_floating_point():
        return True
    return bool((value < 0).any()) or not torch.allclose(value.sum(-1), torch.ones_like(value[..., 0]), atol=1e-5)


def _in_words(returned: tuple[str, ...]) -> str:
    return f"a tuple of {', '.join(returned)}" if returned else "a tensor"


def values(found: Any) -> Iterator[Any]:
    """Yield what a forward returns: a tensor, or each of a tuple or a list."""
    if isinstance(found, (tuple, list)):
        yield from found
    else:
        yield found


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that a forward may write to."""
    return {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in given.items()}


def differentiable(given: Mapping[str, Any], constants: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the arguments that have gradients, as leaves: floating-point tensors but masks and the like."""
    return {
        name: each.requires_grad_()
        for name, each in given.items()
        if isinstance(each, torch.Tensor) and each.is_floating_point() and name not in constants
    }


def with_gradients(out: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> Results:
    """Return an output, and the gradients of leaves for a random gradient of it, which is the same in each call."""
    d_out = torch.randn(out.shape, dtype=out.dtype, device="cpu", generator=torch.Generator().manual_seed(3))
    gradients = torch.autograd.grad(out, list(leaves.values()), d_out, allow_unused=True, materialize_grads=True)
    return {OUTPUT: out.detach(), **{GRADIENT + name: each for name, each in zip(leaves, gradients, strict=True)}}


def difference_of(name: str, ours: Results, stock: Results, limit: float) -> float:
    """Return the largest difference, as a share of each tensor's largest number; of a gradient that cancels to nothing, of a
    hundredth of the largest gradient's.

    Raises:
        Differs: it is above limit; name is in the message.
    """
    if ours.keys() != stock.keys():
        raise Differs(f"{name}: not the same results: {', '.join(sorted(ours.keys() ^ stock.keys()))}")
    largest = max((float(each.abs().max()) for what, each in stock.items() if what.startswith(GRADIENT)), default=0.0)
    worst = 0.0
    for what, expected in stock.items():
        found = ours[what]
        if found.shape != expected.shape:
            raise Differs(f"{name}: {what} has the shape {tuple(found.shape)}, stock {tuple(expected.shape)}")
        finite = expected.abs().where(expected.isfinite(), 0)  # what hides keys may be infinite
        size = max(float(finite.max()), 1e-2 * largest if what.startswith(GRADIENT) else 0.0)
        apart_by = (found.double() - expected.double()).abs().where(found != expected, 0.0)
        difference = float(apart_by.max()) / (size or 1.0)
        if not difference <= limit:  # also of NaN
            message = f"{name}: {what} differs by {difference:.1e} of the largest number there, {limit:.0e} is allowed"
            raise Differs(message, difference)
        worst = max(worst, difference)
    return worst


_MULTI_HEAD = inspect.signature(nn.functional.multi_head_attention_forward)


class Dropout(TorchFunctionMode):
    """Dropout of attention weights does nothing and is noted; that of other numbers multiplies by a pattern that both share."""

    def __init__(self, is_weights: Callable[[torch.Tensor], bool]) -> None:
        self.is_weights, self.noted = is_weights, list[float]()
        super().__init__()

    def __enter__(self) -> Any:
        OURS.noted = self.noted
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        OURS.noted = None
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.functional.dropout, torch.dropout):
            names = ("input", "p", "training" if func is nn.functional.dropout else "train")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            states, p = given["input"], given.get("p", 0.5)
            if not given.get(names[2], True) or p == 0:
                return states
            if self.is_weights(states):
                self.noted.append(p)
                return states
            pattern = torch.linspace(1 - p, 1 + p, states.numel(), dtype=states.dtype, device=states.device)
            return states * pattern.view(states.shape)
        if func is nn.functional.multi_head_attention_forward:
            given = _MULTI_HEAD.bind(*args, **kwargs).arguments
            if given.get("training", True) and given["dropout_p"] > 0:
                self.noted.append(given["dropout_p"])
            return func(**{**given, "dropout_p": 0.0})
        if func is nn.functional.scaled_dot_product_attention:
            given = {**dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)), **kwargs}
            if (p := given.pop("dropout_p", 0.0)) > 0:
                self.noted.append(p)
            return func(**given)
        return func(*args, **kwargs)


class _Ours(threading.local):
    """noted: while forwards are compared, the probabilities with which ours would drop weights; it drops none then."""

    noted: list[float] | None = None


OURS = _Ours()


def weights_dropout(p: float) -> float:
    """Return the probability with which ours drops attention weights now, for one of its module."""
    if OURS.noted is None:
        return p
    if p > 0:
        OURS.noted.append(p)
    return 0.0


class _Promoted(TorchFunctionMode):
    """Functions of torch that are asked for float32 give float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def promoted() -> Iterator[None]:
    """Let the casts to float32 that forwards make give float64, in this thread."""
    with _Promoted():
        yield


def apart(function: Callable[[], T]) -> T:
    """Call function where no mode of the caller has an effect: in a thread, which has no modes of torch, no autocast and no
    device but the CPU, and has gradients. The random states that it changes are put back."""
    threads = torch.get_num_threads()

    def call() -> T:
        torch.set_num_threads(threads)  # a new thread starts with all of the machine's
        with random_state_kept(()):
            torch.default_generator.manual_seed(0)
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.Context().run, call).result()


@contextmanager
def random_state_kept(devices: tuple[torch.device, ...]) -> Iterator[None]:
    """Put back the random states of torch on the CPU and on devices, of Python, and of NumPy: those of the process, so one thread
    does so at a time."""
    with _RANDOM_STATE, torch.random.fork_rng(devices=devices):
        drawn, numpy = random.getstate(), sys.modules.get("numpy")
        state = numpy.random.get_state() if numpy else None
        try:
            yield
        finally:
            random.setstate(drawn)
            if numpy:
                numpy.random.set_state(state)
