"""Random calls are right in each implementation, and invalid arguments raise documented errors.

hypothesis draws the same calls each time; ``python -m tests.draws`` draws more.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.check import WAYS, Way, check, check_refused, environment, run
from tests.conftest import INTERPRETED
from tests.draws import explore, in_every_way, repeatable, samples
from tests.expected import INPUTS, TABLES
from tests.samples import Sample
from triton_relattn import RelativePositions


def seeds_id(seeds: range) -> str:
    return f"{WAYS[0].implementation}_in_any_blocks-{seeds[0]}"


DOZENS = [range(first, first + 12) for first in range(0, 48, 12)]
QUICK = DOZENS[:2] if INTERPRETED else DOZENS


@pytest.mark.parametrize(
    "seeds", [pytest.param(seeds, marks=() if seeds in QUICK else pytest.mark.thorough) for seeds in DOZENS], ids=seeds_id
)
def test_draws(seeds: range) -> None:
    """out, lse and the requested gradients are right, and the call changes no global state."""
    explore(samples(), in_every_way, seeds)


BASE = Sample(batch=2, key_heads=2, num_queries=32, num_keys=32, tables=("rel_key",), positions=(-31, 31, "clamp"))
ONE_CHANGE: tuple[dict[str, Any], ...] = (
    *({"num_keys": 33}, {"query_offset": 5}, {"query_offset": (0, 3)}, {"is_causal": True}, {"window_size": (4, -1)}),
    *({"scale": 0.3}, {"rel_scale": 0.3}, {"softcap": 20.0}, {"dropout_p": 0.2}, {"positions": (-5, 5, "clamp")}),
    *({"positions": (-5, 5, "zero")}, {"tables": (), "positions": None}, {"width": 40}, {"value_width": 72}, {"rel_width": 24}),
    *({"tables": ("rel_key", "rel_value")}, {"tables": ("rel_key", "rel_bias")}, {"tables": ("rel_bias",)}, {"dtype": "float16"}),
    *({"tables": ("rel_p2c",)}, {"group": 2, "tables": TABLES}, {"per_head": ("rel_key",)}, {"key_lengths": (32, 9)}),
    {"strided": ("query", "key")},
)


@pytest.mark.parametrize("way", WAYS[:1], ids=str)
def test_calls_that_differ_in_one_argument(way: Way) -> None:
    """Calls share cached launch decisions: a call that differs in one argument must not get those of another. Nor may a pack of
    another number of sequences of the same total and longest length."""
    packs: tuple[dict[str, Any], ...] = ({"sequences": ((20, 20),) * 2}, {"sequences": ((10, 10),) * 4, "slack": 10})
    for changes in ({}, *ONE_CHANGE, {}, *packs, packs[0]):
        check(replace(BASE, **changes), way)


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_gradients_have_the_same_bits_whichever_others_are_asked_for(way: Way) -> None:
    changes: dict[str, Any] = {"tables": TABLES, "per_head": ("rel_bias",), "rel_width": 16, "positions": (-5, 9, "clamp")}
    changes["workspace"] = 9000  # some keys at a time
    sample = replace(BASE, batch=1, key_heads=1, group=2, **changes)
    call = {**sample.call(), "implementation": way.implementation}
    names = [name for name in INPUTS if name in call]
    with environment(sample, way):
        expected = run(sample, call)
        for asked_for in (("query",), ("key", "rel_key"), tuple(names[2::2]), tuple(names[3:])):
            results = run(replace(sample, requires_grad=asked_for), call)
            for name in asked_for:
                result, right = results[f"d_{name}"], expected[f"d_{name}"]
                assert result is not None and right is not None and torch.equal(result, right), (asked_for, name)


def test_nan_stays_in_its_sequence() -> None:
    """NaN in one packed sequence changes no result or gradient of the others, except in gradients of tables."""
    sample = Sample(sequences=((20, 20), (37, 37), (3, 3)), tables=("rel_key",), rel_width=16, positions=(-4, 4, "clamp"))
    names = ("out", "d_query", "d_key", "d_value", "d_rel_query")
    for way in WAYS:
        clean = {**sample.call(), "implementation": way.implementation}
        changed = {name: clean[name].clone() for name in ("query", "key", "value")}
        for tensor in changed.values():
            tensor[20:57] = math.nan
        with environment(sample, way):
            expected, results = run(sample, clean), run(sample, clean | changed)
        for name in names:
            result, right = results[name], expected[name]
            assert result is not None and right is not None and result[20:57].isnan().any(), name
            assert torch.equal(result[:20], right[:20]) and torch.equal(result[57:], right[57:]), name


KNOWN = {
    "scale 0": {"tables": ("rel_bias",), "positions": (-19, 19, "clamp"), "scale": 0.0, "round_terms": INTERPRETED},
    "no keys": {"batch": 2, "key_lengths": (0, 20), "query_offset": (40, -40), "tables": ("rel_p2c",)},
    "blind queries": {"is_causal": True, "query_offset": -9, "tables": ("rel_key",)},
    "an offset back": {"positions": (-19, 19, "clamp"), "query_offset": -5, "tables": ("rel_key",)},
    "shared keys": {"key_heads": 2, "group": 2, "tables": TABLES},
    "far keys": {
        **{"num_queries": 40, "num_keys": 90, "positions": (-2, 2, "clamp"), "query_offset": 25, "tables": TABLES},
        **{"rel_width": 12, "rel_scale": -0.3},
    },
    "a band beside far keys": {
        **{"num_queries": 40, "num_keys": 260, "positions": (-4, 6, "clamp"), "query_offset": 90, "tables": TABLES[:3]},
    },
    "a band of keys": {
        **{"batch": 2, "num_queries": 18, "num_keys": 180, "query_offset": (70, 85), "tables": ("rel_value", "rel_p2c")},
    },
    "a mask of numbers": {"mask": "float32", "mask_shape": (20, 20), "tables": ("rel_key",)},
    "a scale of the table's own": {
        **{"num_queries": 40, "num_keys": 40, "positions": (-39, 39, "clamp"), "tables": ("rel_key",), "rel_scale": -0.1},
        "dtype": "float16",
    },
    "packed, no queries": {"sequences": ((0, 20), (20, 20)), "query_offset": (40, -40), "tables": ("rel_p2c",)},
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("way", WAYS[1:2], ids=str)
def test_calls_that_went_wrong(way: Way, name: str) -> None:
    """Calls that were wrong once, or that are rarely drawn."""
    sample = Sample(num_queries=20, num_keys=20, positions=(-5, 5, "clamp"), spoilt="nan")
    check(replace(sample, **KNOWN[name]), way)  # type: ignore[arg-type]


def expressions(text: str) -> tuple[str, ...]:
    return tuple(expression.strip() for expression in text.split(";"))


TENSORS = expressions("""
    None; 1.0; text; x.tolist(); x.detach().numpy(); [x]; x.neg(); x.conj(); x[0]; x[None]; x[..., :-1]; x[:-1]; x[:, :-1];
    x[:, :, :-1]; x[:0]; x[:, :0]; x[..., :0]; x.mT; x.transpose(0, -1); x.flatten(); torch.cat((x, x)); torch.cat((x, x), -1);
    x.double(); x.float(); x.half(); x.bfloat16(); x.long(); x.bool(); x.to(torch.float8_e5m2); x.to(torch.cfloat); x.to(meta);
    x.to_sparse(); torch.zeros(()); torch.nested.nested_tensor([x]); torch.zeros(0); torch.zeros(1, 1, 1, 1, 1)
""")
NUMBERS = expressions("""
    None; math.nan; math.inf; -math.inf; text; True; 1; 0; -1; 0.5; 1e300; -1e39; 10**400; 1e-46; 1j; [1.0]; torch.tensor(1.0);
    np.float32(0.5); bytes(3)
""")
FLAGS = expressions("None; True; 0; text; np.bool_(True); torch.tensor(True); []; 1.0; math.nan")
INTEGERS = expressions("""
    None; 1.0; True; text; 0; -1; 40; 2**29; -2**29; 2**29 + 1; -2**63; 2**64; [0]; torch.tensor(3); np.int64(3); math.nan;
    torch.zeros(2); torch.zeros(1, dtype=torch.int32); torch.tensor([2**29 + 1])
""")
VECTORS = expressions("""
    None; 1; text; x.tolist(); x.numpy(); x.float(); x.bool(); x.short(); x.int(); x.to(meta); x[None]; x[:-1]; x[1:]; x[0];
    torch.cat((x, x)); x + 1; x - 1; -x - 1; x - 2**62; x.long() + 2**40; x * 0; x.flip(0)
""")
WINDOWS = expressions("""
    None; 1; (1,); (1, 2, 3); [1, 2]; (-2, 3); (0, 0); (True, 1); (1.0, 2); (None, None); text; {}; (2**29 + 1, 0); (0, 2**64);
    torch.tensor([1, 2]); (np.int64(1), 2); (math.nan, 1)
""")
POSITIONS = expressions("""
    None; (-4, 4); text; 1; RelativePositions; RelativePositions(0, 0); RelativePositions(x.first, x.last + 1);
    RelativePositions(x.first + 1, x.last + 1); torch.zeros(3)
""")
EXPRESSIONS = (
    dict.fromkeys(("query", "key", "value", "rel_key", "rel_query", "rel_value", "rel_bias", "rel_p2c", "attn_mask"), TENSORS)
    | dict.fromkeys(("scale", "rel_scale", "softcap", "dropout_p"), NUMBERS)
    | dict.fromkeys(("is_causal", "enable_gqa", "return_lse"), FLAGS)
    | dict.fromkeys(("key_lengths", "cu_seqlens_q", "cu_seqlens_k"), VECTORS)
    | dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "query_offset"), INTEGERS)
    | {"window_size": WINDOWS, "positions": POSITIONS, "implementation": expressions("text; 1; []; {}; torch.zeros(2); bytes(3)")}
)
NAMES = {"torch": torch, "np": np, "math": math, "RelativePositions": RelativePositions, "text": "text", "meta": "meta"}


@st.composite
def broken(draw: st.DrawFn) -> tuple[Sample, str, str]:
    """A sample, the name of an argument, and an expression of its value x that replaces it and is mostly invalid."""
    sample = replace(draw(samples()), spoilt=None)
    absent = {"attn_mask", "key_lengths"} if sample.sequences is not None else {n for n in EXPRESSIONS if "seqlen" in n}
    name = draw(st.sampled_from([name for name in EXPRESSIONS if name not in absent]))
    is_vector = name == "query_offset" and isinstance(sample.query_offset, tuple)
    return sample, name, draw(st.sampled_from(EXPRESSIONS[name] + (VECTORS if is_vector else ())))


def refused_or_accepted(call: tuple[Sample, str, str]) -> None:
    sample, name, expression = call
    x = sample.call().get(name)
    assume(x is not None or not re.search(r"\bx\b", expression))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            changed = eval(expression, {**NAMES, "x": x})
        except Exception:  # the expression is not for an x of this type
            assume(False)
    check_refused(sample, WAYS[0], {name: changed})


def test_broken_calls() -> None:
    explore(broken(), refused_or_accepted, range(80))


ANYTHING = st.one_of(
    st.integers(),
    st.sampled_from([2**29, -(2**29), 2**29 + 1]),
    st.none() | st.booleans() | st.floats() | st.text() | st.complex_numbers() | st.tuples(st.integers()),
)


@repeatable
@given(ANYTHING, ANYTHING, st.sampled_from(["clamp", "zero", "error"]) | ANYTHING)
def test_positions(first: Any, last: Any, outside: Any) -> None:
    """RelativePositions stores its arguments, or raises a documented error with a message."""
    try:
        positions = RelativePositions(first, last, outside)
    except (ValueError, TypeError) as error:
        assert str(error)
    else:
        assert (positions.first, positions.last, positions.outside) == (first, last, outside)
        assert -(2**29) <= first <= last <= 2**29 and positions.num_rows == last - first + 1


@repeatable
@given(samples())
def test_lines(sample: Sample) -> None:
    """repr(sample) is one line without single quotes, for a shell, that evaluates to the sample."""
    line = repr(sample)
    assert "\n" not in line and "'" not in line
    assert eval(line, {"Sample": Sample}) == sample
