"""The multiprocessors of an A100 and of an H100, as far as the model needs to know.

Where each figure comes from:

* guide: CUDA C++ Programming Guide, throughput of arithmetic instructions and technical specifications by compute capability.
* paper: NVIDIA A100 and H100 Tensor Core GPU Architecture, white papers: clocks, rates of the matrix units.
* Sun: Sun et al., Dissecting Tensor Cores via Microbenchmarks, arXiv 2206.02874.
* Luo: Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture, arXiv 2402.13499.
* assumed: published nowhere, or published figures differ. sensitivity.py varies these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Machine:
    """A GPU of multiprocessors with four schedulers each. A scheduler has pipes of its own; shared memory and L2 serve all four.

    Attributes:
        gigahertz: the clock under load.
        efficiency: what published kernels reach of what the model gives them; calibrate.py fits it. A second has so much less of
            the model's cycles.
        registers: of 32 bits, of a multiprocessor.
        shared_bytes: of a multiprocessor; each program takes reserved_bytes besides its own.
        warps, programs: how many a multiprocessor holds.
        alu, fma, imad, mufu, uniform, memory: cycles for which an instruction keeps its pipe busy.
        fma_pipes: pipes for float32; the first of them also multiplies integers.
        mma: cycles of a scheduler's matrix unit for m16n8k16 in 16 bits.
        wgmma: cycles for m64nNk16 in 16 bits, per column.
        shared_rate: bytes of shared memory a cycle.
        shared_queue: cycles of requests that may be queued there; then the memory pipe takes no more of them.
        wgmma_ahead: cycles of requests that may be queued there when a wgmma begins to read its operands.
        l2_rate: bytes from L2 a cycle while a multiprocessor fetches.
        l2_terabytes: from L2 a second, when all multiprocessors fetch; memory_terabytes: from and to memory.
        ..._latency: cycles from when a unit begins until the result is there; of imad, mufu, mma, wgmma: from when it ends.
        l2_spread: by how much the latency of L2 varies, relative to it.
        operands: cycles until a memory instruction has read its registers.
        barrier: cycles from the last arrival until the warps go on.
        branch: cycles from the end of a loop to its start, at least.
        late: cycles by which an instruction is late now and then, a share late_share of all, for reasons that are not modelled.
    """

    name: str
    multiprocessors: int
    gigahertz: float
    efficiency: float
    registers: int
    shared_bytes: int
    reserved_bytes: int
    warps: int
    programs: int
    alu: float
    fma: float
    fma_pipes: int
    imad: float
    mufu: float
    uniform: float
    memory: float
    mma: float
    wgmma: float
    shared_rate: float
    shared_queue: float
    wgmma_ahead: float
    l2_rate: float
    l2_terabytes: float
    memory_terabytes: float
    imad_latency: float
    mufu_latency: float
    uniform_latency: float
    special_latency: float
    shuffle_latency: float
    shared_latency: float
    l2_latency: float
    l2_spread: float
    mma_latency: float
    wgmma_latency: float
    fence_latency: float
    operands: float
    barrier: float
    branch: float
    late: float
    late_share: float

    @property
    def cycles_per_second(self) -> float:
        """Cycles of the model, of all multiprocessors together."""
        return self.multiprocessors * self.gigahertz * 1e9 * self.efficiency

    @property
    def l2_sustained(self) -> float:
        """Bytes from L2 for a cycle of a multiprocessor."""
        return self.l2_terabytes * 1e12 / self.cycles_per_second

    @property
    def memory_rate(self) -> float:
        """Bytes from and to memory for a cycle of a multiprocessor."""
        return self.memory_terabytes * 1e12 / self.cycles_per_second

    def programs_that_fit(self, warps: int, registers: int, shared_bytes: int) -> int:
        """Return how many programs of so many warps, registers per thread and bytes a multiprocessor runs at once."""
        by_registers = self.registers // (warps * 32 * (-(-registers // 8) * 8))
        by_shared = self.shared_bytes // (shared_bytes + self.reserved_bytes)
        return max(1, min(by_registers, by_shared, self.warps // warps, self.programs))


H100 = Machine(
    name="H100 SXM",
    multiprocessors=132,  # paper
    gigahertz=1.755,  # assumed; the paper's 989 TFLOP/s are of 1.83, and power takes some of it
    efficiency=0.8,  # calibrate.py
    registers=65_536,  # guide
    shared_bytes=233_472,  # guide
    reserved_bytes=1024,  # guide
    warps=64,  # guide
    programs=32,  # guide
    alu=2,  # guide: 64 a cycle and multiprocessor
    fma=2,  # guide: 128
    fma_pipes=2,
    imad=2,  # guide: 64
    mufu=8,  # guide: 16
    uniform=2,  # assumed
    memory=2,  # assumed
    mma=6.5,  # Luo: mma.sync reaches 62 % of the rate of wgmma, of which 4 would be all
    wgmma=0.5,  # paper: 4096 operations a cycle and multiprocessor
    shared_rate=128,  # guide: 32 banks of 4 bytes
    shared_queue=256,  # assumed
    wgmma_ahead=64,  # assumed
    l2_rate=64,  # assumed
    l2_terabytes=6.5,  # assumed; measurements lie between 5.5 and 7
    memory_terabytes=3.0,  # assumed; the paper has 3.35
    imad_latency=3,  # assumed
    mufu_latency=16,  # assumed
    uniform_latency=10,  # assumed
    special_latency=12,  # assumed
    shuffle_latency=23,  # Luo
    shared_latency=29,  # Luo
    l2_latency=270,  # Luo: 260 to 280
    l2_spread=0.2,  # assumed: slices of L2 lie nearer and further
    mma_latency=26.5,  # Luo: 33 in all
    wgmma_latency=30,  # assumed
    fence_latency=12,  # assumed
    operands=12,  # assumed
    barrier=20,  # assumed
    branch=6,  # assumed
    late=2,  # assumed; besides, it keeps figures from depending on a cycle somewhere
    late_share=0.05,  # assumed
)

A100 = replace(
    H100,
    name="A100 SXM",
    multiprocessors=108,  # paper
    gigahertz=1.41,  # paper
    shared_bytes=167_936,  # guide
    fma_pipes=1,  # guide: 64 a cycle and multiprocessor
    mma=8,  # paper: 2048 operations a cycle and multiprocessor
    l2_terabytes=4.4,  # assumed
    memory_terabytes=1.8,  # assumed; the paper has 2.04
    l2_latency=200,  # Luo
    mma_latency=25,  # Sun: 33 in all
)

MACHINES = {"sm_80": A100, "sm_90": H100}
"""By target; for other targets there is no model."""
