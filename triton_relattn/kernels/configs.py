"""Launch configurations: what is valid, and which one serves which call.

The choices come from compiling for each target and reading registers, spills and loop instructions (tests/compile holds
them to it); they have not been tuned by timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MAX_BLOCK = 256


KERNELS = ("forward", "rows", "columns", "table")


@dataclass(frozen=True)
class TileConfig:
    """Tile of a kernel, block_m queries by block_n keys (or table rows), and the resources of a program."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def why_invalid(self, arch: str, has_rel_key: bool) -> str | None:
        """The rule that forbids this configuration for all kernels, None if none does. Whether it fits is known after compiling."""
        for name, value in (("block_m", self.block_m), ("block_n", self.block_n), ("num_warps", self.num_warps)):
            if value < 1 or value & (value - 1):
                return f"{name} must be a power of two, got {value}"
        if not 16 <= min(self.block_m, self.block_n) <= max(self.block_m, self.block_n) <= MAX_BLOCK:
            return f"block_m and block_n must lie in [16, {MAX_BLOCK}], got {self.block_m} and {self.block_n}"
        if has_rel_key and self.block_m not in (self.block_n, 2 * self.block_n):
            return f"with a table, block_m must be block_n or twice that (see band.py), got {self.block_m} and {self.block_n}"
        if arch.startswith("sm_10") and self.num_warps == 4 and self.num_stages > 1:
            return "Triton 3.6 and 3.7 miscompile some loops for sm_100 with 4 warps and more than one stage"
        return None


def architecture(device: torch.device) -> str:
    """ "sm_90", "gfx942", ...; "interpreter" on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def padded_width(width: int) -> int:
    """Width of a tile that holds width columns: a power of two, and at least the 16 that matrix units need."""
    return max(16, triton.next_power_of_2(width))


def input_precision(dtype: torch.dtype) -> str:
    """How float32 products are computed, as torch.set_float32_matmul_precision says; 16-bit inputs do not depend on it."""
    return "ieee" if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest" else "tf32"


def needs_wide_index(tensor: torch.Tensor, rows: int = MAX_BLOCK) -> bool:
    """Whether the offsets of so many rows of the tensor's (length, width) matrices exceed 31 bits.

    A tile is addressed from its first row on, whose offset is 64-bit anyway; only a clamped table is from row 0.
    """
    row_stride, column_stride = tensor.stride()[-2:]
    return rows * row_stride + (tensor.shape[-1] + MAX_BLOCK) * column_stride >= 2**31


def table_splits(device: torch.device, programs: int, units: int) -> int:
    """How many programs share each block of a table's rows, so that a GPU is busy with as few partial sums as that takes.

    Args:
        programs: blocks of rows, of all tables.
        units: what the programs of a block can divide among them: batch entries, times heads if those share the table.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(units, 4 * multiprocessors // programs))


def select(
    kernel: str, arch: str, dtype: torch.dtype, head_dim: int, value_dim: int, outside: str | None, is_causal: bool
) -> TileConfig:
    """The configuration of one of KERNELS for a call; outside is what lies beyond the table (None: there is no table)."""
    width = max(padded_width(head_dim), padded_width(value_dim))
    if arch == "interpreter":
        return TileConfig(64, 64, 4, 1)  # its cost is per operation, whatever the size
    if dtype == torch.float32:
        return _select_float32(kernel, width)
    if arch.startswith("gfx"):
        stages = 2 if width <= 128 else 1
        return TileConfig(64, 32, 4, stages) if kernel == "forward" else TileConfig(32, 32, 4, stages)
    ampere = arch.startswith(("sm_8", "sm_12"))  # matrix instructions of 16 rows, operands in registers
    if kernel == "forward":
        return _select_forward(arch, ampere, width, outside)
    if width == 256:
        return TileConfig(32, 32, 8, 1 if ampere and arch != "sm_80" else 2)
    if kernel == "table":
        return TileConfig(32, 32, 4 if width <= 64 else 8, 2)
    if kernel == "columns":
        if outside is None:
            if ampere:
                return TileConfig(32, 32, 2 if width <= 64 else 4, 2)
            return TileConfig(64, 64 if width <= 64 else 32, 4, 2)
        if ampere or width == 128:
            return TileConfig(32, 32, 2 if width <= 64 else 4, 2)
        return TileConfig(64, 64, 4, 2)
    if outside is None:
        return TileConfig(64, 64, 4, 2) if ampere and width == 128 else TileConfig(128, 64, 8, 2)
    if width == 128:
        return TileConfig(32, 32, 4, 1)
    return TileConfig(64, 32, 4, 2)


def _select_float32(kernel: str, width: int) -> TileConfig:
    if input_precision(torch.float32) == "ieee":  # no matrix units: whole rows of the operands lie in registers
        return TileConfig(32, 32, 8, 1) if kernel == "forward" and width <= 64 else TileConfig(16, 16, 8 if kernel=="forward" else 4, 1)
    if kernel != "forward":
        return TileConfig(32, 32, 4 if width <= 64 else 8, 1)
    return TileConfig(64, 32, 8, 2) if width <= 64 else TileConfig(32, 32, 4, 2 if width == 128 else 1)


def _select_forward(arch: str, ampere: bool, width: int, outside: str | None) -> TileConfig:
    if width == 256:
        if arch == "sm_80":
            return TileConfig(64, 64, 8, 2)
        return TileConfig(32, 32, 4, 1) if ampere else TileConfig(64, 32, 8, 2)
    if outside is None:
        return TileConfig(128, 64, 8, 2)
    if ampere:
        return TileConfig(64, 32, 4, 2) if width <= 64 else TileConfig(64, 64, 8, 2)
    if arch == "sm_90" and (width <= 64 or outside == "clamp"):
        return TileConfig(64, 64 if width <= 64 else 32, 4, 2)
    return TileConfig(128, 64, 8, 2)
