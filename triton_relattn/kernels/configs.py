"""Launch configurations: what is valid, and which one serves which call.

The choices come from compiling for each target and reading registers, spills and loop instructions (tests/compile holds
them to it); they have not been tuned by timing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

MAX_BLOCK = 256
PROGRAMS_PER_MULTIPROCESSOR = 4  # of the table kernel, so that its uneven walks even out


KERNELS = ("forward", "rows", "columns", "table")


@dataclass(frozen=True)
class TileConfig:
    """Tile of a kernel, block_m queries by block_n keys (or table rows), and the resources of a program.

    carry: what the kernels that walk along the keys, forward and rows, keep for the next tile: "scores", rotated table blocks;
    "both", in the rows kernel also gradients of scores; None, nothing: more products, in fewer registers (see band.py).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    carry: str | None = "scores"

    def why_invalid(self, arch: str, has_table: bool) -> str | None:
        """The rule that forbids this configuration, the same for all kernels; None if none does. Compiling tells if it fits."""
        for name, value in (("block_m", self.block_m), ("block_n", self.block_n), ("num_warps", self.num_warps)):
            if value < 1 or value & (value - 1):
                return f"{name} must be a power of two, got {value}"
        if not 16 <= min(self.block_m, self.block_n) <= max(self.block_m, self.block_n) <= MAX_BLOCK:
            return f"block_m and block_n must lie in [16, {MAX_BLOCK}], got {self.block_m} and {self.block_n}"
        if self.carry not in (None, "scores", "both"):
            return f'carry must be None, "scores" or "both", got {self.carry!r}'
        if has_table and self.block_m not in (self.block_n, 2 * self.block_n):
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


def input_precision(dtype: torch.dtype, arch: str) -> str:
    """How float32 products are computed, as torch.set_float32_matmul_precision says; 16-bit inputs do not depend on it."""
    if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "ieee" if arch.startswith("gfx") and arch != "gfx942" else "tf32"  # of AMD's, only these units have it


def needs_wide_index(tensor: torch.Tensor, rows: int = MAX_BLOCK) -> bool:
    """Whether the offsets of so many rows of the tensor's (length, width) matrices exceed 31 bits.

    A tile is addressed from its first row on, whose offset is 64-bit anyway; only a clamped table is from row 0.
    """
    row_stride, column_stride = tensor.stride()[-2:]
    return rows * row_stride + (tensor.shape[-1] + MAX_BLOCK) * column_stride >= 2**31


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors (compute units) the device has; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def table_splits(device: torch.device, programs: int, units: int) -> int:
    """How many programs share each block of a table's rows: as few as keep the device busy, since each has its own sum.

    Args:
        programs: blocks of rows, of all tables.
        units: what the programs of a block divide among them: batch entries, times heads if those share the table.
    """
    return max(1, min(units, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device) // programs))


# 16-bit inputs on NVIDIA GPUs; the entry that says most about a call wins: kernel (or kernel and what is special about the call's
# terms, see select), kind of matrix unit ("mma": 16 rows a warp, operands in registers; "wgmma": 64 rows of four warps, operands
# in shared memory), padded width, what lies beyond the table (None: there is none), is_causal. Widths below 64 go with 64.
_CONFIGS: dict[tuple[object, ...], TileConfig] = {
    ("forward", "mma", 64): TileConfig(64, 32, 4, 2),
    ("forward", "mma", 64, None): TileConfig(128, 64, 8, 2),
    ("forward", "mma", 128): TileConfig(64, 64, 8, 2),
    ("forward", "mma", 128, "zero"): TileConfig(64, 64, 8, 1),
    ("forward", "mma", 128, None): TileConfig(128, 64, 8, 2),
    ("forward", "mma", 256): TileConfig(32, 32, 4, 1),
    ("forward", "wgmma", 64): TileConfig(64, 64, 4, 2),
    ("forward", "wgmma", 64, None): TileConfig(128, 64, 8, 2),
    ("forward", "wgmma", 128): TileConfig(128, 64, 8, 2),
    ("forward", "wgmma", 128, "clamp"): TileConfig(64, 32, 4, 2),
    ("forward", "wgmma", 128, "zero", False): TileConfig(128, 64, 8, 1),
    ("forward", "wgmma", 128, "zero", True): TileConfig(64, 32, 4, 2),
    ("forward", "wgmma", 256): TileConfig(64, 32, 8, 2),
    ("rows", "mma", 64): TileConfig(64, 32, 4, 2, "both"),
    ("rows", "mma", 64, "clamp", True): TileConfig(32, 32, 4, 2, "both"),
    ("rows", "mma", 64, None): TileConfig(128, 64, 8, 2),
    ("rows", "mma", 128): TileConfig(32, 32, 4, 1, "both"),
    ("rows", "mma", 128, "clamp", True): TileConfig(32, 32, 8, 2, "both"),
    ("rows", "mma", 128, "zero", False): TileConfig(32, 32, 8, 2, "both"),
    ("rows", "mma", 128, None): TileConfig(64, 32, 4, 2),
    ("rows", "wgmma", 64): TileConfig(64, 32, 4, 2, "both"),
    ("rows", "wgmma", 64, "none"): TileConfig(64, 64, 4, 2),
    ("rows", "wgmma", 64, "clamp"): TileConfig(64, 32, 4, 1, "both"),
    ("rows", "wgmma", 64, None): TileConfig(128, 64, 8, 2),
    ("rows", "wgmma", 128): TileConfig(32, 32, 4, 1, "both"),
    ("rows", "wgmma", 128, "none"): TileConfig(64, 32, 4, 2, None),
    ("rows", "wgmma", 128, None): TileConfig(128, 64, 8, 2),
    ("columns", "mma", 64): TileConfig(32, 32, 2, 2),
    ("columns", "mma", 128): TileConfig(32, 32, 4, 2),
    ("columns", "wgmma", 64): TileConfig(64, 64, 4, 2),
    ("columns", "wgmma", 64, "clamp"): TileConfig(64, 64, 4, 1),
    ("columns", "wgmma", 64, "clamp", True): TileConfig(64, 32, 4, 2),
    ("columns", "wgmma", 64, "zero"): TileConfig(64, 64, 4, 1),
    ("columns", "wgmma", 64, "zero", True): TileConfig(64, 32, 4, 2),
    ("columns", "wgmma", 128): TileConfig(32, 32, 4, 2),
    ("columns", "wgmma", 128, None): TileConfig(64, 32, 4, 1),
    ("table", "mma", 64): TileConfig(32, 32, 4, 2),
    ("table", "wgmma", 64): TileConfig(32, 32, 4, 1),
    ("table", "wgmma", 64, "clamp"): TileConfig(32, 32, 4, 2),
    ("table", "mma", 128): TileConfig(32, 32, 8, 2),
    ("table", "wgmma", 128): TileConfig(32, 32, 8, 2),
    ("forward, rel_value", "mma", 64): TileConfig(64, 32, 4, 2, None),
    ("forward, rel_value", "mma", 128): TileConfig(32, 32, 4, 2, None),
    ("forward, rel_value", "wgmma", 64): TileConfig(64, 64, 4, 2, None),
    ("forward, rel_value", "wgmma", 128): TileConfig(64, 32, 4, 1, None),
    ("rows, rel_value", "mma", 64): TileConfig(32, 32, 4, 2, "both"),
    ("rows, rel_value", "mma", 128): TileConfig(16, 16, 4, 2, None),
    ("rows, rel_value", "mma", 128, "clamp", False): TileConfig(32, 32, 4, 1),
    ("rows, rel_value", "wgmma", 64): TileConfig(64, 32, 4, 1, None),
    ("rows, rel_value", "wgmma", 128): TileConfig(16, 16, 4, 2, None),
    ("rows, rel_value", "wgmma", 128, "clamp", False): TileConfig(32, 32, 8, 2, "both"),
    ("columns, rel_value", "mma", 64): TileConfig(32, 32, 4, 2),
    ("columns, rel_value", "mma", 64, "clamp", False): TileConfig(32, 32, 2, 2),
    ("columns, rel_value", "mma", 128): TileConfig(32, 32, 8, 2),
    ("columns, rel_value", "wgmma", 64): TileConfig(32, 32, 4, 2),
    ("columns, rel_value", "wgmma", 64, "clamp", False): TileConfig(64, 32, 4, 2),
    ("columns, rel_value", "wgmma", 128): TileConfig(32, 32, 8, 2),
    ("table, rel_value", "mma", 64): TileConfig(32, 32, 4, 1),
    ("table, rel_value", "mma", 128): TileConfig(16, 16, 4, 2),
    ("table, rel_value", "wgmma", 64): TileConfig(32, 32, 4, 1),
    ("table, rel_value", "wgmma", 128): TileConfig(16, 16, 4, 2),
    ("forward, rel_query", "wgmma", 128, "none", True): TileConfig(128, 64, 8, 1, None),
    ("rows, rel_query", "mma", 64): TileConfig(32, 32, 4, 2, "both"),
    ("rows, rel_query", "wgmma", 64): TileConfig(64, 32, 4, 1, "both"),
    ("rows, rel_query", "wgmma", 128): TileConfig(32, 32, 4, 1, "both"),
    ("table, rel_query", "wgmma", 64): TileConfig(32, 32, 4, 2),
    ("rows, narrow rel_query", "mma", 128): TileConfig(32, 16, 2, 1, "both"),
    ("rows, narrow rel_query", "wgmma", 128): TileConfig(32, 16, 2, 2, None),
    ("columns, narrow rel_query", "mma", 128): TileConfig(32, 32, 8, 1),
    ("columns, narrow rel_query", "wgmma", 128): TileConfig(32, 32, 4, 1),
    ("table, narrow rel_query", "mma", 128): TileConfig(32, 16, 4, 2),
    ("table, narrow rel_query", "wgmma", 128): TileConfig(32, 16, 4, 2),
    ("rows, rel_key and rel_bias", "mma", 128): TileConfig(32, 32, 4, 2, "both"),
    ("rows, rel_key and rel_bias", "wgmma", 64): TileConfig(64, 32, 4, 1, "both"),
    ("forward, rel_bias", "wgmma", 128): TileConfig(128, 64, 8, 2, None),
    ("rows, rel_bias", "mma", 64): TileConfig(64, 32, 4, 1, "both"),
    ("rows, rel_bias", "mma", 128): TileConfig(64, 32, 4, 2, None),
    ("table, rel_key and rel_bias", "mma", 128): TileConfig(16, 16, 4, 2),
    ("table, rel_key and rel_bias", "wgmma", 128): TileConfig(16, 16, 4, 2),
    ("table, rel_bias", "mma", 64): TileConfig(32, 16, 2, 2),
    ("table, rel_bias", "mma", 64, "none", True): TileConfig(32, 16, 4, 2),
    ("table, rel_bias", "mma", 128): TileConfig(32, 16, 4, 2),
    ("table, rel_bias", "wgmma", 64): TileConfig(32, 32, 4, 1),
    ("table, rel_bias", "wgmma", 128): TileConfig(16, 16, 2, 2),
}


def select(
    kernel: str,
    arch: str,
    dtype: torch.dtype,
    width: int,
    outside: str | None = None,
    is_causal: bool = False,
    special: str | None = None,
) -> TileConfig:
    """The configuration of one of KERNELS for a call with this largest width.

    Args:
        outside: what lies beyond the tables (None: there are none).
        special: "rel_value" with such a table; else "rel_query" with one besides the query ("narrow rel_query" if narrower);
            else "rel_key and rel_bias", or "rel_bias" if that is the only term.
    """
    width = max(64, padded_width(width))
    if arch == "interpreter":
        return TileConfig(64, 64, 4, 1)  # its cost is per operation, whatever the size
    if dtype == torch.float32:
        return _select_float32(kernel, arch, width, special)
    if arch.startswith("gfx"):
        if width == 256 and kernel != "forward":
            return TileConfig(16, 16, 4, 1)
        return TileConfig(64 if kernel == "forward" else 32, 32, 4, 2 if width <= 128 else 1)
    if (kernel, arch, width, special) == ("forward", "sm_80", 256, None):  # more shared memory than its siblings
        return TileConfig(64, 64, 8, 2)
    unit = "mma" if arch.startswith(("sm_8", "sm_12")) else "wgmma"
    names = [kernel] if special is None else [f"{kernel}, {special}", kernel]
    if special == "rel_value":  # a second band: nothing else would fit
        names = names[:1]
    calls = [(name, unit, width, outside, is_causal) for name in names]
    entries = (_CONFIGS.get(call[:length]) for call in calls for length in (5, 4, 3))
    config = next((entry for entry in entries if entry is not None), TileConfig(16, 16, 4, 1))
    return config if config.why_invalid(arch, outside is not None) is None else replace(config, num_stages=1)


def _select_float32(kernel: str, arch: str, width: int, special: str | None) -> TileConfig:
    if input_precision(torch.float32, arch) == "ieee":  # no matrix units: whole rows of the operands lie in registers
        return TileConfig(32, 32, 8, 1) if kernel == "forward" and width <= 64 else TileConfig(16, 16, 8, 1)
    if kernel == "forward":
        if width == 256 and special is not None:
            return TileConfig(16, 16, 4, 1)
        return TileConfig(64, 32, 8, 2) if width <= 64 else TileConfig(32, 32, 4, 2 if width == 128 and special is None else 1)
    return TileConfig(32, 32, 4, 1) if width <= 64 else TileConfig(16, 16, 4, 1)
