"""Subjects: calls and the tensors they take, sets of features, and the methods that compute them."""
