"""Methods to measure: this package, what people write today, lower bounds, and other packages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from triton_relattn.tables import alibi_slopes
from triton_relattn.testing import Inputs

from .attention import BIAS, Case
from .baselines import BASELINES, relative_scores

OURS = "triton_relattn"
OUR_METHODS = (OURS, "plain")
"""Methods that our operator computes, with the tables and without."""
Function = Callable[[Inputs], torch.Tensor]
TERMS = {
    "plain": "one table for the keys, clipped, and heads that are not grouped",
    "full": "one table for the keys with a row for every distance",
    "bias": "a bias alone, all keys seen",
}


@dataclass(frozen=True)
class Method:
    """One way to compute a case.

    Attributes:
        kind: "ours", "bound" (computes less: no table), "baseline" or "peer".
        make: raises ImportError or NotImplementedError if it cannot.
        terms: the kinds of cases that it computes, of TERMS; empty: all.
        device: the only device that it is for.
    """

    kind: str
    what: str
    make: Callable[[Case], Function]
    terms: tuple[str, ...] = ()
    device: str = ""

    def case(self, case: Case) -> Case:
        """What it computes of a case: a bound has no table."""
        return case.without_table() if self.kind == "bound" else case

    def why_not(self, case: Case, device: str) -> str | None:
        """Why it does not apply to a case on a device; None if it does."""
        if self.device not in ("", device):
            return "needs a GPU" if self.device == "cuda" else "for a CPU"
        is_bias = case.terms == BIAS and not case.is_causal
        kinds = {"plain": case.is_plain, "full": case.is_plain and case.rows is None, "bias": is_bias}
        if self.terms and not any(kinds[name] for name in self.terms):
            return f"needs {', or '.join(TERMS[name] for name in self.terms)}"
        return None


def ours(case: Case, implementation: str | None = None) -> Function:
    return partial(case.attend, implementation=implementation)


def _sdpa(case: Case) -> Function:
    if case.window is not None:
        raise NotImplementedError("has no window")
    is_gqa = case.key_heads is not None
    if not case.is_causal or case.num_queries is None:
        return lambda inputs: scaled_dot_product_attention(*inputs[:3], is_causal=case.is_causal, enable_gqa=is_gqa)

    def run(inputs: Inputs) -> torch.Tensor:
        """Its is_causal lets the first query see the first key alone; here the last one sees the last key."""
        query, key = inputs[:2]
        mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        return scaled_dot_product_attention(*inputs[:3], attn_mask=mask, enable_gqa=is_gqa)

    return run


def dense_bias_matrix(case: Case, table: Any) -> Any:
    """The bias of each pair of positions, (1, H, N, N)."""
    position = torch.arange(case.length, device=table.device)
    row = (position - position[:, None]).clamp(case.positions.first, case.positions.last) - case.positions.first
    return table[None, :, row]


def _sdpa_bias(case: Case) -> Function:
    """The bias of each pair as a mask."""
    return lambda inputs: scaled_dot_product_attention(*inputs[:3], attn_mask=dense_bias_matrix(case, inputs.rel_bias))


def _forward_only(what: str, device: str) -> None:
    if device == "cpu" and torch.is_grad_enabled():
        raise NotImplementedError(f"{what} has no backward on a CPU")


def _onnxruntime(case: Case) -> Function:
    """ONNX Runtime's Attention with the relative scores of all pairs, which torch computes, as its mask."""
    if case.dtype != "fp32" or case.is_causal:
        raise NotImplementedError("for float32, all keys seen")
    import onnx
    import onnxruntime

    names = ("query", "key", "value", "mask")
    node = onnx.helper.make_node("Attention", names, ["out"], scale=case.head_dim**-0.5)
    tensors = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None] * 4) for name in (*names, "out")]
    graph = onnx.helper.make_graph([node], "attention", tensors[:-1], tensors[-1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # its idle threads would slow down other methods
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(inputs: Inputs) -> torch.Tensor:
        _forward_only("ONNX Runtime", "cpu")
        if inputs.rel_key is None:
            mask = dense_bias_matrix(case, inputs.rel_bias)
        else:
            mask = relative_scores(*inputs[:2], inputs.rel_key, False)
        arrays = {name: tensor.contiguous().numpy() for name, tensor in zip(names, (*inputs[:3], mask), strict=True)}
        return torch.from_numpy(session.run(None, arrays)[0])

    return run


def _baseline(name: str, case: Case) -> Function:
    """One of BASELINES, whose tables have a row for r = 0 in their middle: a full one of causal attention has no future."""
    future = case.length - 1 if case.is_causal and case.rows is None else 0

    def run(inputs: Inputs) -> torch.Tensor:
        assert inputs.rel_key is not None
        table = pad(inputs.rel_key, (0, 0, 0, future)) if future else inputs.rel_key
        return BASELINES[name](*inputs[:3], table, case.is_causal)

    return run


@cache
def compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(case: Case) -> Function:
    from torch.nn.attention.flex_attention import create_block_mask

    first, last, window = case.positions.first, case.positions.last, case.window
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "c++"))):
        raise NotImplementedError("needs a C++ compiler")
    mask = None
    if case.is_causal:

        def seen(_batch: Any, _head: Any, i: Any, j: Any) -> Any:
            return i >= j if window is None else (i >= j) & (i - j <= window[0])

        mask = create_block_mask(seen, None, None, case.length, case.length, device=device)

    slopes: Any = alibi_slopes(case.heads, device=device) if case.is_alibi else None

    def add_alibi(score: Any, _batch: Any, head: Any, i: Any, j: Any) -> Any:
        return score - slopes[head] * (j - i).abs()

    def run(inputs: Inputs) -> torch.Tensor:
        _forward_only("FlexAttention", device)
        rel_query = inputs.query if inputs.rel_query is None else inputs.rel_query
        # FlexAttention captures a term per query and row, and one per key and row; it adds both to each score.
        by_query = None if inputs.rel_key is None else (rel_query * case.head_dim**-0.5) @ inputs.rel_key.mT
        by_key = None if inputs.rel_p2c is None else (inputs.key * case.head_dim**-0.5) @ inputs.rel_p2c.mT
        bias = inputs.rel_bias

        def add_relative(score: Any, batch: Any, head: Any, i: Any, j: Any) -> Any:
            row = (j - i).clamp(first, last) - first
            added = score
            added = added if by_query is None else added + by_query[batch, head, i, row]
            added = added if by_key is None else added + by_key[batch, head, j, row]
            added = added if bias is None else added + bias[head, row]
            return added if case.outside == "clamp" else torch.where(j - i >= first, added, score)

        added = add_alibi if case.is_alibi else add_relative if case.terms else None
        is_gqa = case.key_heads is not None
        return compiled_flex_attention()(*inputs[:3], score_mod=added, block_mask=mask, enable_gqa=is_gqa)

    return run


def _backend(name: str, make: Callable[[Case], Function]) -> Callable[[Case], Function]:
    """A method of SDPA by one of its backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def make_with_backend(case: Case) -> Function:
        function = make(case)

        def run(inputs: Inputs) -> torch.Tensor:
            with sdpa_kernel(getattr(SDPBackend, name)):
                return function(inputs)

        return run

    return make_with_backend


_flash, _cudnn = _backend("FLASH_ATTENTION", _sdpa), _backend("CUDNN_ATTENTION", _sdpa)
_bias_cudnn, _bias_efficient = (_backend(f"{name}_ATTENTION", _sdpa_bias) for name in ("CUDNN", "EFFICIENT"))

METHODS: dict[str, Method] = {
    OURS: Method("ours", "fused_relative_attention", ours),
    "plain": Method("bound", "fused_relative_attention without a table", ours),
    "sdpa": Method("bound", "scaled_dot_product_attention without a bias", _sdpa),
    "sdpa_flash": Method("bound", "its FlashAttention-2 backend", _flash, device="cuda"),
    "sdpa_cudnn": Method("bound", "its cuDNN backend", _cudnn, device="cuda"),
    "shaw_gather": Method("baseline", "a vector for every pair", partial(_baseline, "shaw_gather"), ("plain",)),
    "gather": Method("baseline", "a gather from Q E^T", partial(_baseline, "gather"), ("plain",)),
    "skewing": Method("baseline", "pad, reshape and slice of Q E^T", partial(_baseline, "skewing"), ("full",)),
    "dense_bias": Method("baseline", "S as SDPA's attn_mask", partial(_baseline, "dense_bias"), ("plain",)),
    "sdpa_bias": Method("baseline", "a dense bias of all pairs, by SDPA", _sdpa_bias, ("bias",), "cpu"),
    "sdpa_bias_cudnn": Method("baseline", "the same by cuDNN", _bias_cudnn, ("bias",), "cuda"),
    "sdpa_bias_efficient": Method("baseline", "the same by its memory-efficient backend", _bias_efficient, ("bias",), "cuda"),
    "flex_attention": Method("baseline", "compiled FlexAttention with a captured Q E^T", _flex),
    "onnxruntime": Method("peer", "ONNX Runtime's Attention with a dense mask", _onnxruntime, ("plain", "bias"), "cpu"),
}
"""All of them, ours first."""
