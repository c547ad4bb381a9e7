"""Known and generated faults, put into copies of a repository, to see whether its tests notice them."""
