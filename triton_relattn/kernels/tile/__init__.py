"""Device functions about one tile: blocks.py has its rows and pairs, band.py the terms of a table, logits.py its softmax."""
