"""Faults in the launchers of the kernels."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import (
    ARGUMENTS,
    BACKWARD,
    CONFIGS,
    DKV,
    DQ,
    DTABLE,
    FORWARD,
    OF_KERNELS,
    ON_BACKWARD,
    ON_CALLS,
    ON_FEATURES,
    ON_FORWARD,
    ON_TABLES,
    OPS,
    SCORES,
    SPEC,
    TABLE_SUMS,
    TILES,
)

LAUNCHING = f"{OF_KERNELS}/launching.py"
ON_LAUNCHING = "tests/compile/test_launching.py"

OF_LAUNCHERS = (
    Fault(
        "launched-as-if-aligned",
        "a tensor that begins anywhere is launched with a kernel that loads 16 bytes at a time",
        (f"{ON_LAUNCHING}::test_every_group_is_described",),
        (Change(LAUNCHING, "ALIGNMENT = 16 ", "ALIGNMENT = 1 "),),
    ),
    Fault(
        "launched-with-other-strides",
        "rows of 65 numbers are launched with a kernel that was compiled for rows of 64",
        (f"{ON_LAUNCHING}::test_as_triton_would_find_them",),
        (Change(LAUNCHING, "% ALIGNMENT, strides", "% ALIGNMENT, None"),),
    ),
    Fault(
        "launched-with-any-length",
        "lengths that 16 does not divide are launched with a kernel that loads as if it did",
        (f"{ON_LAUNCHING}::test_lengths_are_told_apart",),
        (Change(LAUNCHING, "(each % ALIGNMENT == 0, has_32_bits(each))", "(True, has_32_bits(each))"),),
    ),
    Fault(
        "launched-on-another-device",
        "a kernel that was compiled for one GPU is launched on another",
        (f"{ON_LAUNCHING}::test_each_gpu_has_its_own",),
        (Change(LAUNCHING, "key = kernel, device,", "key = kernel,"),),
    ),
    Fault(
        "launched-alike-whatever-the-call",
        "calls with other sizes, scalars and masks are launched with the kernels of an earlier one",
        (f"{ON_LAUNCHING}::test_as_triton_would_find_them",),
        (Change(ARGUMENTS, "(*self.cache_key, config)", "(config,)"),),
    ),
    Fault(
        "launched-without-the-profiler",
        "a kernel is launched as it was compiled before a profiler asked for another way",
        (f"{ON_LAUNCHING}::test_other_ways_are_left_to_triton",),
        (Change(LAUNCHING, "        and knobs.runtime.add_stages_inspection_hook is None\n", ""),),
    ),
    Fault(
        "a-nested-tuple-hidden-by-tritons-own",
        "the tile of the values has the name of an attribute of Triton's tuple: kernels compile up to Triton 3.7 alone",
        (f"{ON_LAUNCHING}::test_no_field_is_hidden_by_an_attribute_of_tritons_tuple",),
        (
            Change(ARGUMENTS, "value_tile: Tile | None", "values: Tile | None"),
            *(Change(file, "TILE.value_tile", "TILE.values") for file in (FORWARD, DQ, DKV, DTABLE)),
        ),
    ),
    Fault(
        "operands-are-not-copied",
        "keys with a stride stay where they are, and Triton leaves out a fence that their products need",
        (ON_CALLS, "-k", "strided_key"),
        (Change(ARGUMENTS, "if tensor.data_ptr() % 16 == 0 and has_", "if True or has_"),),
    ),
    Fault(
        "copies-in-lanes-differ",
        "lanes store delta to one address, whose copies differ in the last bit",
        (ON_CALLS, "-k", "float32"),
        (Change(SCORES, "return tl.max(tl.broadcast_to(sums[:, None], (sums.shape[0], BLOCK_N)), axis=1)", "return sums"),),
    ),
    Fault(
        "clamp-taken-for-zero",
        "beyond a clamped table there is no term",
        (f"{ON_FORWARD}::test_tables[32x16-shorter-clamp]",),
        (Change(SPEC, 'return "clamp" if self.clamp else "zero"', 'return "zero"'),),
    ),
    Fault(
        "zero-taken-for-clamp",
        "beyond a bounded table its end rows apply",
        (f"{ON_FORWARD}::test_tables[32x16-shorter-zero]",),
        (Change(SPEC, 'return "clamp" if self.clamp else "zero"', 'return "clamp"'),),
    ),
    Fault(
        "table-thought-to-cover",
        "a table whose last row is missing for one pair counts as one that covers all",
        (ON_TABLES, "-k", "short"),
        (Change(SPEC, "farthest_future <= self.last:", "farthest_future <= self.last + 1:"),),
    ),
    Fault(
        "rel-scale-for-scale",
        "q . k is scaled by rel_scale",
        (f"{ON_FEATURES}::test_shapes_and_scales[-rel_scale]",),
        (Change(ARGUMENTS, "scale / math.log(2),", "spec.rel_scale / math.log(2),"),),
    ),
    Fault(
        "end-rows-scaled-as-the-query",
        "far keys' part of the end rows' gradients has scale for rel_scale",
        (f"{ON_TABLES}::test_far_keys[scale-query]",),
        (Change(TABLE_SUMS, "self.call.rel_query, self.spec.rel_scale)", "self.call.rel_query, self.spec.scale)"),),
    ),
    Fault(
        "end-rows-exchanged",
        "the gradient of a clamped table's first row has the keys of the far future, that of its last row those of the far past",
        (f"{ON_BACKWARD}::test_tables[default-shorter-clamp]",),
        (Change(TABLE_SUMS, "partial[0, :, side] = ends[:, side]", "partial[0, :, side] = ends[:, -1 - side]"),),
    ),
    Fault(
        "shared-table-beside-tables-of-heads",
        "where another table has one for each head, a shared one's gradient is that of the first head",
        (ON_TABLES, "-k", "shared"),
        (
            Change(
                TABLE_SUMS,
                "inner[0] if shared and not self.per_head else inner.sum(0) if shared else inner",
                "inner[0] if shared else inner",
            ),
        ),
    ),
    Fault(
        "end-row-without-its-margin",
        "near keys beyond a clamped table are missing in the gradient of its last row",
        (f"{ON_BACKWARD}::test_tables[default-shorter-clamp]",),
        (Change(TABLE_SUMS, "                inner[:, -1] += total[:, stop:].sum(1)\n", ""),),
    ),
    Fault(
        "one-end-row-unfilled",
        "far keys are missing in the gradients of tables at one end, which memory that nothing has written takes",
        (f"{ON_FEATURES}::test_one_table_alone[clamp-rel_bias]",),
        (Change(TABLE_SUMS, "for side in (0, -1):", "for side in (0,):"),),
    ),
    Fault(
        "exact-delta-skipped",
        "exact_query_grad makes no first pass",
        (f"{ON_FEATURES}::test_exact_delta[False]",),
        (
            Change(
                BACKWARD,
                "per_query, out, d_out, d_lse, None, None)\n"
                '            launch_dq(call, tiles["dq"], per_query, None, d_out, d_lse, d_query, d_rel_query)\n',
                "per_query, out, d_out, d_lse, d_query, d_rel_query)\n",
            ),
        ),
    ),
    Fault(
        "rows-of-no-sequence-are-summed",
        "what no program writes is summed for the end rows of a packed batch",
        (f"{ON_FEATURES}::test_rows_of_no_sequence",),
        (
            Change(
                BACKWARD,
                "new = query.new_empty if tensors.cu_seqlens_q is None else query.new_zeros",
                "new = query.new_empty",
            ),
        ),
    ),
    Fault(
        "start-in-32-bits",
        "the offset of a batch entry overflows at 2**31 elements",
        ("tests/interpreter/test_offsets.py::test_offsets_of_a_head_and_of_a_tile[entry-key]",),
        (
            Change(
                TILES,
                "    start = pointer + tl.cast(entry, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]\n"
                "    start += tl",
                "    start = pointer + entry * strides[0] + tl.cast(head, tl.int64) * strides[1]\n    start += tl",
            ),
        ),
    ),
    Fault(
        "head-in-32-bits",
        "the offset of a head overflows at 2**31 elements",
        ("tests/interpreter/test_offsets.py::test_offsets_of_a_head_and_of_a_tile[head-key]",),
        (
            Change(
                TILES,
                "tl.cast(head, tl.int64) * strides[1]\n    start += tl.cast(first_row",
                "head * strides[1]\n    start += tl.cast(first_row",
            ),
        ),
    ),
    Fault(
        "sequence-in-32-bits",
        "the offset of a packed sequence overflows at 2**31 elements",
        ("tests/interpreter/test_offsets.py::test_offsets_of_a_packed_sequence",),
        (Change(TILES, "tl.cast(first_row, tl.int64) * strides[2]", "tl.cast(first_row, tl.int32) * strides[2]"),),
    ),
    Fault(
        "tile-in-32-bits",
        "the offset of a tile overflows at 2**31 elements",
        ("tests/interpreter/test_offsets.py::test_offsets_of_a_head_and_of_a_tile[tile-key]",),
        (Change(TILES, "matrix[0] + tl.cast(start, tl.int64) * matrix[1]", "matrix[0] + start * matrix[1]"),),
    ),
    Fault(
        "wide-rows-in-32-bits",
        "rows far apart are thought to need no 64-bit offsets",
        ("tests/interpreter/test_offsets.py::test_offsets_of_a_table[rel_key]",),
        (Change(CONFIGS, "column_stride >= 2**31", "column_stride >= 2**41"),),
    ),
    Fault(
        "wide-values-table-in-32-bits",
        "of the tables only rel_key is looked at for 64-bit offsets",
        ("tests/interpreter/test_offsets.py::test_offsets_of_a_table[rel_value]",),
        (
            Change(
                ARGUMENTS,
                "for table in (tensors.rel_key, tensors.rel_value, tensors.rel_p2c):",
                "for table in (tensors.rel_key,):",
            ),
        ),
    ),
    Fault(
        "gradient-of-infinite-lse",
        "a NaN gradient of an lse that is -inf spreads",
        (f"{ON_FEATURES}::test_nan_gradient_of_an_lse_that_is_infinite[clamp]",),
        (Change(OPS, "d_lse = d_lse.masked_fill(lse == -torch.inf, 0)", "d_lse = d_lse"),),
    ),
)
