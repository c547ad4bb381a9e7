"""Settings of all tests: one thread per worker, poisoned memory, no profiles of the user, and tests of kernels only in a process
with the TRITON_INTERPRET they need."""

from __future__ import annotations

import functools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from triton_relattn._blockwise.products import Memory

TESTS = Path(__file__).parent
PATIENCE = 600.0
"""Seconds that a test waits for another process, far more than any machine needs: only a failure waits that long."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton decides when a kernel is decorated whether it is interpreted, so one process cannot do both.
NOT_HERE = {
    TESTS / "interpreter": None if INTERPRETED else "runs kernels in Triton's interpreter: needs TRITON_INTERPRET=1",
    TESTS / "compile": "compiles kernels: needs a process without TRITON_INTERPRET=1" if INTERPRETED else None,
    TESTS / "emulator": "compiles kernels: needs a process without TRITON_INTERPRET=1" if INTERPRETED else None,
    **{
        TESTS / name: "needs a process without TRITON_INTERPRET=1, and no kernels" if INTERPRETED else None
        for name in ("cpu", "enable")
    },
}


class SkippedModule(pytest.Module):
    """A test module that is reported as skipped without being imported."""

    reason: str

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip(self.reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    reason = next((why for folder, why in NOT_HERE.items() if why and folder in module_path.parents), None)
    if reason is None:
        return None
    module: SkippedModule = SkippedModule.from_parent(parent, path=module_path)
    module.reason = reason
    return module


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    # In the environment, so that processes started by tests do not read the user's profiles either.
    cache = tempfile.TemporaryDirectory(prefix="triton_relattn-")
    config.add_cleanup(cache.cleanup)
    os.environ["TRITON_RELATTN_CACHE"] = cache.name


def poisoned(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``create``, with NaN or the largest integer in tensors that the package's modules create."""

    @functools.wraps(create)
    def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = create(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "triton_relattn":
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(math.nan)
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return wrapper


def cut_blocks(patch: pytest.MonkeyPatch, queries: int, elements: int, few: int, step: int = 0, short: int = 0) -> None:
    """Make blockwise cut short calls: into blocks of these queries and elements (scores per thread), with heads computed one by
    one from ``few`` scores on. With a step, oneDNN multiplies float32 heads, whose sizes are rounded up to it. Calls of up to
    ``short`` queries are not cut."""
    from triton_relattn._blockwise import blocks, products

    patch.setattr(blocks, "SIZES", blocks.Sizes(short, queries, 1, queries, few, elements, queries, elements))
    patch.setattr(blocks, "MIN_ALIGNED", 0)
    patch.setattr(blocks, "takes_onednn", lambda dtype: step > 0 and products.has_linear())  # float64 has the same sizes
    if step not in (0, products.STEP):
        patch.setattr(products.OneDNN, "step", step)


def forget_warnings() -> None:
    """Let warnings that are given once per process be given again: tests must not depend on earlier ones."""
    from triton_relattn._core import warn

    warn._given.clear()


def take_processor(patch: pytest.MonkeyPatch, *flags: str) -> None:
    """Make blockwise find an x86 processor with exactly these of torch's flags, and multiply in 16 bits also in short calls: each
    processor's path can be tested on any machine."""
    from triton_relattn._blockwise import products

    for flag in ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_amx_fp16_supported"):
        patch.setattr(torch.cpu, flag, lambda flag=flag: flag in flags, raising=False)
    patch.setattr("platform.machine", lambda: "x86_64")
    for name in ("fast_dtypes", "has_fast_fused_attention"):  # without their caches
        patch.setattr(products, name, functools.cache(getattr(products, name).__wrapped__))
    patch.setattr("triton_relattn._blockwise.attention.has_fast_fused_attention", products.has_fast_fused_attention)
    patch.setattr(products, "MIN_PRODUCTS", 0)


def poison_memory(patch: pytest.MonkeyPatch) -> None:
    """Fill all memory that the package allocates with NaN, or the largest integer."""
    made_by = ((torch, ("empty", "empty_like", "empty_strided")), (torch.Tensor, ("new_empty", "new_empty_strided")))
    for owner, names in made_by:
        for name in names:
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
    patch.setattr(Memory, "__call__", poisoned(Memory.__call__))


def without_plans(patch: pytest.MonkeyPatch) -> None:
    """Forget what was decided."""
    from triton_relattn.kernels import plan

    patch.setattr(plan, "_plans", {})
    patch.setattr(plan, "_templates", {})


def cut_tiles(patch: pytest.MonkeyPatch, tiles: Mapping[str, Any] | None, rounds_terms: bool | None = None) -> None:
    """Give the kernels these tiles, by their names: (block_m, block_n, carry, rotation), or configurations. Others keep theirs.
    Each test has plans of its own.

    Args:
        rounds_terms: whether terms of tables are rounded to float16, as on a GPU; None: as by default.
    """
    from triton_relattn.kernels.config import architectures
    from triton_relattn.kernels.config.selection import Tables
    from triton_relattn.kernels.config.tile_config import TileConfig

    without_plans(patch)
    if tiles is not None:
        configs, select = dict[str, TileConfig](), Tables.select
        for name, tile in tiles.items():
            configs[name] = tile if isinstance(tile, TileConfig) else TileConfig(*tile[:2], tile[0] // 16, 1, *tile[2:])
        patch.setattr(Tables, "select", lambda *call, **others: configs.get(call[1]) or select(*call, **others))
    if rounds_terms is not None:
        patch.setattr(architectures, "rounds_terms", lambda *_: rounds_terms)


@pytest.fixture(autouse=True)
def fresh_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test has calls and plans of another one, which may have changed what they depend on."""
    monkeypatch.setattr("triton_relattn._calls._known", {})
    if "triton_relattn.kernels.plan" in sys.modules:
        without_plans(monkeypatch)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN, so that a result that depends on it is wrong every time instead of rarely."""
    with pytest.MonkeyPatch.context() as patch:
        poison_memory(patch)
        yield
