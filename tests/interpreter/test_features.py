"""Features beyond rel_key in the kernels: shapes, scales, strided vectors, packing, and tiles that windows skip."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.interpreter.calls import packed_call
from tests.interpreter.guard import recorded
from tests.interpreter.launch import OTHER, SMALL, all_gradients, check_forward_backward
from tests.tolerance import assert_at_most, assert_bit_equal
from triton_relattn import RelativePositions, fused_relative_attention_varlen
from triton_relattn._core import validation
from triton_relattn.kernels.call import SMALLEST_SCALE
from triton_relattn.testing import forward_backward, make_inputs

# Two variants, of which the second is slow.
BOTH, BOTH_NAMES = (False, pytest.param(True, marks=pytest.mark.slow)), ("", "other")
POSITIONS = {
    "full": RelativePositions(-50, 50),
    "clamp": RelativePositions(-4, 6),
    "zero": RelativePositions(-4, 6, "zero"),
}
ALL_TERMS: dict[str, Any] = {"rel_width": 12, "rel_value": True, "rel_bias": True}


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # arguments of make_inputs, arguments of the call
    "width_40": ({"width": 40, "rel_width": 80}, {}),
    "width_80": ({"width": 80, "rel_width": 12}, {"is_causal": True}),
    "width_96": ({"width": 96, "value_width": 96}, {"query_offset": 4}),
    "value_width_40": ({"value_width": 40}, {}),
    "groups_of_2": ({"heads": 4, "key_heads": 2}, {"enable_gqa": True}),
    "groups_of_3": ({"heads": 3, "key_heads": 1, "per_head": True}, {"enable_gqa": True, "is_causal": True}),
    "rel_scale": ({}, {"rel_scale": -0.3}),
    "rel_scale_of_the_query": ({"rel_width": None}, {"rel_scale": 0.7, "scale": 0.1}),
    "no_rel_scale": ({}, {"rel_scale": 0.0}),
    "no_scale": ({}, {"scale": 0.0, "rel_scale": 0.2}),
    "tiny_scale": ({}, {"scale": 1e-39, "rel_scale": 0.2}),
    "no_scale_softcap": ({}, {"scale": 0.0, "rel_scale": 0.2, "softcap": 2.0}),
    "nothing_but_the_bias": ({}, {"scale": 0.0, "rel_scale": 0.0}),
    "negative_scale": ({}, {"scale": -0.4}),
    "negative_scale_of_the_query": ({"rel_width": None}, {"scale": -0.4, "rel_scale": 0.5}),
    "negative_scale_softcap": ({"rel_width": None}, {"scale": -0.4, "softcap": 2.0}),
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("other", BOTH, ids=BOTH_NAMES)
def test_shapes_and_scales(case: str, other: bool) -> None:
    """Widths that differ or are not powers of two, heads that share keys, and scales of any sign."""
    changes, arguments = SHAPES[case]
    kind = ("clamp", "zero")[(list(SHAPES).index(case) + other) % 2]
    sizes = {"batch": 1, "heads": 1, "num_queries": 21, "num_keys": 35, "width": 16, "value_width": 12}
    options: dict[str, Any] = {**sizes, **ALL_TERMS, "num_rows": 11, "dtype": torch.float32, "seed": 2, **changes}
    inputs = make_inputs(**options)
    results = check_forward_backward(inputs, SMALL, positions=POSITIONS[kind], **arguments)
    if arguments.get("scale") == 0:
        assert inputs.rel_value is not None  # |dS| sums up to at most twice the largest |dP| in each row, and |d_lse|
        d_probs = inputs.d_out.double().abs().sum() * (inputs.value.abs().max() + inputs.rel_value.abs().max())
        d_scores = 2 * d_probs + inputs.d_lse.abs().sum()
        for name, factor in (("d_key", inputs.query), ("d_query", inputs.key)):  # without that of rel_key, if it uses the query
            assert_at_most(name, results[name].abs().max(), SMALLEST_SCALE * d_scores * factor.double().abs().max())


@pytest.mark.parametrize(("scale", "rel_scale"), [(-0.4, 0.5), (1e-4, 10.0)])
def test_the_query_given_as_rel_query(scale: float, rel_scale: float) -> None:
    """query passed also as rel_query has two gradients, with the bits of those for a copy."""
    inputs = make_inputs(1, 2, 20, 33, 16, num_rows=11, dtype=torch.float16, seed=3)
    same, copy = (inputs._replace(rel_query=rel_query) for rel_query in (inputs.query, inputs.query.clone()))
    results = [all_gradients(given, SMALL, scale=scale, rel_scale=rel_scale) for given in (same, copy)]
    assert_bit_equal(*results)
    assert results[0]["d_rel_query"].any()


@pytest.mark.parametrize(("scale", "rel_scale"), [(0.0, 0.25), (1e-4, 10.0), (-1e-6, 1.0)])
def test_ratio_of_scales_beyond_float16(scale: float, rel_scale: float) -> None:
    """The gradient of a query used by both products is finite and obeys the error rule at any ratio of their scales."""
    inputs = make_inputs(1, 2, 20, 33, 16, num_rows=11, dtype=torch.float16, seed=3)
    check_forward_backward(inputs, SMALL, positions=POSITIONS["clamp"], scale=scale, rel_scale=rel_scale)


def test_vectors_with_strides() -> None:
    """key_lengths with stride 2, and query_offset with stride 0."""
    inputs = make_inputs(3, 1, 20, 33, 16, num_rows=11, dtype=torch.float32, seed=3)
    lengths, offset = torch.tensor([[20, 7], [33, 8], [5, 9]])[:, 0], torch.tensor([4], dtype=torch.int32).expand(3)
    results = all_gradients(inputs, SMALL, key_lengths=lengths, query_offset=offset)
    assert_bit_equal(results, all_gradients(inputs, SMALL, key_lengths=lengths.clone(), query_offset=4))


@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize("limit", ["", "0"])
def test_rows_of_no_sequence(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed tensors that are longer than their sequences raise an error on a CPU. On a GPU, where that is not checked, results
    of the sequences are right. (Deterministic algorithms fill new memory with NaN.)"""
    attend_varlen: Any = fused_relative_attention_varlen
    monkeypatch.setenv("TRITON_RELATTN_WORKSPACE", limit)
    inputs, arguments = packed_call("clamp", {"q": (7, 13, 10), "k": (16, 14, 6)}, **ALL_TERMS)
    arguments |= {"implementation": "triton", "return_lse": True}
    arguments |= {"cu_seqlens_q": torch.tensor([0, 7, 20]), "cu_seqlens_k": torch.tensor([0, 16, 30])}
    with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0 to the total length 30"):
        attend_varlen(*inputs[:4], **inputs.terms(), **arguments)
    short = {name: getattr(inputs, name)[:20] for name in ("query", "rel_query", "d_out")}
    short |= {name: getattr(inputs, name)[:30] for name in ("key", "value")}
    expected = forward_backward(attend_varlen, inputs._replace(**short, d_lse=inputs.d_lse[:, :20]), **arguments)
    monkeypatch.setattr(validation, "_check_integers", lambda *_: None)  # values are not known
    torch.use_deterministic_algorithms(True)
    try:
        results = forward_backward(attend_varlen, inputs, **arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, result in results.items():
        rows = {"out": 20, "d_query": 20, "d_rel_query": 20, "d_key": 30, "d_value": 30}.get(name)
        part = result[:, :20] if name == "lse" else result[:rows]
        assert torch.equal(part, expected[name]), name


@pytest.mark.parametrize("kind", ["full", "clamp", pytest.param("zero", marks=pytest.mark.slow), None])
def test_windows_skip_tiles(kind: str | None) -> None:
    """With a fixed window, each kernel's loads grow linearly with the length: tiles outside are skipped. Without one they grow
    faster."""

    def loads(length: int, window: tuple[int, int]) -> Counter[str]:
        positions = None if kind is None else RelativePositions(-100, 100) if kind == "full" else POSITIONS[kind]
        num_rows = None if positions is None else positions.num_rows
        options: dict[str, Any] = {"rel_value": True, "rel_bias": True} if kind else {}
        inputs = make_inputs(1, 1, length, length, 16, num_rows=num_rows, dtype=torch.float32, seed=1, **options)
        with recorded() as launches:
            all_gradients(inputs, OTHER, positions=positions, window_size=window)
        counted: Counter[str] = Counter()
        for launch in launches:  # there are two dtable kernels, for dS and for P
            counted[launch.kernel] += launch.loads
        return counted

    short, middle, long, unbounded = (loads(*call) for call in ((32, (9, 5)), (64, (9, 5)), (96, (9, 5)), (96, (-1, -1))))
    kernels = {
        "forward",
        "delta",
        "dkv",
        *{None: ["dq"], "full": ["stored_dq", "dtable"]}.get(kind, ["dq", "stored_dq", "dtable", "table_gradient"]),
    }
    assert set(short) == {f"{kernel}_kernel" for kernel in kernels}
    for kernel in set(short) - {"delta_kernel", "table_gradient_kernel"}:  # which read no keys
        assert 0 < long[kernel] - middle[kernel] <= 1.05 * (middle[kernel] - short[kernel]), kernel
    assert unbounded["forward_kernel"] > 1.2 * long["forward_kernel"]
    assert unbounded["dkv_kernel"] > 1.2 * long["dkv_kernel"]
