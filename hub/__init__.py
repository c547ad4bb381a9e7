"""The package as a repository of kernels for the Hugging Face hub."""
