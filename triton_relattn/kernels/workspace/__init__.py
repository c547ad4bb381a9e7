"""What the dkv kernel stores for the kernels after it: where it lies, how much at a time."""
