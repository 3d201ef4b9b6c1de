"""Runs plans. Imports neither passes nor templates nor the tuner."""
