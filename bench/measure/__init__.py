"""Instruments: time, peak memory, processes."""
