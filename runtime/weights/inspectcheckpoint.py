"""What a checkpoint holds, from its headers and JSON files alone.

In: an open ``Checkpoint``. Out: an ``Inspection``. A format that is not understood is no error here: tensors are then
counted by their types, and ``refused`` says why they cannot be packed.

Example::

    inspect_checkpoint(open_checkpoint(Path("Qwen3.6-35B-A3B"))).experts       # (256, 256, ...)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from lynnc.build import build_graph
from lynnc.errors import ModelError, WeightError
from lynnc.hfconfig import import_config
from lynnc.model import ModelSpec
from lynnc.runtime.checkpoints.checkpoint import CONFIG, INDEX, Checkpoint
from lynnc.runtime.checkpoints.declared import Recognised
from lynnc.runtime.checkpoints.declaredformats import DeclaredFormats
from lynnc.runtime.checkpoints.modulenames import split_prefix
from lynnc.runtime.checkpoints.recognise import recognise
from lynnc.runtime.checkpoints.shardheader import BITS, StoredTensor
from lynnc.runtime.checkpoints.skipped import TIED_HEAD, skip_reason
from lynnc.runtime.checkpoints.stored import Stored, catalogue, check_stored
from lynnc.runtime.checkpoints.tensorclasses import tensor_class
from lynnc.runtime.checkpoints.textnames import TextNames
from lynnc.runtime.weights.inspected import (
    ANY,
    OTHER,
    VECTOR,
    Counted,
    Inspection,
    ShardSize,
    SkippedRow,
    add_up,
    mixed_classes,
    ranges,
    some,
)
from lynnc.tensors import Format

_PLAIN = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


@dataclass(frozen=True, slots=True)
class _Survey:
    """A checkpoint whose format is understood; model and names are None where they could not be told."""

    checkpoint: Checkpoint
    recognised: Recognised
    values: Mapping[str, Stored]
    model: ModelSpec | None
    names: TextNames | None

    def skip_reason(self, key: str) -> str | None:
        """Why packing leaves the values of that key out."""
        if self.model and self.names and self.model.tied_embeddings and key == self.names.head:
            return TIED_HEAD
        return skip_reason(key)

    def rest(self, key: str) -> str:
        """A key without the prefix of the text model."""
        return self.names.rest(key) if self.names else split_prefix(key)[1]

    @property
    def text_values(self) -> Mapping[str, Stored]:
        """What packing looks at."""
        return {key: stored for key, stored in self.values.items() if self.skip_reason(key) is None}


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Counts what is there; nothing but a damaged folder raises an error."""
    remarks: list[str] = []
    model = _model(checkpoint, remarks)
    try:
        recognised = recognise(checkpoint)
        values = catalogue(checkpoint, recognised)
    except WeightError as error:
        return _by_types(checkpoint, model, str(error), remarks)
    survey = _Survey(checkpoint, recognised, values, model, _names(checkpoint, values, model, remarks))
    experts = _experts(survey)
    counted = tuple(_counted(survey))
    remarks += [*_odd_metadata(survey), *_odd_experts(survey, experts), *_odd_tensors(survey, experts)]
    return Inspection(
        kind="checkpoint",
        detail=recognised.detail,
        model=_with_experts(model, experts) if model else None,
        activations=recognised.activations,
        rows=add_up(counted),
        experts=experts,
        shards=_shards(checkpoint),
        skipped=_skipped(survey),
        odd=(*remarks, *mixed_classes(counted)),
    )


def _model(checkpoint: Checkpoint, remarks: list[str]) -> ModelSpec | None:
    place = checkpoint.folder / CONFIG
    try:
        return import_config(checkpoint.config, name=checkpoint.folder.resolve().name, file=str(place))
    except ModelError as error:
        remarks.append(f"the model is not understood: {error}")
        return None


def _names(
    checkpoint: Checkpoint, values: Mapping[str, Stored], model: ModelSpec | None, remarks: list[str]
) -> TextNames | None:
    if model is None:
        return None
    try:
        return TextNames(checkpoint.folder, values, model)
    except WeightError as error:
        remarks.append(str(error).removesuffix("."))
        return None


def _by_types(checkpoint: Checkpoint, model: ModelSpec | None, refused: str, remarks: list[str]) -> Inspection:
    """The inspection of a checkpoint in a format that is not understood."""
    tensors = checkpoint.tensors.values()
    return Inspection(
        kind="checkpoint",
        detail="a format that lynnc does not read",
        model=model,
        activations="unknown",
        rows=add_up(Counted(item.name, ANY, item.dtype.lower(), "", _elements(item), item.bytes) for item in tensors),
        experts=(),
        shards=_shards(checkpoint),
        skipped=(),
        odd=tuple(remarks),
        refused=refused,
    )


def _elements(tensor: StoredTensor) -> int:
    return 8 * tensor.bytes // BITS[tensor.dtype]


def _shards(checkpoint: Checkpoint) -> tuple[ShardSize, ...]:
    return tuple(ShardSize(shard.name, shard.bytes) for shard in checkpoint.shards)


def _counted(survey: _Survey) -> Iterator[Counted]:
    """Every value that packing looks at, with the bytes of its data and scales."""
    tensors = survey.checkpoint.tensors
    for key, stored in survey.text_values.items():
        size = sum(tensors[name].bytes for name in stored.tensors if name in tensors)
        yield Counted(key, _class(survey, stored), _format(survey, stored), "", prod(stored.shape), size)


def _class(survey: _Survey, stored: Stored) -> str:
    rest = survey.rest(stored.key)
    is_vector = sum(size > 1 for size in stored.shape) < 2 or rest.endswith(".conv1d.weight")
    return tensor_class(rest) or (VECTOR if is_vector else OTHER)


def _format(survey: _Survey, stored: Stored) -> str:
    if stored.format is not Format.BF16:
        return str(stored.format)
    dtype = survey.checkpoint.tensors[stored.data].dtype
    return _PLAIN.get(dtype, dtype.lower())


def _skipped(survey: _Survey) -> tuple[SkippedRow, ...]:
    found: dict[str, list[str]] = {}
    for key, stored in survey.values.items():
        reason = survey.skip_reason(key)
        if reason is not None:
            found.setdefault(reason, []).extend(stored.tensors)
    tensors = survey.checkpoint.tensors
    return tuple(
        SkippedRow(reason, len(names), sum(tensors[name].bytes for name in names if name in tensors))
        for reason, names in found.items()
    )


def _experts(survey: _Survey) -> tuple[int, ...]:
    """Routed experts of each layer by the rows of its router; 0 for a layer without one, none for a dense model."""
    if survey.model is None or survey.model.moe is None or survey.names is None:
        return ()
    keys = [f"{survey.names.prefix}layers.{layer}.mlp.gate.weight" for layer in range(len(survey.model.layers))]
    return tuple(survey.values[key].shape[0] if key in survey.values else 0 for key in keys)


def _with_experts(model: ModelSpec, experts: tuple[int, ...]) -> ModelSpec:
    """The model with the experts that were found."""
    return replace(model, moe=replace(model.moe, experts=experts)) if model.moe and experts else model


def _odd_metadata(survey: _Survey) -> Iterator[str]:
    yield from survey.recognised.notes
    declared = DeclaredFormats(survey.recognised)
    modules = {key.removesuffix(".weight"): stored for key, stored in survey.text_values.items()}
    yield from declared.notes(modules.items())
    problems = []
    for module, stored in modules.items():
        try:
            declared.check(stored, module)
        except WeightError as error:
            problems.append(str(error))
    yield from _first(problems)
    if survey.checkpoint.unlisted:
        yield f"{INDEX} does not name {some(survey.checkpoint.unlisted)}, which the shards hold"


def _odd_experts(survey: _Survey, experts: tuple[int, ...]) -> Iterator[str]:
    """Where router, side file and configuration disagree."""
    if survey.model is None or survey.model.moe is None or not experts:
        return
    try:
        side = survey.checkpoint.expert_counts
    except ModelError as error:
        yield str(error)
        return
    yield from _few_experts(experts, survey.model.moe.top_k)
    configured = survey.model.moe.experts[0]
    if side is None and set(experts) != {configured}:
        yield f"{CONFIG} says {configured} experts, and routers have {min(experts)} to {max(experts)} rows"
    if side is not None:
        other = [layer for layer, held in enumerate(experts) if side.get(str(layer)) != held]
        extra = sorted(side.keys() - {str(layer) for layer in range(len(experts))})
        if other:
            said, rows = side.get(str(other[0]), "nothing"), experts[other[0]]
            more = f" ({len(other)} such layers: {ranges(other)})" if len(other) > 1 else ""
            yield f"the side file of experts says {said} in layer {other[0]}, whose router has {rows} rows{more}"
        if extra:
            yield f"the side file of experts names layers that the model lacks: {some(extra)}"


def _few_experts(experts: tuple[int, ...], top_k: int) -> Iterator[str]:
    """Layers that have routers, but fewer experts than a token needs."""
    few = [layer for layer, held in enumerate(experts) if 0 < held < top_k]
    if few:
        where = f"layer{'s' if len(few) > 1 else ''} {ranges(few)}"
        yield f"{where}: fewer experts than the {top_k} that each token goes to"


def _odd_tensors(survey: _Survey, experts: tuple[int, ...]) -> Iterator[str]:
    """What the model lacks, what it has no place for, and what has another shape or type than it needs."""
    if survey.model is None or survey.names is None:
        return
    elements: dict[str, int] = {}
    missing, damaged = [], []
    for name, count in _needed(survey.model, experts):
        try:
            key = survey.names.find(name).key
        except WeightError as error:
            missing.append(str(error))
        else:
            elements[key] = elements.get(key, 0) + count
    for key, count in elements.items():
        stored = survey.values[key]
        try:
            check_stored(survey.checkpoint, stored)
        except WeightError as error:
            damaged.append(str(error))
        else:
            if prod(stored.shape) != count:
                damaged.append(f"{key} holds {[*stored.shape]}, and the model takes {count} values of it")
    yield from _first(missing)
    yield from _first(damaged)
    left = survey.text_values.keys() - elements.keys()
    if left:
        yield f"no part of the model takes {some(left)}"


def _needed(model: ModelSpec, experts: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Every name of the model's graph, and the values that it stands for."""
    if model.moe:
        found = tuple(count or model.moe.experts[0] for count in experts)
        model = _with_experts(model, found)
    for weight in build_graph(model, 1).weights.values():
        if weight.name == "lm_head" and model.tied_embeddings:
            continue
        for expert in range(weight.experts):
            for part in weight.parts:
                yield part.source.format(expert=expert), part.rows * weight.columns


def _first(problems: list[str]) -> Iterator[str]:
    """The first problem, and how many more there are of its kind."""
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        yield f"{problems[0].removesuffix('.')}{more}"
