"""What the tests of ``lynnc inspect`` share: running it, and the checkpoints that it looks at.

Example::

    inspected(folder)["experts"]                     # [6, 5, 4, 7]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints import Flavour
from click.testing import CliRunner, Result

from lynnc.cli.main import cli

NESTED = "model.language_model."
NVFP4 = Flavour("compressed-tensors", activations="nvfp4", extras=True, shards=2)
MIXED = Flavour("modelopt", fp8=("attention_in", "attention_out"), kept=("embed", "router", "shared_gate", "gdn_gates"))
LYNN = Flavour("lynn-v1", fused=True, prefix=NESTED)
PLAIN = Flavour("plain")


def lynnc_cli(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def inspected(folder: Path) -> dict[str, Any]:
    """The JSON document about a folder."""
    result = lynnc_cli("inspect", folder, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def complaint(result: Result) -> str:
    """The one line on standard error of a command that failed as it should."""
    assert result.exit_code == 2, (result.output, result.exception)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("lynnc: ") and result.stdout == ""
    return lines[0]


def rows(document: Mapping[str, Any]) -> dict[tuple[str, ...], tuple[int, int, int]]:
    """Count, elements and bytes by class and format."""
    return {
        (row["tensor_class"], row["stored"], row["packed"]): (row["count"], row["elements"], row["bytes"])
        for row in document["classes"]
    }
