"""Faults in attention over several ranks."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import AS_BLOCKWISE, AS_TRITON, BLOCKS, BLOCKWISE, DQ, KEPT, OF_KERNELS

SHARDING, RING, EXCHANGE, RING_OPS, DTENSORS, PARTS = (
    f"triton_relattn/_distributed/{name}.py" for name in ("sharding", "ring", "exchange", "ops", "dtensors", "parts")
)
PUBLIC = "triton_relattn/distributed.py"
LAUNCHER = f"{OF_KERNELS}/backward.py"
ON_PARTS = "tests/interpreter/test_parts.py"


def on(check: str) -> tuple[str, ...]:
    return (f"tests/cpu/test_context_parallel.py::test_context_parallel[{check}]",)


OF_DISTRIBUTED = (
    Fault(
        "ring-forgets-where-keys-begin",
        "parts of the keys stand where the first part stands",
        on("cases"),
        (Change(SHARDING, "between = queries.start - keys.start", "between = queries.start"),),
    ),
    Fault(
        "ring-lengths-not-moved",
        "padding is counted from the first key of each part",
        on("cases"),
        (Change(SHARDING, "(lengths - keys.start).clamp(0, len(keys))", "lengths.clamp(0, len(keys))"),),
    ),
    Fault(
        "ring-packs-begin-anew",
        "sequences that are cut begin anew in each part of a pack",
        on("cases"),
        (Change(SHARDING, "if offsets is None else offsets) + first_query - first_key", "if offsets is None else offsets)"),),
    ),
    Fault(
        "ring-dropout-by-rank",
        "dropout counts queries and keys from the first of each part",
        on("cases"),
        (Change(SHARDING, "if tensors.dropout_seed is not None:", "if False:"),),
    ),
    Fault(
        "ring-skips-a-part-too-many",
        "a part in which a window begins is left out",
        on("cases"),
        (Change(SHARDING, "0 <= right < lowest - spec.query_offset", "0 <= right <= lowest - spec.query_offset"),),
    ),
    Fault(
        "ring-sends-on-what-nobody-needs",
        "with a window, keys go all the way round",
        on("messages"),
        (Change(RING, "next(filter(is_needed, reversed(range(self.size))), 0)", "self.size - 1"),),
    ),
    Fault(
        "ring-loses-gradients-on-the-way",
        "gradients of keys that come from the ranks before are not added",
        on("cases"),
        (Change(RING, "                of_keys += behind.arrived()\n", "                behind.arrived()\n"),),
    ),
    Fault(
        "ring-gradients-go-to-the-neighbour",
        "the last rank to have keys sends their gradients on, not home",
        on("cases"),
        (
            Change(
                RING,
                "of_keys, owner, received, source, OF_GRADIENTS",
                "of_keys, (self.rank + 1) % self.size, received, before, OF_GRADIENTS",
            ),
            Change(
                RING,
                "        source = (self.rank + self.last_step) % self.size\n",
                "        before = (self.rank - 1) % self.size\n",
            ),
        ),
    ),
    Fault(
        "ring-delta-of-out-alone",
        "the gradient of lse is left out of delta",
        on("cases"),
        (Change(RING_OPS, "        delta -= d_lse.masked_fill(blind, 0)\n", "        pass\n"),),
    ),
    Fault(
        "ring-gradient-of-lse-where-nothing-is-seen",
        "NaN from a query that sees no key reaches all gradients",
        on("cases"),
        (Change(RING_OPS, "d_lse.masked_fill(blind, 0)", "d_lse"),),
    ),
    Fault(
        "part-with-a-softmax-of-its-own",
        "blockwise takes the softmax of a part instead of that of all keys",
        on("cases"),
        (
            Change(
                BLOCKWISE, "softmax(block, block.probs) if whole is None else whole.probs(block)", "softmax(block, block.probs)"
            ),
        ),
    ),
    Fault(
        "ring-has-one-number-for-a-softmax",
        "the number of keys is lost where a mask adds the lowest number to all logits of a query",
        on("cases"),
        (Change(AS_BLOCKWISE, "return Part(out, largest, log_sum)", "return Part(out, largest + log_sum, 0 * log_sum)"),),
    ),
    Fault(
        "kernels-have-one-number-for-a-softmax",
        "the same, with the kernels' statistics",
        (ON_PARTS,),
        (
            Change(AS_TRITON, "log_sum * LN_2)", "0 * log_sum)"),
            Change(AS_TRITON, "largest.masked_fill(lse == -", "lse.masked_fill(lse == -"),
        ),
    ),
    Fault(
        "part-with-a-delta-of-its-own",
        "blockwise takes delta from a part of the keys",
        on("cases"),
        (
            Change(
                BLOCKWISE,
                "softmax_backward(probs, d_probs) if whole is None else whole.d_scores(block, probs, d_probs)",
                "softmax_backward(probs, d_probs)",
            ),
        ),
    ),
    Fault(
        "tables-not-summed-over-ranks",
        "each rank has its part of the gradients of tables",
        on("cases"),
        (Change(PUBLIC, "    if reduce_tables:\n", "    if not reduce_tables:\n"),),
    ),
    Fault(
        "all-to-all-in-order-of-ranks",
        "with a zigzag, positions come in the order of the ranks",
        on("cases"),
        (
            Change(
                EXCHANGE,
                "for source, piece in sharding.in_order()], 2))",
                "for source, pieces in enumerate(sharding.pieces) for piece in pieces], 2))",
            ),
        ),
    ),
    Fault(
        "all-to-all-dropout-by-rank",
        "dropout counts heads from the first that a rank has",
        on("cases"),
        (Change(EXCHANGE, "(tensors.num_sequences, 1), own.start,", "(tensors.num_sequences, 1), 0,"),),
    ),
    Fault(
        "dtensor-tables-taken-for-whole",
        "gradients of tables of DTensors are not added up over the shards",
        on("dtensor"),
        (Change(DTENSORS, "            Partial() if isinstance(to, Replicate)", "            to if isinstance(to, Replicate)"),),
    ),
    Fault(
        "dtensor-heads-with-keys-of-others",
        "heads meet the keys of their rank where ranks do not divide the heads of the key",
        on("dtensor_shared_keys"),
        (Change(DTENSORS, "gathers_keys = not keeps_groups(heads, key_heads, ranks_of_heads)", "gathers_keys = False"),),
    ),
    Fault(
        "origins-of-dropout-ignored-by-blockwise",
        "blockwise counts keys of a part from its first for dropout",
        on("cases"),
        (Change(BLOCKS, "slice(self.keys.start + first_key, self.keys.stop + first_key)", "self.keys"),),
    ),
    Fault(
        "kernels-correct-delta-by-a-part",
        "the dq kernel takes the sum over a part of the keys for that over all",
        (ON_PARTS,),
        (Change(DQ, "    if IS_PART:\n", "    if False:\n"),),
    ),
    Fault(
        "maxima-of-parts-without-scale",
        "the kernels' maxima are merged as if they were logits",
        (ON_PARTS,),
        (Change(LAUNCHER, "max(abs(spec.scale), SMALLEST_SCALE) if is_linear else 1.0", "1.0"),),
    ),
    Fault(
        "kernels-drop-by-part",
        "kernels count the queries of a part from its first for dropout",
        (ON_PARTS,),
        (Change(KEPT, "        offs_m += tl.load(origins + 1).to(tl.int32)\n", ""),),
    ),
)
