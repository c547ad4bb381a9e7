"""Parts that all implementations share: the resolved call, validation, the choice of implementation, dropout, dtypes."""
