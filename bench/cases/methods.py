"""Who is measured: this package, what people write today, lower bounds, and other packages."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from triton_relattn import fused_relative_attention

from .attention import Case, CaseTensors
from .baselines import BASELINES, relative_scores

OURS = "triton_relattn"
OF_OURS = (OURS, "plain")
"""Methods that our operator computes, with the table and without."""
Function = Callable[[CaseTensors], torch.Tensor]


@dataclass(frozen=True)
class Method:
    """One way to compute a case."""

    kind: str
    """"ours", "bound" (computes less: no table), "baseline" or "peer"."""
    what: str
    make: Callable[[Case], Function]
    """Raises ImportError or NotImplementedError if it cannot."""
    why_not: Callable[[Case, str], str | None]
    """Why it does not apply to a case on a device; None if it does."""

    @property
    def has_table(self) -> bool:
        return self.kind != "bound"


def ours(case: Case, has_table: bool = True, implementation: str | None = None) -> Function:
    def run(inputs: CaseTensors) -> torch.Tensor:
        out: torch.Tensor = fused_relative_attention(*inputs[:3], **case.terms(inputs, has_table), implementation=implementation)
        return out

    return run


def _sdpa(case: Case) -> Function:
    options: dict[str, Any] = {"is_causal": case.is_causal, "enable_gqa": case.key_heads is not None}
    if not case.is_causal or case.num_queries is None:
        return lambda inputs: scaled_dot_product_attention(*inputs[:3], **options)

    def run(inputs: CaseTensors) -> torch.Tensor:
        """Its is_causal lets the first query see the first key alone; here the last one sees the last key."""
        query, key = inputs[:2]
        seen = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        return scaled_dot_product_attention(*inputs[:3], attn_mask=seen, enable_gqa=options["enable_gqa"])

    return run


def _sdpa_backend(name: str, case: Case) -> Function:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run(inputs: CaseTensors) -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return _sdpa(case)(inputs)

    return run


def bias_of_pairs(case: Case, table: torch.Tensor) -> torch.Tensor:
    """Return a bias for each pair of positions, (1, H, N, N)."""
    place = torch.arange(case.length, device=table.device)
    row = (place - place[:, None]).clamp(case.positions.first, case.positions.last) - case.positions.first
    return table[None, :, row]


def _sdpa_with_bias(name: str, case: Case) -> Function:
    """The bias of each pair as a mask, by one of SDPA's backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run(inputs: CaseTensors) -> torch.Tensor:
        if inputs.query.device.type == "cpu":
            return scaled_dot_product_attention(*inputs[:3], attn_mask=bias_of_pairs(case, inputs.table))
        with sdpa_kernel(getattr(SDPBackend, name)):
            return scaled_dot_product_attention(*inputs[:3], attn_mask=bias_of_pairs(case, inputs.table))

    return run


def _forward_only(what: str, device: str) -> None:
    if device == "cpu" and torch.is_grad_enabled():
        raise NotImplementedError(f"{what} has no backward on a CPU")


def _onnxruntime(case: Case) -> Function:
    """Return ONNX Runtime's Attention with the relative scores of all pairs, which torch computes, as its mask."""
    import onnx
    import onnxruntime

    node = onnx.helper.make_node("Attention", ["query", "key", "value", "mask"], ["out"], scale=case.head_dim**-0.5)
    infos = {
        name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None] * 4)
        for name in ("query", "key", "value", "mask", "out")
    }
    graph = onnx.helper.make_graph([node], "attention", [each for name, each in infos.items() if name != "out"], [infos["out"]])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # its idle threads would slow down other methods
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(inputs: CaseTensors) -> torch.Tensor:
        _forward_only("ONNX Runtime", "cpu")
        mask = bias_of_pairs(case, inputs.table) if case.bias else relative_scores(*inputs[:2], inputs.table, False)
        given = dict(zip(("query", "key", "value", "mask"), (*inputs[:3], mask), strict=True))
        return torch.from_numpy(session.run(None, {name: each.detach().contiguous().numpy() for name, each in given.items()})[0])

    return run


def _centred(inputs: CaseTensors, case: Case) -> torch.Tensor:
    """The table with a row for r = 0 in its middle: a full one of causal attention has no future."""
    return pad(inputs.table, (0, 0, 0, case.length - 1)) if case.is_causal and case.rows is None else inputs.table


def _baseline(name: str, case: Case) -> Function:
    return lambda inputs: BASELINES[name](*inputs[:3], _centred(inputs, case), case.is_causal)


@cache
def compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(case: Case) -> Function:
    from torch.nn.attention.flex_attention import create_block_mask

    first, last = case.positions.first, case.positions.last
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mask = None
    if case.is_causal:

        def past(_batch: Any, _head: Any, i: Any, j: Any) -> Any:
            return i >= j

        mask = create_block_mask(past, None, None, case.length, case.length, device=device)

    def run(inputs: CaseTensors) -> torch.Tensor:
        _forward_only("FlexAttention", device)
        inputs = inputs.map(torch.Tensor.detach) if device == "cpu" else inputs  # it refuses what wants gradients there
        rel_query = inputs.query if inputs.rel_query is None else inputs.rel_query
        by_row = inputs.table if case.bias else (rel_query * case.head_dim**-0.5) @ inputs.table.mT
        by_key = None if inputs.p2c is None else (inputs.key * case.head_dim**-0.5) @ inputs.p2c.mT

        def add_relative(score: Any, batch: Any, head: Any, i: Any, j: Any) -> Any:
            row = (j - i).clamp(first, last) - first
            added = score + (by_row[head, row] if case.bias else by_row[batch, head, i, row])
            added = added if by_key is None else added + by_key[batch, head, j, row]
            return added if case.outside == "clamp" else torch.where(j - i >= first, added, score)

        return compiled_flex_attention()(
            *inputs[:3], score_mod=add_relative, block_mask=mask, enable_gqa=case.key_heads is not None
        )

    return run


def disentangled_flash_slots(case: Case) -> torch.Tensor:
    """(2N - 1,), the row of a table that is turned round for each of i - j = -(N - 1) .. N - 1."""
    distance = torch.arange(1 - case.length, case.length)
    return (distance + case.num_rows // 2).clamp(0, case.num_rows - 1).int()


def _disentangled_flash(case: Case) -> Function:
    """Return disentangled-flash. Slots count i - j upwards: the table is turned round, one for each head, of 8 k rows."""
    from disentangled_flash.position import gradient_band, pad_position_table
    from disentangled_flash.training._kernels import training_attention

    slots = disentangled_flash_slots(case)
    device = torch.device("cuda")
    band, on_gpu = gradient_band(slots, device), slots.to(device)
    mask = torch.ones(case.batch, case.length, dtype=torch.bool, device=device)

    def turned(table: torch.Tensor | None) -> torch.Tensor | None:
        return None if table is None else pad_position_table(table.flip(0).expand(case.heads, -1, -1))

    def run(inputs: CaseTensors) -> torch.Tensor:
        out = training_attention(  # (B, N, H D)
            *inputs[:3],
            turned(inputs.table),
            turned(inputs.p2c),
            on_gpu,
            mask,
            score_scale=1 / math.sqrt(case.head_dim),
            has_padding=False,
            strict_fp32=True,
            gradient_band=band,
        )
        return out.unflatten(-1, (case.heads, case.head_dim)).transpose(1, 2)

    return run


def flashdeberta_table(table: torch.Tensor, heads: int) -> tuple[torch.Tensor, int]:
    """(R, D) as flashdeberta takes it, and its span: rows by i - j, a row for each of -span .. span - 1, clipped beyond.

    With span = (R + 1) / 2 that is one row more than ours at the end of the future, where the outermost serves twice.
    """
    by_distance = table.flip(0)
    return torch.cat([by_distance[:1], by_distance]).expand(1, heads, -1, -1), table.shape[0] // 2 + 1


def _flashdeberta(case: Case) -> Function:
    from flashdeberta.ops.flash_attention import flash_attention_with_disentangled

    lengths = torch.full((case.batch,), case.length, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")

    def run(inputs: CaseTensors) -> torch.Tensor:
        pos_key, span = flashdeberta_table(_centred(inputs, case), case.heads)
        pos_query = None if inputs.p2c is None else flashdeberta_table(inputs.p2c, case.heads)[0]
        return flash_attention_with_disentangled(
            *inputs[:3], lengths, pos_key, pos_query, case.is_causal, max_relative_distance=span, sm_scale=case.head_dim**-0.5
        )

    return run


def _always(_case: Case, _device: str) -> str | None:
    return None


def _needs_gpu(_case: Case, device: str) -> str | None:
    return None if device == "cuda" else "needs a GPU"


def _plain_terms(case: Case, _device: str) -> str | None:
    return (
        None
        if case.is_plain
        else "has no grouped heads, no query of its own for the table, no second table, no zero outside it, no missing queries"
    )


def _full_table(case: Case, device: str) -> str | None:
    return _plain_terms(case, device) or (None if case.rows is None else "needs a row for every distance")


def _needs_compiler(_case: Case, device: str) -> str | None:
    """Compiled FlexAttention on a CPU is C++."""
    has_one = any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "c++")))
    return None if device == "cuda" or has_one else "needs a C++ compiler"


def _bias_alone(case: Case, _device: str) -> str | None:
    return None if case.bias and not case.is_causal else "needs a bias alone, all keys seen"


def _bias_alone_on_cpu(case: Case, device: str) -> str | None:
    return "for a CPU" if device != "cpu" else _bias_alone(case, device)


def _bias_alone_on_gpu(case: Case, device: str) -> str | None:
    return _needs_gpu(case, device) or _bias_alone(case, device)


def _for_onnxruntime(case: Case, device: str) -> str | None:
    if device != "cpu" or case.dtype != "fp32" or case.is_causal:
        return "for a CPU, in float32, all keys seen"
    return _plain_terms(replace(case, bias=False), device)


def _peer(case: Case, device: str, causal: bool = True) -> str | None:
    if case.head_dim not in (32, 64, 128):
        return "head widths 32, 64 and 128 only"
    if case.is_causal and not causal:
        return "no causal attention"
    return _needs_gpu(case, device) or _plain_terms(replace(case, p2c=False), device)


METHODS: dict[str, Method] = {
    OURS: Method("ours", "fused_relative_attention", ours, _always),
    "plain": Method("bound", "fused_relative_attention without a table", partial(ours, has_table=False), _always),
    "sdpa": Method("bound", "scaled_dot_product_attention without a bias", _sdpa, _always),
    "sdpa_flash": Method("bound", "its FlashAttention-2 backend", partial(_sdpa_backend, "FLASH_ATTENTION"), _needs_gpu),
    "sdpa_cudnn": Method("bound", "its cuDNN backend", partial(_sdpa_backend, "CUDNN_ATTENTION"), _needs_gpu),
    "shaw_gather": Method("baseline", "a vector for every pair", partial(_baseline, "shaw_gather"), _plain_terms),
    "gather": Method("baseline", "a gather from Q E^T", partial(_baseline, "gather"), _plain_terms),
    "skewing": Method("baseline", "pad, reshape and slice of Q E^T", partial(_baseline, "skewing"), _full_table),
    "dense_bias": Method("baseline", "S as SDPA's attn_mask", partial(_baseline, "dense_bias"), _plain_terms),
    "sdpa_bias": Method("baseline", "a dense bias of all pairs, by SDPA", partial(_sdpa_with_bias, "MATH"), _bias_alone_on_cpu),
    "sdpa_bias_cudnn": Method("baseline", "the same by cuDNN", partial(_sdpa_with_bias, "CUDNN_ATTENTION"), _bias_alone_on_gpu),
    "sdpa_bias_efficient": Method(
        "baseline",
        "the same by its memory-efficient backend",
        partial(_sdpa_with_bias, "EFFICIENT_ATTENTION"),
        _bias_alone_on_gpu,
    ),
    "flex_attention": Method("baseline", "compiled FlexAttention with a captured Q E^T", _flex, _needs_compiler),
    "onnxruntime": Method("peer", "ONNX Runtime's Attention with a dense mask", _onnxruntime, _for_onnxruntime),
    "disentangled_flash": Method("peer", "disentangled-flash 1.1.1", _disentangled_flash, partial(_peer, causal=False)),
    "flashdeberta": Method("peer", "flashdeberta 0.0.8 without buckets", _flashdeberta, _peer),
}
"""All of them, ours first."""
