"""Measured choices of devices: ``records/<device>.json``, read by ``lynnc.recordfiles``."""
