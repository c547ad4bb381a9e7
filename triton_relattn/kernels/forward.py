"""The forward kernel and its launcher: online softmax over key tiles with the relative terms from the rotating band."""

import torch
import triton
import triton.language as tl

from .._core.spec import AttentionSpec, AttentionTensors
from .call import Call, cdiv, with_aligned_operands, with_positive_scale
from .config.tile_config import TileConfig
from .delta import RESIDUAL_SCALE, launch_far_keys
from .draft import Draft, strided
from .plan import Key, Plan, Template, find
from .splits import launch_merge, num_key_splits, split_range
from .tile.band import add_end_rows, add_far_tile, add_tile, blocks_before, far_terms, reached_positions, reached_table
from .tile.blocks import (
    FAR,
    NEAR,
    exists,
    first_part,
    head_matrix,
    keep_mask,
    key_order,
    key_range,
    load_queries,
    load_rows,
    locate_queries,
    loop_position,
    part_range,
    row_vector,
    stop_part,
    store_past_future,
    store_rows,
)
from .tile.key_terms import natural_keys
from .tile.logits import (
    LN_2,
    Keys,
    Queries,
    exponent_scale,
    is_linear,
    key_table,
    relative_terms,
    score_table,
    settled,
    softmax_update,
    tile_logits,
    value_table,
)


@triton.jit(do_not_specialize=["first", "last", "num_heads"])
def forward_kernel(
    inputs,
    outs,
    lses,
    softmax_stats,
    residuals,
    common,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS_KEYS: tl.constexpr,
):
    """Compute out and lse of BLOCK_M queries of one head, and the softmax_stats [B, H, 2, Nq] from which the backward computes
    probabilities: the maximum of a query's scores, and the base-2 logarithm of the sum of its exponentials.

    For each tile of keys: its logits (logits.py), online softmax, dropout, and the product with the values.

    Grid: (query blocks * batch * heads,), query blocks fastest. SPLITS_KEYS: program_id(1) has one share of the keys, and stores
    partial results as those of head ``head + program_id(1) * num_heads``; merge_kernel combines them. lses, which may
    be None, is None then. residuals, [B, H, Nq, Dv] or None: what rounding takes from out; see delta.py.
    """
    VALUE_TILE: tl.constexpr = TILE.value_tile
    # This program's block of queries; in a pack, sequences that are shorter than the longest have fewer
    row_start, head, place = locate_queries(common.sequences, common.window, num_heads, TILE.block_m)
    if common.sequences.cu_seqlens_q is not None:
        if row_start >= place.num_queries:
            return

    # The block's queries [M, D], and what rel_key meets [M, Dr]
    tile_m = tl.arange(0, TILE.block_m)
    offs_m = row_start + tile_m
    tile_n = key_order(TILE)
    valid_m = offs_m < place.num_queries
    keys = head_matrix(inputs.key, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
    values = head_matrix(inputs.value, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
    query, rel_query = load_queries(inputs, place, head, row_start, tile_m, valid_m, SHAPE)
    mask = None if inputs.attn_mask is None else head_matrix(inputs.attn_mask, place.entry, head, 0, True)

    # The keys that they see, and of these the near ones, between which the table changes
    last_query = tl.minimum(row_start + TILE.block_m, place.num_queries) - 1
    key_first, key_stop, near_start, near_stop = key_range(row_start, last_query, first, last, place, common.window, TILE)
    out_head = head
    if SPLITS_KEYS:  # this program's share of the keys
        out_head = head + tl.program_id(1) * num_heads
        key_first, key_stop, near_start, near_stop = split_range(key_first, key_stop, near_start, near_stop, TILE)

    # The head's tables. Beyond a clamped one the term is one number per query: its product with an end row.
    HAS_TERM: tl.constexpr = TILE.has_matrix or TILE.has_bias
    table = score_table(inputs, common, head, first, last, SHAPE, TILE)
    keys_table = key_table(inputs, common, head, first, last, SHAPE, TILE)
    if HAS_TERM and TILE.coverage == "clamp":
        far_past, far_future = far_terms(rel_query, table, TILE)  # [M], [M]
    if inputs.rel_value is not None:
        values_table = value_table(inputs, head, first, last, SHAPE)
        lowest, highest = reached_positions(row_start, last_query, place, common.window)
        reached = reached_table(values_table, lowest, highest, TILE)

    # State of the online softmax: maximum and sum [M], out [M, Dv], not yet divided by the sum
    row_max = tl.full([TILE.block_m], -float("inf"), tl.float32)
    row_sum = tl.full([TILE.block_m], 0.0, tl.float32)
    if residuals is not None:
        # A product with ones [N, 16], the narrowest that matrix units take, sums the rounded probabilities: columns are alike.
        ones = tl.full([TILE.block_n, 16], 1.0, values[0].dtype.element_ty)
        rounded_sum = tl.full([TILE.block_m, 16], 0.0, tl.float32)
    past, future = row_sum, row_sum  # [M], [M]: sums over far keys of the probabilities that dropout keeps
    acc = settled(tl.full([TILE.block_m, SHAPE.block_dv], 0.0, tl.float32))
    scale = exponent_scale(common.scaling, mask)

    # The far tiles, then the near ones: two loops, since only a near tile needs the band
    for PART in tl.static_range(first_part(TILE), stop_part(TILE)):
        start, stop = part_range(PART, key_first, key_stop, near_start, near_stop)
        # From tile to tile goes what the next one needs of the table blocks so far (band.py).
        carried, keys_carried = 0, 0
        if PART == NEAR and TILE.has_matrix and TILE.carry is not None:
            carried = blocks_before(rel_query, table, start - row_start - place.query_offset, TILE)

        for position in tl.range(start, stop, TILE.block_n):
            key_start = loop_position(PART, position, near_start, near_stop, TILE)
            offs_n = key_start + tile_n
            valid_n = exists(offs_n, place, common.window)
            relative = key_start - row_start - place.query_offset  # of the tile's first key to its first query
            is_past = key_start < near_start  # of a far tile: before the table, or behind it
            natural, far_term = query, None
            if PART == NEAR and inputs.rel_p2c is not None:
                natural = natural_keys(keys, key_start, place, common.window, TILE, SHAPE)  # [N, D]
            if PART == FAR and HAS_TERM and TILE.coverage == "clamp":
                far_term = tl.where(is_past, far_past, far_future)  # [M]
            # S: the relative terms [M, N], and Q K^T added to them
            tile_queries = Queries(rel_query, table, far_term, offs_m, valid_m)
            tile_keys = Keys(natural, keys_table, inputs.far_keys, offs_n, valid_n)
            terms, carried, keys_carried = relative_terms(
                tile_queries, tile_keys, carried, keys_carried, relative, is_past, place, head, PART, TILE
            )
            key = load_rows(keys, key_start, tile_n, valid_n, SHAPE.head_dim, SHAPE.block_d)  # [N, D]
            scores, is_visible, _ = tile_logits(
                query, key, terms, tile_queries, tile_keys, relative, mask, place, common, False, PART, TILE
            )
            # P = exp(S - maximum) [M, N]; sums so far are rescaled if the maximum moves.
            scores = tl.where(is_visible, scores, -float("inf"))
            beyond = far_term if is_linear(common.scaling.softcap, mask) else None
            probs, row_max, row_sum, rescale = softmax_update(scores, beyond, row_max, row_sum, scale)
            if residuals is not None:
                # [M, N] @ [N, 16] -> [M, 16]
                rounded_sum = tl.dot(probs.to(ones.dtype), ones, rounded_sum * rescale[:, None], input_precision=TILE.precision)
            # Dropout, after the sum of the row: the softmax is that of all keys. Its factor comes at the end.
            if common.dropout.seed is not None:
                probs = tl.where(keep_mask(common.dropout, place.batch, head, offs_m[:, None], offs_n[None, :]), probs, 0.0)
            # out += P V, and along the diagonals P times the rows of rel_value
            value = load_rows(values, key_start, tile_n, valid_n, SHAPE.value_dim, SHAPE.block_dv)  # [N, Dv]
            # [M, N] @ [N, Dv] -> [M, Dv]
            acc = tl.dot(probs.to(value.dtype), value, acc * rescale[:, None], input_precision=TILE.precision)
            if inputs.rel_value is not None:
                if TILE.coverage == "clamp":
                    past, future = past * rescale, future * rescale
                if PART == NEAR:
                    acc = add_tile(acc, probs, reached, relative, VALUE_TILE)
                elif TILE.coverage == "clamp":
                    past, future = add_far_tile(past, future, probs, is_past)

    # Far keys have an end row of rel_value. Divide by the sum, and store.
    if inputs.rel_value is not None and TILE.coverage == "clamp":
        acc = add_end_rows(acc, past, future, values_table, lowest, highest, VALUE_TILE)
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a query that sees nothing: out = 0, and lse = -inf by row_max
    if residuals is not None:
        rounded_sum = tl.max(rounded_sum, axis=1)  # [M, 16] -> [M]
        exact_by_out = row_sum / tl.where(rounded_sum == 0.0, 1.0, rounded_sum)
    acc /= row_sum[:, None]
    if common.dropout.seed is not None:
        acc *= tl.cast(common.dropout.keep_scale, tl.float32)
    outs = head_matrix(outs, place.entry, out_head, place.query_start, SHAPE.wide_index)
    # out [M, Dv], of the queries that exist
    store_rows(outs, row_start, tile_m, valid_m, acc, SHAPE.value_dim, SHAPE.block_dv)
    # What rounding takes from out [M, Dv], for an exact delta in the backward
    if residuals is not None:
        residuals = head_matrix(residuals, place.entry, out_head, place.query_start, SHAPE.wide_index)
        residual = acc * exact_by_out[:, None] - acc.to(outs[0].dtype.element_ty).to(tl.float32)
        store_rows(residuals, row_start, tile_m, valid_m, residual * RESIDUAL_SCALE, SHAPE.value_dim, SHAPE.block_dv)
    # lse = ln(sum of exp(logits)) [M], and for the backward the maximum and log2 of the sum apart, [M] each
    log_sum = tl.log2(row_sum)
    if lses is not None:
        lse = row_vector(lses, place.entry, head, place.query_start)
        tl.store(lse + offs_m, row_max * (scale * LN_2) + log_sum * LN_2, mask=valid_m)
    if not SPLITS_KEYS:
        row_max = tl.where(row_max == -float("inf"), 0.0, row_max)
    store_past_future(softmax_stats, place.entry, out_head, place.query_start, offs_m, valid_m, row_max, log_sum)


def forward(
    tensors: AttentionTensors, spec: AttentionSpec, config: TileConfig | None = None, keeps_residual: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Return out (B, H, Nq, Dv) in query's memory order and dtype, lse (B, H, Nq) float32, None without spec.with_lse, and for
    the backward the statistics, (B, H, 2, Nq), and the residual of out, None unless it is to be kept; see delta.py. The
    statistics are each query's maximum and the logarithm of its sum of exponentials; lse, both in one number, has no digits left
    for the sum of large logits."""
    return find(plan_forward, tensors, (spec, config, keeps_residual))(*tensors)  # type: ignore[return-value]


def prepared(tensors: AttentionTensors, spec: AttentionSpec, keeps_residual: bool) -> Plan:
    """Return the plan of calls like this one, a function of the tensors one by one that returns what forward does."""
    return find(plan_forward, tensors, (spec, None, keeps_residual))


def plan_forward(key: Key) -> Template:
    """Decide how to compute what forward returns."""
    draft = Draft(key)
    tensors, (spec, config, keeps_residual) = AttentionTensors(*draft.given), key.options
    query = tensors.query
    entries, heads, num_queries, _ = query.shape
    out = draft.new_like(query, tensors.value.shape[3])
    lse = draft.new((entries, heads, num_queries), torch.float32) if spec.with_lse else None
    softmax_stats = draft.new((entries, heads, 2, num_queries), torch.float32)
    residual = draft.new(out.shape, out.dtype, out.strides) if keeps_residual else None
    if out.numel() > 0:
        tensors, spec = with_positive_scale(draft, tensors, spec)
        call = Call(draft, with_aligned_operands(draft, tensors), spec)
        launch_far_keys(call, tensors.key)
        tile = call.tile("forward", config)
        programs = cdiv(spec.max_seqlen_q, tile.block_m) * call.num_sequences * heads
        splits = 1 if keeps_residual else num_key_splits(call, tile, programs)
        results, grid = (out, lse, softmax_stats, residual), (programs,)
        if splits > 1:
            parts = draft.temporary((entries, splits * heads, num_queries, out.shape[3]))
            part_statistics = draft.temporary((entries, splits * heads, 2, num_queries))
            results, grid = (parts, None, part_statistics, None), (programs, splits)
        outs, lses, all_statistics, residuals = map(strided, results)
        call.launch(
            "forward",
            forward_kernel,
            tile,
            grid,
            outs=outs,
            lses=lses,
            softmax_stats=all_statistics,
            residuals=residuals,
            SPLITS_KEYS=splits > 1,
        )
        if splits > 1:
            launch_merge(call, parts, part_statistics, out, lse, softmax_stats)
    return draft.compile(out, lse, softmax_stats, residual)
