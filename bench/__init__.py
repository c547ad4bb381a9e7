"""Benchmarks: see ``python -m bench --help``.

cases     calls, sets of features, methods, baselines; families has models
measure   instruments: time, peak memory, processes
report    rows and their files, tables of text, figures, progress
verbs     what the command line runs; beside it compile.py, models.py and gpu/
"""
