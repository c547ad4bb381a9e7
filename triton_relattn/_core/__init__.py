"""Parts that all implementations share: the resolved call, validation, dropout, dtypes."""
