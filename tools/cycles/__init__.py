"""A model of cycles: loops of compiled kernels, instruction by instruction, on one multiprocessor of a GPU that is not there.

sass.py reads machine code; machine.py says what a multiprocessor is, decode.py what it does for an instruction; simulate.py runs
a loop on it; predict.py says what that means for a kernel; calibrate.py compares it with published speeds of kernels like those
in known.py. README.md is the page to begin with.
"""
