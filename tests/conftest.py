"""Runs kernels with Triton's interpreter: the variable must be set before anything imports Triton."""

import os

os.environ["TRITON_INTERPRET"] = "1"
