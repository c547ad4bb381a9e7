"""Small kernels written in PTX, for tests of the emulator itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .decode import SHARED_BASE, decode
from .machine import Report, run

SHARED_BYTES = 64 * 1024


def kernel(body: str, warps: int = 1, tensors: int = 1) -> str:
    """PTX of a kernel with the body. Before it, the addresses of the tensors are loaded to %d0, %d1, ..., the number of the
    thread to %r0, of its lane to %r1, of its warp to %r2, and the address of shared memory to %r3. Registers: %p<20> are
    predicates, %h<20>, %r<400> and %d<60> have 16, 32 and 64 bits."""
    parameters = ", ".join(f".param .u64 tensor_{index}" for index in range(tensors))
    loads = "\n".join(f"ld.param.b64 %d{index}, [tensor_{index}];" for index in range(tensors))
    return f"""
.visible .entry handwritten({parameters})
.reqntid {32 * warps}
{{
.reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<400>; .reg .b64 %d<60>;
{loads}
mov.u32 %r0, %tid.x; mov.u32 %r1, %laneid; shr.u32 %r2, %r0, 5; mov.b32 %r3, global_smem;
{body}
ret;
}}
"""


def execute(
    body: str,
    tensors: Sequence[torch.Tensor],
    *,
    warps: int = 1,
    grid: int = 1,
    seed: int = 0,
    shared_bytes: int = SHARED_BYTES,
    instruction_limit: int = 10_000,
) -> Report:
    """Run a kernel with the body on the tensors."""
    program = decode(kernel(body, warps, len(tensors)))
    return run(program, (grid, 1, 1), shared_bytes, tensors, tensors, seed, instruction_limit)


__all__ = ["SHARED_BASE", "SHARED_BYTES", "execute", "kernel"]
