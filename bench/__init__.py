"""Benchmarks: see ``python -m bench --help``.

verbs     what the command line runs; also compile.py, gpu/, models.py and tune.py
cases     subjects: calls, sets of features, methods, baselines
measure   instruments: time, peak memory, processes
report    rows and their files, tables of text, figures, progress
"""
