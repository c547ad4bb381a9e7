"""Faults in what runs without a GPU, and in the parts of several processes."""

from __future__ import annotations

from tools.mutants.fault import Change, Fault

BLOCKWISE = (
    Fault(
        "blockwise-sign-of-query-offset",
        "relative positions have the sign of query_offset turned round",
        ("tests/implementations/test_diagonals.py::test_one_table_row_moves_only_its_diagonal",),
        (
            Change(
                "triton_relattn/_blockwise", "queries.start + sequences.query_offset", "queries.start - sequences.query_offset"
            ),
        ),
    ),
    Fault(
        "blockwise-hidden-rows-are-read",
        "table rows of positions that the window hides are multiplied by zero, which NaN survives",
        ("tests/implementations/test_hidden.py::test_rows_that_no_visible_pair_has_may_hold_nan",),
        (
            Change(
                "triton_relattn/_blockwise",
                "low, high = max(low, -left) if left >= 0 else low, min(high, right) if right >= 0 else high",
                "pass",
            ),
        ),
    ),
    Fault(
        "blockwise-band-not-cleared",
        "what lies beside the scores in a band is taken for a gradient",
        (
            "tests/cpu/test_random.py::test_against_loops",
            "-k",
            "blockwise",
        ),
        (
            Change(
                "triton_relattn/_blockwise",
                """if self.width > frame.num_near:
            band.zero_()""",
                "",
            ),
        ),
    ),
    Fault(
        "blockwise-far-end-of-the-first-head",
        "the gradient of an end row that heads share is not summed over them",
        (
            "tests/cpu/test_random.py::test_against_loops",
            "-k",
            "blockwise",
        ),
        (
            Change(
                "triton_relattn/_blockwise",
                "unflatten(0, (self.num_tables, self.sharing)).sum(1, keepdim=True)",
                "unflatten(0, (self.num_tables, self.sharing))[:, :1]",
            ),
        ),
    ),
    Fault(
        "blockwise-probabilities-by-lse",
        "probabilities are exp(logits - lse), whose sum is not one where logits are large",
        (
            "tests/cpu/test_blockwise.py::test_error_rule_at_any_scale",
            "tests/cpu/test_blockwise.py::test_probabilities_sum_to_one",
        ),
        (
            Change(
                "triton_relattn/_blockwise",
                "torch.softmax(scores, -1, out=probs)",
                "torch.sub(scores, scores.logsumexp(-1, keepdim=True), out=probs).exp_()",
                times=2,
            ),
        ),
    ),
    Fault(
        "blockwise-nothing-seen-by-some",
        "a row that sees nothing becomes NaN if another one of its block sees something",
        (
            "tests/implementations/test_hidden.py::test_rows_that_see_nothing",
            "-k",
            "blockwise",
        ),
        (Change("triton_relattn/_blockwise", "not blind.any()", "not blind.all()"),),
    ),
    Fault(
        "blockwise-dropout-by-local-sequence",
        "dropout counts sequences from the first of a block",
        (
            "tests/cpu/test_random.py::test_against_loops",
            "-k",
            "blockwise",
        ),
        (
            Change(
                "triton_relattn/_blockwise",
                "sequence[:, None, None, None],",
                "sequence[:, None, None, None] - sequences.batch.start,",
            ),
        ),
    ),
    Fault(
        "blockwise-keys-written-once-a-block",
        "the gradients of keys are those of the last block of queries, not the sum",
        ("tests/implementations/test_hidden.py::test_rows_that_no_visible_pair_has_may_hold_nan",),
        (Change("triton_relattn/_blockwise", "0 < stack.num_queries <= num_queries and", "0 < stack.num_queries and"),),
    ),
    Fault(
        "blockwise-frames-live-on",
        "frames and their bands refer to each other: their memory grows until the next garbage collection",
        ("tests/cpu/test_blockwise.py::test_memory_is_given_back_at_once",),
        (
            Change(
                "triton_relattn/_blockwise/bands.py",
                "self.sharing =",
                """frame.__dict__.setdefault('bands', []).append(self)
        self.sharing =""",
            ),
        ),
    ),
    Fault(
        "blockwise-gaps-of-kept-probabilities",
        "probabilities that the forward has not written are read by a backward with another number of threads",
        ("tests/cpu/test_determinism.py::test_another_number_of_threads_in_the_backward",),
        (
            Change(
                "triton_relattn/_implementations",
                "if tensors.key_lengths is None else query.new_zeros",
                "if True else query.new_zeros",
            ),
        ),
    ),
    Fault(
        "autocast-inside",
        "autocast rounds the products within the forward",
        ("tests/cpu/test_ops.py::test_autocast_does_not_change_the_precision[blockwise]",),
        (
            Change(
                "triton_relattn/_implementations",
                """with without_autocast(tensors.query.device):
            softmax_stats, kept""",
                """if True:
            softmax_stats, kept""",
            ),
        ),
    ),
    Fault(
        "grid-interpolation-meets-the-ends",
        "tables of another length are stretched from end to end",
        (
            "tests/cpu/test_grids.py::test_the_formula",
            "-k",
            "tables",
        ),
        (Change("triton_relattn/grids.py", 'mode="linear")', 'mode="linear", align_corners=True)'),),
    ),
    Fault(
        "ring-dropout-by-rank",
        "dropout counts queries and keys from the first of each part",
        ("tests/cpu/test_context_parallel.py::test_context_parallel[cases]",),
        (Change("triton_relattn/_distributed/sharding.py", "if tensors.dropout_origins is not None:", "if False:"),),
    ),
    Fault(
        "ring-gradients-go-to-the-neighbour",
        "the last rank to have keys sends their gradients on, not home",
        ("tests/cpu/test_context_parallel.py::test_context_parallel[cases]",),
        (
            Change(
                "triton_relattn/_distributed",
                "of_keys, owner, received, source, OF_GRADIENTS",
                "of_keys, (self.rank + 1) % self.size, received, before, OF_GRADIENTS",
            ),
            Change(
                "triton_relattn/_distributed",
                "source = (self.rank + self.last_step) % self.size",
                "before = (self.rank - 1) % self.size",
            ),
        ),
    ),
    Fault(
        "dtensor-tables-taken-for-whole",
        "gradients of tables of DTensors are not added up over the shards",
        ("tests/cpu/test_context_parallel.py::test_context_parallel[dtensor]",),
        (Change("triton_relattn/_distributed", "Partial() if isinstance(to, Replicate)", "to if isinstance(to, Replicate)"),),
    ),
)
