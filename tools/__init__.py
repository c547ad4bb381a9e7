"""Tools for any Triton project, which do not import the package or its benchmarks."""
