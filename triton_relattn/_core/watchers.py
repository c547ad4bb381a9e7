"""Whether something watches or transforms calls: then they go through torch's dispatcher, as operators.

In eager mode nothing does, and the dispatcher's way through Python takes longer than all else that a call does on the host. What
watches shows in the dispatcher's own sets of keys: modes, transforms of torch.func, tracing, profilers of operators, tensors that
are wrapped, nested, sparse, on no device, or negated when they are read. The questions are private to torch, all in this file.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

PLAIN = (torch.Tensor, torch.nn.Parameter)
_included, _excluded = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
_keys, _num_function_modes = torch._C._dispatch_keys, torch._C._len_torch_function_stack


def _state() -> tuple[int, int]:
    """Return the keys that this thread adds to those of all tensors, and those that it takes away, but for those without meaning
    here: a call sees to autocast itself, which is among the second where it is off, and torch 2.11's backward, within which a
    checkpoint calls again, takes names of dimensions away."""
    return _included().raw_repr(), _excluded().raw_repr() | _MEANINGLESS


def _state_in_inference_mode() -> tuple[int, int]:
    with torch.inference_mode():
        return _state()


with ThreadPoolExecutor(1) as _fresh:  # of a thread in which nothing has begun; this one may be within an operator
    _MEANINGLESS = _fresh.submit(lambda: _excluded().raw_repr()).result()
    if (_named := torch._C._parse_dispatch_key("Named")) is not None:
        _MEANINGLESS |= torch._C.DispatchKeySet(_named).raw_repr()
    _UNWATCHED = {_fresh.submit(state).result() for state in (_state, _state_in_inference_mode)}
_plain_keys: dict[torch.device, frozenset[int]] = {}
ALIGNMENT = 16  # bytes; kernels are compiled for whether an address is a multiple of it


class Facts(NamedTuple):
    """All of a tensor that a decision may depend on."""

    keys: int  # the dispatcher's
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    alignment: int  # address modulo ALIGNMENT


def is_watched() -> bool:
    """Return whether something watches calls of this thread."""
    return (
        torch.compiler.is_compiling()
        or _state() not in _UNWATCHED
        or (_num_function_modes() > 0 and any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()))
        or forward_ad._current_level >= 0
    )


def facts_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the Facts of a tensor, as a tuple, which takes less time."""
    keys, address = _keys(tensor).raw_repr(), tensor.data_ptr() % ALIGNMENT
    return keys, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address


def plain_keys(device: torch.device) -> frozenset[int]:
    """Return the keys of tensors on a device that are no more than their numbers in memory."""
    usual = _plain_keys.get(device)
    if usual is None:
        with torch.inference_mode(False):
            plain = torch.empty(0, device=device)
            keys = {_keys(plain).raw_repr(), _keys(plain.requires_grad_()).raw_repr()}
        with torch.inference_mode():
            keys.add(_keys(torch.empty(0, device=device)).raw_repr())
        usual = _plain_keys[device] = frozenset(keys)
    return usual
