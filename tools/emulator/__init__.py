"""Runs the PTX of Triton kernels on the CPU, and reports wrong accesses, missing waits and races; see README.md."""
