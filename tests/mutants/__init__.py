"""Known faults put into copies of the repository, to see that the tests notice them: ``python -m tests.mutants``."""
