"""``python -m triton_relattn measure``: time, memory and output of a model before and after :func:`enable`, on this machine.

Stock and enabled model have a process each: what one has allocated does not count for the other, and a stock model that does not
fit into memory ends its own process alone.
"""

from __future__ import annotations

import importlib
import operator
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from ._peaks import OUT_OF_MEMORY, SHARE, available_bytes, in_own_process, is_out_of_memory, limit_memory, peak_cpu, peak_cuda
from .integrations.enable import enable
from .integrations.replacement import Replacement

WARM_UP = 64  # positions of a first step, in which libraries set themselves up
FEWEST = 3  # steps that are timed, at least
UNITS = {"input_ids": "tokens", "input_values": "samples", "input_features": "feature frames"}  # of a model of transformers


class Work(NamedTuple):
    """What is measured; see ``python -m triton_relattn measure --help``."""

    model: str
    inputs: str | None
    length: int
    batch: int
    dtype: torch.dtype
    device: str
    backward: bool
    seconds: float


def find(path: str) -> Any:
    """Return what ``package.module:name`` names; ValueError if there is no such thing."""
    module, _, name = path.partition(":")
    sys.path.insert(0, "")
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}: {error}; expected package.module:function, from the folder of the file or with that in PYTHONPATH"
        ) from error


def build(path: str) -> object:
    """Return the model that ``package.module:factory`` returns, called without arguments; or the module itself that it names."""
    factory = find(path)
    return factory() if callable(factory) and not isinstance(factory, torch.nn.Module) else factory


def example_inputs(model: Any, length: int, batch: int) -> dict[str, torch.Tensor]:
    """Return random inputs of a model of transformers, by its main input and configuration; ValueError if these do not tell."""
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", None)
    vocabulary = getattr(config, "vocab_size", None)
    widths = [getattr(config, key, None) for key in ("num_mel_bins", "feature_size", "feature_projection_input_dim")]
    width = next((size for size in widths if isinstance(size, int)), None)
    if name == "input_ids" and isinstance(vocabulary, int):
        ids = torch.randint(vocabulary, (batch, length))
        return {name: ids} | ({"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {})
    if name == "input_values":
        return {name: torch.randn(batch, length)}
    if name == "input_features" and width is not None:
        return {name: torch.randn(batch, length, width)}
    raise ValueError(
        f"the inputs of {type(model).__name__} are not known. Name a function with --inputs package.module:function: it takes a "
        "length and returns a tensor, a tuple of positional arguments or a dict of keyword arguments"
    )


def make_inputs(work: Work, model: torch.nn.Module, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of the model at a length, the same in every process."""
    torch.manual_seed(1)
    inputs = example_inputs(model, length, work.batch) if work.inputs is None else find(work.inputs)(length)

    def move(argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        return argument.to(work.device, work.dtype if argument.is_floating_point() else argument.dtype)

    if isinstance(inputs, dict):
        return (), {name: move(argument) for name, argument in inputs.items()}
    return tuple(map(move, inputs if isinstance(inputs, (tuple, list)) else (inputs,))), {}


def floating_tensors(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of an output, however it is nested."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for part in parts for tensor in floating_tensors(part)]


def step(work: Work, model: torch.nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[torch.Tensor]:
    """Run the model, with the backward of the sum of its outputs if that is wanted; return the outputs."""
    with torch.set_grad_enabled(work.backward):
        outputs = floating_tensors(model(*inputs[0], **inputs[1]))
    if not outputs:
        raise ValueError(f"{type(model).__name__} returns no floating-point tensor")
    if work.backward:
        model.zero_grad()
        torch.stack([output.float().sum() for output in outputs if output.requires_grad]).sum().backward()
    if work.device == "cuda":
        torch.cuda.synchronize()
    return [output.detach() for output in outputs]


def largest_difference(outputs: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Return the largest difference of two outputs, of each tensor relative to its largest number."""
    pairs = zip(outputs, others, strict=True)
    return max(float((one - other).abs().max() / other.abs().max().clamp_min(1e-30)) for one, other in pairs if other.numel())


def measure_model(work: Work, is_enabled: bool, file: str, memory_limit: int) -> dict[str, Any]:
    """Return seconds, bytes beyond weights and inputs, and for an enabled model its report and difference from the stock output
    in the file; or a status that says why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what enable leaves is in its report
            return _measure_model(work, is_enabled, Path(file), memory_limit)
    except Exception as error:
        if is_out_of_memory(error):
            return {"status": f"{OUT_OF_MEMORY}: more than {memory_limit / 2**30:.1f} GiB"}
        return {"status": f"{type(error).__name__}: {error}"}


def _measure_model(work: Work, is_enabled: bool, file: Path, memory_limit: int) -> dict[str, Any]:
    if work.device == "cpu":
        limit_memory(memory_limit)
    torch.manual_seed(0)  # of weights that are random
    model = build(work.model)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{work.model} is {type(model).__name__}, not a torch.nn.Module")
    model = model.to(work.device, work.dtype).eval()
    unit = UNITS.get(getattr(model, "main_input_name", ""), "") if work.inputs is None else ""
    lengths: dict[str, Any] = {"lengths": work.length} if unit == "tokens" else {}  # others are not positions of the attention
    report = str(enable(model, by_structure=True, check_calls=False, **lengths)) if is_enabled else ""
    inputs = make_inputs(work, model, work.length)
    try:
        step(work, model, make_inputs(work, model, min(WARM_UP, work.length)))
    except Exception:  # shorter than the model takes
        pass
    with counted_calls() as counts:
        peak = (peak_cuda if work.device == "cuda" else peak_cpu)(lambda: step(work, model, inputs))
    times = list[float]()
    while len(times) < FEWEST or sum(times) < work.seconds:
        began = time.perf_counter()
        outputs = step(work, model, inputs)
        times.append(time.perf_counter() - began)
    outputs = [output.float().cpu() for output in outputs]
    result = {"status": "ok", "seconds": min(times), "bytes": peak, "report": report, "unit": unit, "calls": dict(counts)}
    if not is_enabled:
        torch.save(outputs, file)
    elif file.stat().st_size:
        result["difference"] = largest_difference(outputs, torch.load(file))
    return result


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count the calls of enabled attention that "ours" computes, and those that its "stock" class does."""
    counts, run, by_stock = Counter[str](), Replacement.run, Replacement.by_stock

    def ours(*arguments: Any) -> Any:
        counts["ours"] += 1
        return run(*arguments)

    def stock(*arguments: Any) -> Any:
        counts["stock"] += 1
        return by_stock(*arguments)

    with mock.patch.object(Replacement, "run", ours), mock.patch.object(Replacement, "by_stock", stock):
        yield counts


def measure(work: Work) -> int:
    """Measure a model before and after enable, and print what differs. Return 0, or 1 if the enabled model was not measured."""
    for path in filter(None, (work.model, work.inputs)):
        find(path)
    passes = "forward and backward" if work.backward else "forward"
    conditions = f"length {work.length:,}, batch {work.batch}, {str(work.dtype)[6:]} on {work.device}"
    print(f"{work.model}, {passes}, {conditions}", flush=True)
    results = []
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        for is_enabled, name in ((False, "stock"), (True, "triton_relattn")):
            arguments = work, is_enabled, file.name, int(SHARE * available_bytes())
            result = in_own_process(measure_model, arguments, None)
            is_ok = result["status"] == "ok"
            text = f"{result['seconds']:9.3f} s {result['bytes'] / 2**20:9,.0f} MiB" if is_ok else result["status"]
            print(f"  {name:15}{text}", flush=True)
            results.append(result)
    stock, ours = results
    if ours["status"] != "ok":
        return 1
    by_ours, by_stock = ours["calls"].get("ours", 0), ours["calls"].get("stock", 0)
    if unit := ours["unit"]:
        print(f"  the length counts {unit}")
    print(f"  attention: {by_ours} calls computed by triton_relattn, {by_stock} by the stock class")
    if not by_ours:
        print("  The stock class computed all of them, as it does small ones on a CPU: take a longer input")
    elif stock["status"] == "ok":
        time_, memory = ours["seconds"] / stock["seconds"], ours["bytes"] / max(stock["bytes"], 1)
        print(f"  {time_:.2f} of the stock model's time, {memory:.2f} of its memory (weights and inputs not counted)")
        print(f"  largest relative difference of the outputs: {ours['difference']:.1e}")
    print(f"\n{ours['report']}")
    return 0
