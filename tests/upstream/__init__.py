"""transformers' own common tests, run on stock models and on enabled ones.

``python -m tests.upstream FOLDER`` takes an unpacked source distribution of transformers, or a checkout of it, of the installed
version: ``tests/test_modeling_common.py`` is in both. It needs pytest and parameterized.
"""
