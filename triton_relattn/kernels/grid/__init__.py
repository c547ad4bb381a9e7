"""Attention on a grid, with a table for rows and one for columns: a second operator, with kernels of its own."""
