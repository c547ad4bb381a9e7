"""Reports: rows and their files, tables of text, figures, progress."""
