"""The papers' algorithms, dense, as their code computes them, against the equivalent call: out and all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.check import WAYS, Way
from tests.expected import exact_results
from tests.tolerance import assert_near, dtype_tolerance
from triton_relattn import RelativePositions, fused_relative_attention, tables
from triton_relattn.testing import Inputs

Attention = Callable[..., Tensor]


@pytest.fixture(params=[way for way in WAYS if not way.small], ids=str)
def attend(request: pytest.FixtureRequest) -> Attention:
    """The public function in the most precise dtype of each implementation, with results converted to float64."""
    way: Way = request.param

    def attend(*tensors: Tensor, **arguments: Any) -> Tensor:
        given = [tensor.to(way.dtype) for tensor in tensors]
        named = {name: value.to(way.dtype) if is_floating(value) else value for name, value in arguments.items()}
        out = fused_relative_attention(*given, **named, implementation=way.implementation)  # type: ignore[arg-type]
        assert isinstance(out, Tensor) and out.dtype == way.dtype
        return out.double()

    attend.tolerance = dtype_tolerance(way.dtype)  # type: ignore[attr-defined]
    return attend


def is_floating(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.is_floating_point()


def check(model: Attention, ours: Attention, attend: Attention, **shapes: tuple[int, ...]) -> None:
    """Assert equal out and equal, nonzero gradients of random parameters of these shapes."""
    torch.manual_seed(0)
    parameters = {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}
    expected, actual = model(**parameters), ours(**parameters)
    options = {"tolerance": attend.tolerance, "smallest": 1.0}  # type: ignore[attr-defined]
    assert_near("out", actual, expected, **options)
    d_out = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, list(parameters.values()), d_out)
    gradients = torch.autograd.grad(actual, list(parameters.values()), d_out)
    for name, gradient, expected_gradient in zip(parameters, gradients, expected_gradients, strict=True):
        assert expected_gradient.abs().max() > 0.001, f"{name} has no part in the model"
        assert_near(f"gradient of {name}", gradient, expected_gradient, **options)


def call_shapes(
    batch: int, heads: int, num_queries: int, num_keys: int, width: int, key_heads: int = 0
) -> dict[str, tuple[int, ...]]:
    key = (batch, key_heads or heads, num_keys, width)
    return {"query": (batch, heads, num_queries, width), "key": key, "value": key}


def distances(num_queries: int, num_keys: int, offset: int = 0) -> Tensor:
    """r = j - i - offset of every pair."""
    return torch.arange(num_keys) - (torch.arange(num_queries)[:, None] + offset)


def shift(scores: Tensor) -> Tensor:
    """The relative shift of Transformer-XL, appendix B: pad a column, reshape, drop a row."""
    *batch, num_queries, num_rows = scores.shape
    return pad(scores, (1, 0)).view(*batch, num_rows + 1, num_queries)[..., 1:, :].reshape(scores.shape)


def diagonal_stacking(query: Tensor, general_table: Tensor, num_keys: int) -> Tensor:
    """S = truncate(transpose(diagonals(Q E))), E (d, 2T - 1) from the most distant future to the most distant past.

    The scores of key j are the diagonal of Q E that starts in column T - 1 - j.
    """
    num_queries, max_length = query.shape[-2], (general_table.shape[-1] + 1) // 2
    products = query @ general_table
    diagonals = [products.diagonal(max_length - 1 - j, -2, -1)[..., :num_queries] for j in range(num_keys)]
    return torch.stack(diagonals, -2).mT


def pad_reshape_slice(query: Tensor, table: Tensor) -> Tensor:
    """Music Transformer's skewing of Q E^T, E (L, d) with rows for -(L - 1) .. 0: right on and below the diagonal."""
    products = query @ table.mT
    length = products.shape[-1]
    padded = pad(products, (1, 0))
    return padded.reshape(*products.shape[:-2], length + 1, length)[..., 1:, :]


def test_general_relative_attention(attend: Attention) -> None:
    """E (heads, d, 2T - 1), most distant future first; cross attention with Nq != Nk < T."""

    def model(query: Tensor, key: Tensor, value: Tensor, general_table: Tensor) -> Tensor:
        scores = diagonal_stacking(query, general_table, key.shape[2])
        return (((query @ key.mT + scores) / math.sqrt(8)).softmax(-1)) @ value

    def ours(query: Tensor, key: Tensor, value: Tensor, general_table: Tensor) -> Tensor:
        return attend(query, key, value, tables.from_general_layout(general_table))

    check(model, ours, attend, **call_shapes(2, 3, 7, 11, 8), general_table=(3, 8, 25))


def test_music_transformer(attend: Attention) -> None:
    """E (heads, L, d), rows for -(L - 1) .. 0, causal."""

    def model(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        logits = (query @ key.mT + pad_reshape_slice(query, table)) / math.sqrt(6)
        return logits.masked_fill(distances(12, 12) > 0, -math.inf).softmax(-1) @ value

    def ours(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        return attend(query, key, value, table, positions=RelativePositions(-11, 0), is_causal=True)

    check(model, ours, attend, **call_shapes(2, 3, 12, 12, 6), table=(3, 12, 6))


def test_shaw(attend: Attention) -> None:
    """a^K and a^V gathered for every pair, clipped at k = 3, added to the keys and to the values."""
    row = distances(9, 14).clamp(-3, 3) + 3

    def model(query: Tensor, key: Tensor, value: Tensor, table_k: Tensor, table_v: Tensor) -> Tensor:
        logits = (query @ key.mT + torch.einsum("bhid,ijd->bhij", query, table_k[row])) / math.sqrt(8)
        probs = logits.softmax(-1)
        return probs @ value + torch.einsum("bhij,ijd->bhid", probs, table_v[row])

    def ours(query: Tensor, key: Tensor, value: Tensor, table_k: Tensor, table_v: Tensor) -> Tensor:
        return attend(query, key, value, table_k, rel_value=table_v)

    check(model, ours, attend, **call_shapes(2, 3, 9, 14, 8), table_k=(7, 8), table_v=(7, 8))


@pytest.mark.parametrize("way", ["folded", "rel_query"])
def test_conformer(way: str, attend: Attention) -> None:
    """Wav2Vec2-Conformer, Parakeet, NeMo, ESPnet: projected interleaved sinusoids, biases u and v, padding."""
    length, heads, width, model_width = 13, 3, 8, 10
    lengths = torch.tensor([length, 8])
    padding = torch.arange(length) >= lengths.view(-1, 1, 1, 1)

    def model(query: Tensor, key: Tensor, value: Tensor, linear_pos: Tensor, u: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(length - 1, -length, -1, dtype=torch.float64)
        angles = distance[:, None] / 10000 ** (torch.arange(0, model_width, 2, dtype=torch.float64) / model_width)
        sinusoids = torch.stack((angles.sin(), angles.cos()), -1).view(2 * length - 1, model_width)
        table = (sinusoids @ linear_pos.T).view(2 * length - 1, heads, width).permute(1, 2, 0)
        relative_scores = shift((query + v[:, None]) @ table)[..., :length]
        logits = ((query + u[:, None]) @ key.mT + relative_scores) / math.sqrt(width)
        return logits.masked_fill(padding, -math.inf).softmax(-1) @ value

    def ours(query: Tensor, key: Tensor, value: Tensor, linear_pos: Tensor, u: Tensor, v: Tensor) -> Tensor:
        sinusoids = tables.sinusoids(-(length - 1), length - 1, model_width, dtype=torch.float64)
        table = (sinusoids @ linear_pos.T).view(-1, heads, width).transpose(0, 1)
        if way == "rel_query":
            return attend(query + u[:, None], key, value, table, rel_query=query + v[:, None], key_lengths=lengths)
        query, bias = tables.fold_transformer_xl(query, table, u, v)
        return attend(query, key, value, table, rel_bias=bias, key_lengths=lengths)

    inputs = call_shapes(2, heads, length, length, width)
    check(model, ours, attend, **inputs, linear_pos=(heads * width, model_width), u=(heads, width), v=(heads, width))


def test_transformer_xl_with_memory(attend: Attention) -> None:
    """Five keys of memory before seven queries, causal; concatenated sinusoids of the distances 11 .. 0."""
    memory, length, width = 5, 7, 6
    total = memory + length

    def model(query: Tensor, key: Tensor, value: Tensor, r_net: Tensor, u: Tensor, v: Tensor) -> Tensor:
        angles = torch.outer(
            torch.arange(total - 1, -1, -1, dtype=torch.float64), 10000 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        )
        r_head_k = (torch.cat((angles.sin(), angles.cos()), -1) @ r_net.T).view(total, 2, width)
        ac = torch.einsum("bnid,bnjd->bnij", query + u[:, None], key)
        bd = shift(torch.einsum("bnid,jnd->bnij", query + v[:, None], r_head_k))
        mask = torch.ones(length, total, dtype=torch.bool).triu(1 + memory)
        return ((ac + bd) / math.sqrt(width)).masked_fill(mask, -math.inf).softmax(-1) @ value

    def ours(query: Tensor, key: Tensor, value: Tensor, r_net: Tensor, u: Tensor, v: Tensor) -> Tensor:
        sinusoids = tables.sinusoids(-(total - 1), 0, 8, "concatenated", dtype=torch.float64)
        table = (sinusoids @ r_net.T).view(total, 2, width).transpose(0, 1)
        query, bias = tables.fold_transformer_xl(query, table, u, v)
        positions = RelativePositions(-(total - 1), 0, outside="error")
        return attend(query, key, value, table, rel_bias=bias, positions=positions, is_causal=True, query_offset=memory)

    check(model, ours, attend, **call_shapes(2, 2, length, total, width), r_net=(2 * width, 8), u=(2, width), v=(2, width))


def t5_buckets_of_pairs(relative_position: Tensor, bidirectional: bool = True) -> Tensor:
    """16 buckets up to distance 24, by the distances at which transformers' T5Attention starts them."""
    starts = torch.tensor([*range(4), 4, 7, 10, 16] if bidirectional else [*range(8), 8, 10, 11, 13, 14, 16, 19, 21])
    distance = relative_position.abs() if bidirectional else -relative_position.clamp(max=0)
    return torch.searchsorted(starts, distance, right=True) - 1 + 8 * (bidirectional & (relative_position > 0))


@pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder with a cache"])
def test_t5(bidirectional: bool, attend: Attention) -> None:
    """The rows up to distance 24 are enough for any length: the bucket is constant from max_distance on. The decoder has six new
    tokens after 30 cached ones, and buckets of the past only."""
    num_queries, num_keys, cached = (40, 40, 0) if bidirectional else (6, 36, 30)
    relative_position = distances(num_queries, num_keys, cached)
    bucket = t5_buckets_of_pairs(relative_position, bidirectional)

    def model(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        logits = query @ key.mT + weight[bucket].permute(2, 0, 1)
        return (logits if bidirectional else logits.masked_fill(relative_position > 0, -math.inf)).softmax(-1) @ value

    def ours(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        positions = RelativePositions(-24, 24 if bidirectional else 0)
        bias = weight[tables.t5_buckets(torch.arange(-24, positions.last + 1), 16, 24, bidirectional)].T
        given = {"rel_bias": bias, "positions": positions, "is_causal": not bidirectional, "query_offset": cached}
        return attend(query, key, value, **given, scale=1.0)

    check(model, ours, attend, **call_shapes(2, 3, num_queries, num_keys, 4), weight=(16, 3))


def test_wavlm(attend: Attention) -> None:
    """The bias of the bucket times a gate of the query: a product of width 1."""
    bucket = t5_buckets_of_pairs(distances(30, 30))

    def gated(gate: Tensor, constant: Tensor) -> Tensor:
        gate_a, gate_b = gate.sigmoid().chunk(2, dim=-1)
        return gate_a * (gate_b * constant - 1.0) + 2.0

    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, constant: Tensor, weight: Tensor) -> Tensor:
        position_bias = weight[bucket].permute(2, 0, 1)[None]
        return (query @ key.mT * 8**-0.5 + gated(gate, constant) * position_bias).softmax(-1) @ value

    def ours(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, constant: Tensor, weight: Tensor) -> Tensor:
        table = weight[tables.t5_buckets(torch.arange(-24, 25), 16, 24)].T[..., None]
        return attend(query, key, value, table, rel_query=gated(gate, constant), rel_scale=1.0)

    check(model, ours, attend, **call_shapes(2, 3, 30, 30, 8), gate=(2, 3, 30, 2), constant=(1, 3, 1, 1), weight=(16, 3))


def test_alibi(attend: Attention) -> None:
    """As BLOOM has it: slope * j, which differs from -slope * (i - j) by a constant of the query that softmax ignores."""

    def model(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
        logits = query @ key.mT / math.sqrt(8) + slopes[:, None, None] * torch.arange(17)
        return logits.masked_fill(distances(17, 17) > 0, -math.inf).softmax(-1) @ value

    def ours(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
        positions = RelativePositions(-16, 0, outside="error")
        return attend(query, key, value, rel_bias=tables.alibi_bias(slopes, -16, 0), positions=positions, is_causal=True)

    check(model, ours, attend, **call_shapes(2, 3, 17, 17, 8), slopes=(3,))


@pytest.mark.parametrize("length", [3, 12])
def test_vits(length: int, attend: Attention) -> None:
    """Tables of keys and values for -4 .. 4 and nothing beyond, by padding and reshaping; the query is scaled before."""
    window, width = 4, 6

    def resized(table: Tensor) -> Tensor:
        extra, start = max(length - (window + 1), 0), max((window + 1) - length, 0)
        return pad(table, (0, 0, extra, extra))[:, start : start + 2 * length - 1]

    def to_absolute(x: Tensor) -> Tensor:
        flat = pad(pad(x, (0, 1)).flatten(-2), (0, length - 1))
        return flat.view(*x.shape[:2], length + 1, 2 * length - 1)[..., :length, length - 1 :]

    def to_relative(x: Tensor) -> Tensor:
        flat = pad(pad(x, (0, length - 1)).flatten(-2), (length, 0))
        return flat.view(*x.shape[:2], length, 2 * length)[..., 1:]

    def model(query: Tensor, key: Tensor, value: Tensor, emb_rel_k: Tensor, emb_rel_v: Tensor) -> Tensor:
        query = query * width**-0.5
        probs = (query @ key.mT + to_absolute(query @ resized(emb_rel_k).mT)).softmax(-1)
        return probs @ value + to_relative(probs) @ resized(emb_rel_v)

    def ours(query: Tensor, key: Tensor, value: Tensor, emb_rel_k: Tensor, emb_rel_v: Tensor) -> Tensor:
        positions = RelativePositions(-window, window, outside="zero")
        arguments = {"rel_value": emb_rel_v[0], "positions": positions, "scale": 1.0}
        return attend(query * width**-0.5, key, value, emb_rel_k[0], **arguments)

    check(model, ours, attend, **call_shapes(2, 2, length, length, width), emb_rel_k=(1, 9, width), emb_rel_v=(1, 9, width))


@pytest.mark.parametrize("kinds", ["c2p", "p2c", "c2p and p2c"])
def test_deberta(kinds: str, attend: Attention) -> None:
    """The terms q_i . PK[slot] and k_j . PQ[slot], slots by log buckets of i - j, clamped; the scale is that of all terms."""
    span, max_position, length, width = 8, 20, 24, 6
    # The buckets of the distances, as transformers' make_log_bucket_position has them.
    starts = torch.tensor([1, 2, 3, 4, 5, 7, 12, 20])
    delta = -distances(length, length)
    relative_pos = delta.sign() * torch.searchsorted(starts, delta.abs(), right=True)
    c2p_pos, p2c_pos = ((pos + span).clamp(0, 2 * span - 1).expand(2, 2, -1, -1) for pos in (relative_pos, -relative_pos))
    scale = ((2 + (" and " in kinds)) * width) ** -0.5

    def model(query: Tensor, key: Tensor, value: Tensor, **positions: Tensor) -> Tensor:
        scores = query @ key.mT
        if "c2p" in kinds:
            scores = scores + (query @ positions["position_key"].mT).gather(-1, c2p_pos)
        if "p2c" in kinds:
            scores = scores + (key @ positions["position_query"].mT).gather(-1, p2c_pos).mT
        return (scale * scores).softmax(-1) @ value

    def ours(query: Tensor, key: Tensor, value: Tensor, **positions: Tensor) -> Tensor:
        bucket = tables.deberta_log_buckets(torch.arange(1 - length, length), span, max_position)
        slots = (span - bucket).clamp(0, 2 * span - 1)
        names = {"position_key": "rel_key", "position_query": "rel_p2c"}
        rows = {names[name]: table[:, slots] for name, table in positions.items()}
        return attend(query, key, value, **rows, scale=scale)

    wanted = {"position_key": "c2p", "position_query": "p2c"}
    shapes = {name: (2, 2 * span, width) for name, kind in wanted.items() if kind in kinds}
    check(model, ours, attend, **call_shapes(2, 2, length, length, width), **shapes)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_two_by_two_by_hand(way: Way) -> None:
    """d = 1, queries 1 and 2, keys 1 and 0, values 1 and 3, E = -1, 0, 1 + ln 3 for r = -1, 0, 1, scale 1.

    Logits [[1 + 0, 0 + 1 + ln 3], [2 - 2, 0 + 0]]: P = [[1/4, 3/4], [1/2, 1/2]], out = 5/2, 2, lse = 1 + ln 4, ln 2.
    For d_out = 1, 0: dP = 1, 3, delta = 5/2, dS = -3/8, 3/8 in row 0. dE = 0, -3/8, 3/8; dq_0 = 3/8 (ln 3), as
    key + row is 1 for the first pair and 1 + ln 3 for the second; dk = -3/8, 3/8; dv = 1/4, 3/4.
    """
    column = lambda *numbers: torch.tensor(numbers, dtype=torch.float64).view(1, 1, -1, 1)  # noqa: E731
    table = column(-1, 0, 1 + math.log(3))[0, 0]
    inputs = Inputs(column(1, 2), column(1, 0), column(1, 3), table, column(1, 0), torch.zeros(1, 1, 2, dtype=torch.float64))
    expected = {
        "out": column(2.5, 2),
        "lse": column(1 + math.log(4), math.log(2))[..., 0],
        "d_query": column(0.375 * math.log(3), 0),
        "d_key": column(-0.375, 0.375),
        "d_value": column(0.25, 0.75),
        "d_rel_key": column(0, -0.375, 0.375)[0, 0],
    }
    exact = exact_results(inputs)
    for name, result in way.results(inputs.to(way.dtype), scale=1.0).items():
        assert_near(name, result.double(), expected[name], tolerance=dtype_tolerance(way.dtype), smallest=1.0)
        assert_near(name, exact[name], expected[name])
