"""Plans launch what Triton would launch for the same tensors, in any order of calls, and depend on their key alone.

Nothing is compiled. A plan's launch is what Triton's own specialisation of its described arguments gives, with the numbers and
addresses that a call fills in. Beside it, Triton gets the tensors themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from bench.compiled import selected_for
from tests.compile.calls import Call, call, call_of, unwritten
from tests.conftest import without_plans
from tests.draws import compiled
from tests.draws import drawn as drawn_sample
from tests.expected import INPUTS, TABLES
from tests.samples import Sample
from tools.absent_gpu import AbsentGPU, gpu_target
from triton_relattn import _calls, decomposed_relative_attention
from triton_relattn._core import validation, watchers
from triton_relattn._core.arguments import Arguments
from triton_relattn.kernels import draft, plan
from triton_relattn.kernels.config import architectures, selection
from triton_relattn.kernels.config.tile_config import KERNELS, TileConfig
from triton_relattn.kernels.sizes import Notes, fixed, one_step
from triton_relattn.kernels.tuning import save
from triton_relattn.kernels.workspace import planning

ROUNDS, CALLS = 6, 400
Launched = tuple[str, str, tuple[int, ...], list[Any]]
"""A launch: its kernel, what Triton compiles it for, the grid, and its arguments."""


def compiled_for(kernel: JITFunction, arguments: Any, options: dict[str, Any]) -> str:
    """All that Triton compiles a kernel for."""
    *_, backend, binder = kernel.device_caches[driver.active.get_current_device()]
    bound, specialization, parsed = binder(*arguments, **options)
    parsed, *others = kernel._pack_args(backend, dict(options), bound, specialization, parsed)
    return repr((kernel.__name__, others, parsed.num_warps, parsed.num_stages, parsed.maxnreg))


def numbers(argument: Any) -> Any:
    """An argument with addresses in place of tensors."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return tuple(map(numbers, argument)) if isinstance(argument, tuple) else argument


class Recorder:
    """Launches, by plans or by Triton itself; and plans that are those of calls with other sizes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launches: list[Launched] = []
        self.by_plans = self.for_new_lengths = 0
        patch.setattr(JITFunction, "run", lambda kernel, *arguments, **options: self.run(kernel, arguments, **options))
        patch.setattr(plan, "_run", JITFunction.run)
        patch.setattr(plan.Launch, "compile", lambda launch, _, arguments: (self.compile(launch, arguments), None, None))
        plan_of = plan.Template.plan
        patch.setattr(plan.Template, "plan", lambda template, sizes: self.seen(plan_of(template, sizes)))

    def run(self, kernel: JITFunction, arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        self.launches.append((kernel.__name__, compiled_for(kernel, arguments, options), grid, list(map(numbers, arguments))))

    def compile(self, launch: plan.Launch, arguments: Any) -> Callable[..., None]:
        """Compile nothing."""
        return partial(self.note, launch.kernel, compiled_for(launch.kernel, arguments, launch.options))

    def note(self, kernel: JITFunction, compiled_for: str, *given: Any) -> None:
        grid, arguments = given[:3], given[9:]  # between them stream, function, metadata twice and two hooks
        self.by_plans += 1
        self.launches.append((kernel.__name__, compiled_for, grid, list(arguments)))

    def seen(self, found: plan.Plan | None) -> plan.Plan | None:
        self.for_new_lengths += found is not None
        return found


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Records the launches on an sm_90."""
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr(draft, "_compiled", {})
    monkeypatch.setattr(driver, "_active", AbsentGPU(gpu_target("sm_90")))
    with selected_for("sm_90"):
        yield recorder


# Calls.


def moved(choose: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one in another memory order, or not at a multiple of 16 bytes."""
    kind = choose.random()
    if kind < 0.1 and tensor.dim() == 4:
        return tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2)
    return tensor.new_empty(tensor.numel() + 2)[2:].view(tensor.shape) if kind < 0.2 else tensor


@functools.cache
def kind_of_call(seed: int) -> Sample:
    dtype = random.Random(seed).choice((torch.bfloat16, torch.float16, torch.float32))
    return drawn_sample(seed, compiled(dtype), is_packed=False)


def drawn(seed: int, length: int | None = None) -> Call:
    """A call of any kind. length: of the queries and keys, in place of those drawn; half of the tables cover it then."""
    choose, sample = random.Random(seed), kind_of_call(seed)
    if 0 in (sample.num_queries, sample.num_keys):
        length = length or 33  # views of empty tensors have no addresses
    if length is not None:
        changes: dict[str, Any] = {"num_queries": length, "num_keys": length}
        sides = range(-len(sample.mask_shape), 0)
        changes["mask_shape"] = tuple(
            length if side >= -2 and size != 1 else size for side, size in zip(sides, sample.mask_shape, strict=True)
        )
        changes["key_lengths"] = sample.key_lengths and (length,) * sample.batch
        if sample.positions and choose.random() < 0.5:
            changes["positions"] = (1 - length, length - 1, sample.positions[2])
        sample = dataclasses.replace(sample, **changes)
    call = call_of(sample, lambda tensor: moved(choose, unwritten(tensor)))
    call.arguments["return_lse"] = choose.random() < 0.2
    call.wanted = frozenset(name for name in INPUTS if choose.random() < 0.8)
    return call


def drawn_on_a_grid(choose: random.Random) -> Call:
    """A call on a grid, with or without a class token."""
    height, width, prefix = choose.randrange(1, 30), choose.choice((7, 8, 16, 40)), choose.choice((0, 0, 1))
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("query", "key", "value"), (2, 2, prefix + height * width, 64))
    shapes |= {"rel_pos_h": (2 * height - 1, 64), "rel_pos_w": (2 * width - 1, 64)}
    tensors = {name: moved(choose, torch.empty(shape, dtype=torch.bfloat16)) for name, shape in shapes.items()}
    options = {"grid": (height, width), "scale": choose.choice((None, -0.2))}
    return Call(decomposed_relative_attention, tensors, options, (torch.empty_like(tensors["query"]),), frozenset(shapes))


def launched(recorder: Recorder, call: Call) -> list[Any]:
    """The launches of a call, forward and backward, to be compared with others."""
    given = {value.data_ptr() for value in (*call.tensors.values(), *call.arguments.values()) if isinstance(value, torch.Tensor)}
    found = []
    recorder.launches.clear()
    for _ in call.halves():
        found += comparable(recorder.launches, given)
        recorder.launches.clear()
    return found


def comparable(launches: list[Launched], given: set[int]) -> list[Any]:
    """Launches with addresses that are given, and all others numbered in the order in which they appear."""
    seen: dict[int, int] = {}

    def compare(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(map(compare, argument))
        if isinstance(argument, int) and not isinstance(argument, bool) and argument > 2**40 and argument not in given:
            return "allocated", seen.setdefault(argument, len(seen))
        return argument

    return [(name, compiled_for, grid, compare(tuple(arguments))) for name, compiled_for, grid, arguments in launches]


def change_a_setting(choose: random.Random, patch: pytest.MonkeyPatch) -> None:
    match choose.randrange(7):
        case 0:
            torch.set_float32_matmul_precision(choose.choice(("highest", "high")))
        case 1:
            patch.setenv(planning.VARIABLE, str(choose.choice((2**14, 2**16, 2**40))))
        case 2:
            path, config = selection.profile_path("sm_90"), choose.choice((TileConfig(64, 64, 4, 1), TileConfig(32, 32, 4, 2)))
            assert path is not None
            save(path, "sm_90", selection.row_of({"kernel": choose.choice(KERNELS)}, config), "")
            selection.forget()
        case 3:
            kernel, kind = choose.choice(KERNELS), selection.conditions("sm_90", torch.bfloat16, "highest", 64, "full", length=64)
            if selection.tables("sm_90").select(kernel, kind).smaller() is not None:
                with pytest.warns(RuntimeWarning, match="does not fit this GPU"):
                    selection.take_smaller(kernel, "sm_90", kind, RuntimeError("no room"))
        case 4:
            torch.use_deterministic_algorithms(choose.random() < 0.5)
        case 5:
            patch.setattr(triton.knobs.runtime, "debug", choose.random() < 0.5)
        case 6:
            torch.set_grad_enabled(choose.random() < 0.7)


def compare_with_triton(recorder: Recorder, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the launches of a call with those by Triton, with nothing kept."""
    kept = launched(recorder, call)
    with monkeypatch.context() as patch:
        without_plans(patch)
        patch.setattr(_calls, "_known", {})
        patch.setattr(plan, "launcher", lambda: "another")
        assert kept == launched(recorder, call)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_plans_launch_what_triton_would(recorder: Recorder, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of many kinds in random order, some of new lengths, with settings that change between them, by plans that are kept
    and, with the same tensors, by Triton with nothing kept: the same kernels for the same arguments, in the same grids."""
    choose = random.Random(seed)
    kinds = [choose.randrange(2**20) for _ in range(30)]
    pool = [drawn(kind) for kind in kinds]
    for _ in range(CALLS):
        if choose.random() < 0.1:
            change_a_setting(choose, monkeypatch)
        call = choose.choice(pool)
        if choose.random() < 0.6:  # of few kinds
            length = choose.choice((choose.randrange(1, 700), 16 * choose.randrange(1, 40)))
            call = drawn(choose.choice(kinds[:4]), length)
        call = dataclasses.replace(call, d_outs=tuple(moved(choose, d_out) for d_out in call.d_outs))
        with torch.autocast("cpu", torch.bfloat16, enabled=choose.random() < 0.1):
            compare_with_triton(recorder, call, monkeypatch)
    assert recorder.by_plans > CALLS / 4 and recorder.for_new_lengths > CALLS / 10


def test_plans_on_grids_launch_what_triton_would(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(0)
    for _ in range(200):
        compare_with_triton(recorder, drawn_on_a_grid(choose), monkeypatch)
    assert recorder.for_new_lengths > 100


# What a decision reads.


READ = {"arch", "multiprocessors", "tables", "float32_precision", "gpu", "launcher", "ptx_options"}
"""Of the surroundings."""
READ_OF_TENSORS = {"shape", "strides", "dtype", "alignment", "strided", "cell", "source"}
READ_OF_ARGUMENTS = {"shape", "dim", "dtype", "device", "layout", "is_nested", "requires_grad", "numel"}
"""By validation, of tensors whose values it does not read. facts_of has them; layout and is_nested are among the keys."""


class Noted:
    """An object whose attributes are noted when they are read."""

    def __init__(self, of: Any, names: set[str]) -> None:
        self._of, self._names = of, names

    def __getattr__(self, name: str) -> Any:
        self._names.add(name)
        return getattr(self._of, name)


def fails(*_: Any, **__: Any) -> Any:
    raise AssertionError("a decision reads what is not in its key")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_decisions_read_their_key(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else: not the environment, not settings of torch, no tensors. The attributes that are read are all in the key."""
    read, of_tensors, keys, made = set[str](), set[str](), list[plan.Key](), plan._made

    def make(key: plan.Key) -> plan.Plan:
        keys.append(key)
        return made(key)

    monkeypatch.setattr(plan, "_made", make)
    for seed in range(60):
        launched(recorder, drawn(seed))
    sources: dict[Any, tuple[str, ...]] = {
        torch: ("get_float32_matmul_precision", "is_grad_enabled", "empty_strided"),
        torch.Tensor: ("data_ptr",),
        os: ("getenv",),
        type(os.environ): ("__getitem__",),
        planning: ("workspace_limit",),
        architectures: ("architecture", "multiprocessors"),
        selection: ("tables", "load"),
        watchers: ("facts_of",),
    }
    inner = draft.Slot.__getattribute__

    def noted(slot: draft.Slot, name: str) -> Any:
        of_tensors.add(name)
        return inner(slot, name)

    with monkeypatch.context() as patch:
        for owner, names in sources.items():
            for name in names:
                patch.setattr(owner, name, fails)
        patch.setattr(draft.Slot, "__getattribute__", noted, raising=False)
        for key in keys:
            key.decide(key._replace(surroundings=Noted(key.surroundings, read)))
    assert len(keys) > 100 and read == READ
    methods = {name for name in dir(draft.Slot) if callable(getattr(draft.Slot, name)) or name == "ndim"}
    assert of_tensors - methods == READ_OF_TENSORS


class Watched(torch.Tensor):
    """A tensor whose attributes are noted when they are read."""

    read: ClassVar[set[str]] = set()
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        Watched.read.add(name)
        return super().__getattribute__(name)


def test_validation_reads_what_a_key_has() -> None:
    """A call that was valid is valid again if its key is the same: the key has all that validation reads, except values."""
    sizes: dict[str, Any] = {"batch": 2, "key_heads": 2, "num_queries": 8, "num_keys": 8, "rel_width": 12}
    tables: dict[str, Any] = {
        "tables": TABLES,
        "per_head": ("rel_value",),
        "positions": (-7, 7, "clamp"),
        "default_positions": True,
    }
    given = Sample(**sizes, **tables, mask="bool", mask_shape=(8, 8), key_lengths=(8, 8), query_offset=(0, 0)).call()
    given = {name: value.as_subclass(Watched) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    Watched.read.clear()
    validation.resolve(Arguments(**given))
    views = {"reshape", "expand", "transpose"}
    assert {name for name in Watched.read if not name.startswith("__")} - views <= READ_OF_ARGUMENTS, Watched.read


# Sizes as symbols.


@pytest.mark.parametrize("decide", [int, hash, bool, range, list(range(99)).__getitem__, lambda size: {7: 1}[size], fixed])
def test_sizes_that_are_read_are_decided(decide: Callable[[Any], Any]) -> None:
    """Python needs the integer itself, for which alone the rest is decided then; for a condition whether it is 0."""
    notes = Notes([7, 3])
    length, width = notes.sizes
    decide(length)
    function = notes.function((length + 1, width))
    assert function((7, 5)) == (8, 5)
    assert function((8, 5)) == ((9, 5) if decide is bool else None) and function((0, 5)) is None


def test_a_step_is_computed_for_other_sizes() -> None:
    """Also what needs the integer itself."""
    notes = Notes([7])
    halved = one_step(lambda size: len(range(size)) // 2)
    assert notes.function((halved(notes.sizes[0]), "half"))((12,)) == (6, "half")


# What is kept.


def test_no_tensor_is_kept(recorder: Recorder) -> None:
    alive = []
    for seed in range(40):
        call = drawn(seed)
        given = (*call.tensors.values(), *call.arguments.values())
        alive += [weakref.ref(value) for value in given if isinstance(value, torch.Tensor)]
        launched(recorder, call)
    del call, given
    gc.collect()
    assert plan._plans and _calls._known and not any(ref() is not None for ref in alive)


def test_plans_do_not_grow_without_end(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many lengths; the oldest are forgotten."""
    monkeypatch.setattr(plan, "MOST_PLANS", 20)
    monkeypatch.setattr(_calls, "MOST_KNOWN", 20)
    for length in range(1, 60):
        last = call_of(call(length, "none", requires_grad=()))
        last.run()
    assert len(plan._plans) <= 20 and len(_calls._known) <= 20
    names = len(recorder.launches)
    last.run()
    assert len(recorder.launches) == names + 1


@pytest.mark.parametrize(("table", "last"), [("none", 0), ("clamp", 64), ("full", 499)])
def test_new_lengths_are_rarely_decided(recorder: Recorder, table: str, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision holds for whether numbers are multiples of 16, for tiles, and for how many programs share a sum."""
    decided, made = list[str](), plan._decided

    def noted(key: plan.Key, sizes: Any) -> plan.Template:
        decided.append(key.decide.__name__)
        return made(key, sizes)

    monkeypatch.setattr(plan, "_decided", noted)
    positions = (-last, last, "clamp") if last else None
    for length in random.Random(0).sample(range(300, 500), 100):
        call_of(call(length, table, batch=2, positions=positions)).run()
    assert decided.count("plan_forward") <= 4 and decided.count("plan_backward") <= 12, decided


def test_parts_share_their_kernels(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that differ in numbers alone are looked up once."""
    monkeypatch.setenv(planning.VARIABLE, str(200 * 2 * 64 * 64))  # 200 heads, more than there are multiprocessors
    compiled, compile_nothing = list[str](), plan.Launch.compile

    def compile_and_note(launch: plan.Launch, grid: Any, given: Any) -> plan.Compiled:
        compiled.append(launch.name)
        return compile_nothing(launch, grid, given)

    monkeypatch.setattr(plan.Launch, "compile", compile_and_note)
    launches = launched(recorder, call_of(call(batch=400)))
    assert len(compiled) == len(set(compiled)) < len(launches) / 2


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (triton.knobs.runtime, "debug", True),
        (triton.knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", "")),
        (torch.version, "hip", "6.4"),
        (plan, "_run", None),
    ],
)
def test_triton_launches_what_is_watched(
    recorder: Recorder, owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For debugging, with hooks, on AMD's GPUs, or if its launches are replaced; before that and afterwards, plans do."""
    run, counts = call_of(call(32, "none", requires_grad=())).run, [recorder.by_plans]
    for _ in range(2):
        run()
        counts.append(recorder.by_plans)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            run()
        counts.append(recorder.by_plans)
    assert counts == [0, 1, 1, 2, 2] and len(recorder.launches) == 4
