"""The choice of a launch configuration (selection.py): GPUs, tiles, tables of defaults and of what was timed."""
