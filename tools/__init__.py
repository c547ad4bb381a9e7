"""Tools for any Triton project: nothing in here imports the package or its benchmarks."""
