"""Faults around the computation: registration, the choice of an implementation, arguments, files, command lines."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import ON_TORCH, OPS

BACKENDS, INTERPRETED = (f"triton_relattn/{name}.py" for name in ("backends", "kernels/__init__"))
(ON_IMPORTS,) = (f"tests/cpu/test_{name}.py" for name in ("imports",))

OF_USE = (
    Fault(
        "torch-func-does-not-see-the-operator",
        "within torch.func the operator is differentiated as outside of it",
        (f"{ON_TORCH}::test_torch_func", "-k", "not inductor"),
        (Change(OPS, '    _library.impl(_name, _operator.apply, "FuncTorchDynamicLayerFrontMode")', "    "),),
    ),
    Fault(
        "vmap-hides-from-autograd",
        "what is mapped over has no derivative outside of vmap",
        (f"{ON_TORCH}::test_vmap",),
        (Change(OPS, "results = [cls.operator(*each)", "results = [cls.forward(*each)"),),
    ),
    Fault(
        "a-gpu-gets-blockwise-silently",
        "nobody is told that the kernels do not serve a GPU",
        (f"{ON_IMPORTS}::test_a_gpu_that_gets_blockwise_is_told_why",),
        (Change(BACKENDS, "        _warn_of_blockwise(reason)\n", ""),),
    ),
    Fault(
        "a-gpu-needs-the-interpreter",
        "kernels are not found to be compiled where Triton's interpreter cannot be imported, for lack of numpy",
        (f"{ON_IMPORTS}::test_a_gpu_without_numpy_gets_the_kernels",),
        (
            Change(
                INTERPRETED,
                "from triton.runtime.jit import JITFunction ",
                "from triton.runtime.interpreter import InterpretedFunction\n    from triton.runtime.jit import JITFunction ",
            ),
        ),
    ),
)
