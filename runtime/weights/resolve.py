"""What is to be packed, settled before any data is read: checkpoint, model, and the kept experts of each layer.

In: a checkpoint folder, maybe a model, maybe the experts to keep. Out: an open source with the model as the checkpoint
has it. A layer's experts are counted from its router; that count, the checkpoint's side file and the model must agree,
except where the model's map is only representative: then the checkpoint's wins.

Example::

    resolved = resolve(Path("checkpoint"), None, None)
    resolved.spec.moe.experts, resolved.kept[0][:4]           # (6, 5, 4, 7), (0, 1, 2, 3)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lynnc.errors import ModelError, WeightError
from lynnc.hfconfig import import_config
from lynnc.model import ModelSpec, PrecisionSpec
from lynnc.modelfile import model_name_from
from lynnc.modelshape import ACTIVATIONS
from lynnc.runtime.checkpoints.checkpoint import Checkpoint, open_checkpoint
from lynnc.runtime.checkpoints.recognise import recognise
from lynnc.runtime.checkpoints.source import Source
from lynnc.runtime.experts.expertspec import ExpertSpec, Kept
from lynnc.runtime.weights.textconfig import differences
from lynnc.tensors import Format


@dataclass(frozen=True, slots=True)
class Resolved:
    """An open source, the model with the checkpoint's experts (after pruning), and their numbers in the checkpoint."""

    source: Source
    spec: ModelSpec
    kept: Kept
    notes: tuple[str, ...]

    def close(self) -> None:
        """Closes the checkpoint's files."""
        self.source.close()


def resolve(folder: Path, model: ModelSpec | None, experts: ExpertSpec | None, keep_first: bool = False) -> Resolved:
    """Opens the checkpoint and settles its model. WeightError or ModelError where the parts contradict each other."""
    checkpoint = open_checkpoint(folder)
    source = Source(checkpoint, recognise(checkpoint), model or configured_model(checkpoint))
    counts = source_experts(source)
    _check_side_file(checkpoint, counts)
    spec, kept, notes = _settle_experts(source, counts, experts, keep_first, is_given=model is not None)
    if spec.moe:
        _check_top_k(source, counts if experts is None else tuple(map(len, kept)), spec.moe.top_k)
    if model is None:
        spec = replace(spec, precision=PrecisionSpec(found_formats(source), _followed_activations(source)))
    else:
        notes = (*_configuration_notes(checkpoint, spec), *notes)
    return Resolved(source, spec, kept, (*source.notes(), *_activation_notes(source, spec), *notes))


def _followed_activations(source: Source) -> str:
    """The activations that the checkpoint declares, as far as a model may: FP8 ones are BF16, which is more exact."""
    declared = source.recognised.activations
    return declared if declared in ACTIVATIONS else "bf16"


def _activation_notes(source: Source, spec: ModelSpec) -> tuple[str, ...]:
    """4-bit activations, and a model that differs from what the checkpoint declares, are never a silent change."""
    declared, asked = source.recognised.activations, spec.precision.activations
    if declared != asked:
        return (f"the checkpoint declares {declared} activations and the model {asked}: its plans use {asked}",)
    if declared == "bf16":
        return ()
    return (f"the checkpoint declares {declared} activations: prompts run with them where a target has FP4 MMA",)


def _configuration_notes(checkpoint: Checkpoint, spec: ModelSpec) -> tuple[str, ...]:
    """What the checkpoint's configuration says unlike the model that was given. WeightError for another family."""
    try:
        family = configured_model(checkpoint).family
    except ModelError as error:
        return (f"the model was not compared with the checkpoint's configuration, which is not understood: {error}",)
    if family is not spec.family:
        raise WeightError(
            f"{checkpoint.folder} is of the family {family} by its config.json and the model {spec.name} of "
            f"{spec.family}: leave out --model, or name another one."
        )
    return tuple(f"{found}: the model counts" for found in differences(checkpoint.config, spec))


def _check_top_k(source: Source, counts: tuple[int, ...], top_k: int) -> None:
    for layer, count in enumerate(counts):
        if count < top_k:
            raise WeightError(
                f"{source.checkpoint.folder} has {count} experts to keep in layer {layer} and a token selects {top_k}: "
                "use a checkpoint with more."
            )


def configured_model(checkpoint: Checkpoint) -> ModelSpec:
    """The model of the checkpoint's ``config.json``, with the usual formats; ModelError if it cannot be read."""
    file = str(checkpoint.folder / "config.json")
    return import_config(checkpoint.config, name=model_name_from(checkpoint.folder.resolve().name), file=file)


def source_experts(source: Source) -> tuple[int, ...]:
    """Routed experts of each layer, by the rows of its router; empty for a dense model."""
    if source.spec.moe is None:
        return ()
    return tuple(source.experts(layer) for layer in range(len(source.spec.layers)))


def found_formats(source: Source) -> Mapping[str, Format]:
    """The format of each tensor class: as stored where it is quantised anywhere, else the usual one of the class."""
    usual = dict(source.spec.precision.formats)
    for tensor_class, stored in source.formats_by_class().items():
        quantised = sorted(stored - {Format.BF16})
        if len(quantised) > 1:
            raise WeightError(
                f"{source.checkpoint.folder} stores tensors of the class {tensor_class} as {' and '.join(quantised)}, "
                "but a class has one format: use a checkpoint with one."
            )
        if quantised:
            usual[tensor_class] = quantised[0]
        elif source.is_quantised:
            usual[tensor_class] = Format.BF16
    return usual


def _check_side_file(checkpoint: Checkpoint, counts: tuple[int, ...]) -> None:
    side = checkpoint.expert_counts
    if side is None or not counts:
        return
    expected = {str(layer): count for layer, count in enumerate(counts)}
    for layer in sorted(expected.keys() | side.keys()):
        if side.get(layer) != expected.get(layer):
            raise WeightError(
                f"{checkpoint.folder} has {expected.get(layer, 'no')} rows in the router of layer {layer} and its side "
                f"file says {side.get(layer, 'nothing')}: one of the two belongs to another checkpoint."
            )


def _settle_experts(
    source: Source, counts: tuple[int, ...], experts: ExpertSpec | None, keep_first: bool, is_given: bool
) -> tuple[ModelSpec, Kept, tuple[str, ...]]:
    spec = source.spec
    if spec.moe is None:
        if experts is not None:
            raise WeightError(f"{spec.name} has no routed experts: leave out --experts.")
        return spec, (), ()
    if experts is None:
        kept = tuple(tuple(range(count)) for count in counts)
    else:
        kept = experts.resolve(counts, spec.moe.top_k, keep_first)
    left = tuple(len(ids) for ids in kept)
    settled = replace(spec, moe=replace(spec.moe, experts=left), representative=False)
    if not is_given or spec.moe.experts == left:
        return settled, kept, ()
    if spec.representative:
        return settled, kept, (f"the checkpoint's experts of each layer replace the representative map of {spec.name}",)
    if experts is not None and spec.moe.experts == counts:
        return settled, kept, ()
    raise _other_counts(source, spec.moe.experts, left)


def _other_counts(source: Source, asked: tuple[int, ...], found: tuple[int, ...]) -> WeightError:
    layer = next(layer for layer, pair in enumerate(zip(asked, found, strict=True)) if pair[0] != pair[1])
    return WeightError(
        f"{source.checkpoint.folder} has {found[layer]} experts to keep in layer {layer} and the model "
        f"{source.spec.name} says {asked[layer]}: leave out --model, or use the model file of this checkpoint."
    )
