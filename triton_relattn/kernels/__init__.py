"""The Triton kernels: one per file, over shared device functions (tiles, table, band, quads, walk, masking, scores).

Importing this needs triton.
"""

import functools


@functools.cache
def kernels_are_interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter. TRITON_INTERPRET decides that when they are first imported.

    Raises:
        RuntimeError: TRITON_INTERPRET changed after the first import of triton, whose own functions the kernels call.
    """
    import triton
    from triton.runtime.jit import JITFunction  # the interpreter's own kind would need numpy

    from . import backward  # noqa: F401 - not later: TRITON_INTERPRET may change before the first backward
    from .forward import forward_kernel

    kinds = {not isinstance(function, JITFunction) for function in (triton.language.standard.sum, forward_kernel)}
    if len(kinds) > 1:
        raise RuntimeError("TRITON_INTERPRET has changed after the first import of triton; set it before that")
    return kinds.pop()
