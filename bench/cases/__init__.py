"""What is measured: calls and their tensors, sets of features, and the methods that compute them."""
