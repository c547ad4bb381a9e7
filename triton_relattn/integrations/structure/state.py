"""What a forward may depend on besides its arguments and the numbers of weights: settings of a module and of its children, class
attributes, names of modules, and the code of methods. A proof holds for modules that agree in all of that."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from ..._core.cache import digest
from .roles import widths
from .sources import bases_of, function_of, is_the_users, names_used

ATTRIBUTE = "_triton_relattn"
"""What the class in place of a stock class has, and no other; see kind.py."""
PLAIN = (bool, int, float, complex, str, bytes, range, torch.Size, torch.dtype)
OF_TORCH = frozenset(vars(nn.Module()))
OF_ACCELERATE = frozenset(("forward", "_hf_hook", "_old_forward"))
"""Attributes by which accelerate puts weights on a device for a call."""
DEEPEST = 8
State = dict[str, Any]


def state_of(module: nn.Module, exact: bool = True) -> State:
    """Return all of it by name; of a child's attribute the name is "child.attribute".

    Projections, which are called and not read, count by their widths, dropout by its class: its probability is read in each call.

    Args:
        exact: with the values of whole numbers in buffers, and code by its instructions, so that it is the same in all processes.
            Else with what shows quickly, and without waiting for a GPU, that nothing has changed in this one.
    """
    found: State = {}
    _add_module(found, "", module, exact, {id(module)})
    return found


def name_of(state: State, without: Collection[str] = ()) -> str:
    """Return a name for an exact state, the same for all that agree in it."""
    return digest({name: value for name, value in state.items() if name not in without})


def _add_module(found: State, prefix: str, module: nn.Module, exact: bool, met: set[int]) -> None:
    stock = _stock(type(module))
    found[f"{prefix}class"] = stock.__module__, stock.__qualname__, _of_class(stock, exact)
    if prefix:
        if isinstance(module, nn.modules.dropout._DropoutNd):
            return
        if (projects := widths(module)) is not None:
            found[f"{prefix}class"] = projects
            return
        found[f"{prefix}hooks"] = bool(module._forward_hooks or module._forward_pre_hooks)
    left_out = OF_ACCELERATE if "_hf_hook" in vars(module) else ()
    for name, value in vars(module).items():
        if name not in OF_TORCH and name not in left_out:
            found[prefix + name] = described(value, exact, met)
    for name, parameter in module._parameters.items():
        found[prefix + name] = None if parameter is None else tuple(parameter.shape)
    for name, buffer in module._buffers.items():
        found[prefix + name] = described(buffer, exact, met)
    for name, child in module._modules.items():
        if child is None:
            found[f"{prefix}{name}.class"] = None
        elif id(child) not in met:
            met.add(id(child))
            _add_module(found, f"{prefix}{name}.", child, exact, met)


def _stock(own: type) -> type:
    """Return the class, or the stock class in whose place it is."""
    return next(each for each in own.__mro__ if ATTRIBUTE not in vars(each))


def described(value: Any, exact: bool, met: set[int], depth: int = 0) -> Any:
    """Return plain values, and tuples of them, that are equal for equal settings. Tensors of numbers are nothing: forwards leave
    them there, and a proof is of any."""
    kind = type(value)
    if value is None or kind in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _of_tensor(value, exact)
    if isinstance(value, torch.device) or depth == DEEPEST:
        return kind.__name__
    if isinstance(value, enum.Enum):
        return kind.__qualname__, value.name
    if isinstance(value, type):
        return value.__module__, value.__qualname__
    if isinstance(value, types.CodeType):
        return _of_code(value) if exact else value
    if id(value) in met:
        return kind.__name__
    met.add(id(value))

    def further(each: Any) -> Any:
        return described(each, exact, met, depth + 1)

    if isinstance(value, nn.Module):
        inner: State = {}
        _add_module(inner, ".", value, exact, met)
        return tuple(inner.items())
    if isinstance(value, Mapping):
        return (kind.__qualname__, *((further(key), further(each)) for key, each in value.items()))
    if isinstance(value, (tuple, list)):
        return (kind.__qualname__, *map(further, value))
    if isinstance(value, (set, frozenset)):
        return (kind.__qualname__, *sorted(repr(further(each)) for each in value))
    if isinstance(value, types.MethodType):
        return further(value.__func__), further(value.__self__)
    if isinstance(value, types.FunctionType):
        cells = [further(cell.cell_contents) for cell in value.__closure__ or () if cell != types.CellType()]
        return value.__module__, value.__qualname__, further(value.__code__), further(value.__defaults__), tuple(cells)
    if isinstance(value, functools.partial):
        return further(value.func), further(value.args), further(value.keywords)
    if isinstance(value, (types.BuiltinFunctionType, types.ModuleType)):
        return value.__name__
    return kind.__module__, kind.__qualname__, further(getattr(value, "__dict__", None))


def _of_tensor(tensor: torch.Tensor, exact: bool) -> Any:
    if tensor.is_floating_point() or tensor.is_complex():
        return None
    if not exact:
        return id(tensor), None if tensor.is_inference() else tensor._version
    return tuple(tensor.shape), str(tensor.dtype), None if tensor.is_meta else digest(tensor.tolist())


def _of_code(code: types.CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_names, tuple(map(_of_constant, code.co_consts))


def _of_constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _of_code(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)  # sets have another order in each process


@functools.cache
def _names_of(stock: type) -> tuple[tuple[Mapping[str, Any], str, bool], ...]:
    """Return where a class's attributes are, and the names of modules that its methods use; True of attributes."""
    found: dict[tuple[int, str], tuple[Mapping[str, Any], str, bool]] = {}
    for each in bases_of(stock):
        for name, value in vars(each).items():
            if name.startswith("__") and name != "__call__":
                continue
            found[id(each), name] = vars(each), name, True
            if (function := function_of(value)) is not None:
                of_module = function.__globals__
                for used in names_used(function.__code__):
                    if used in of_module:
                        found[id(of_module), used] = of_module, used, False
    return tuple(found.values())


def _of_class(stock: type, exact: bool) -> tuple[Any, ...]:
    """Return plain attributes of a class and code of its methods; of what these name, plain values and code of functions."""
    found = list[Any]()
    for place, name, is_own in _names_of(stock):
        value = place.get(name)
        if (function := function_of(value)) is not None:
            if is_own or is_the_users(function):
                found.append((name, described(function.__code__, exact, set())))
        elif value is None or type(value) in PLAIN or (type(value) is tuple and all(type(each) in PLAIN for each in value)):
            found.append((name, value))
    return tuple(found)
