"""Faults put into copies of this repository, to see that its tests notice them: ``python -m tests.mutants``."""
