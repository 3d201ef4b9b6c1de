"""The whole way of a pruned model through the command line: pack, count, choose, pack again with what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from click.testing import CliRunner
from reference import Case
from storedformats import Flavour

from lynnc.cli.main import cli
from lynnc.modelfile import load_model
from lynnc.runtime.experts.expertspec import ExpertSpec, read_expert_spec
from lynnc.runtime.experts.prune import Rules, choose_experts
from lynnc.runtime.experts.routing import PackedValues, RunSettings, Tokens, collect_routing
from lynnc.runtime.experts.routingfile import Routing, read_routing
from lynnc.runtime.weights.packedfile import Packed, open_packed

CASE = Case("tiny-moe")
TOKENS = [token * token % 384 for token in range(60)]
BUDGET = 16


def lynnc_cli(*arguments: object) -> None:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output


class Way:
    """The folders and files of one pass over the whole way; layer 0 is protected."""

    def __init__(self, folder: Path) -> None:
        write_checkpoint(folder / "checkpoint", CASE, Flavour("modelopt"))
        (folder / "ids.json").write_text(json.dumps(TOKENS))
        lynnc_cli("pack", folder / "checkpoint", "-o", folder / "whole")
        lynnc_cli("routing", folder / "whole", "--token-ids", folder / "ids.json", "-o", folder / "stats.json")
        arguments = ("--stats", folder / "stats.json", "--budget", BUDGET, "--protect-first", 1)
        model = ("--model", "tiny-moe", "--write-model", folder / "pruned.yaml")
        lynnc_cli("prune", *arguments, "-o", folder / "kept.json", *model)
        lynnc_cli("pack", folder / "checkpoint", "--experts", folder / "kept.json", "-o", folder / "pruned")
        self.folder = folder
        self.whole: Packed = open_packed(folder / "whole")
        self.pruned: Packed = open_packed(folder / "pruned")
        self.routing: Routing = read_routing(folder / "stats.json")
        self.spec: ExpertSpec = read_expert_spec(folder / "kept.json")


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Way:
    return Way(tmp_path_factory.mktemp("way"))


def test_statistics_are_those_of_the_packed_values(way: Way) -> None:
    tokens = Tokens("ids.json", TOKENS)
    assert way.routing == collect_routing(way.whole.spec, PackedValues(way.whole, "cpu"), tokens, RunSettings())


def test_the_choice_is_that_of_the_statistics(way: Way) -> None:
    assert way.spec.kept == choose_experts(way.routing, Rules(BUDGET, 2, frozenset({0})))
    assert way.spec.original == (6, 5, 4, 7) and way.spec.counts[0] == 6 and sum(way.spec.counts) == BUDGET


def test_packed_model_and_written_model_have_the_counts(way: Way) -> None:
    written, packed = load_model(way.folder / "pruned.yaml"), way.pruned.spec
    assert written.moe is not None and packed.moe is not None
    assert written.moe.experts == packed.moe.experts == way.spec.counts


def test_packed_weights_are_the_kept_ones(way: Way) -> None:
    """Experts and router rows are those of the kept numbers; every other weight is as it was."""
    assert way.spec.kept is not None
    for name in way.whole.weights:
        whole, pruned = way.whole.values(name), way.pruned.values(name)
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
        kept = torch.tensor(way.spec.kept[layer])
        if name.endswith((".experts_up_weight", ".experts_down_weight")):
            whole = whole[kept]
        elif "logits" in name:
            held = way.routing.layers[layer].experts
            whole = torch.cat([whole[:held][kept], whole[held:]])
        assert torch.equal(pruned, whole), name


def test_the_pruned_model_can_be_counted_again(way: Way) -> None:
    lynnc_cli("routing", way.folder / "pruned", "--token-ids", way.folder / "ids.json", "-o", way.folder / "again.json")
    again = read_routing(way.folder / "again.json")
    assert again.experts == way.spec.counts and again.text == way.routing.text
    # Nothing before the first router was cut, nor in the first layer.
    assert again.layers[0] == way.routing.layers[0]
