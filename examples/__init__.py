"""Examples, run from a clone: ``python -m examples.demo``, ``python -m examples.music_transformer``."""
