"""Plans launch what Triton would launch for the same tensors, in any order of calls, and depend on their key alone.

Nothing is compiled. A plan's launch is what Triton's own specialisation of its described arguments gives, with the numbers and
addresses that a call fills in. Beside it, Triton gets the tensors themselves.
"""

from __future__ import annotations

import gc
import operator
import os
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from bench.compiled import selected_for
from tests.conftest import without_plans
from tools.absent_gpu import AbsentGPU, gpu_target
from triton_relattn import RelativePositions, _calls, decomposed_relative_attention, fused_relative_attention
from triton_relattn import _implementations as implementations
from triton_relattn._core import validation, watchers
from triton_relattn._core.arguments import Arguments
from triton_relattn.kernels import draft, plan
from triton_relattn.kernels.config import architectures, selection
from triton_relattn.kernels.config.tile_config import KERNELS, TileConfig
from triton_relattn.kernels.sizes import COMPARISONS, OPERATIONS, Notes, fixed, one_step, plain
from triton_relattn.kernels.tuning import save
from triton_relattn.kernels.workspace import planning
from triton_relattn.kernels.workspace.stored import Layout

ROUNDS, CALLS = 6, 400
Launched = tuple[str, str, tuple[int, ...], list[Any]]
"""A launch: its kernel, what Triton compiles it for, the grid, and its arguments."""


def specialised(kernel: JITFunction, arguments: Any, options: dict[str, Any]) -> str:
    """All that Triton compiles a kernel for."""
    *_, backend, binder = kernel.device_caches[driver.active.get_current_device()]
    bound, specialization, parsed = binder(*arguments, debug=False, instrumentation_mode="", **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, dict(options), bound, specialization, parsed)
    return repr((kernel.__name__, signature, constants, attributes, parsed.num_warps, parsed.num_stages, parsed.maxnreg))


def numbers(argument: Any) -> Any:
    """An argument with addresses in place of tensors."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return tuple(map(numbers, argument)) if isinstance(argument, tuple) else argument


class Recorder:
    """Launches, by plans or by Triton itself."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launches: list[Launched] = []
        self.by_plans = 0
        patch.setattr(JITFunction, "run", lambda kernel, *arguments, **options: self.run(kernel, arguments, **options))
        patch.setattr(plan, "_run", JITFunction.run)

    def run(self, kernel: JITFunction, arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        self.launches.append((kernel.__name__, specialised(kernel, arguments, options), grid, list(map(numbers, arguments))))

    def note(self, kernel: JITFunction, compiled_for: str, *given: Any) -> None:
        grid, arguments = given[:3], given[9:]  # between them stream, function, metadata twice and two hooks
        self.by_plans += 1
        self.launches.append((kernel.__name__, compiled_for, grid, list(arguments)))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recorder]:
    """Records the launches on an sm_90, with no profile of the user."""
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(implementations, "_why_no_kernels", lambda *_: None)
    recorder = Recorder(monkeypatch)

    def compile_nothing(launch: plan.Launch, grid: Any, arguments: Any) -> plan.Compiled:
        return partial(recorder.note, launch.kernel, specialised(launch.kernel, arguments, launch.options)), None, None

    monkeypatch.setattr(plan.Launch, "compile", compile_nothing)
    monkeypatch.setattr(draft, "_compiled", {})
    monkeypatch.setattr(_calls, "_known", {})
    active = driver._active
    driver.set_active(AbsentGPU(gpu_target("sm_90")))
    selection.forget()
    with selected_for("sm_90"):
        yield recorder
    driver._active = active
    selection.forget()


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Disabled: nothing is written to results."""


# Calls.


def tensor(choose: random.Random, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that requires a gradient, some in another memory order, or not at a multiple of 16 bytes."""
    kind = choose.random()
    if kind < 0.1 and len(shape) == 4:
        batch, heads, length, width = shape
        return torch.zeros(batch, length, heads, width, dtype=dtype).transpose(1, 2).requires_grad_()
    if kind < 0.2:
        count = torch.Size(shape).numel()
        return torch.zeros(count + 2, dtype=dtype)[2:].view(shape).requires_grad_()
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def drawn(choose: random.Random, other_length: int | None = None) -> tuple[partial[Any], list[torch.Tensor]]:
    """A call, and the tensors whose gradients are wanted. other_length: in place of that drawn."""
    dtype = choose.choice((torch.bfloat16, torch.float16, torch.float32))
    new = partial(tensor, choose, dtype=dtype)
    batch, heads, length, width = choose.choice((1, 2)), choose.choice((1, 2, 4)), choose.choice((1, 16, 33, 64, 200)), 64
    length = other_length or length
    group = choose.choice((1, 2)) if heads > 1 else 1
    rows = choose.choice((1, 9, 2 * length - 1))
    given: dict[str, Any] = {"rel_scale": None}
    tables: dict[str, tuple[int, ...]] = {"rel_key": (rows, width), "rel_bias": (rows,)}
    tables |= {"rel_value": (rows, width), "rel_p2c": (rows, width)}
    for name, shape in tables.items():
        if choose.random() < (0.6 if name == "rel_key" else 0.2):
            shared = choose.random() < 0.7
            given[name] = new(*(shape if shared else (heads, *shape)))
    if any(name in given for name in tables):
        outside: Any = choose.choice(("clamp", "zero"))
        given["positions"] = RelativePositions(-(rows // 2), rows - 1 - rows // 2, outside)
    operands = [new(batch, heads, length, width), *(new(batch, heads // group, length, width) for _ in range(2))]
    given |= {"is_causal": choose.random() < 0.3, "enable_gqa": group > 1, "scale": choose.choice((None, 0.2, -0.2))}
    if choose.random() < 0.2:
        given["key_lengths"] = torch.full((batch,), length, dtype=choose.choice((torch.int32, torch.int64)))
    if choose.random() < 0.2:
        given["attn_mask"] = torch.ones(length, length, dtype=choose.choice((torch.bool, torch.float32, dtype)))
    if "rel_bias" in given and choose.random() < 0.3:
        given["rel_bias"] = tensor(choose, *given["rel_bias"].shape, dtype=torch.float32)
    given["window_size"] = choose.choice((None, None, (20, 5)))
    given["query_offset"] = choose.choice((None, 1, 16, torch.ones(batch, dtype=torch.int64)))
    given["softcap"] = choose.choice((None, None, 30.0))
    given["dropout_p"] = choose.choice((0.0, 0.0, 0.3))
    if choose.random() < 0.2:
        given["return_lse"] = True
    leaves = [value for value in (*operands, *given.values()) if isinstance(value, torch.Tensor) and value.requires_grad]
    wanted = [leaf for leaf in leaves if choose.random() < 0.8] or leaves[:1]
    return partial(fused_relative_attention, *operands, **given, implementation="triton"), wanted


def drawn_on_a_grid(choose: random.Random) -> tuple[partial[Any], list[torch.Tensor]]:
    """A call on a grid, with or without a class token, and the tensors whose gradients are wanted."""
    height, width, prefix = choose.randrange(1, 30), choose.choice((7, 8, 16, 40)), choose.choice((0, 0, 1))
    new = partial(tensor, choose, dtype=torch.bfloat16)
    query, key, value = (new(2, 2, prefix + height * width, 64) for _ in range(3))
    rows, columns = (new(2 * side - 1, 64) for side in (height, width))
    options: dict[str, Any] = {"grid": (height, width), "scale": choose.choice((None, -0.2)), "implementation": "triton"}
    leaves = [query, key, value, rows, columns]
    return partial(decomposed_relative_attention, query, key, value, rows, columns, **options), leaves


def launched(recorder: Recorder, call: partial[Any], wanted: list[torch.Tensor], seed: int = 0) -> list[Any]:
    """The launches of a call, forward and backward, to be compared with others. seed: of the memory order of gradients."""
    choose = random.Random(seed)
    given = {value.data_ptr() for value in (*call.args, *call.keywords.values()) if isinstance(value, torch.Tensor)}
    recorder.launches.clear()
    out = call()
    outs = out if isinstance(out, tuple) else (out,)
    forward = comparable(recorder.launches, given)
    recorder.launches.clear()
    if outs[0].requires_grad:
        grads = tuple(tensor(choose, *out.shape, dtype=out.dtype).detach() for out in outs)
        torch.autograd.grad(outs, wanted, grads)
    return [*forward, *comparable(recorder.launches, given)]


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


# In-place changes between calls.


def precision(choose: random.Random, patch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision(choose.choice(("highest", "high")))


def workspace(choose: random.Random, patch: pytest.MonkeyPatch) -> None:
    limit = choose.choice((None, 2**14, 2**16))
    patch.delenv(planning.VARIABLE, raising=False) if limit is None else patch.setenv(planning.VARIABLE, str(limit))


def profile(choose: random.Random, patch: pytest.MonkeyPatch) -> None:
    path = selection.profile_path("sm_90")
    assert path is not None
    config = choose.choice((TileConfig(64, 64, 4, 1), TileConfig(32, 32, 4, 2)))
    save(path, "sm_90", selection.row_of({"kernel": choose.choice(KERNELS)}, config), "")
    selection.forget()


def smaller_tile(choose: random.Random, patch: pytest.MonkeyPatch) -> None:
    kernel, call = choose.choice(KERNELS), selection.conditions("sm_90", torch.bfloat16, "highest", 64, "full", length=64)
    if selection.tables("sm_90").select(kernel, call).smaller() is not None:
        with pytest.warns(RuntimeWarning, match="does not fit this GPU"):
            selection.take_smaller(kernel, "sm_90", call, RuntimeError("no room"))


def deterministic(choose: random.Random, patch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(choose.random() < 0.5)


def debugging(choose: random.Random, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(triton.knobs.runtime, "debug", choose.random() < 0.5)


def gradients(choose: random.Random, patch: pytest.MonkeyPatch) -> None:
    torch.set_grad_enabled(choose.random() < 0.7)


CHANGES = (precision, workspace, profile, smaller_tile, deterministic, debugging, gradients)


@pytest.fixture
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)


def compare_with_triton(
    recorder: Recorder, call: partial[Any], wanted: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, order: int = 0
) -> None:
    """Compare the launches of a call with those by Triton, with nothing kept. order: of gradients, a seed."""
    kept = launched(recorder, call, wanted, order)
    with monkeypatch.context() as patch:
        without_plans(patch)
        patch.setattr(_calls, "_known", {})
        patch.setattr(plan, "launcher", lambda: "another")
        assert kept == launched(recorder, call, wanted, order)


@pytest.fixture
def for_new_lengths(monkeypatch: pytest.MonkeyPatch) -> list[plan.Plan]:
    """The plans that are those of calls with other sizes."""
    found, plan_of = list[plan.Plan](), plan.Template.plan

    def plan_for(template: plan.Template, sizes: Any) -> plan.Plan | None:
        if (other := plan_of(template, sizes)) is not None:
            found.append(other)
        return other

    monkeypatch.setattr(plan.Template, "plan", plan_for)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_plans_launch_what_triton_would(
    recorder: Recorder, for_new_lengths: list[plan.Plan], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of many kinds in random order, some of new lengths, with settings that change between them, by plans that are kept
    and, with the same tensors, by Triton with nothing kept: the same kernels for the same arguments, in the same grids."""
    choose = random.Random(seed)
    kinds = [choose.random() for _ in range(30)]
    pool = [drawn(random.Random(kind)) for kind in kinds]
    for _ in range(CALLS):
        if choose.random() < 0.1:
            choose.choice(CHANGES)(choose, monkeypatch)
        call, wanted = choose.choice(pool)
        if choose.random() < 0.5:  # of few kinds
            length = choose.choice((choose.randrange(1, 700), 16 * choose.randrange(1, 40)))
            call, wanted = drawn(random.Random(choose.choice(kinds[:5])), length)
        with torch.autocast("cpu", torch.bfloat16, enabled=choose.random() < 0.1):
            order = choose.randrange(100)
            compare_with_triton(recorder, call, wanted, monkeypatch, order)
    assert recorder.by_plans > CALLS / 4 and len(for_new_lengths) > CALLS / 10


def test_plans_on_grids_launch_what_triton_would(
    recorder: Recorder, for_new_lengths: list[plan.Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = random.Random(0)
    for _ in range(200):
        compare_with_triton(recorder, *drawn_on_a_grid(choose), monkeypatch)
    assert len(for_new_lengths) > 100


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
    read, of_tensors, keys = set[str](), set[str](), list[plan.Key]()
    made, choose = plan._made, random.Random(0)

    def make(key: plan.Key) -> plan.Plan:
        keys.append(key)
        return made(key)

    monkeypatch.setattr(plan, "_made", make)
    for _ in range(60):
        launched(recorder, *drawn(choose))
    sources = (
        (torch, "get_float32_matmul_precision"),
        (torch, "is_grad_enabled"),
        (torch, "empty_strided"),
        (torch.Tensor, "data_ptr"),
        (os, "getenv"),
        (planning, "workspace_limit"),
        (architectures, "architecture"),
        (architectures, "multiprocessors"),
        (selection, "tables"),
        (selection, "load"),
        (watchers, "facts_of"),
        (type(os.environ), "__getitem__"),
    )
    inner = draft.Slot.__getattribute__

    def noted(slot: draft.Slot, name: str) -> Any:
        of_tensors.add(name)
        return inner(slot, name)

    with monkeypatch.context() as patch:
        for owner, name in sources:
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
    new = lambda *shape, **options: torch.zeros(shape, **options).as_subclass(Watched)  # noqa: E731
    tables: dict[str, Any] = {name: new(2, 2, 8, 16) for name in ("query", "key", "value")}
    tables |= {
        "rel_key": new(15, 12),
        "rel_value": new(2, 15, 16),
        "rel_bias": new(15),
        "rel_p2c": new(15, 16),
        "rel_query": new(2, 2, 8, 12),
    }
    vectors: dict[str, Any] = {
        "attn_mask": new(8, 8, dtype=torch.bool),
        "key_lengths": new(2, dtype=torch.int64),
        "query_offset": new(2, dtype=torch.int64),
    }
    Watched.read.clear()
    validation.resolve(Arguments(**tables, **vectors))
    views = {"reshape", "expand", "transpose"}
    assert {name for name in Watched.read if not name.startswith("__")} - views <= READ_OF_ARGUMENTS, Watched.read


# Sizes as symbols.


@one_step
def halved(size: int, other: int) -> int:
    """A function that reads integers, and compares them."""
    return len(range(size)) // 2 if size > other else 3


def computed(numbers: list[Any], seed: int) -> tuple[Any, list[bool]]:
    """What a program of this seed computes from numbers, and the answers to its questions."""
    choose, numbers, answers = random.Random(seed), list(numbers), list[bool]()
    for _ in range(30):
        left, right = (choose.choice((choose.choice(numbers), choose.randrange(-20, 20))) for _ in range(2))
        symbol, name = choose.choice((*OPERATIONS, choose.choice(COMPARISONS)))
        if symbol in dict(COMPARISONS):
            answers.append(getattr(operator, name)(left, right))
        else:
            answers.append(symbol not in ("//", "%") or right != 0)
            if answers[-1]:
                numbers.append(getattr(operator, name)(left, right))
    numbers.append(halved(*numbers[-2:]))
    return ([numbers[-1], ("text", None, *numbers)], -numbers[0], Layout(numbers[1], 64, True)), answers


@pytest.mark.parametrize("seed", range(40))
def test_sizes_repeat_what_was_computed(seed: int) -> None:
    """A function from notes computes for other sizes what the program does, unless a question has another answer."""
    choose = random.Random(seed)
    notes = Notes([choose.randrange(1, 40) for _ in range(3)])
    structure, _ = computed(notes.sizes, seed)
    function = notes.function(structure)
    assert plain(structure) == computed([size.value for size in notes.sizes], seed)[0]
    answers = computed([size.value for size in notes.sizes], seed)[1]
    for _ in range(200):
        sizes = [size.value + choose.choice((0, 0, 1, -1, 16)) for size in notes.sizes]
        wanted, asked = computed(sizes, seed)
        found = function(sizes)
        assert (found is not None) == (asked == answers)
        assert found is None or (found == wanted and type(found[2]) is Layout)


@pytest.mark.parametrize("decide", [int, hash, bool, range, list(range(99)).__getitem__, lambda size: {7: 1}[size], fixed])
def test_sizes_that_are_read_are_decided(decide: Callable[[Any], Any]) -> None:
    """Python needs the integer itself, for which alone the rest is decided then; for a condition whether it is 0."""
    notes = Notes([7, 3])
    length, width = notes.sizes
    decide(length)
    function = notes.function((length + 1, width))
    assert function((7, 5)) == (8, 5)
    assert function((8, 5)) == ((9, 5) if decide is bool else None) and function((0, 5)) is None


# What is kept.


def test_no_tensor_is_kept(recorder: Recorder) -> None:
    choose, alive = random.Random(1), []
    for _ in range(40):
        call, wanted = drawn(choose)
        alive += [weakref.ref(value) for value in (*call.args, *call.keywords.values()) if isinstance(value, torch.Tensor)]
        launched(recorder, call, wanted)
    del call, wanted
    gc.collect()
    assert plan._plans and _calls._known and not any(ref() is not None for ref in alive)


def test_plans_do_not_grow_without_end(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many lengths; the oldest are forgotten."""
    monkeypatch.setattr(plan, "MOST_PLANS", 20)
    monkeypatch.setattr(_calls, "MOST_KNOWN", 20)
    for length in range(1, 60):
        query = torch.zeros(1, 1, length, 16, dtype=torch.float16)
        fused_relative_attention(query, query, query, implementation="triton")
    assert len(plan._plans) <= 20 and len(_calls._known) <= 20
    names = len(recorder.launches)
    fused_relative_attention(query, query, query, implementation="triton")
    assert len(recorder.launches) == names + 1


@pytest.mark.parametrize("rows", [0, 129, 999])
def test_new_lengths_are_rarely_decided(recorder: Recorder, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision is made for whether numbers are multiples of 16, for tiles, and for how many programs share a sum."""
    decided, made = list[str](), plan._decided

    def noted(key: plan.Key, sizes: Any) -> plan.Template:
        decided.append(key.decide.__name__)
        return made(key, sizes)

    monkeypatch.setattr(plan, "_decided", noted)
    lengths = random.Random(0).sample(range(300, 500), 100)
    for length in lengths:
        leaves = [torch.zeros(2, 2, length, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        leaves += [torch.zeros(rows, 64, dtype=torch.bfloat16).requires_grad_()] * (rows > 0)
        launched(recorder, partial(fused_relative_attention, *leaves, implementation="triton"), leaves)
    assert decided.count("plan_forward") <= 4 and decided.count("plan_backward") <= 12, decided


def test_parts_share_their_kernels(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that differ in numbers alone are looked up once."""
    monkeypatch.setenv(planning.VARIABLE, str(200 * 2 * 64 * 64))  # 200 heads, more than there are multiprocessors
    leaves = [torch.zeros(400, 2, 64, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    leaves.append(torch.zeros(127, 64, dtype=torch.bfloat16).requires_grad_())
    compiled: list[str] = []
    compile_nothing = plan.Launch.compile

    def compile_and_note(launch: plan.Launch, grid: Any, given: Any) -> plan.Compiled:
        compiled.append(launch.name)
        return compile_nothing(launch, grid, given)

    monkeypatch.setattr(plan.Launch, "compile", compile_and_note)
    launches = launched(recorder, partial(fused_relative_attention, *leaves, implementation="triton"), leaves)
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
    query = torch.zeros(1, 1, 32, 64, dtype=torch.bfloat16)
    call = partial(fused_relative_attention, query, query, query, implementation="triton")
    counts = [recorder.by_plans]
    for _ in range(2):
        call()
        counts.append(recorder.by_plans)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            call()
        counts.append(recorder.by_plans)
    assert counts == [0, 1, 1, 2, 2] and len(recorder.launches) == 4
