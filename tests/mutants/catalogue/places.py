"""Files that have faults, and files of tests that notice them."""

from __future__ import annotations

OF_KERNELS = "triton_relattn/kernels"
FORWARD, DQ, DKV, DTABLE, BACKWARD, ARGUMENTS, DQ_FROM_DS, DELTA, LOGITS, KEY_SPLITS, DP2C = (
    f"{OF_KERNELS}/{name}.py"
    for name in (
        "forward",
        "bwd_dq",
        "bwd_dkv",
        "bwd_dtable",
        "backward",
        "call",
        "bwd_dq_from_ds",
        "delta",
        "logits",
        "splits",
        "bwd_dp2c",
    )
)
BAND, BAND_REGISTERS, ROWS_OF_TABLE, QUADS, SCORES, MASKING, TILES, KEPT, KEY_TERMS = (
    f"{OF_KERNELS}/tile/{name}.py"
    for name in ("band", "band_registers", "table", "registers", "scores", "masking", "addressing", "dropout", "key_terms")
)
STORED, WORKSPACE, TABLE_SUMS = (f"{OF_KERNELS}/workspace/{name}.py" for name in ("stored", "planning", "table_sums"))
CONFIGS = f"{OF_KERNELS}/config/selection.py"
BLOCKWISE, BLOCKS, STACKS, BANDS, FRAME = (
    f"triton_relattn/_blockwise/{name}.py" for name in ("attention", "partition", "stacks", "bands", "frame")
)
DROPOUT, SPEC, DTYPES = (f"triton_relattn/_core/{name}.py" for name in ("dropout", "spec", "dtypes"))
OPS = "triton_relattn/_operators/ops.py"
AS_TRITON, AS_BLOCKWISE = (f"triton_relattn/_implementations/{name}.py" for name in ("kernels", "blockwise"))
FUNCTIONAL, REFERENCE, POSITIONS = (f"triton_relattn/{name}.py" for name in ("functional", "_reference", "positions"))

# Tests of the kernels, and those of the rest.
ON_FORWARD, ON_BACKWARD, ON_FEATURES = (f"tests/interpreter/test_{name}.py" for name in ("forward", "backward", "features"))
ON_GUARDS, ON_PROBABILITIES, ON_ROTATIONS, ON_TABLES = (
    f"tests/interpreter/test_{name}.py" for name in ("guards", "probabilities", "rotations", "tables")
)
ON_KEY_TERMS = "tests/interpreter/test_key_terms.py"
ON_KEY_SPLITS = "tests/interpreter/test_key_splits.py"
ON_WORKSPACE = "tests/interpreter/test_workspace.py"
ON_QUERY_FROM_DS = "tests/interpreter/test_query_from_ds.py"
(
    ON_BLOCKWISE,
    ON_MASKS,
    ON_DROPOUT,
    ON_VARLEN,
    ON_RANDOM,
    ON_OPS,
    ON_TORCH,
    ON_DELTA,
    ON_POSITIONS,
) = (
    f"tests/cpu/test_{name}.py"
    for name in (
        "blockwise",
        "masks",
        "dropout",
        "varlen",
        "random",
        "ops",
        "torch",
        "delta",
        "positions",
    )
)
ON_STACKS = "tests/cpu/test_stacks.py"
ON_CALLS = "tests/emulator/test_calls.py::test_what_was_wrong"  # of compiled kernels
RANDOM = (f"{ON_RANDOM}::test_against_loops", "-k", "blockwise")
RANDOM_REFERENCE = (f"{ON_RANDOM}::test_against_loops", "-k", "reference")
RANDOM_PACKED = (f"{ON_VARLEN}::test_random_combination", "-k", "blockwise")
