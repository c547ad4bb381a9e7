"""Which configurations the kernels of a case run in."""

from __future__ import annotations

from triton_relattn import can_run_triton
from triton_relattn.kernels import configs, workspace
from triton_relattn.kernels.arguments import Call

from .attention import Case

OF_DIRECTION = {
    "forward": configs.KERNELS[:1],
    "backward": configs.KERNELS[1:],
    "forward+backward": configs.KERNELS,
    "backward of query": configs.KERNELS[1:2],
    "backward of all but the table": configs.KERNELS[1:3],
}


def shown(config: configs.TileConfig) -> str:
    """Describe a configuration in a few words: queries x keys, warps, stages, what is carried, rotation, limit of registers."""
    rotation = "" if config.rotation == "gather" else f" {config.rotation}"
    limit = "" if config.max_registers is None else f" r{config.max_registers}"
    return f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages} carry {config.carry}{rotation}{limit}"


def used_configurations(case: Case, direction: str, device: str, has_table: bool) -> str:
    """Return the configurations of the kernels that run, first to last; "blockwise" where no kernels do."""
    inputs = case.empty(device)
    if device != "cuda" or not can_run_triton(inputs.query, inputs.value):
        return "blockwise"
    tensors, spec = case.resolved(inputs, has_table)
    call = Call(tensors, spec)
    tiles = {kernel: call.tile(kernel) for kernel in configs.KERNELS}
    plan = workspace.plan(call, tensors, spec, tiles, configs.multiprocessors(inputs.query.device))
    of_tables = {"table": has_table and plan is None, "diagonals": plan is not None}
    return ", ".join(f"{kernel} {shown(tiles[kernel])}" for kernel in OF_DIRECTION[direction] if of_tables.get(kernel, True))
