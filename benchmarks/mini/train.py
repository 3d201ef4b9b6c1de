"""Trains lynn-mini, or what is left of it after pruning.

In: a model file and a standard library of CPython (``corpus.py``). Out: a folder with a BF16 checkpoint, its tokenizer,
the held-out text and ``training.json``, which says everything that the result depends on. With ``--from``, an earlier
result goes on, with the experts that ``--experts`` (a file of ``lynnc prune``) keeps.

Example::

    python benchmarks/mini/train.py trained --steps 3000
    python benchmarks/mini/train.py recovered --from trained --experts experts.json --steps 300 --rate 5e-4
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from corpus import END, collect, divide, sample
from evaluation import HeldOut, both_logits, cross_entropy, evaluate
from network import MTP_PREFIX, MtpHead, Recorder, cut_experts, load_values, new_model, tensors_in
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as library

from lynnc.hfconfig import EXPERT_SPEC
from lynnc.model import ModelSpec
from lynnc.modelfile import load_model
from lynnc.runtime.experts.expertspec import read_expert_spec

MODEL = Path(__file__).with_name("lynn-mini.yaml")
HELD_OUT_SIZES = {"code": 120_000, "prose": 60_000, "json": 30_000, "tools": 30_000}
"""Bytes of each kind in the held-out text."""
ROUTING_SIZES = {"code": 40_000, "prose": 20_000, "json": 10_000, "tools": 10_000}
"""The same of the learned text that `lynnc routing` is to count on."""
SHARD_BYTES = 12_000_000
KEEP_FP32 = ("A_log", "dt_bias")
BALANCE, MTP = 0.01, 0.3
"""Weights of the load-balancing loss of each layer and of the loss of the second next token."""
_LIBRARY: Any = library
TRIALS, UPDATE = 15, 1.25
"""Steps to measure before training, and how much longer one takes with all losses and the update of the weights."""
LAST_RATE = 0.05
"""Of the first, after the last step."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the result, besides the text."""

    steps: int
    rate: float
    warmup: int
    batch: int
    length: int
    decay: float
    seed: int


@dataclass(frozen=True, slots=True)
class Wish:
    """What to train, of what and where: ``origin`` is an earlier result to go on from, ``experts`` those it keeps."""

    output: Path
    model: Path
    library: Path
    origin: Path | None
    experts: Path | None
    device: str
    minutes: float | None


@click.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), default=MODEL, help="Model file.")
@click.option("--library", type=click.Path(path_type=Path), default=sysconfig.get_paths()["stdlib"])
@click.option("--from", "origin", type=click.Path(path_type=Path), help="Folder of an earlier training to go on from.")
@click.option("--experts", type=click.Path(path_type=Path), help="Experts to keep, by `lynnc prune`.")
@click.option("--steps", default=3000, show_default=True, help="Updates of the weights.")
@click.option("--minutes", type=float, help="As many steps as take so long, instead of --steps.")
@click.option("--rate", default=2e-3, show_default=True, help="Largest learning rate.")
@click.option("--warmup", default=100, show_default=True, help="Steps until the rate is reached.")
@click.option("--batch", default=32, show_default=True, help="Sequences of a step.")
@click.option("--length", default=1024, show_default=True, help="Tokens of a sequence.")
@click.option("--decay", default=0.1, show_default=True, help="Weight decay of matrices.")
@click.option("--seed", default=0, show_default=True)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
def main(**options: Any) -> None:
    """Train a model into OUTPUT."""
    train(Wish(**{name: options.pop(name) for name in Wish.__slots__}), Settings(**options))


def train(wish: Wish, settings: Settings) -> None:
    """The whole way from text to checkpoint."""
    spec, output = load_model(wish.model), wish.output
    output.mkdir(parents=True)
    learned, held_out = divide(collect(wish.library))
    text = sample(held_out, HELD_OUT_SIZES)
    (output / "heldout.txt").write_text(text, "utf-8")
    (output / "routing.txt").write_text(sample(learned, ROUTING_SIZES), "utf-8")
    tokenizer = load_tokenizer(wish.origin) if wish.origin else train_tokenizer(learned, spec.vocabulary)
    tokenizer.save(str(output / "tokenizer.json"))
    tokens = encode(tokenizer, learned)
    characters = sum(map(len, learned.values()))
    click.echo(f"{len(learned)} documents, {characters / 1e6:.1f} M characters, {len(tokens) / 1e6:.2f} M tokens")
    network = new_model(spec, settings.seed)
    head = MtpHead(network.config)
    if wish.origin:
        load_values(network, head, tensors_in(wish.origin))
    if wish.experts:
        kept = read_expert_spec(wish.experts).kept
        assert kept is not None, f"{wish.experts} does not say which experts are kept"
        cut_experts(network.model.layers, kept)
    trained = Training(network.to(wish.device), head.to(wish.device), tokens.to(wish.device), settings)
    if wish.minutes:
        settings = trained.settings = replace(settings, steps=int(60 * wish.minutes / trained.seconds_of_a_step()))
        click.echo(f"{settings.steps} steps")
    history = list(trained.run(HeldOut.of(text, tokenizer, settings.length, wish.device)))
    write_checkpoint(output, spec, network, head)
    facts = {
        "settings": asdict(settings),
        "text": {
            "source": f"standard library of CPython {_version(wish.library)}",
            "licence": "PSF-2.0",
            "documents": len(learned),
            "tokens": len(tokens),
            "characters": characters,
        },
        "device": torch.cuda.get_device_name() if wish.device != "cpu" else platform.processor(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "history": history,
    }
    (output / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def _version(library: Path) -> str:
    """CPython's version by what its library's folder is called or holds."""
    found = library / "VERSION"
    return found.read_text().strip() if found.exists() else platform.python_version()


def train_tokenizer(documents: Mapping[str, str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE; token 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((documents[name] for name in sorted(documents)), trainer)
    assert tokenizer.get_vocab_size() == vocabulary
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode(tokenizer: Tokenizer, documents: Mapping[str, str]) -> torch.Tensor:
    """All documents one after the other, each followed by token 0."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast([documents[name] for name in sorted(documents)]):
        ids += encoding.ids
        ids.append(0)
    return torch.tensor(ids, dtype=torch.int32)


class Training:
    """Steps of AdamW on random windows of the text, in BF16 with FP32 weights."""

    def __init__(self, model: Any, head: MtpHead, tokens: torch.Tensor, settings: Settings) -> None:
        self.model, self.head, self.tokens, self.settings = model, head, tokens, settings
        self.generator = torch.Generator().manual_seed(settings.seed)
        torch.set_float32_matmul_precision("high")
        parameters = [*model.parameters(), *head.parameters()]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), fused=tokens.is_cuda)
        self.parameters = parameters

    def seconds_of_a_step(self) -> float:
        """Measured without a change of weights or of the windows that follow."""
        before, times = self.generator.get_state(), []
        with Recorder(self.model, self.head) as recorder:
            for _ in range(TRIALS):
                started = time.perf_counter()
                losses = self.losses(self.windows(), recorder)
                losses["next"].backward()
                float(self.parameters[-1].sum())  # waits for a GPU
                times.append(time.perf_counter() - started)
        self.optimizer.zero_grad(set_to_none=True)
        self.generator.set_state(before)
        return statistics.median(times) * UPDATE

    def run(self, held: HeldOut) -> Iterator[dict[str, float]]:
        """All steps; the losses from time to time and at the end."""
        started = time.perf_counter()
        with Recorder(self.model, self.head) as recorder:
            for step in range(self.settings.steps + 1):
                is_last = step == self.settings.steps
                if step % 500 == 0 or is_last:
                    found = asdict(evaluate(self.model, self.head, recorder, held))
                    found |= {"step": step, "seconds": round(time.perf_counter() - started, 1)}
                    click.echo(json.dumps(found))
                    yield found
                if not is_last:
                    losses = self.step(step, recorder)
                    if step % 100 == 0:
                        said = " ".join(f"{name} {float(loss.detach()):.4f}" for name, loss in losses.items())
                        click.echo(f"{step}: {said}, {time.perf_counter() - started:.1f} s")

    def step(self, step: int, recorder: Recorder) -> dict[str, torch.Tensor]:
        """One update of the weights."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate * self.share(step)
        losses = self.losses(self.windows(), recorder)
        total = losses["next"] + MTP * losses["second"] + BALANCE * losses["balance"]
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return losses

    def share(self, step: int) -> float:
        """Of the largest learning rate: a linear start, then half a cosine."""
        done = step / max(1, self.settings.steps)
        cosine = LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))
        return min(1.0, (step + 1) / self.settings.warmup) * cosine

    def windows(self) -> torch.Tensor:
        """Random pieces of the text [batch, length + 2]."""
        last = len(self.tokens) - self.settings.length - 2
        starts = torch.randint(0, last, (self.settings.batch, 1), generator=self.generator)
        places = starts + torch.arange(self.settings.length + 2)
        return self.tokens[places.to(self.tokens.device)].long()

    def losses(self, windows: torch.Tensor, recorder: Recorder) -> dict[str, torch.Tensor]:
        """Cross-entropies of the next token and the one after it, and how unevenly experts are used."""
        with torch.autocast(windows.device.type, dtype=torch.bfloat16):
            logits, second = both_logits(self.model, self.head, recorder, windows[:, :-1])
        routers, balance_loss = recorder.take_routers(), _LIBRARY.load_balancing_loss_func
        top_k = self.model.config.num_experts_per_tok
        balance = [balance_loss((logits,), logits.shape[-1], top_k) for logits in routers]
        return {
            "next": cross_entropy(logits, windows[:, 1:-1]),
            "second": cross_entropy(second, windows[:, 2:]),
            "balance": torch.stack(balance).mean(),
        }


def tensors_of(model: Any, head: MtpHead) -> dict[str, torch.Tensor]:
    """Every tensor by its name in a published checkpoint, in the type that it has there."""
    named = {**model.state_dict(), **{f"{MTP_PREFIX}{name}": value for name, value in head.state_dict().items()}}
    return {
        name: (value.float() if name.endswith(KEEP_FP32) else value.bfloat16()).cpu().contiguous()
        for name, value in named.items()
    }


def write_checkpoint(folder: Path, spec: ModelSpec, model: Any, head: MtpHead) -> None:
    """Shards of at most ``SHARD_BYTES``, their index and the configuration."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors_of(model, head).items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=1) + "\n")
    model.config.architectures = ["Qwen3_5MoeForCausalLM"]
    model.config.save_pretrained(folder)
    counts = {str(layer): len(each.mlp.gate.weight) for layer, each in enumerate(model.model.layers)}
    if set(counts.values()) != set(spec.moe.experts if spec.moe else ()):
        (folder / EXPERT_SPEC).write_text(
            json.dumps({"hf_vanilla_compatible": False, "remaining_experts_by_layer": counts}) + "\n"
        )


if __name__ == "__main__":
    main()
