"""Runs the PTX that Triton compiles kernels to on the CPU, and reports wrong accesses, missing waits and races; see README.md."""
