"""Measures loaded plans on a GPU."""
