"""Faults around the computation: registration, the choice of an implementation, arguments, files, command lines."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import OF_KERNELS, ON_OPS, ON_TORCH, OPS

IMPLEMENTATIONS, CACHE, DOUBTS, VALIDATION, WARN = (
    f"triton_relattn/{name}.py"
    for name in ("_implementations/__init__", "_core/cache", "_core/doubts", "_core/validation", "_core/warn")
)
INTERPRETED, PROFILES = (f"{OF_KERNELS}/{name}.py" for name in ("__init__", "config/profiles"))
ON_FAULTS, ON_IMPORTS, ON_PROFILES, ON_VALIDATION = (
    f"tests/cpu/test_{name}.py" for name in ("faults", "imports", "profiles", "validation")
)

OF_USE = (
    Fault(
        "torch-func-does-not-see-the-operator",
        "within torch.func the operator is differentiated as outside of it",
        (f"{ON_TORCH}::test_torch_func", "-k", "not inductor"),
        (Change(OPS, '    _library.impl(name, operator.apply, "FuncTorchDynamicLayerFrontMode")', "    "),),
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
        (Change(IMPLEMENTATIONS, "        _warn_of_blockwise(reason)\n", ""),),
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
    Fault(
        "data-dependent-guards",
        "numbers that a compiled program reads from tensors cannot be checked while it is compiled",
        (f"{ON_OPS}::test_compiles_with_numbers_from_tensors", "-k", "not inductor"),
        (Change(VALIDATION, "        if not guard_or_true(holds):\n", "        if not holds:\n"),),
    ),
    Fault(
        "numbers-of-tensors-not-checked",
        "a compiled program takes any number that it reads from a tensor",
        (f"{ON_OPS}::test_compiles_with_numbers_from_tensors", "-k", "not inductor"),
        (Change(VALIDATION, "        torch._check(holds)\n", ""),),
    ),
    Fault(
        "short-tables-warned-of",
        "clipped tables get a warning",
        (f"{ON_VALIDATION}::test_what_is_meant_is_not_warned_of",),
        (Change(DOUBTS, "num_rows <= 2 * LARGEST_CLIP + 1", "num_rows <= 1"),),
    ),
    Fault(
        "said-positions-warned-of",
        "a table whose positions the call says gets a warning",
        (f"{ON_VALIDATION}::test_what_is_meant_is_not_warned_of",),
        (Change(VALIDATION, "num_rows if centred else None", "num_rows"),),
    ),
    Fault(
        "a-step-without-its-position-unnoticed",
        "a step of decoding attends to the first key alone, and nobody is told",
        (f"{ON_VALIDATION}::test_a_doubtful_call_is_warned_of_once",),
        (Change(DOUBTS, "if 0 < num_queries < num_keys:", "if 1 < num_queries < num_keys:"),),
    ),
    Fault(
        "an-offset-of-0-is-doubted",
        "a call that says that its first query stands at the first key gets a warning",
        (f"{ON_VALIDATION}::test_what_is_meant_is_not_warned_of",),
        (
            Change(
                VALIDATION,
                "has_offset, query_offset = query_offset is not None,",
                "has_offset, query_offset = isinstance(query_offset, torch.Tensor) or bool(query_offset),",
            ),
        ),
    ),
    Fault(
        "another-layout-unnoticed",
        "tensors of flash-attn's layout with a short table are attended over heads, and nobody is told",
        (f"{ON_VALIDATION}::test_a_doubtful_call_is_warned_of_once",),
        (Change(DOUBTS, "return bool(ranks) and not has_heads", "return False"),),
    ),
    Fault(
        "many-heads-are-doubted",
        "a prompt of a few tokens for a model with a table for each of many heads gets a warning",
        (f"{ON_VALIDATION}::test_what_is_meant_is_not_warned_of",),
        (Change(DOUBTS, "return bool(ranks) and not has_heads", "return bool(ranks)"),),
    ),
    Fault(
        "scalars-on-a-grid-not-checked",
        "on a grid a scale of NaN, or of text, is taken",
        ("tests/cpu/test_grids.py::test_scalars_are_checked_as_those_of_the_other_function",),
        (Change("triton_relattn/grids.py", 'else check_number("scale", scale)', "else float(scale)"),),
    ),
    Fault(
        "outgrown-table-unnoticed",
        "nobody is told that a long table does not cover the call",
        (f"{ON_VALIDATION}::test_a_doubtful_call_is_warned_of_once",),
        (Change(DOUBTS, 'spec.coverage() == "clamp"', 'spec.coverage() == "full"'),),
    ),
    Fault(
        "cure-that-is-none",
        "an error recommends another order of dimensions to whom it does not help",
        (f"{ON_VALIDATION}::test_no_cure_is_named_that_is_none",),
        (
            Change(
                DOUBTS,
                "                except (TypeError, ValueError):\n                    continue\n",
                "                except (TypeError, ValueError):\n                    pass\n",
            ),
        ),
    ),
    Fault(
        "warnings-at-every-call",
        "a warning comes again at every call",
        (f"{ON_VALIDATION}::test_a_doubtful_call_is_warned_of_once",),
        (Change(WARN, "        _given.add(about)\n", ""),),
    ),
    Fault(
        "an-untested-triton-is-used-silently",
        "kernels on a GPU are compiled by a Triton that came after the tests, and nothing says so",
        (f"{ON_IMPORTS}::test_a_gpu_with_an_untested_triton_is_told",),
        (Change(IMPLEMENTATIONS, "        TRITON.warn(query.device)\n", ""),),
    ),
    Fault(
        "lock-empties-another-file",
        "where the lock file is a link, the file that it points to is emptied",
        (f"{ON_PROFILES}::test_links_are_not_followed",),
        (Change(PROFILES, '"ab", opener=_not_through_a_link)', '"wb")'),),
    ),
    Fault(
        "profile-written-into-another-file",
        "where the file that becomes the profile is a link, the profile is written into what it points to",
        (f"{ON_PROFILES}::test_links_are_not_followed",),
        (
            Change(PROFILES, "    temporary.unlink(missing_ok=True)  # never follow a symbolic link\n", ""),
            Change(PROFILES, 'open(temporary, "xb")', 'open(temporary, "wb")'),
        ),
    ),
    Fault(
        "profiles-below-a-folder-of-that-name",
        "without a home, profiles are in a folder whose name is ~",
        (f"{ON_FAULTS}::test_no_home",),
        (Change(CACHE, 'None if folder.startswith("~") else Path(folder)', "Path(folder)"),),
    ),
)
