"""Puts known and generated faults into copies of a repository, to find out whether its tests notice them."""
