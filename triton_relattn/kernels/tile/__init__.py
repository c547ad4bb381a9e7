"""Device functions about one tile: its addresses, which pairs exist, its scores, and its relative terms."""
