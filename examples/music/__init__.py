"""Parts of music_transformer.py: data, baseline, figures and tables."""
