"""Weights in the plan's packed layout."""
