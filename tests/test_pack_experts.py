"""Experts of each layer: counted, compared with the model, and pruned while packing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from checkpoints import Flavour, edit_tensors
from packing import DIVIDED, PLAIN, packed_to, written

from lynnc.errors import ModelError, WeightError
from lynnc.model import Family
from lynnc.modelfile import load_model
from lynnc.runtime.experts.expertspec import ExpertSpec
from lynnc.runtime.weights.pack import PackRequest, pack
from lynnc.runtime.weights.packedfile import open_packed
from lynnc.runtime.weights.verify import verify


def test_a_pruned_checkpoint_is_read_by_its_routers(tmp_path: Path) -> None:
    made = written(tmp_path)
    report = pack(PackRequest(made.folder, tmp_path / "packed"))
    assert report.spec.moe and report.spec.moe.experts == (6, 5, 4, 7)
    assert report.index.experts == {}


@dataclass(frozen=True)
class Counts:
    name: str
    experts: tuple[int, ...]
    representative: bool = False
    says: str = ""

    def __str__(self) -> str:
        return self.name


COUNTS = (
    Counts("right", (6, 5, 4, 7)),
    Counts("other", (6, 5, 5, 7), says="has 4 experts to keep in layer 2 and the model tiny-moe says 5"),
    Counts("uniform", (7, 7, 7, 7), says="has 6 experts to keep in layer 0 and the model tiny-moe says 7"),
    Counts("representative", (7, 6, 4, 5), representative=True),
)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_experts_of_model_and_checkpoint_agree(counts: Counts, tmp_path: Path) -> None:
    made = written(tmp_path)
    spec = load_model("tiny-moe")
    assert spec.moe
    moe = replace(spec.moe, experts=counts.experts)
    asked = replace(spec, moe=moe, representative=counts.representative)
    request = PackRequest(made.folder, tmp_path / "packed", asked)
    if counts.says:
        with pytest.raises(WeightError, match=counts.says):
            pack(request)
        return
    report = pack(request)
    assert report.spec.moe and report.spec.moe.experts == (6, 5, 4, 7)
    assert not report.spec.representative
    assert any("representative map" in note for note in report.notes) == counts.representative


def test_the_side_file_must_agree_with_the_routers(tmp_path: Path) -> None:
    made = written(tmp_path)
    side = made.folder / "lynn_engine_variable_expert_spec.json"
    counts = {str(layer): count for layer, count in enumerate((6, 5, 4, 7))}
    side.write_text(json.dumps({"remaining_experts_by_layer": counts}))
    packed_to(tmp_path)
    side.write_text(json.dumps({"remaining_experts_by_layer": counts | {"2": 5}}))
    with pytest.raises(WeightError, match=r"4 rows in the router of layer 2 and its side file says 5"):
        packed_to(tmp_path, force=True)
    side.write_text(json.dumps({"remaining_experts_by_layer": counts | {"4": 5}}))
    with pytest.raises(WeightError, match=r"has no rows in the router of layer 4 and its side file says 5"):
        packed_to(tmp_path, force=True)
    del counts["1"]
    side.write_text(json.dumps({"remaining_experts_by_layer": counts}))
    with pytest.raises(WeightError, match=r"5 rows in the router of layer 1 and its side file says nothing"):
        packed_to(tmp_path, force=True)


KEPT = ((0, 2, 3, 5), (1, 2, 3, 4), (0, 1, 3), (0, 1, 2, 3, 4, 5, 6))


@pytest.mark.parametrize(
    "flavour", [PLAIN, Flavour("plain", fused=True), DIVIDED, Flavour("lynn-v1", fused=True)], ids=str
)
def test_pruning_keeps_router_rows_and_experts_together(flavour: Flavour, tmp_path: Path) -> None:
    made = written(tmp_path, flavour=flavour)
    whole = open_packed(packed_to(tmp_path))
    spec = ExpertSpec(tuple(map(len, KEPT)), KEPT, (6, 5, 4, 7))
    report = pack(PackRequest(made.folder, tmp_path / "pruned", experts=spec))
    pruned = open_packed(tmp_path / "pruned")
    assert report.spec.moe and report.spec.moe.experts == (4, 4, 3, 7)
    assert report.index.experts == {"0": KEPT[0], "1": KEPT[1], "2": KEPT[2]}
    for layer, kept in enumerate(KEPT):
        for name in ("experts_up_weight", "experts_down_weight"):
            found = pruned.values(f"layers.{layer}.{name}")
            assert torch.equal(found, whole.values(f"layers.{layer}.{name}")[list(kept)])
        router = f"layers.{layer}.logits_shared_gate_weight"
        experts = (6, 5, 4, 7)[layer]
        rows = whole.values(router)
        assert torch.equal(pruned.values(router), torch.cat([rows[list(kept)], rows[experts:]]))
    assert report.pruned_tensors > 0 or flavour.fused
    verify(made.folder, tmp_path / "pruned")


def test_counts_alone_do_not_say_which_experts_go(tmp_path: Path) -> None:
    made = written(tmp_path)
    counts = ExpertSpec((4, 4, 3, 7), file="kept.json")
    with pytest.raises(ModelError, match=r"kept\.json: .* 4 of the checkpoint's 6 experts, without their numbers"):
        pack(PackRequest(made.folder, tmp_path / "packed", experts=counts))
    report = pack(PackRequest(made.folder, tmp_path / "packed", experts=counts, keep_first=True))
    assert report.index.experts["0"] == (0, 1, 2, 3)
    compacted = ExpertSpec((6, 5, 4, 7))
    assert not pack(PackRequest(made.folder, tmp_path / "same", experts=compacted)).index.experts


def test_experts_of_a_dense_model(tmp_path: Path) -> None:
    written(tmp_path, "tiny-dense")
    with pytest.raises(WeightError, match="has no routed experts: leave out --experts"):
        packed_to(tmp_path, experts=ExpertSpec((4,)))


def test_fewer_experts_than_a_token_selects(tmp_path: Path) -> None:
    made = written(tmp_path)

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.gate.weight"] = tensors["model.layers.1.mlp.gate.weight"][:1]
        for name in [n for n in tensors if ".layers.1.mlp.experts." in n and ".experts.0." not in n]:
            del tensors[name]

    edit_tensors(made.folder, cut)
    (made.folder / "lynn_engine_variable_expert_spec.json").unlink()
    with pytest.raises(WeightError, match="has 1 experts to keep in layer 1 and a token selects 2"):
        packed_to(tmp_path)


def test_a_model_unlike_the_configuration_is_said(tmp_path: Path) -> None:
    made = written(tmp_path)
    spec = load_model("tiny-moe")
    other = replace(spec, norm_eps=1e-5, attention=replace(spec.attention, rope_theta=5e5))
    notes = pack(PackRequest(made.folder, tmp_path / "packed", other)).notes
    assert any("differ in norm_eps" in note and note.endswith("the model counts") for note in notes)
    assert any("differ in attention" in note for note in notes)
    assert not pack(PackRequest(made.folder, tmp_path / "same", spec)).notes
    with pytest.raises(WeightError, match=r"of the family qwen3_5_moe by its config\.json"):
        pack(PackRequest(made.folder, tmp_path / "family", replace(spec, family=Family.QWEN3_5)))
