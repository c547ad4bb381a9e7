"""The operator inside models of other libraries."""
