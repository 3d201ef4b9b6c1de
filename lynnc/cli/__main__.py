"""``python -m lynnc.cli``: the ``lynnc`` command where its script is not on PATH."""

from lynnc.cli.main import main

main()
