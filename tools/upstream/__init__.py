"""transformers' own common tests, run on stock and on enabled models.

``python -m tools.upstream FOLDER`` takes an unpacked source distribution or a checkout of the installed version of transformers,
which has ``tests/test_modeling_common.py``. It needs pytest and parameterized.
"""
