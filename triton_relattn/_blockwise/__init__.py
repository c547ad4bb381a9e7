"""Linear memory in plain torch: how a call is cut, the terms of a band, forward and backward over blocks."""
