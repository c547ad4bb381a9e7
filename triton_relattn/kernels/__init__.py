"""The Triton kernels. Read minimal.py first, the idea in one kernel, and minimal_backward.py, its backward on one page.

Then plan.py and draft.py, how the launches of a call are decided once for all calls of its kind, whatever their sizes (sizes.py),
forward.py, and backward.py with delta.py, bwd_dkv.py, bwd_stored_dq.py, bwd_dtable.py, bwd_dp2c.py, bwd_dq.py and
table_gradient.py, a file per kernel. Their steps are functions of tile/blocks.py, tile/band.py and tile/logits.py.
DERIVATION.md derives them. Attention on a grid is an operator of its own.

Shapes in comments: a tile has M queries and N keys, [M, N] (TILE.block_m, TILE.block_n). A query or key has the width D, a value
Dv, a row of rel_key Dr (SHAPE.block_d, block_dv, block_dr: padded to a power of two). Tensors are (B, H, Nq or Nk, width), a
table has R rows.

Importing this needs triton.
"""

import functools


@functools.cache
def kernels_are_interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter, which TRITON_INTERPRET decides when they are first imported."""
    import triton
    from triton.runtime.jit import JITFunction  # the interpreter's own kind would need numpy

    from . import backward  # noqa: F401 - not later: TRITON_INTERPRET may change before the first backward
    from .forward import forward_kernel

    kinds = {not isinstance(function, JITFunction) for function in (triton.language.standard.sum, forward_kernel)}
    if len(kinds) > 1:
        raise RuntimeError("TRITON_INTERPRET has changed after the first import of triton; set it before that")
    return kinds.pop()
