"""The model of cycles on loops whose cycles can be counted by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from bench.compile import KernelCase
from bench.cycles.calls import BACKWARD, FORWARD, Size, designs, of_call, workspace
from tools.cycles.decode import decode
from tools.cycles.machine import MACHINES, Machine
from tools.cycles.predict import SCORES, Loop, Prediction, near_share, of_sass, teraflops
from tools.cycles.sass import Instruction, loops, parse
from tools.cycles.simulate import Steady, steady

WARPS = 4  # one for each scheduler
EXACT = {target: replace(machine, late_share=0.0, l2_spread=0.0) for target, machine in MACHINES.items()}
"""Nothing is random."""
H100, A100 = EXACT["sm_90"], EXACT["sm_80"]


def instruction(
    text: str, stall: int = 1, sets: int | None = None, waits: Sequence[int] = (), reads: int | None = None
) -> Instruction:
    predicate, _, rest = text.partition(" ") if text.startswith("@") else ("", "", text)
    name, _, operands = rest.partition(" ")
    return Instruction(0, predicate, name, operands, stall, sets, reads, tuple(waits))


def cycles(loop: Sequence[Instruction], machine: Machine = H100, warps: int = WARPS, programs: int = 1) -> float:
    return steady(loop, machine, warps, programs).cycles


def printed(*instructions: Instruction) -> str:
    """As cuobjdump prints them, one every 16 bytes."""
    lines = [" Function : kernel:\n  REG:120 STACK:0 SHARED:1024 LOCAL:0"]
    for number, each in enumerate(instructions):
        sets, reads = (7 if one is None else one for one in (each.sets, each.reads))
        control = each.stall | sets << 5 | reads << 8 | sum(1 << wait for wait in each.waits) << 11
        text = f"{each.predicate} {each.name} {each.operands}".strip()
        lines.append(f"        /*{16 * number:04x}*/                   {text} ;    /* 0x{random.getrandbits(64):016x} */")
        lines.append(f"                                    /* 0x{control << 41 | 0xFE0:016x} */")
    return "\n".join(lines)


EXAMPLE = (
    instruction("ULDC.64 UR4, c[0x0][0x208]", 4),
    instruction("LDGSTS.E.BYPASS.128 [R27+0x8000], desc[UR4][R4.64], P1", 1, reads=5),
    instruction("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0", 15, waits=(0, 3)),
    instruction("@!P0 MUFU.EX2 R3, R4", 2, sets=1),
    instruction("@P1 BRA 0x10", 5, waits=(5,)),
    instruction("BRA 0x50", 5),
)


def test_control_codes() -> None:
    """Control codes are read back from the words of machine code, whatever their other bits are."""
    found = parse(printed(*EXAMPLE))
    assert [replace(each, address=0) for each in found] == list(EXAMPLE)
    assert [each.address for each in found] == [0, 16, 32, 48, 64, 80]


def test_loops_are_innermost() -> None:
    """From the target of a branch backwards to the branch; a jump to itself, at the end of every kernel, is none."""
    body = [instruction("FADD R1, R1, R2")] * 3
    (inner,) = loops(parse(printed(*EXAMPLE)))
    assert [each.base for each in inner] == ["LDGSTS", "HGMMA", "MUFU", "BRA"]
    nest = (*body, *body, instruction("@P0 BRA 0x30"), *body, instruction("@P1 BRA 0x0"), instruction("BRA 0xb0"))
    assert [len(loop) for loop in loops(parse(printed(*nest)))] == [4]


@pytest.mark.parametrize("machine", EXACT.values(), ids=lambda machine: machine.name)
def test_rates(machine: Machine) -> None:
    """A hundred instructions that wait for nothing take what their pipe takes, or the scheduler."""
    floats = [instruction("FFMA R1, R2, R3, R4")] * 100
    assert cycles(floats, machine) == pytest.approx(100 * machine.fma / machine.fma_pipes, abs=machine.branch)
    for text, busy in (
        ("IADD3 R1, R2, R3, RZ", machine.alu),
        ("MUFU.EX2 R1, R2", machine.mufu),
        ("IMAD R1, R2, R3, R4", machine.imad),
    ):
        for programs in (1, 3):
            assert cycles([instruction(text)] * 100, machine, programs=programs) == pytest.approx(100 * busy, abs=machine.branch)


def test_shared_memory_serves_all_schedulers() -> None:
    """A warp's 16 bytes a thread take four cycles, those of the four schedulers sixteen; what never runs takes none."""
    assert cycles([instruction("LDS.128 R4, [R2]")] * 100) == pytest.approx(1600, rel=0.02)
    assert cycles([instruction("LDSM.16.M88.4 R4, [R2]")] * 100) == pytest.approx(1600, rel=0.02)
    assert cycles([instruction("SHFL.BFLY PT, R1, R2, 0x1, 0x1f")] * 100) == pytest.approx(400, rel=0.02)
    assert cycles([instruction("LDS R4, [R2]")] * 100, warps=2) == pytest.approx(200, rel=0.02)
    assert cycles([instruction("@!PT LDS.128 RZ, [RZ]")] * 100) == pytest.approx(100, abs=H100.branch)


def test_programs_hide_pauses() -> None:
    """Pauses of one program are others' time, until the scheduler or the pipe is busy."""
    loop = [instruction("FFMA R1, R2, R3, R4", 4)] * 100
    for programs, expected in ((1, 400), (2, 200), (4, 100), (8, 100)):
        assert cycles(loop, programs=programs) == pytest.approx(expected, rel=0.05)
    assert cycles(loop, warps=8) == pytest.approx(400, rel=0.05)  # twice the warps do twice the work


def test_scoreboards() -> None:
    """A load is waited for where the machine code says so, and only there."""
    load, use = "LDG.E.128 R4, [R2.64]", "FADD R1, R4, R5"
    waiting = cycles([instruction(load, sets=0), instruction(use, waits=(0,)), *[instruction(use)] * 98])
    later = cycles([instruction(load, sets=0), *[instruction(use)] * 98, instruction(use, waits=(0,))])
    never = cycles([instruction(load, sets=0), *[instruction(use)] * 98, instruction(use, waits=(1,))])
    latency = H100.l2_latency + 2048 / H100.l2_rate
    assert waiting == pytest.approx(latency + 100, rel=0.1) and later == pytest.approx(latency, rel=0.1)
    assert never == pytest.approx(100, abs=H100.branch)


def stages(pending: int) -> list[Instruction]:
    """A loop that copies a tile and waits until at most so many copies are pending."""
    copies = [instruction("LDGSTS.E.BYPASS.128 [R2], [R4.64]")] * 4
    wait = instruction(f"DEPBAR.LE SB0, 0x{pending:x}")
    return [wait, *[instruction("FFMA R1, R2, R3, R4")] * 100, *copies, instruction("LDGDEPBAR")]


def test_stages_hide_latency() -> None:
    """Without a pending group the loop takes the latency besides its instructions; with one or more not."""
    at_once, one, two = (cycles(stages(pending)) for pending in (0, 1, 2))
    assert at_once == pytest.approx(106 + H100.l2_latency + 8192 / H100.l2_rate, rel=0.15)
    assert 150 < one < 300 and two == pytest.approx(8192 / H100.l2_sustained, rel=0.01)


def test_l2_is_shared_by_all_multiprocessors() -> None:
    """However many programs and stages: no faster than the bytes that L2 delivers."""
    loop = stages(4)
    found = steady(loop, H100, WARPS, 4)
    assert found.l2_bytes == 8192
    assert found.cycles == pytest.approx(8192 / H100.l2_sustained) and found.busy["L2"] == pytest.approx(1)


def products(text: str, count: int, waits: int) -> list[Instruction]:
    """A loop of so many wgmma, with a group and a wait at so many places."""
    loop = []
    for number in range(count):
        ends = (number + 1) % (count // waits) == 0
        loop.append(instruction(text + ", gsb0" * ends))
        loop += [instruction("WARPGROUP.DEPBAR.LE gsb0, 0x0")] * ends
    return loop


def test_wgmma() -> None:
    """Four warps multiply 64 x 64 x 16 in 32 cycles; each wait costs the latency, if no other program has something to do."""
    text = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24"
    once, serialised = products(text, 8, 1), products(text, 8, 8)
    assert steady(once, H100, WARPS, 1).operations == 8 * 2 * 64 * 64 * 16
    assert cycles(once) == pytest.approx(8 * 32 + H100.wgmma_latency, rel=0.05)
    assert cycles(serialised) == pytest.approx(8 * (32 + H100.wgmma_latency), rel=0.05)
    assert cycles(once, programs=3) == pytest.approx(8 * 32, rel=0.03)
    assert cycles(products("HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR4], R24", 8, 1), programs=3) == pytest.approx(
        512, rel=0.03
    )
    assert decode(instruction("HGMMA.64x64x8.F32.TF32 R24, R88, gdesc[UR4], R24"), H100).busy == 32
    shared = decode(instruction("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24"), H100)
    assert (shared.shared, decode(instruction(text), H100).shared) == (4096 / 128 / 4, 2048 / 128 / 4)


def test_mma() -> None:
    """A scheduler of the A100 takes 8 cycles for an m16n8k16."""
    step = decode(instruction("HMMA.16816.F32.BF16 R4, R8, R12, R4"), A100)
    assert (step.busy, step.operations) == (8, 2 * 16 * 8 * 16)
    assert decode(instruction("HMMA.1688.F32.TF32 R4, R8, R12, R4"), A100).busy == 8
    assert decode(instruction("HMMA.1688.F32.BF16 R4, R8, R12, R4"), A100).busy == 4
    assert cycles([instruction("HMMA.16816.F32.BF16 R4, R8, R12, R4")] * 50, A100, programs=2) == pytest.approx(400, rel=0.02)


def test_barriers() -> None:
    """Warps of a program wait for each other, not for those of other programs."""
    loop = [*[instruction("FFMA R1, R2, R3, R4")] * 100, instruction("BAR.SYNC.DEFER_BLOCKING 0x0")]
    assert cycles(loop) == pytest.approx(100 + H100.barrier, rel=0.05)
    assert cycles(loop, warps=8) == pytest.approx(200 + H100.barrier, rel=0.05)
    assert cycles(loop, warps=8, programs=2) == pytest.approx(200, rel=0.05)


def test_same_result_each_time() -> None:
    """Whatever is random is so by a seed."""
    loop = [*stages(0), *products("HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24", 4, 1)]
    machine = MACHINES["sm_90"]
    first = steady(loop, machine, WARPS, 2)
    assert first == steady(loop, machine, WARPS, 2) != steady(loop, replace(machine, late=4.0), WARPS, 2)
    assert 0 < first.spread < 0.2 and first.alone > first.cycles
    assert sum(first.waits.values()) + first.busy["issue"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    "text", ["UTMALDG.2D [UR8], [UR4]", "HGMMA.F32.BF16 R24, R88, gdesc[UR4], R24", "HMMA.F32 R4, R8, R12, R4"]
)
def test_what_the_model_does_not_know(text: str) -> None:
    """No figure at all rather than a wrong one."""
    with pytest.raises(ValueError, match=text.partition(" ")[0]):
        decode(instruction(text), H100)


def test_programs_that_fit() -> None:
    """Registers in eights, shared memory with what a program takes besides, warps."""
    fit = H100.programs_that_fit
    assert (fit(4, 255, 0), fit(4, 168, 0), fit(4, 169, 0), fit(8, 122, 0), fit(8, 129, 0)) == (2, 3, 2, 2, 1)
    assert (fit(4, 32, 232_448), fit(4, 32, 115_712), fit(4, 32, 115_713), fit(4, 32, 0), fit(1, 16, 0)) == (1, 2, 1, 16, 32)
    assert A100.programs_that_fit(4, 128, 90_000) == 1


def prediction(*cycles: float, groups: int = 2) -> Prediction:
    turns = [Steady(100, 4e5, 1e3, value, 0.01, 900, {"issue": 0.5}, {"L2": 0.4}) for value in cycles]
    return Prediction(H100, 2, tuple(Loop(turn, 0.5) for turn in turns), 2, groups)


def test_predictions() -> None:
    """cycles are those of the longest loop, near the diagonal; far_cycles those of the shortest, beyond a bounded table; the mean
    weighs both by their shares of the tiles."""
    one, two = prediction(1000), prediction(1000, 600, groups=8)
    assert (one.cycles, one.far_cycles, one.mean_cycles(0.25), one.is_serialised) == (500, None, 500, False)
    assert (two.cycles, two.far_cycles, two.mean_cycles(0.25), two.is_serialised) == (500, 300, 350, True)
    assert near_share(-64, 64, 4096, 64, 64) == 256 / 4096 and near_share(-300, 300, 300, 64, 64) == 1


def test_machine_code_to_prediction() -> None:
    """Registers from its head; loops with products, the longest first; groups of wgmma counted in all of it."""
    product = instruction("HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24, gsb0")
    wait, other = instruction("WARPGROUP.DEPBAR.LE gsb0, 0x0"), instruction("FADD R1, R1, R2")
    part = instruction("HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24")
    short, long = [product, wait, instruction("@P0 BRA 0x10")], [*[other] * 40, part, product, wait, instruction("@P0 BRA 0x40")]
    code = [product, *short, *long, other, other, instruction("@P0 BRA 0x300")]
    found = of_sass(printed(*code), H100, WARPS, 50_000, 64 * 32, 3)
    assert (found.programs, [loop.turn.instructions for loop in found.loops]) == (4, [44, 3])
    assert (found.wgmma_products, found.wgmma_groups, found.is_serialised) == (3, 3, False)
    assert found.cycles == 2 * found.loops[0].turn.cycles and found.loops[0].operations == 2 * 2 * 2 * 64 * 64 * 16
    assert "tensor" in found.loops[1].limit


def test_teraflops() -> None:
    """At the rate of the matrix units, all of what the white papers say but for clock and efficiency."""
    busy = 2 * 2 * SCORES * 64 / 4096  # two products at 4096 operations a cycle
    expected = 989.4 * 1.755 / 1.83 * H100.efficiency
    assert teraflops(busy, H100, 64, 2) == pytest.approx(expected, rel=0.001)
    assert H100.l2_sustained * H100.cycles_per_second == pytest.approx(H100.l2_terabytes * 1e12)


def test_calls() -> None:
    """The backward is the sum of its kernels; there is no dtable kernel without a table, nor beyond a bounded one."""
    clamp, none, shaw = (KernelCase("forward", "sm_90", "bf16", 64, name) for name in ("clamp", "none", "shaw"))
    found: dict[KernelCase, Prediction | None] = {
        replace(case, kernel=kernel): prediction(1000 * number, 100 * number)
        for case in (clamp, none, shaw)
        for number, kernel in enumerate(("forward", "dq", "dkv", "dtable"), 1)
    }
    assert (of_call(found, clamp, FORWARD), of_call(found, clamp, BACKWARD)) == (500, 1000 + 1500 + 2000)
    assert (of_call(found, none, BACKWARD), of_call(found, clamp, BACKWARD, far=True)) == (2500, 250)
    assert of_call(found, shaw, BACKWARD) == 1000 + 1500 + 2 * 2000  # a product of dS and one of P
    stored = 8192 / H100.memory_rate  # loops are no faster than what they read comes from memory
    with_query = {**found, replace(clamp, kernel="dq_from_ds"): prediction(4000)}
    assert of_call(with_query, clamp, BACKWARD) == 2000 + 1500 + 2000
    assert of_call(with_query, clamp, BACKWARD, far=True) == 250  # of a call that has far keys
    with_query[replace(clamp, kernel="dq_from_ds")] = prediction(100)
    assert of_call(with_query, clamp, BACKWARD) == pytest.approx(stored + 1500 + 2000)
    with_p2c = {**found, replace(clamp, kernel="dp2c"): prediction(100)}
    assert of_call(with_p2c, clamp, BACKWARD) == pytest.approx(4500 + stored)
    assert of_call({**with_p2c, replace(clamp, kernel="dp2c"): None}, clamp, BACKWARD) is None
    found[replace(none, kernel="dq")] = prediction(1000)
    assert of_call(found, none, BACKWARD, far=True) is None
    del found[replace(clamp, kernel="dtable")]
    assert of_call(found, clamp, BACKWARD) is None and of_call({}, clamp, FORWARD) is None


def test_designs_of_the_backward() -> None:
    """Sums of parts; 16 bits of each score are written and read."""
    size = Size(2, 4, 1024, 64)
    assert size.blocks == 2 * 4 * 16 * 16
    assert workspace(size, H100, 2, 64) == 132 * 2 * 64 * 1024 * 2
    cycles = {"dq": 1500, "dkv": 1700, "dtable": 600, "dq_from_ds": 1100}
    found, stored = designs(cycles, H100), 8192 / H100.memory_rate
    assert found["query from q.k, writing hidden"] == 1500 + 1700 + 600
    assert found["query from q.k, writing not hidden"] == pytest.approx(1500 + 1700 + 600 + stored)
    assert found["query from dS, writing hidden"] == 1100 + 1700 + 600
    assert found["query from dS, writing not hidden"] == pytest.approx(1100 + 1700 + 600 + stored)
    slow = designs({**cycles, "dkv": 100}, H100)
    assert slow["query from dS, writing hidden"] == pytest.approx(1100 + stored + 600)
