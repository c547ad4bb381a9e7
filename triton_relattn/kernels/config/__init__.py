"""The choice of a launch configuration: GPUs, tile sizes, defaults, profiles, and what to do if one does not fit."""
