"""The torch operators: schemas, shapes of results, derivatives, vmap, and counts of floating-point operations.

Attention over a sequence and attention on a grid are two instances of one class, AttentionOperator. Each is a forward operator
whose derivative is a backward operator, and both are opaque to torch. The fields of a call's records are the schema:

    name_forward(tensors..., spec..., str implementation, bool save_extra) -> (out, lse, softmax_stats, extra)
    name_backward(d_out, d_lse, out, lse, softmax_stats, extra, tensors..., spec..., str implementation, bool[n] needs_grad)
        -> gradients of the first n tensors
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_type_hints

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ._core.dtypes import compute_dtype, gradient_like
from ._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors, GridSpec, GridTensors
from ._core.warn import untraced
from ._implementations import IMPLEMENTATIONS, Gradients, Implementation, Reference, Results

NAMESPACE = __name__.partition(".")[0]
"""The operators' namespace in ``torch.ops``: triton_relattn, or the name by which a copy of the package was loaded beside it."""
OPERATORS: Any = getattr(torch.ops, NAMESPACE)
_library = torch.library.Library(NAMESPACE, "DEF")
_SCHEMA_TYPES = {float: "float", float | None: "float?", int: "SymInt", bool: "bool"}
NUM_SAVED = 6
"""Arguments of a backward operator before the tensors of the call: d_out, d_lse, out, lse, softmax_stats, extra."""


class AttentionOperator:
    """A forward operator and the backward operator that differentiates it, for calls of one kind of records.

    count: products of the call's tensors, given their shapes, as (operations of a product, products that its backward has).
    new_grad: allocate a gradient as the implementations do.
    """

    def __init__(
        self,
        name: str,
        tensors: Any,
        spec: Any,
        differentiable: Sequence[str],
        count: Callable[[Any], list[tuple[int, int]]],
        new_grad: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.tensors, self.spec, self.count, self.new_grad = tensors, spec, count, new_grad
        self.differentiable, self.num_tensors, self.num_grads = differentiable, len(tensors._fields), len(differentiable)
        optional = tensors._field_defaults
        arguments = [f"{'Tensor?' if field in optional else 'Tensor'} {field}" for field in tensors._fields]
        arguments += [f"{_SCHEMA_TYPES[python_type]} {field}" for field, python_type in get_type_hints(spec).items()]
        schema, grads = ", ".join([*arguments, "str implementation"]), ", ".join(["Tensor"] * self.num_grads)
        saved = "Tensor d_out, Tensor? d_lse, Tensor? out, Tensor? lse, Tensor? softmax_stats, Tensor? extra"
        _library.define(f"{name}_forward({schema}, bool save_extra) -> (Tensor, Tensor, Tensor, Tensor)")
        _library.define(f"{name}_backward({saved}, {schema}, bool[{self.num_grads}] needs_grad) -> ({grads})")
        self.forward_op: Any = getattr(OPERATORS, f"{name}_forward").default
        self.backward_op: Any = getattr(OPERATORS, f"{name}_backward").default

        class Forward(OperatorFunction):
            operator = self.forward_op
            num_differentiable = self.num_grads
            setup_context = staticmethod(self._save_for_backward)
            backward = staticmethod(self._differentiate)

        class Backward(OperatorFunction):  # without it, a second derivative would silently leave out terms
            operator = self.backward_op
            num_differentiable = NUM_SAVED + self.num_grads
            setup_context = staticmethod(lambda ctx, inputs, output: None)
            backward = staticmethod(self._refuse_second_derivatives)

        Forward.register(self._forward, self._forward_fake)
        Backward.register(self._backward, self._backward_fake)

    def split(self, arguments: Sequence[Any]) -> tuple[Any, Any, str, Any]:
        """Return tensors, spec, name of the implementation and the last argument from arguments in the order of a schema."""
        *scalars, name, last = arguments[self.num_tensors :]
        return self.tensors(*arguments[: self.num_tensors]), self.spec(*scalars), name, last

    def _forward(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        tensors, spec, name, save_extra = self.split(arguments)
        return with_empty(tensors.query, IMPLEMENTATIONS[name].forward(tensors, spec, save_extra))

    def _forward_fake(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        tensors, spec, name, save_extra = self.split(arguments)
        return with_empty(tensors.query, IMPLEMENTATIONS[name].empty_results(tensors, spec, save_extra))

    def gradients(
        self,
        d_out: torch.Tensor,
        d_lse: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        softmax_stats: torch.Tensor | None,
        extra: torch.Tensor | None,
        tensors: Any,
        spec: Any,
        implementation: Implementation,
        needs_grad: Sequence[bool],
    ) -> Gradients:
        """Compute the gradients of the first tensors of a call; None for those that are absent or not needed."""
        if lse is None or lse.shape[2] != d_out.shape[2]:
            d_lse = None  # zeros of torch.func for an absent lse
        elif d_lse is not None:  # for a query that sees nothing, merging of partial results may give NaN
            d_lse = d_lse.masked_fill(lse.isneginf(), 0)
        return implementation.backward(d_out, d_lse, (out, softmax_stats, extra), tensors, spec, needs_grad)

    def differentiate(self, *arguments: Any) -> Gradients:
        """Compute the same by the operator."""
        *saved, tensors, spec, implementation, needs_grad = arguments
        grads = self.backward_op(*saved, *tensors, *spec, implementation.name, needs_grad)
        return tuple(grad if needed else None for grad, needed in zip(grads, needs_grad, strict=True))

    def _backward(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        d_out, d_lse, out, lse, softmax_stats, extra, *call = arguments
        tensors, spec, name, needs_grad = self.split(call)
        grads = self.gradients(d_out, d_lse, out, lse, softmax_stats, extra, tensors, spec, IMPLEMENTATIONS[name], needs_grad)
        return tuple(d_out.new_empty(0) if grad is None else grad for grad in grads)

    def _backward_fake(self, d_out, d_lse, out, lse, softmax_stats, extra, *arguments) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
        return tuple(
            d_out.new_empty(0) if tensor is None or not needed else self.new_grad(tensor)
            for tensor, needed in zip(arguments[: self.num_grads], arguments[-1], strict=True)
        )

    def _save_for_backward(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        out, lse, softmax_stats, extra = output
        *ctx.scalars, save_extra = inputs[self.num_tensors :]
        ctx.set_materialize_grads(False)  # autograd's zeros would not be distributed as a DTensor is
        ctx.mark_non_differentiable(softmax_stats, extra)
        stats = (out, lse, softmax_stats) if IMPLEMENTATIONS[ctx.scalars[-1]].saves_stats else (None, lse, None)
        ctx.save_for_backward(*stats, extra if save_extra else None, *inputs[: self.num_tensors])

    def _differentiate(self, ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        out, lse, softmax_stats, extra, *tensors = ctx.saved_tensors  # read once: checkpointing allows no more
        if d_out is None:
            query, value = tensors[0], tensors[2]
            d_out = query.new_zeros(*query.shape[:3], value.shape[3])
        needs_grad, implementation = ctx.needs_input_grad[: self.num_grads], IMPLEMENTATIONS[ctx.scalars[-1]]
        saved, call = (d_out, d_lse, out, lse, softmax_stats, extra), (tensors, ctx.scalars[:-1], implementation, needs_grad)
        grads = self.differentiate(*saved, *call)
        return *grads, *(None,) * (len(ctx.needs_input_grad) - self.num_grads)

    def _refuse_second_derivatives(self, ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            f"{NAMESPACE}::{self.backward_op._opname} cannot be differentiated: there are first derivatives only; "
            'implementation="reference" has all of them'
        )

    def count_forward(self, *arguments: Any, **_: Any) -> int:
        """Count the operations of the forward operator, whose tensors are given by their shapes."""
        return sum(operations for operations, _ in self.count(self.tensors(*arguments[: self.num_tensors])))

    def count_backward(self, *arguments: Any, **_: Any) -> int:
        """Count the operations of the backward operator."""
        tensors = self.tensors(*arguments[NUM_SAVED : NUM_SAVED + self.num_tensors])
        return sum(times * operations for operations, times in self.count(tensors))


def with_empty(query: torch.Tensor, results: Results) -> tuple[torch.Tensor, ...]:
    """Return the results of a forward, with tensors of no elements in place of absent ones: operators return
    tensors."""
    out, lse, *others = results
    if lse is None:
        lse = query.new_empty((*query.shape[:2], 0), dtype=compute_dtype(query.dtype))
    return out, lse, *(query.new_empty(0) if other is None else other for other in others)


def is_differentiated(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Return whether a derivative by any of the tensors may be asked for, in reverse or (to be refused) in forward mode."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return True
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0  # private: torch has no question for it


class OperatorFunction(torch.autograd.Function):
    """An operator as autograd and torch.func see it."""

    operator: Any
    num_differentiable: int  # the derivative may be asked for by so many of its first arguments

    @classmethod
    def forward(cls, *arguments: Any) -> Any:
        """Run the operator below autograd."""
        with torch._C._AutoDispatchBelowAutograd():  # private, but what torch's own tutorial on operators has for this
            return cls.operator(*arguments)

    @classmethod
    def with_autograd(cls, *arguments: Any) -> Any:
        """Run the operator, as a node of autograd's graph only if it may be differentiated: the node costs time."""
        register_late()
        if not is_differentiated(arguments[: cls.num_differentiable]):
            return cls.forward(*arguments)
        # The apply of Function's base in C++. That of Function itself binds all arguments by inspect.signature and looks for
        # transforms of torch.func, which are above this dispatch key: it takes five times as long.
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        raise NotImplementedError(
            'the operators of triton_relattn have no forward-mode derivatives (jvp); implementation="reference" has them'
        )

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        """Run the operator for each index of the dimensions that vmap maps over, one call after the other."""
        if info.batch_size == 0:
            raise ValueError(f"{cls.operator}: vmap over a dimension of size 0")
        results = []
        for index in range(info.batch_size):
            pairs = zip(arguments, in_dims, strict=True)
            results.append(cls.operator(*(value.select(dim, index) if isinstance(dim, int) else value for value, dim in pairs)))
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    @classmethod
    def register(cls, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
        """Register the function that computes the operator, and one for the shapes of its results.

        This is not done with torch.library.register_autograd: torch.func does not accept the Functions that it makes, and their
        forward-mode tangents are zero. The last key is torch.func's: apply passes the call from transform to transform, and then
        to the operator itself.
        """
        name = cls.operator._opname
        _library.impl(name, run, "CompositeExplicitAutograd")
        _library.impl(name, cls.with_autograd, "Autograd")
        _library.impl(name, cls.apply, "FuncTorchDynamicLayerFrontMode")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


# Floating-point operations are counted as torch counts those of scaled_dot_product_attention: a multiplication and an addition
# are two, masks do not reduce them, and softmax and the rotation of the tables' products do not count.


def _sequence_products(shapes: AttentionTensors) -> list[tuple[int, int]]:
    """Count queries with keys, probabilities with values, queries with rel_key and keys with rel_p2c, and probabilities with
    rel_value. Each query is multiplied with as many rows of a table as it can reach."""
    tensors: Any = shapes
    batch, heads, num_queries, width = tensors.query
    num_keys, value_width = tensors.key[2], tensors.value[3]
    rel_width = (tensors.rel_query or tensors.query)[3]
    rows, columns = 2 * batch * heads * num_queries, 2 * batch * heads * num_keys
    if tensors.cu_seqlens_k is not None:  # the sequences are counted as if equally long: their lengths may be on a GPU
        sequences = max(tensors.cu_seqlens_k[0] - 1, 1)
        num_queries, num_keys = num_queries // sequences, num_keys // sequences
    rel_key = 0 if tensors.rel_key is None else rows * min(tensors.rel_key[-2], num_keys) * rel_width
    rel_value = 0 if tensors.rel_value is None else rows * min(tensors.rel_value[-2], num_keys) * value_width
    rel_p2c = 0 if tensors.rel_p2c is None else columns * min(tensors.rel_p2c[-2], num_queries) * width
    return [(rows * num_keys * width, 3), (rows * num_keys * value_width, 2), (rel_key + rel_p2c, 3), (rel_value, 2)]


def _grid_products(shapes: GridTensors) -> list[tuple[int, int]]:
    """Count queries with keys, probabilities with values, queries with both tables."""
    tensors: Any = shapes
    batch, heads, num_queries, width = tensors.query
    rows, num_keys = 2 * batch * heads * num_queries, tensors.key[2]
    tables = rows * (tensors.rel_h[1] + tensors.rel_w[1]) * width
    return [(rows * num_keys * width, 3), (rows * num_keys * tensors.value[3], 2), (tables, 3)]


SEQUENCE = AttentionOperator(
    "attention", AttentionTensors, AttentionSpec, DIFFERENTIABLE, _sequence_products, new_grad=gradient_like
)
GRID = AttentionOperator(
    "grid_attention",
    GridTensors,
    GridSpec,
    ("query", "key", "value", "rel_h", "rel_w"),
    _grid_products,
    new_grad=lambda tensor: tensor.new_empty(tensor.shape),
)


def register_flops() -> None:
    """Register the counts with torch.utils.flop_counter."""
    from torch.utils.flop_counter import register_flop_formula

    for kind in (SEQUENCE, GRID):
        register_flop_formula(kind.forward_op.overloadpacket)(kind.count_forward)
        register_flop_formula(kind.backward_op.overloadpacket)(kind.count_backward)


def add_to_flop_counters() -> None:
    """Add the formulas to the counters that are active now: each has a copy of the formulas that existed when it began."""
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, FlopCounterMode):
            for kind in (SEQUENCE, GRID):
                for packet in (kind.forward_op.overloadpacket, kind.backward_op.overloadpacket):
                    counter.flop_registry.setdefault(packet, flop_registry[packet])


def register_sharding() -> None:
    """Register sharding strategies with DTensor."""
    from . import _sharding

    _sharding.register()


LATE_REGISTRATIONS: dict[str, Callable[[], None]] = {
    "torch.utils.flop_counter": register_flops,
    "torch.distributed.tensor": register_sharding,
}
"""Registrations that are still to be done, by the module of torch that must have been imported before."""


@untraced
def register_late() -> None:
    """Register with those modules of torch that are imported by now. Importing them here would take a second, and triton."""
    for name in [name for name in LATE_REGISTRATIONS if name in sys.modules]:
        LATE_REGISTRATIONS.pop(name)()
    if torch._C._len_torch_dispatch_stack() > 0 and "torch.utils.flop_counter" in sys.modules:
        add_to_flop_counters()


def relative_attention(
    tensors: AttentionTensors, spec: AttentionSpec, implementation: Implementation, return_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse, with gradients; lse may be empty unless return_lse. The arguments have been validated."""
    if isinstance(implementation, Reference):
        return implementation.attend(tensors, spec)
    register_late()  # also here, since inference mode does not come through autograd
    if not return_lse:
        spec = spec._replace(with_lse=False)
    save_extra = is_differentiated(tensors) and implementation.saves_extra(tensors, spec)
    out, lse, *_ = SEQUENCE.forward_op(*tensors, *spec, implementation.name, save_extra)
    return out, lse


def grid_attention(tensors: GridTensors, spec: GridSpec, implementation: Implementation) -> torch.Tensor:
    """Compute out on a grid, with gradients, by an implementation other than the reference. The arguments have been validated."""
    register_late()
    out: torch.Tensor = GRID.forward_op(*tensors, *spec, implementation.name, False)[0]
    return out
