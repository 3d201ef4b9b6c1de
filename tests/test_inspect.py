"""What ``lynnc inspect`` counts and notices, against figures worked out here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Flavour, Written, write_checkpoint
from inspecting import LYNN, MIXED, NVFP4, PLAIN, inspected, lynnc_cli, rows
from reference import Case

from lynnc.build import build_graph
from lynnc.model import Family, ModelSpec
from lynnc.modelfile import load_model
from lynnc.runtime.weights.inspected import compact_experts, ranges
from lynnc.runtime.weights.pack import PackRequest, pack
from lynnc.runtime.weights.packedindex import INDEX_FILE
from lynnc.version import VERSION

EXPERTS = 6 + 5 + 4 + 7
EXPERT_VALUES = 3 * 64 * 128
"""Values of one expert of tiny-moe: gate, up and down."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Callable[[Flavour], Written]:
    """tiny-moe in each flavour, made once; never changed by a test."""
    made: dict[Flavour, Written] = {}

    def get(flavour: Flavour) -> Written:
        if flavour not in made:
            folder = tmp_path_factory.mktemp("checkpoints") / "checkpoint"
            made[flavour] = write_checkpoint(folder, Case("tiny-moe"), flavour)
        return made[flavour]

    return get


@pytest.fixture(scope="session")
def packed_folders(checkpoints) -> Callable[[Flavour], Path]:
    made: dict[Flavour, Path] = {}

    def get(flavour: Flavour) -> Path:
        if flavour not in made:
            written = checkpoints(flavour)
            made[flavour] = written.folder.with_name("packed")
            pack(PackRequest(written.folder, made[flavour], written.spec))
        return made[flavour]

    return get


def test_compressed_tensors(checkpoints):
    written = checkpoints(NVFP4)
    found = inspected(written.folder)
    assert found["kind"] == "checkpoint" and found["activations"] == "nvfp4" and found["refused"] is None
    assert found["detail"].startswith("compressed-tensors nvfp4-pack-quantized")
    assert found["model"] == {"name": "checkpoint", "family": "qwen3_5_moe", "layers": 4}
    assert found["experts"] == [6, 5, 4, 7]
    values = EXPERTS * EXPERT_VALUES
    by_class = rows(found)
    # Half a byte for a code, one for the scale of 16, four for the scale of each of three matrices.
    assert by_class["experts", "nvfp4", ""] == (3 * EXPERTS, values, values // 2 + values // 16 + 3 * 4 * EXPERTS)
    assert by_class["embed", "bf16", ""] == (1, 384 * 128, 2 * 384 * 128)
    assert by_class["gdn_in", "nvfp4", ""][:2] == (6, 3 * (512 + 256) * 128)
    assert by_class["gdn_gates", "bf16", ""] == (6, 3 * 8 * 128, 2 * 3 * 8 * 128)
    assert by_class["router", "bf16", ""] == (4, EXPERTS * 128, 2 * EXPERTS * 128)
    assert by_class["vector", "f32", ""] == (3, 3 * 4, 4 * 3 * 4)
    bits = {row["tensor_class"]: row["bits"] for row in found["classes"]}
    assert bits["experts"] == pytest.approx(4.5, abs=0.01) and bits["lm_head"] == 16
    assert sum(row["elements"] for row in found["classes"]) == sum(v.numel() for v in written.values.values())
    assert sum(row["tensors"] for row in found["skipped"]) == len(written.skipped)
    assert {row["reason"].partition(":")[0] for row in found["skipped"]} == {
        "vision tower",
        "MTP layer",
        "scale of activations",
        "scale of the key/value cache",
        "rotary frequencies",
    }
    assert found["shards"] == [
        {"name": path.name, "bytes": path.stat().st_size} for path in sorted(written.folder.glob("*.safetensors"))
    ]
    assert found["odd"] == []


def test_every_byte_of_a_checkpoint_is_told(checkpoints):
    written = checkpoints(NVFP4)
    found = inspected(written.folder)
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in written.folder.glob("*.safetensors"))
    told = sum(row["bytes"] for row in (*found["classes"], *found["skipped"]))
    assert told + headers == sum(shard["bytes"] for shard in found["shards"])


def test_mixed_modelopt(checkpoints):
    found = inspected(checkpoints(MIXED).folder)
    by_class = rows(found)
    assert by_class["attention_in", "fp8", ""] == (3, 768 * 128, 768 * 128 + 3 * 4)
    assert by_class["lm_head", "nvfp4", ""] == (1, 384 * 128, 384 * 128 * 9 // 16 + 4)
    assert "MIXED_PRECISION" in found["detail"]


def test_lynn_native_with_fused_experts(checkpoints):
    found = inspected(checkpoints(LYNN).folder)
    values = EXPERTS * EXPERT_VALUES
    # Two bytes for the scale of 16, and a global scale for each of the two tensors of a layer.
    assert rows(found)["experts", "nvfp4-fp16", ""] == (8, values, values // 2 + values // 8 + 4 * 2 * 4)
    assert {row["tensor_class"]: row["bits"] for row in found["classes"]}["experts"] == pytest.approx(5, abs=0.001)
    assert found["odd"] == []


@pytest.mark.parametrize("flavour", [PLAIN, NVFP4, MIXED, LYNN], ids=str)
def test_a_packed_folder_has_the_classes_of_its_checkpoint(checkpoints, packed_folders, flavour):
    before, after = inspected(checkpoints(flavour).folder), inspected(packed_folders(flavour))
    assert after["kind"] == "packed" and after["layout"] == "nvfp4-w64-1" and after["odd"] == []
    assert after["experts"] == before["experts"] and after["activations"] == before["activations"]
    elements: list[dict[str, int]] = []
    for document in (before, after):
        elements.append({})
        for row in document["classes"]:
            elements[-1][row["tensor_class"]] = elements[-1].get(row["tensor_class"], 0) + row["elements"]
    assert elements[0] == elements[1]
    skipped = [sorted((row["reason"], row["tensors"]) for row in document["skipped"]) for document in (before, after)]
    assert skipped[0] == skipped[1]


def test_packed_figures(packed_folders):
    found = inspected(packed_folders(PLAIN))
    by_class, values = rows(found), EXPERTS * EXPERT_VALUES
    # gate and up have a global scale each, and so has down.
    assert by_class["experts", "bf16", "nvfp4"] == (3 * EXPERTS, values, values * 9 // 16 + 3 * 4 * EXPERTS)
    assert by_class["lm_head", "bf16", "nvfp4"] == (1, 384 * 128, 384 * 128 * 9 // 16 + 4)
    assert by_class["router", "bf16", "bf16"] == (4, EXPERTS * 128, 2 * EXPERTS * 128)
    assert by_class["shared_gate", "bf16", "bf16"] == (4, 4 * 128, 2 * 4 * 128)
    assert {row["tensor_class"]: row["bits"] for row in found["classes"]}["experts"] == pytest.approx(4.5, abs=0.01)
    index = json.loads((packed_folders(PLAIN) / INDEX_FILE).read_text())
    arrays = sum(array["bytes"] for entry in index["weights"].values() for array in entry["arrays"])
    assert sum(row["bytes"] for row in found["classes"]) == arrays
    assert found["source_digest"] == index["source"]["digest"]


def test_a_full_size_checkpoint_is_read_in_a_moment(tmp_path):
    """Only headers are read: the data of this file is a hole of 69 GB."""
    spec = load_model("qwen3.6-35b-a3b")
    tensors: dict[str, tuple[int, ...]] = {}
    for weight in build_graph(spec, 1).weights.values():
        for part in weight.parts:
            lead = (256,) if "{expert}" in part.source else ()
            name = part.source.replace(".{expert}", "").removesuffix(".weight" if lead else "")
            if name.endswith("up_proj") and lead:
                continue
            name = name.replace("gate_proj", "gate_up_proj") if lead else name
            part_rows = part.rows * (2 if name.endswith("gate_up_proj") and lead else 1)
            tensors[name] = (*lead, part_rows, weight.columns) if len(weight.shape) > 1 else (part.rows,)
    folder = tmp_path / "full"
    folder.mkdir()
    write_header(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(published_config(spec)))
    found = inspected(folder)
    assert found["odd"] == [] and found["experts"] == [256] * 40
    experts = rows(found)["experts", "bf16", ""]
    assert experts == (80, 40 * 256 * 3 * 512 * 2048, 2 * 40 * 256 * 3 * 512 * 2048)
    text = lynnc_cli("inspect", folder).stdout
    assert "experts: 256 x 40" in text and "shards: 1 of 69." in text


def write_header(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of BF16 tensors whose data is a hole."""
    header, end = {}, 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + 2 * prod(shape)]}
        end += 2 * prod(shape)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def published_config(spec: ModelSpec) -> dict[str, Any]:
    gdn, moe = spec.gdn, spec.moe
    assert gdn and moe
    text = {
        "model_type": f"{Family.QWEN3_5_MOE}_text",
        "hidden_size": spec.hidden,
        "vocab_size": spec.vocabulary,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.attention.heads,
        "num_key_value_heads": spec.attention.kv_heads,
        "head_dim": spec.attention.head_dim,
        "full_attention_interval": 4,
        "linear_num_key_heads": gdn.key_heads,
        "linear_num_value_heads": gdn.value_heads,
        "linear_key_head_dim": gdn.key_dim,
        "linear_value_head_dim": gdn.value_dim,
        "linear_conv_kernel_dim": gdn.conv_width,
        "num_experts": 256,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate,
        "shared_expert_intermediate_size": moe.shared_intermediate,
        "rope_parameters": {"rope_theta": spec.attention.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
    }
    return {"model_type": str(Family.QWEN3_5_MOE), "text_config": text}


def test_text_of_a_checkpoint(checkpoints):
    text = lynnc_cli("inspect", checkpoints(NVFP4).folder).stdout
    lines = text.splitlines()
    assert lines[0].endswith("checkpoint: checkpoint, compressed-tensors nvfp4-pack-quantized, nvfp4 activations")
    assert "model: checkpoint, family qwen3_5_moe, 4 layers, hidden 128" in lines
    assert "experts: 6 in layer 0, 5 in layer 1, 4 in layer 2, 7 in layer 3" in lines
    assert "activations: nvfp4" in lines
    assert any(line.startswith("shards: 2 of ") for line in lines)
    (experts,) = (line.split() for line in lines if line.startswith(" experts"))
    assert experts == ["experts", "nvfp4", "66", "540,672", "304.39", "kB", "4.50"]
    assert any(line.startswith("skipped: 2 tensors (240 B), vision tower: ") for line in lines)
    assert "odd:" not in text


def test_text_of_a_packed_folder(packed_folders):
    lines = lynnc_cli("inspect", packed_folders(PLAIN)).stdout.splitlines()
    assert lines[0].endswith(f"packed: packed, by lynnc {VERSION} from Hugging Face, BF16 and F32")
    (experts,) = (line.split() for line in lines if line.startswith(" experts"))
    assert experts[:5] == ["experts", "bf16", "nvfp4", "66", "540,672"] and experts[-1] == "4.50"
    assert "layout: nvfp4-w64-1" in lines


@dataclass(frozen=True)
class Compact:
    experts: tuple[int, ...]
    text: str


@pytest.mark.parametrize(
    "case",
    [
        Compact((256,) * 40, "256 x 40"),
        Compact((256, 256, 248, 240, 240), "256 in layers 0-1, 248 in layer 2, 240 in layers 3-4"),
        Compact((7,), "7 x 1"),
    ],
    ids=lambda case: case.text,
)
def test_compact_experts(case):
    assert compact_experts(case.experts) == case.text


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and ranges([]) == ""


def test_torch_is_not_needed(checkpoints, packed_folders):
    code = (
        "import sys\nfrom lynnc.cli.main import cli\n"
        f"for folder in ({str(checkpoints(MIXED).folder)!r}, {str(packed_folders(MIXED))!r}):\n"
        "    try: cli.main(['inspect', folder])\n    except SystemExit as end: assert end.code == 0, end\n"
        "print([m for m in ('torch', 'safetensors', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.splitlines()[-1] == "[]"
