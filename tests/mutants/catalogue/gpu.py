"""Faults in the measurements on a GPU and in what is predicted of them: figures and verdicts that need one to be checked."""

from __future__ import annotations

from ..fault import Change, Fault

GPU = "bench/gpu"
PREDICTIONS = "bench/predictions.py"
ON_PARTS, ON_PREDICTIONS, ON_CALLS_ALIKE = (f"tests/cpu/test_{name}.py" for name in ("gpu_parts", "predictions", "calls_alike"))
ON_SCRIPT = "tests/interpreter/test_gpu_script.py"
ARGUMENTS = "triton_relattn/kernels/call.py"

OF_GPU = (
    Fault(
        "gpu-part-cut-off-passes",
        "a part that was ended for its time counts as one that passed",
        (f"{ON_PARTS}::test_parts_are_judged_one_by_one",),
        (
            Change(f"{GPU}/report.py", "    if status is None:\n", "    if False:\n"),
            Change(f"{GPU}/report.py", "elif not", "elif status and not"),
        ),
    ),
    Fault(
        "gpu-part-that-crashed-passes",
        "a part that crashed counts as one that passed",
        (f"{ON_PARTS}::test_parts_are_judged_one_by_one",),
        (Change(f"{GPU}/report.py", "elif not outcome.is_done or status != 0:", "elif not outcome.is_done and status == 0:"),),
    ),
    Fault(
        "gpu-tests-cut-off-pass",
        "pytest that was ended for its time counts as passed",
        (f"{ON_PARTS}::test_pytest_is_judged",),
        (Change(f"{GPU}/__main__.py", '"ok" if status == 0 else "cut off"', '"ok"'),),
    ),
    Fault(
        "gpu-slow-sanitizer-fails",
        "a tool that is slow has found something",
        (f"{ON_SCRIPT}::test_a_slow_sanitizer_has_not_failed",),
        (Change(f"{GPU}/sanitizer.py", "if status is None else", "if False else"),),
    ),
    Fault(
        "gpu-broken-worker-goes-on",
        "after an error of the GPU that lasts, all that follows in that process fails",
        (f"{ON_PARTS}::test_workers",),
        (Change(f"{GPU}/workers.py", "is_usable = _gpu_is_usable()", "is_usable = True"),),
    ),
    Fault(
        "gpu-wrong-case-verified",
        "the speed of a case that breaks the error rule is called verified",
        (f"{ON_SCRIPT}::test_what_is_wrong_is_not_verified",),
        (Change(f"{GPU}/measurements.py", 'is_wrong = row["method"] in wrong', "is_wrong = False"),),
    ),
    Fault(
        "gpu-wrong-variant-timed",
        "a configuration that computes something else is timed, and may look fast",
        (f"{ON_SCRIPT}::test_a_kernel_that_is_wrong_or_cannot_run",),
        (Change(f"{GPU}/kernels.py", 'if not row["error"] <= ALLOWED:', "if False:"),),
    ),
    Fault(
        "predictions-for-every-gpu",
        "what is predicted of an H100 stands beside what another GPU takes",
        (f"{ON_PREDICTIONS}::test_beside_what_is_measured",),
        (Change(PREDICTIONS, " if arch == TARGET else None", ""),),
    ),
    Fault(
        "predictions-without-far-keys",
        "keys beyond a bounded table take as long as those near",
        (f"{ON_PREDICTIONS}::test_seconds",),
        (Change("bench/cycles/calls.py", "return prediction.mean_cycles(near)", "return prediction.cycles"),),
    ),
    Fault(
        "predictions-of-causal-calls-whole",
        "causal attention is predicted to compute all scores",
        (f"{ON_PREDICTIONS}::test_seconds",),
        (Change(PREDICTIONS, "max(span, config.block_n)) / 2", "max(span, config.block_n))"),),
    ),
    Fault(
        "calls-alike-in-precision",
        "a call has the precision of an earlier one, whatever torch is set to by now",
        (f"{ON_CALLS_ALIKE}",),
        (Change(ARGUMENTS, "            selection.input_precision(query.dtype, self.arch),\n", '            "ieee",\n'),),
    ),
    Fault(
        "calls-alike-in-offsets",
        "a call with an offset for each sequence has the tables of one with a single offset",
        (f"{ON_CALLS_ALIKE}",),
        (Change(ARGUMENTS, "            tensors.query_offsets is None,\n", "            True,\n"),),
    ),
)
