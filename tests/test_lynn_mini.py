"""The trained models of the repository: whole, small, trained, and computed as ``transformers`` computes them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from harness import assert_close
from safetensors.torch import load_file
from tokenizers import Tokenizer

from lynnc.cli.main import cli
from lynnc.engines.interpreted import Interpreted, open_interpreted
from lynnc.model import MoeSpec
from lynnc.modelfile import load_model
from lynnc.quality.score import Windows, score_text
from lynnc.runtime.experts.expertspec import read_expert_spec
from lynnc.runtime.weights.packedfile import open_packed
from lynnc.runtime.weights.unpack import unpack

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "mini"))

from corpus import divide  # noqa: E402
from evaluation import HeldOut, evaluate  # noqa: E402
from network import MtpHead, Recorder, cut_experts, new_model, tensors_in  # noqa: E402
from report import build  # noqa: E402

MODELS = ("lynn-mini", "lynn-mini-pruned")
MOST_BYTES = 12_000_000
PROMPT = "def fibonacci(n):"
PIECE = 2_000
"""Characters of the held-out text that a test reads."""
UNTRAINED, TRAINED = 2.5, 1.2
"""Bits a byte that no untrained model falls below (3.5 at the start), and that a trained one stays below."""
TOKENS, ROUTED_LIMIT = 200, 6e-2
"""Of the comparison with ``transformers``; the limit is that of an RMS error where routing may tip."""
SMALL_MOE = MoeSpec(experts=(5, 5, 5, 5), top_k=2, intermediate=64, normalize_top_k=True, shared_intermediate=64)
LATER = torch.arange(12, 20)


@dataclass(frozen=True)
class Shipped:
    name: str
    folder: Path
    engine: Interpreted
    tokenizer: Tokenizer


@pytest.fixture(scope="module", params=MODELS)
def shipped(request: pytest.FixtureRequest) -> Shipped:
    folder = ROOT / "models" / request.param
    return Shipped(request.param, folder, open_interpreted(folder), Tokenizer.from_file(str(folder / "tokenizer.json")))


def held_out() -> str:
    return (ROOT / "models" / "lynn-mini" / "heldout.txt").read_text("utf-8")


def test_weights_are_whole_and_small(shipped: Shipped) -> None:
    packed = open_packed(shipped.folder)
    for weight in packed.weights:
        packed.check(weight)
    assert sum(path.stat().st_size for path in shipped.folder.glob("weights-*.safetensors")) <= MOST_BYTES
    assert packed.spec == load_model(str(shipped.folder / "model.yaml"))


def test_pruned_model_has_the_experts_that_its_file_names() -> None:
    folder = ROOT / "models" / "lynn-mini-pruned"
    spec, kept = load_model(str(folder / "model.yaml")), read_expert_spec(folder / "experts.json")
    assert spec.moe is not None and spec.moe.experts == kept.counts
    assert len(set(kept.counts)) > 2 and sum(kept.counts) < 8 * 24


def test_held_out_text_is_predicted_and_noise_is_not(shipped: Shipped) -> None:
    engine = shipped.engine
    piece = held_out()[:PIECE]

    def bits(text: str) -> float:
        ids = shipped.tokenizer.encode(text).ids
        return score_text(engine, ids, len(text.encode()), Windows(1024, 512)).bits_per_byte

    assert bits(piece) < TRAINED
    shuffled = torch.randperm(len(piece) // 4, generator=torch.Generator().manual_seed(0)).tolist()
    assert bits("".join(piece[index] for index in shuffled)) > UNTRAINED


def test_logits_are_those_of_transformers(shipped: Shipped, tmp_path: Path) -> None:
    """The library in FP32 on the values that the packed weights stand for. A routing choice that is nearly tied moves
    single logits further than rounding does, in the library as here."""
    ids = shipped.tokenizer.encode(held_out()[:PIECE]).ids[:TOKENS]
    model, _ = library_model(shipped.folder, tmp_path)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    shipped.engine.reset()
    ours = shipped.engine.append(ids)
    assert_close(ours, theirs, ROUTED_LIMIT, shipped.name)
    margins = theirs.topk(2).values.diff(dim=-1).abs()[ours.argmax(-1) != theirs.argmax(-1)]
    assert len(margins) <= 0.05 * TOKENS and (margins < 1.0).all(), margins


def library_model(folder: Path, scratch: Path) -> tuple[Any, MtpHead]:
    """The model of ``transformers`` with a packed folder's values, and the draft head beside it."""
    unpack(folder, scratch / "back", dtype="f32")
    head = load_file(folder / "mtp.safetensors")
    return build(load_model(str(folder / "model.yaml")), {**tensors_in(scratch / "back"), **head})


def test_draft_head_foresees_what_the_model_chooses(tmp_path: Path) -> None:
    folder = ROOT / "models" / "lynn-mini"
    model, head = library_model(folder, tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    held = HeldOut(torch.tensor(tokenizer.encode(held_out()[:PIECE]).ids), PIECE, 512)
    with Recorder(model, head) as recorder:
        assert evaluate(model, head, recorder, held).mtp_agreement > 0.6
        for parameter in head.fc.parameters():
            torch.nn.init.normal_(parameter)
        assert evaluate(model, head, recorder, held).mtp_agreement < 0.3


def test_run_goes_on_with_code(shipped: Shipped) -> None:
    arguments = ["run", str(shipped.folder), "--prompt", PROMPT, "--tokens", "24", "--device", "cpu", "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found["ids"]) == 24 and found["text"].startswith("\n    "), found["text"]
    lines = found["text"].strip("\n").splitlines()
    assert all(line == "" or line.startswith("    ") for line in lines), "the body of the function is indented"


def small_model() -> Any:
    model = new_model(replace(load_model("tiny-moe"), moe=SMALL_MOE), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else None
    return model


def test_computing_every_expert_is_what_the_library_computes() -> None:
    model, tokens = small_model(), torch.randint(0, 384, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(input_ids=tokens).logits
        for layer in model.model.layers:
            del layer.mlp.experts.forward
        assert_close(ours, model(input_ids=tokens).logits, 1e-4)


def test_experts_are_cut_with_their_routers() -> None:
    model = small_model()
    before = [layer.mlp.experts.down_proj.detach().clone() for layer in model.model.layers]
    kept = [(0, 1, 2, 3, 4), (1, 3), (0, 4), (2, 3, 4)]
    cut_experts(model.model.layers, kept)
    for layer, ids, old in zip(model.model.layers, kept, before, strict=True):
        assert torch.equal(layer.mlp.experts.down_proj, old[list(ids)])
        assert layer.mlp.gate.weight.shape[0] == layer.mlp.gate.num_experts == len(ids)
    assert model(input_ids=torch.arange(9)[None]).logits.isfinite().all()


def test_draft_head_sees_no_later_token() -> None:
    model = small_model()
    head, tokens = MtpHead(model.config), torch.arange(20)[None]
    hidden = torch.randn(1, 20, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole, changed = head(model, hidden, tokens), head(model, hidden, tokens.clone().index_fill_(1, LATER, 7))
    assert torch.equal(whole[:, :12], changed[:, :12]) and not torch.equal(whole[:, 12:], changed[:, 12:])


def test_documents_of_one_file_are_on_one_side() -> None:
    documents = {f"{kind}/{number}.py": "x" for kind in ("code", "json", "tools") for number in range(400)}
    learned, held = divide(documents)
    assert {**learned, **held} == documents and 20 < len(held) < 120
    assert {name.partition("/")[2] for name in held}.isdisjoint(name.partition("/")[2] for name in learned)
