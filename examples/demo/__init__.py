"""The demo: real music through one layer of relative attention, checked and measured. ``python -m examples.demo``.

layer   the loss, output and gradients of a layer on Bach's chorales, against the float64 reference
sweep   peak memory and time of all methods over all lengths, up to limits of memory and time
"""
