"""Seeded random packed weights, made where they are needed."""
