"""The tile of a kernel and the resources of its programs: a TileConfig, and the rules for those that the kernels allow."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from .architectures import architecture_of

KERNELS = ("forward", "dkv", "stored_dq", "dtable", "dp2c", "dq")
WITHOUT_BANDS = ("stored_dq", "dtable")  # kernels whose block_m need not be block_n or twice that
READERS = (*WITHOUT_BANDS, "dp2c")  # kernels that read what the dkv kernel has stored, and so rotate nothing in registers
MAX_BLOCK = 256
MAX_THREADS = 1024  # of a program, on any GPU
MAX_STAGES = 8
REGISTERS = 65536  # of a multiprocessor of any of NVIDIA's GPUs


@dataclass(frozen=True)
class TileConfig:
    """Tile of a kernel, block_m queries by block_n keys (or table rows), and the resources of a program.

    carry: what the forward, the dq kernel and, with rel_p2c, the dkv kernel keep for the next tile. "scores": rotated table
    blocks; None: nothing, which takes more products and fewer registers (see band.py).
    rotation: the way in which a tile's rows are rotated: "gather", on any GPU, or "registers", within quads of lanes (see
    registers.py).
    max_registers: limit on the registers of a thread, so that more programs share a multiprocessor; the rest is spilled. None:
    no limit but the GPU's.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    carry: str | None = "scores"
    rotation: str = "gather"
    max_registers: int | None = None

    @property
    def programs_at_once(self) -> int:
        """Return how many programs can run on one NVIDIA multiprocessor at once, at least, as far as registers go."""
        return max(1, REGISTERS // (32 * self.num_warps * (self.max_registers or 255)))

    def smaller(self) -> TileConfig | None:
        """Return the next smaller configuration that is valid, one stage less or half the tile; None if there is none."""
        if self.num_stages > 1:
            return replace(self, num_stages=self.num_stages - 1)
        if max(self.block_m, self.block_n) <= 16:
            return None
        if self.block_m > self.block_n:
            block_m = self.block_m // 2
            warps = self.num_warps if self.rotation == "gather" else min(self.num_warps, block_m // 16)
            return replace(self, block_m=block_m, num_warps=warps)
        return replace(self, block_n=self.block_n // 2)

    def why_invalid(self, arch: str, has_table: bool, kernel: str | None = None) -> str | None:
        """Return the rule that forbids this configuration for a kernel, or for any (None). Only compiling tells whether it
        fits."""
        for name, value in (("block_m", self.block_m), ("block_n", self.block_n), ("num_warps", self.num_warps)):
            if value < 1 or value & (value - 1):
                return f"{name} must be a power of two, got {value}"
        if not 16 <= min(self.block_m, self.block_n) <= max(self.block_m, self.block_n) <= MAX_BLOCK:
            return f"block_m and block_n must lie in [16, {MAX_BLOCK}], got {self.block_m} and {self.block_n}"
        gpu = architecture_of(arch)
        if self.num_warps * gpu.warp > MAX_THREADS:
            return f"num_warps must be at most {MAX_THREADS // gpu.warp}, got {self.num_warps}"
        if not 1 <= self.num_stages <= MAX_STAGES:
            return f"num_stages must lie in [1, {MAX_STAGES}], got {self.num_stages}"
        if self.carry not in (None, "scores"):
            return f'carry must be None or "scores", got {self.carry!r}'
        if self.rotation not in ("gather", "registers"):
            return f'rotation must be "gather" or "registers", got {self.rotation!r}'
        if self.rotation != "gather" and kernel in READERS:
            return f'rotation must be "gather" for {kernel}, got {self.rotation!r}'
        if self.max_registers is not None and (not gpu.is_nvidia or not 32 <= self.max_registers <= 255):
            return f"max_registers must lie in [32, 255], on NVIDIA GPUs alone, got {self.max_registers}"
        if self.rotation != "gather" and self.block_m % (16 * self.num_warps):
            return f"16 * num_warps must divide block_m for rotations in registers, got {self.block_m} and {self.num_warps} warps"
        if self.rotation != "gather" and self.block_n > 128:
            return f"block_n must be at most 128 for rotations in registers, got {self.block_n}"
        if has_table and kernel not in WITHOUT_BANDS and self.block_m not in (self.block_n, 2 * self.block_n):
            return f"with a table, block_m must be block_n or twice that (see band.py), got {self.block_m} and {self.block_n}"
        if gpu.few_stages and self.num_warps == 4 and self.num_stages > 1:
            return "Triton 3.6 and 3.7 miscompile some loops for sm_100 with 4 warps and more than one stage"
        return None


def candidates(kernel: str, arch: str, has_table: bool) -> list[TileConfig]:
    """Return every configuration that a search for the best one looks at. All are valid; only compiling tells which fit."""
    gpu = architecture_of(arch)
    carries = ("scores", None) if kernel in ("forward", "dq") and has_table else ("scores",)
    rotations = ("gather", "registers") if has_table and gpu.rotates_in_registers else ("gather",)
    # 128 registers: two programs of eight warps, or four of four, share a multiprocessor. 168: three of four warps.
    limits = (None, 128, 168) if gpu.is_nvidia else (None,)
    blocks, warps, stages = (16, 32, 64, 128), (2, 4, 8), (1, 2, 3)
    configs = itertools.starmap(TileConfig, itertools.product(blocks, blocks, warps, stages, carries, rotations, limits))
    return [config for config in configs if config.why_invalid(arch, has_table, kernel) is None]
