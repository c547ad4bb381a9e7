"""The modules: what they compute, what they hold, and that they stand in for torch.nn.MultiheadAttention."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import forget_warnings
from tests.cpu.small_call import HEADS, KINDS, LENGTH, WIDTH, module
from tests.tolerance import assert_near, assert_same
from triton_relattn import RelativePositions, fused_relative_attention, tables
from triton_relattn.nn import RelativeAttention, RelativeMultiheadAttention, RelativePositionTable, encodings


def inputs(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_state_after_construction(kind: str) -> None:
    """Projections begin as in torch.nn.MultiheadAttention, their biases at zero, and the same seed gives the same state."""
    attention = module(kind)
    glorot, linear = math.sqrt(6 / (2 * WIDTH)), math.sqrt(1 / WIDTH)
    for name, parameter in attention.named_parameters():
        if name.endswith("_proj.bias"):
            assert not parameter.any(), name
        elif name.endswith("_proj.weight"):
            bound = linear if name == "out_proj.weight" else glorot
            assert 0.9 * bound < float(parameter.detach().abs().max()) <= bound, name
        else:
            assert parameter.isfinite().all(), name
    again = module(kind)
    assert all(torch.equal(*pair) for pair in zip(attention.state_dict().values(), again.state_dict().values(), strict=True))


def by_hand(attention: RelativeMultiheadAttention, kind: str, x: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
    """The output of self-attention from dense tensors, with all scores and vectors written out."""
    projections, state = (attention.q_proj, attention.k_proj, attention.v_proj), dict(attention.attention.named_parameters())
    length = x.shape[1]
    q, k, v = (project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in projections)
    r = torch.arange(length) - torch.arange(length)[:, None]
    clipped, logits, extra = r.clamp(-4, 4) + 4, scale * q @ k.mT, torch.zeros(())
    rows = {"shaw": clipped, "shaw_keys": clipped, "general": r + LENGTH - 1}
    rows["music_transformer"] = rows["general"].clamp(max=LENGTH - 1)  # the future is hidden
    if kind in rows:
        key_table = state["encoding.rel_key.weight"].expand(HEADS, -1, -1)
        logits = logits + scale * torch.einsum("bhid,hijd->bhij", q, key_table[:, rows[kind]])
    elif kind == "transformer_xl":
        sinusoids = tables.sinusoids(1 - length, length - 1, WIDTH, dtype=torch.float64)
        vectors = (sinusoids @ state["encoding.linear_pos.weight"].T).view(2 * length - 1, HEADS, -1).transpose(0, 1)
        u, w = state["encoding.pos_bias_u"][:, None], state["encoding.pos_bias_v"][:, None]
        logits = scale * ((q + u) @ k.mT + torch.einsum("bhid,hijd->bhij", q + w, vectors[:, r + length - 1]))
    elif kind == "t5":
        logits = logits + state["encoding.weight"][tables.t5_buckets(r, 8, 20)].permute(2, 0, 1)
    elif kind in ("alibi", "fixed_alibi"):
        slopes = state.get("encoding.slopes", tables.alibi_slopes(HEADS, dtype=torch.float64))
        logits = logits - slopes[:, None, None] * r.abs()
    if is_causal:
        logits = logits.masked_fill(r > 0, -torch.inf)
    probs = logits.softmax(-1)
    if kind == "shaw":
        extra = torch.einsum("bhij,ijd->bhid", probs, state["encoding.rel_value.weight"][clipped])
    return attention.out_proj((probs @ v + extra).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formula(kind: str, scale: float | None) -> None:
    """The output and gradients of all parameters and the input match dense attention written out. (A Music Transformer's table
    has no future; T5 does not scale.)"""
    is_causal = kind.startswith("music") or scale is not None
    attention, x = module(kind, **({} if scale is None else {"scale": scale})), inputs().requires_grad_()
    scale = scale or (1.0 if kind == "t5" else (WIDTH // HEADS) ** -0.5)
    d_out = torch.randn(x.shape, dtype=x.dtype)
    output, weights = attention(x, x, x, is_causal=is_causal)
    assert weights is None
    expected = by_hand(attention, kind, x, is_causal, scale)
    assert_same("output", output, expected)
    parameters = dict(attention.named_parameters())
    ours, theirs = (torch.autograd.grad(result, (x, *parameters.values()), d_out) for result in (output, expected))
    for name, actual, exact in zip(("x", *parameters), ours, theirs, strict=True):
        if name != "k_proj.bias":  # cancels without a table of values
            assert_same(name, actual, exact)


def masks(num_queries: int, num_keys: int) -> dict[str, dict[str, torch.Tensor]]:
    """Masks for torch.nn.MultiheadAttention, where True hides; every query sees key 0. The lowest finite number hides nothing
    from a query if all of its keys have it."""
    generator = torch.Generator().manual_seed(2)
    attn = torch.rand(num_queries, num_keys, generator=generator) < 0.3
    by_head = torch.rand(2 * HEADS, num_queries, num_keys, generator=generator) < 0.3
    padding = torch.arange(num_keys) >= torch.tensor([num_keys, num_keys - 4])[:, None]
    attn[..., 0] = by_head[..., 0] = False
    added = torch.zeros(attn.shape, dtype=torch.float64).masked_fill(attn, -torch.inf) + 0.5 * ~attn
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "attn": {"attn_mask": attn},
        "by_head": {"attn_mask": by_head},
        "added": {"attn_mask": added},
        "both": {"attn_mask": attn, "key_padding_mask": padding},
        "added_and_padding": {"attn_mask": added, "key_padding_mask": padding},
        "lowest": {"attn_mask": torch.full(attn.shape, torch.finfo(torch.float64).min, dtype=torch.float64)},
    }


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", masks(1, 4))
def test_in_place_of_multihead_attention(mask: str, batch_first: bool) -> None:
    """Without an encoding and with torch's state: torch's output for self- and cross-attention, masks, and other key and value
    widths."""
    for options in ({}, {"kdim": 10, "vdim": 14}):
        torch.manual_seed(0)
        stock = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, dtype=torch.float64, **options)  # type: ignore[arg-type]
        nn.init.normal_(stock.in_proj_bias)
        ours = module("none", batch_first=batch_first, **options)
        ours.load_state_dict(stock.state_dict())
        for keys in (LENGTH, 7):
            widths = options.values() if options else (WIDTH, WIDTH)
            given = [inputs(), *(torch.randn(2, keys, width, dtype=torch.float64) for width in widths)]
            given = given if batch_first else [tensor.transpose(0, 1) for tensor in given]
            arguments = masks(LENGTH, keys)[mask]
            assert_same("output", ours(*given, **arguments)[0], stock(*given, need_weights=False, **arguments)[0])


def test_a_single_sequence() -> None:
    attention, x = module("shaw", batch_first=False), inputs(batch=1)[0]
    expected = attention(x[:, None], x[:, None], x[:, None])[0][:, 0]
    assert_same("output", attention(x, x, x)[0], expected)
    padded = attention(x, x, x, key_padding_mask=torch.arange(LENGTH) > 5)[0]
    assert_same("padded", padded, attention(x, x[:6], x[:6])[0])


@pytest.mark.parametrize("training", [False, True])
def test_in_an_encoder_layer(training: bool) -> None:
    """TransformerEncoderLayer's fast path, which computes plain attention from the weights, is not used with this module."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = module("shaw")  # type: ignore[assignment]
    layer.train(training)
    x = inputs()
    with torch.no_grad():
        attended = layer.norm1(x + layer.self_attn(x, x, x)[0])
        expected = layer.norm2(attended + layer.linear2(layer.linear1(attended).relu()))
        assert_same("output", layer(x), expected)
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
        masked = layer(x, src_mask=causal, is_causal=True)
        assert_same("causal", masked[:, :4], layer(x[:, :4], src_mask=causal[:4, :4], is_causal=True))
        encoder = nn.TransformerEncoder(layer, 2).train(training)
        assert_same("encoder", encoder(x), encoder.layers[1](encoder.layers[0](x)))


def test_key_value_cache_and_lengths() -> None:
    """query_offset: the last queries alone give the same output as among all queries; key_lengths: keys beyond them do not
    matter."""
    attention, x = module("transformer_xl"), inputs()
    whole = attention(x, x, x, is_causal=True)[0]
    last = attention(x[:, -2:], x, x, is_causal=True, query_offset=LENGTH - 2)[0]
    assert_same("last", last, whole[:, -2:])
    short = attention(x, x, x, key_lengths=torch.tensor([LENGTH, 6]))[0]
    assert_same("short", short[1:], attention(x[1:], x[1:, :6], x[1:, :6])[0])


def test_a_step_without_its_position() -> None:
    """A single query without query_offset warns, because it is placed at the first key and sees no other; query_offset=0 does
    not."""
    attention, x = module("shaw"), inputs()
    forget_warnings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = attention(x[:, -1:], x, x, is_causal=True, query_offset=0)[0]
        attention(x[:, -1:], x, x)
    with pytest.warns(UserWarning, match=f"query_offset={LENGTH - 1}, the number of keys before"):
        output = attention(x[:, -1:], x, x, is_causal=True)[0]
    assert torch.equal(output, expected)


def test_shared_key_heads() -> None:
    attention = RelativeMultiheadAttention(WIDTH, 4, encoding=None, num_key_heads=2, batch_first=True, dtype=torch.float64)
    x = inputs()
    assert attention.k_proj.weight.shape == (12, WIDTH)
    q, k, v = (p(x).unflatten(-1, (-1, 6)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    out: Any = fused_relative_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    assert_same("output", attention(x, x, x)[0], attention.out_proj(out.transpose(1, 2).flatten(-2)))


def test_dropouts() -> None:
    """Dropout of the probabilities and of the output is active only in training."""
    x = inputs()
    for options in ({"dropout": 0.5}, {"output_dropout": 0.5}):
        attention = module("shaw", **options)
        torch.manual_seed(1)
        first, second = attention(x, x, x)[0], attention(x, x, x)[0]
        assert not torch.equal(first, second)
        attention.eval()
        assert torch.equal(attention(x, x, x)[0], attention(x, x, x)[0])
        without = module("shaw").eval()
        assert torch.equal(attention(x, x, x)[0], without(x, x, x)[0])
    halves = module("shaw", output_dropout=0.5)(x, x, x)[0]
    assert 0.3 < float((halves == 0).double().mean()) < 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_state(kind: str) -> None:
    """A state_dict restores a module whether it was initialised or not; reset_parameters sets everything, including buffers of a
    module created on the meta device."""
    attention, loaded, reset, x = module(kind), *(module(kind, device="meta").to_empty(device="cpu") for _ in range(2)), inputs()
    for tensor in (*loaded.buffers(), *loaded.parameters(), *reset.parameters(), *reset.buffers()):
        nn.init.constant_(tensor, 77)
    assert str(loaded.load_state_dict(attention.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(attention(x, x, x, is_causal=True)[0], loaded(x, x, x, is_causal=True)[0])
    for part in reset.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()  # type: ignore[operator]
    attention.load_state_dict(reset.state_dict())
    output = reset(x, x, x, is_causal=True)[0]
    assert output.isfinite().all() and torch.equal(output, attention(x, x, x, is_causal=True)[0])
    assert not any((tensor == 77).any() for tensor in reset.parameters())
    assert all(
        name.partition(".")[0] in ("q_proj", "k_proj", "v_proj", "out_proj", "attention") for name in attention.state_dict()
    )
    assert "RelativeMultiheadAttention" in repr(attention) and f"embed_dim={WIDTH}" in repr(attention)


@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes(kind: str) -> None:
    """Modules are built in the requested dtype; under autocast, float32 parameters work."""
    attention, x = module(kind, dtype=torch.float32), inputs().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attention(x, x, x, is_causal=True)[0]
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), name
    low = module(kind, dtype=torch.bfloat16)
    assert low(*[x.bfloat16()] * 3, is_causal=True)[0].dtype == torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def table(end: int) -> RelativePositionTable:
    return RelativePositionTable(RelativePositions(-end, end), 8)


def load(**state: torch.Tensor) -> None:
    module("shaw").load_state_dict(state, strict=False)


def attend_with(kind: str = "shaw", **changes: Any) -> Any:
    return module(kind)(inputs(), inputs(), inputs(), **changes)


REFUSED: tuple[tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception], str], ...] = (
    (attend_with, (), {"need_weights": True}, NotImplementedError, "need_weights"),
    *((attend_with, (), {"key_padding_mask": zeros(*s)}, ValueError, "padding_mask must have") for s in ((3, 11), (2, 1), (11,))),
    *(
        (attend_with, (), {"attn_mask": zeros(*s)}, ValueError, "attn_mask must have shape")
        for s in ((5, 11, 11), (1, 11), (11,))
    ),
    (attend_with, (), {"key_padding_mask": zeros(2, 11, dtype=torch.int64)}, TypeError, "bool or floating point"),
    (attend_with, ("alibi",), {"query_offset": torch.tensor([0, 1])}, ValueError, "must be an int"),
    (RelativeMultiheadAttention.shaw, (10, 4, 3), {}, ValueError, "divisible by num_heads"),
    (RelativeMultiheadAttention, (12, 4), {"num_key_heads": 3}, ValueError, "divisible by num_key_heads"),
    (RelativeMultiheadAttention, (12, 4), {"dropout": 1.5}, ValueError, "dropout must lie"),
    (RelativeMultiheadAttention, (12, 4, 0.0, True, False, True), {}, NotImplementedError, "no position"),
    (RelativeMultiheadAttention, (12, 4), {"max_distance": 3}, TypeError, "'max_distance'; RelativeMultiheadAttention.shaw has"),
    (RelativeMultiheadAttention, (12, 4), {"colour": 3}, TypeError, r"RelativeMultiheadAttention\(\) got .* 'colour'$"),
    (lambda: encodings.TableEncoding(table(2), table(3)), (), {}, ValueError, "same positions"),
    (load, (), {"in_proj_weight": zeros(30, WIDTH)}, ValueError, "in_proj_weight has 30 rows"),
    (lambda: table(4).resized(-1, 1, "other"), (), {}, ValueError, "mode must be"),  # type: ignore[arg-type]
    (lambda: table(4).resized(-3, 0), (), {}, ValueError, "the same sides"),
)


def test_refuses() -> None:
    for function, arguments, named, error, message in REFUSED:
        with pytest.raises(error, match=message):
            function(*arguments, **named)


def test_no_positions_are_warned_of_once() -> None:
    """torch.nn.MultiheadAttention's arguments alone make a module without positions; encoding=None asks for one."""
    forget_warnings()
    with pytest.warns(UserWarning, match=r"has no positions.*shaw, general.*encoding=None says"):
        RelativeMultiheadAttention(WIDTH, HEADS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RelativeMultiheadAttention(WIDTH, HEADS)
        forget_warnings()
        RelativeMultiheadAttention(WIDTH, HEADS, encoding=None)
        module("shaw")


def test_table_initialisation() -> None:
    """Glorot-uniform per head, +-sqrt(6 / (R + D)), and zero biases."""
    torch.manual_seed(0)
    table = RelativePositionTable(RelativePositions(-20, 20), 16, num_heads=3)
    bound = (6 / (41 + 16)) ** 0.5
    assert table.weight.shape == (3, 41, 16)
    assert 0.95 * bound < float(table.weight.abs().max()) <= bound
    assert float(table.weight.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
    numbers = RelativePositionTable(RelativePositions(-2, 2, "zero"), None, 3)
    assert numbers.weight.shape == (3, 5) and not numbers.weight.any()
    assert 'r=-2..2, outside="zero", numbers, num_heads=3' in repr(numbers)
    assert RelativePositionTable(RelativePositions(-2, 2), 4).weight.shape == (5, 4)


@pytest.mark.parametrize("num_heads", [None, 2])
@pytest.mark.parametrize("width", [None, 3])
def test_resizing(width: int | None, num_heads: int | None) -> None:
    """Interpolation keeps the vectors of the ends and of r = 0; extension keeps the vector of every distance."""
    table = RelativePositionTable(RelativePositions(-4, 2), width, num_heads)
    nn.init.normal_(table.weight)
    dim = 1 if num_heads else 0

    def at(which: RelativePositionTable, r: int) -> torch.Tensor:
        return which.weight.select(dim, r - which.positions.first)

    longer = table.resized(-8, 6)
    assert longer.positions == RelativePositions(-8, 6) and longer.num_heads == num_heads
    for new, old in ((-8, -4), (-6, -3), (0, 0), (3, 1), (6, 2)):
        assert_near("at", at(longer, new), at(table, old))
    assert_near("at", at(longer, -7), (at(table, -4) + at(table, -3)) / 2)
    assert_near("resized", longer.resized(-4, 2).weight, table.weight)
    extended = table.resized(-6, 3, "extend")
    assert all(torch.equal(at(extended, r), at(table, max(-4, min(2, r)))) for r in range(-6, 4))
    zero = RelativePositionTable(RelativePositions(-4, 2, "zero"), width, num_heads)
    nn.init.normal_(zero.weight)
    assert not at(zero.resized(-6, 3, "extend"), -5).any() and at(zero.resized(-6, 3, "extend"), 1).any()


def test_attention_without_projections() -> None:
    """The module equals the functional with its encoding."""
    table = RelativePositionTable(RelativePositions.centred(9), 8, dtype=torch.float64)
    attention = RelativeAttention(encodings.TableEncoding(table), softcap=5.0, window_size=(6, -1))
    q, k, v = (torch.randn(2, 3, LENGTH, 8, dtype=torch.float64) for _ in range(3))
    expected: Any = fused_relative_attention(
        *(q, k, v, table.weight), positions=table.positions, softcap=5.0, window_size=(6, -1), return_lse=True
    )
    for actual, exact in zip(attention(q, k, v, return_lse=True), expected, strict=True):
        assert torch.equal(actual, exact)
    assert "softcap=5.0" in repr(attention)


class Adapter(nn.Module):
    """Like LoRA's wrapper of a projection: it exposes the base weight and adds a correction to the output."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.change = base, nn.Parameter(torch.randn_like(base.weight))

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.base.weight + self.change)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("change", ["adapter", "torch.ao"])
def test_a_projection_of_another_kind(change: str) -> None:
    """linear_pos may be any module with any weight: it is called with the sinusoids in the dtype of the other parameters."""
    attention: Any = module("transformer_xl").float()
    x = inputs().float()
    if change == "torch.ao":
        quantise = pytest.importorskip("torch.ao.quantization").quantize_dynamic
        attention = quantise(attention, {nn.Linear}, dtype=torch.qint8)
    else:
        attention.attention.encoding.linear_pos = Adapter(attention.attention.encoding.linear_pos)
    encoding = attention.attention.encoding
    _, terms = encoding(x.unflatten(-1, (HEADS, -1)).transpose(1, 2), LENGTH)
    projected = encoding.linear_pos(tables.sinusoids(1 - LENGTH, LENGTH - 1, WIDTH))
    assert torch.equal(terms["rel_key"].transpose(0, 1).flatten(1), projected)
    output = attention(x, x, x)[0]
    assert output.isfinite().all()
    if change == "adapter":
        output.square().sum().backward()
        assert encoding.linear_pos.change.grad.norm() > 0


def test_alibi_in_16_bits() -> None:
    """Fixed slopes stay exact when the model becomes bfloat16, so that biases of distant keys still differ."""
    attention = RelativeMultiheadAttention.alibi(16, 8, batch_first=True).to(torch.bfloat16)
    query = torch.zeros(1, 8, 1, 2, dtype=torch.bfloat16)
    _, terms = attention.attention.encoding(query, 2048, 2047)  # type: ignore[misc]
    assert torch.equal(terms["rel_bias"], tables.alibi_bias(8, -2047, 0))


@pytest.mark.parametrize("kind", ["alibi", "transformer_xl"])
def test_nothing_to_see(kind: str) -> None:
    """Calls without queries or without keys."""
    attention, x = module(kind), inputs()
    assert attention(x[:, :0], x, x)[0].shape == (2, 0, WIDTH)
    assert torch.equal(attention(x, x[:, :0], x[:, :0])[0], attention.out_proj(torch.zeros_like(x)))
