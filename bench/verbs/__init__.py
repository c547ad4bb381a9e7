"""Verbs of ``python -m bench``: each module has ``add_arguments(parser)`` and ``run(options)``."""
