"""What a trained lynn-mini is worth: in BF16, and packed with and without the search for scales.

In: a folder of ``train.py`` and its model file. Out: a table and a JSON list of records: bits per byte of the held-out
text, how many drafted tokens speculation would accept, how evenly experts are used, bytes. Every variant is computed by
``transformers`` on the values that ``lynnc unpack`` gives back.

Example::

    python benchmarks/mini/report.py trained --model models/lynn-mini/model.yaml --output lynn-mini.json
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from evaluation import HeldOut, evaluate
from network import MTP_PREFIX, MtpHead, Recorder, cut_experts, load_values, new_model, tensors_in
from train import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from measuring import Bench, Record, report

from lynnc.model import ModelSpec
from lynnc.modelfile import load_model
from lynnc.runtime.weights.pack import PackRequest, pack
from lynnc.runtime.weights.unpack import unpack

PACKAGES = ("lynnc", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Variant:
    """One form of the weights: tensors by name, and the bytes that they take."""

    label: str
    tensors: dict[str, torch.Tensor]
    bytes: int


def variants(trained: Path, spec: ModelSpec, scratch: Path) -> Iterator[Variant]:
    """BF16 as trained, then what is left of it after packing; the draft head stays BF16."""
    original = tensors_in(trained)
    own = {name: value for name, value in original.items() if not name.startswith(MTP_PREFIX)}
    head = {name: value for name, value in original.items() if name.startswith(MTP_PREFIX)}
    yield Variant("bf16", original, sum(value.nbytes for value in own.values()))
    for label, search in (("packed", False), ("packed, scales searched for", True)):
        packed, back = scratch / f"packed-{search}", scratch / f"back-{search}"
        pack(PackRequest(trained, packed, model=spec, search=search))
        unpack(packed, back, dtype="f32")
        size = sum(path.stat().st_size for path in packed.glob("*.safetensors"))
        yield Variant(label, {**tensors_in(back), **head}, size)


def build(spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> tuple[Any, MtpHead]:
    """The model and its head with these values."""
    model = new_model(spec, seed=0)
    head = MtpHead(model.config)
    assert spec.moe is not None
    cut_experts(model.model.layers, [range(count) for count in spec.moe.experts])
    load_values(model, head, tensors)
    return model, head


@torch.no_grad()
def shares(model: Any, head: MtpHead, held: HeldOut, top_k: int) -> list[torch.Tensor]:
    """For each layer, the share of the choices that each expert has, from the first windows of the text."""
    with Recorder(model, head) as recorder:
        for window in held.tokens[: 8 * held.window].split(held.window):
            model(input_ids=window[None], use_cache=False)
        routers = recorder.take_routers()
    layers = len(model.model.layers)
    found = []
    for layer in range(layers):
        chosen = torch.cat([logits.topk(top_k).indices.flatten() for logits in routers[layer::layers]])
        count = routers[layer].shape[-1]
        found.append(torch.bincount(chosen, minlength=count) / len(chosen) * count)
    return found


@click.command()
@click.argument("trained", type=click.Path(exists=True, path_type=Path))
@click.option("--model", type=click.Path(exists=True, path_type=Path), required=True, help="Its model file.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the JSON list of records.")
def main(trained: Path, model: Path, output: Path | None) -> None:
    """Measure the model that was trained into TRAINED."""
    spec = load_model(model)
    assert spec.moe is not None
    text = (trained / "heldout.txt").read_text("utf-8")
    held = HeldOut.of(text, load_tokenizer(trained), spec.max_context, "cpu")
    command = f"python benchmarks/mini/report.py trained --model {model}"
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as scratch:
        for variant in variants(trained, spec, Path(scratch)):
            network, head = build(spec, variant.tensors)
            bench = Bench(
                Path(scratch), {"model": spec.name, "weights": variant.label, "text": "heldout.txt"}, PACKAGES
            )
            with Recorder(network, head) as recorder:
                found = evaluate(network, head, recorder, held)
            records += [
                bench.record("bits_per_byte", [found.bits_per_byte], "bits", command),
                bench.record("mtp_acceptance", [found.mtp_agreement], "of drafted tokens", command),
                bench.record("bytes", [variant.bytes], "B", command),
            ]
            if variant.label == "bf16":
                for layer, share in enumerate(shares(network, head, held, spec.moe.top_k)):
                    least, most = float(share.min()), float(share.max())
                    records += [
                        bench.record(f"layers.{layer} least used expert", [least], "of an even share", command),
                        bench.record(f"layers.{layer} most used expert", [most], "of an even share", command),
                    ]
    report(records, output)


if __name__ == "__main__":
    main()
