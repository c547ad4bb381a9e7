"""Faults in the model of cycles: figures that nobody can check without a GPU."""

from __future__ import annotations

from ..fault import Change, Fault

CYCLES = "tools/cycles"
ON_CYCLES = "tests/cpu/test_cycles.py"

OF_CYCLES = (
    Fault(
        "cycles-control-code-off-by-a-bit",
        "pauses and scoreboards are read a bit too low",
        (f"{ON_CYCLES}::test_control_codes",),
        (Change(f"{CYCLES}/sass.py", "_CONTROL_BITS = 41", "_CONTROL_BITS = 40"),),
    ),
    Fault(
        "cycles-shared-memory-for-each-scheduler",
        "each scheduler has shared memory and L2 to itself: four times as fast",
        (f"{ON_CYCLES}::test_shared_memory_serves_all_schedulers",),
        (Change(f"{CYCLES}/simulate.py", "self.share = programs * warps / len(self.warps)", "self.share = 1.0"),),
    ),
    Fault(
        "cycles-without-scoreboards",
        "loads are never waited for",
        (f"{ON_CYCLES}::test_scoreboards",),
        (Change(f"{CYCLES}/simulate.py", "if warp.scoreboards[number] > ready:", "if False:"),),
    ),
    Fault(
        "cycles-l2-without-limit",
        "tiles of 64 queries look better than they are: L2 delivers any number of bytes to all multiprocessors",
        (f"{ON_CYCLES}::test_l2_is_shared_by_all_multiprocessors",),
        (Change(f"{CYCLES}/simulate.py", "max(fmean(found), l2_bytes / machine.l2_sustained)", "fmean(found)"),),
    ),
    Fault(
        "cycles-every-wgmma-a-group",
        "every kernel looks serialised",
        (f"{ON_CYCLES}::test_machine_code_to_prediction",),
        (
            Change(
                f"{CYCLES}/decode.py",
                'return instruction.base in _WGMMA and "gsb0" in instruction.operands',
                "return instruction.base in _WGMMA",
            ),
        ),
    ),
    Fault(
        "cycles-far-loop-counts",
        "configurations are ranked by the loop beyond a bounded table, where there is one",
        (f"{ON_CYCLES}::test_predictions",),
        (Change(f"{CYCLES}/predict.py", "return self.loops[0].cycles", "return self.loops[-1].cycles"),),
    ),
)
