"""Counts how the tokens of a text choose their experts, by running the model in torch.

In: a model, its weights as FP32 values, and token ids. Out: ``Routing``, which ``lynnc prune`` reads. The model runs
through ``lynnc.interpret``, the reference meaning of its graph, layer by layer: all tokens pass a layer before the next
one's weights are asked for, so one layer's weights are in memory at a time and each is asked for once. What comes after
the last router (its experts, the vocabulary) is not run. The text is cut into sequences with a context of their own.

Example::

    packed = open_packed(Path("packed"))
    settings = RunSettings(chunk=512, device="cuda")
    collect_routing(packed.spec, PackedValues(packed, settings.device), Tokens("sample.txt", ids), settings)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lynnc.build import build_graph
from lynnc.errors import ModelError, OptionError, WeightError
from lynnc.interpret import interpret, new_states, step_inputs
from lynnc.ir import Graph, Op
from lynnc.model import ModelSpec, MoeSpec
from lynnc.ops import TopK
from lynnc.runtime.experts.routingfile import LayerRouting, Routing, text_facts
from lynnc.runtime.weights.packedfile import Packed

OnProgress = Callable[[int, int], None]
"""Told how many tokens have passed a layer, and how many will in all layers together."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of a text's tokens, and the text's name."""

    name: str
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a text is run: tokens of a step, tokens after which the context starts anew (the model's context at the
    latest), and the device of the weights."""

    chunk: int = 512
    sequence: int = 2048
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens ``first`` to ``end`` of a text, at the positions of their sequence from ``start`` on."""

    first: int
    end: int
    start: int


class PackedValues(Mapping[str, torch.Tensor]):
    """FP32 values of a packed folder's weights on a device, read and decoded each time that one is asked for."""

    def __init__(self, packed: Packed, device: str) -> None:
        self.packed, self.device = packed, device

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.packed.values(name, self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.packed.weights)

    def __len__(self) -> int:
        return len(self.packed.weights)


def collect_routing(
    spec: ModelSpec,
    values: Mapping[str, torch.Tensor],
    tokens: Tokens,
    settings: RunSettings,
    on_progress: OnProgress | None = None,
) -> Routing:
    """Runs the tokens through the model and counts each layer's choices.

    ``values`` holds FP32 values by weight name of ``build_graph(spec)``, on the device of the settings; it may compute
    them when it is asked. ModelError for a model without experts, OptionError for tokens or settings that do not fit
    it, WeightError where router logits are not finite.
    """
    moe = _moe(spec)
    _check_tokens(spec, tokens, settings)
    steps = cut_steps(len(tokens.ids), replace(settings, sequence=min(settings.sequence, spec.max_context)))
    total = len(tokens.ids) * len(spec.layers)
    layers: list[LayerRouting] = []
    with torch.device(settings.device), torch.inference_mode():
        embedding, *parts = split_layers(build_graph(spec), len(spec.layers))
        passage = _Passage(values, tokens.ids, steps)
        passage.hidden = [found[embedding.outputs[0]] for found in passage.through(embedding)]
        for part in parts:
            tally = _Tally(part, moe.experts[len(layers)])
            for index, found in enumerate(passage.through(part)):
                tally.add(found, steps[index])
                passage.hidden[index] = found[part.outputs[0]]
                if on_progress:
                    on_progress(len(layers) * len(tokens.ids) + steps[index].end, total)
            layers.append(tally.result())
    return Routing(spec.name, text_facts(tokens.name, tokens.ids), moe.top_k, tuple(layers))


def cut_steps(count: int, settings: RunSettings) -> tuple[Step, ...]:
    """Steps of at most ``chunk`` tokens that do not cross the end of a sequence."""
    return tuple(
        Step(first, min(first + settings.chunk, head + settings.sequence, count), first - head)
        for head in range(0, count, settings.sequence)
        for first in range(head, min(head + settings.sequence, count), settings.chunk)
    )


def split_layers(graph: Graph, layers: int) -> tuple[Graph, ...]:
    """The embedding, then each layer, as graphs of their own; the last one ends with its router's choice.

    The last input of a layer's graph is the first output of the graph before it.
    """
    owners = [_layer_of(op) for op in graph.ops]
    groups = [graph.ops[: owners.index(0)]]
    groups += [tuple(op for op, owner in zip(graph.ops, owners, strict=True) if owner == n) for n in range(layers)]
    last = next(index for index, op in enumerate(groups[-1]) if isinstance(op, TopK))
    groups[-1] = groups[-1][: last + 1]
    entries = [_entries(graph, ops) for ops in groups]
    exits = [*entries[1:], (groups[-1][last].writes)]
    return tuple(_part(graph, *piece) for piece in zip(groups, entries, exits, strict=True))


def _layer_of(op: Op) -> int | None:
    kind, _, rest = op.name.partition(".")
    return int(rest.partition(".")[0]) if kind == "layers" else None


def _entries(graph: Graph, ops: tuple[Op, ...]) -> tuple[str, ...]:
    """What the ops read that neither they nor the step provide."""
    written = {*graph.inputs, *(name for op in ops for name in op.writes)}
    return tuple(dict.fromkeys(name for op in ops for name in op.reads if name not in written))


def _part(graph: Graph, ops: tuple[Op, ...], entries: tuple[str, ...], exits: tuple[str, ...]) -> Graph:
    weights = {name: graph.weights[name] for op in ops for name in op.names("weight")}
    states = {name: graph.states[name] for op in ops for name in op.names("state")}
    inputs = (*graph.inputs, *entries)
    return replace(graph, weights=weights, states=states, inputs=inputs, outputs=exits).with_ops(ops)


class _Passage:
    """A text on its way through the layers: ``hidden`` holds what each step brings to the next one."""

    def __init__(self, values: Mapping[str, torch.Tensor], ids: Sequence[int], steps: Sequence[Step]) -> None:
        self.values, self.ids, self.steps = values, ids, steps
        self.hidden: list[torch.Tensor] = []

    def through(self, part: Graph) -> Iterator[Mapping[str, torch.Tensor]]:
        """What the graph computes in each step. A step at position 0 overwrites what an earlier sequence left."""
        weights = {name: self.values[name] for name in part.weights}
        longest = max(step.start + step.end - step.first for step in self.steps)
        states = new_states(part, slots=1, context=longest)
        for index, step in enumerate(self.steps):
            inputs = step_inputs(self.ids[step.first : step.end], step.start)
            if self.hidden:
                inputs[part.inputs[-1]] = self.hidden[index]
            yield interpret(part, weights, states, inputs)


class _Tally:
    """Counts and gate mass of one layer's experts, summed in int64 and FP64."""

    def __init__(self, part: Graph, experts: int) -> None:
        self.choice = next(op for op in part.ops if isinstance(op, TopK))
        self.counts = torch.zeros(experts, dtype=torch.int64)
        self.gate_mass = torch.zeros(experts, dtype=torch.float64)

    def add(self, found: Mapping[str, torch.Tensor], step: Step) -> None:
        """Counts one step's choices."""
        finite = found[self.choice.logits].isfinite().all(dim=-1)
        if not finite.all():
            token = step.first + int((~finite).nonzero()[0])
            layer = self.choice.name.rpartition(".")[0]
            raise WeightError(
                f"{layer}: the router's logits for token {token} of the text are not finite: weights of this layer or "
                "of one before it are damaged, so verify the packed folder."
            )
        ids = found[self.choice.ids].flatten().long()
        scores = found[self.choice.scores].flatten().double()
        self.counts += torch.bincount(ids, minlength=len(self.counts))
        self.gate_mass += torch.bincount(ids, weights=scores, minlength=len(self.counts))

    def result(self) -> LayerRouting:
        """Plain numbers."""
        return LayerRouting(tuple(self.counts.tolist()), tuple(self.gate_mass.tolist()))


def _moe(spec: ModelSpec) -> MoeSpec:
    if spec.moe is None:
        raise ModelError(f"{spec.name} has no experts whose choices could be counted: name a mixture of experts.")
    return spec.moe


def _check_tokens(spec: ModelSpec, tokens: Tokens, settings: RunSettings) -> None:
    if not tokens.ids:
        raise OptionError(f"{tokens.name} has no tokens: give a longer text.")
    for size, what in ((settings.chunk, "Steps"), (settings.sequence, "Sequences")):
        if size < 1:
            raise OptionError(f"{what} of {size} tokens cannot be run: give at least 1.")
    for position, token in enumerate(tokens.ids):
        if not 0 <= token < spec.vocabulary:
            raise OptionError(
                f"{tokens.name}: token {position} has the id {token}, outside the vocabulary of {spec.vocabulary:,} "
                f"of {spec.name}: use the tokenizer of this model."
            )
