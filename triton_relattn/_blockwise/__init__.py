"""Attention in linear memory, in plain torch: the cut of a call into blocks, their terms, forward and backward."""
