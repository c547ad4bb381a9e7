"""The Triton kernels: one per file, over shared device functions (tiles, band, masking, scores). Importing this needs triton."""


def kernels_are_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter; TRITON_INTERPRET decides when they are first imported."""
    from triton.runtime.interpreter import InterpretedFunction

    from .forward import forward_kernel

    return isinstance(forward_kernel, InterpretedFunction)
