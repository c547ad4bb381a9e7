"""Attention over a sequence whose positions are spread over the ranks of a process group."""
