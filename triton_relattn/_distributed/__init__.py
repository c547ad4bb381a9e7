"""Attention over several ranks: DTensors, and sequences whose positions the ranks of a process group share."""
