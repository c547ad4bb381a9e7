"""Known faults: each is one that somebody made, or nearly made, and tells what can go wrong."""

from tools.mutants.fault import Fault

from .blockwise import BLOCKWISE
from .kernels import KERNELS
from .use import USE

FAULTS: tuple[Fault, ...] = (*KERNELS, *BLOCKWISE, *USE)
