"""The version, in a module of its own so that type checkers see it."""

VERSION = "0.1.0"
