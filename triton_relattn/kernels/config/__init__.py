"""The choice of a launch configuration (selection.py): GPUs, valid tiles, defaults."""
