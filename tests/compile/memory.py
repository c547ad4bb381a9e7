"""A GPU with little shared memory, played by what records the launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from triton.compiler.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources

from bench.compiled import Launch, recorded_launches


@contextmanager
def little_memory(limit: int) -> Iterator[list[Launch]]:
    """Record launches of sm_90 whose programs can have so many bytes of shared memory."""
    with recorded_launches("sm_90") as launches:
        record = CompiledKernel.run

        def run(kernel: CompiledKernel) -> object:
            if kernel.metadata.shared > limit:
                raise OutOfResources(kernel.metadata.shared, limit, "shared memory")
            return record.fget(kernel)

        CompiledKernel.run = property(run)
        yield launches
