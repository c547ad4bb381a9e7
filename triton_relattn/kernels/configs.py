"""Launch configurations: what is valid, and which one serves which call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


MAX_BLOCK = 256


@dataclass(frozen=True)
class ForwardConfig:
    """Tile sizes and resources of the forward kernel: BLOCK_M queries by BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


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


def needs_wide_index(tensor: torch.Tensor) -> bool:
    """Whether an offset within one (length, width) matrix of the tensor can exceed 31 bits."""
    (length, width), (row_stride, column_stride) = tensor.shape[-2:], tensor.stride()[-2:]
    # Tiles reach past the end of a matrix, by less than a tile; those elements are masked, but their offsets are formed.
    return (length + MAX_BLOCK) * abs(row_stride) + (width + MAX_BLOCK) * abs(column_stride) >= 2**31


def select_forward(arch: str, dtype: torch.dtype, head_dim: int, value_dim: int, has_rel_key: bool) -> ForwardConfig:
    return ForwardConfig(64, 64, 4, 2)
