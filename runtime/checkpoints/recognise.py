"""Which format a checkpoint is in, by its metadata alone: recognised or refused, never guessed.

In: a ``Checkpoint``. Out: ``Recognised``: the kind, what the metadata declares of it, and what a user should know; or a
``WeightError`` that says what was found and what is supported.

Example::

    recognise(open_checkpoint(folder)).detail          # "ModelOpt MIXED_PRECISION: nvfp4 and fp8"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lynnc.runtime.checkpoints.checkpoint import LYNN_FILE, MODELOPT_FILE, Checkpoint
from lynnc.runtime.checkpoints.compressedtensors import read_compressed_tensors
from lynnc.runtime.checkpoints.declared import Recognised, SourceKind, mapping, refuse
from lynnc.runtime.checkpoints.modelopt import read_modelopt
from lynnc.runtime.checkpoints.skipped import skip_reason
from lynnc.runtime.checkpoints.stored import PLAIN_DTYPES
from lynnc.tensors import GROUP

LYNN_SCHEMAS = ("lynn-variable-nvfp4-pack-v1", "lynn-variable-nvfp4-pack-v0")
LYNN_FORMAT = "nvfp4_e2m1_rowwise_per_16"
_METHODS = {
    "compressed-tensors": SourceKind.COMPRESSED_TENSORS,
    "modelopt": SourceKind.MODELOPT,
    "lynn_native": SourceKind.LYNN,
}
_SCALE_SUFFIXES = (
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".weight_global_scale",
    ".weight_zero_point",
    ".pre_quant_scale",
    ".packed",
    ".qweight",
    ".qzeros",
    ".scales",
    ".absmax",
)
"""How the names of tensors end that only quantised weights have."""


def recognise(checkpoint: Checkpoint) -> Recognised:
    """The format of a checkpoint; WeightError for one that is none of the supported, or claims to be two of them."""
    method = quantization_config(checkpoint)
    kinds = dict.fromkeys(_claims(checkpoint, method))
    if len(kinds) > 1:
        refuse(checkpoint, f"holds metadata of two formats at once ({' and '.join(kinds)})")
    if not kinds:
        return _read_plain(checkpoint)
    kind = next(iter(kinds))
    if kind is SourceKind.LYNN:
        return _read_lynn(checkpoint)
    if kind is SourceKind.MODELOPT:
        return read_modelopt(checkpoint, method)
    return read_compressed_tensors(checkpoint, method)


def quantization_config(checkpoint: Checkpoint) -> Mapping[str, object]:
    """The section of that name in ``config.json``, which may stand in the text model's part; empty if there is none."""
    text = mapping(checkpoint.config.get("text_config"))
    section = checkpoint.config.get("quantization_config") or text.get("quantization_config")
    if section and not isinstance(section, Mapping):
        refuse(checkpoint, f"has a quantization_config that is no object but {section!r}")
    return mapping(section)


def _claims(checkpoint: Checkpoint, method: Mapping[str, object]) -> Iterator[SourceKind]:
    """What each piece of metadata says that the checkpoint is."""
    if LYNN_FILE in checkpoint.side_files:
        yield SourceKind.LYNN
    if MODELOPT_FILE in checkpoint.side_files:
        section = mapping(checkpoint.side_files[MODELOPT_FILE].get("quantization"))
        if section.get("quant_algo", "") is not None:
            yield SourceKind.MODELOPT
    if method:
        name = method.get("quant_method")
        if not isinstance(name, str) or name not in _METHODS:
            refuse(checkpoint, f"is quantised by the method {name!r}")
        yield _METHODS[name]


def _read_plain(checkpoint: Checkpoint) -> Recognised:
    used = [tensor for tensor in checkpoint.tensors.values() if skip_reason(tensor.name) is None]
    for tensor in used:
        if tensor.dtype not in PLAIN_DTYPES or tensor.name.endswith(_SCALE_SUFFIXES):
            refuse(checkpoint, f"holds {tensor.name} of type {tensor.dtype}, but no metadata of how it is quantised")
    dtypes = sorted({tensor.dtype for tensor in used})
    return Recognised(SourceKind.PLAIN, f"Hugging Face, {' and '.join(dtypes)}", "bf16")


def _read_lynn(checkpoint: Checkpoint) -> Recognised:
    if LYNN_FILE not in checkpoint.side_files:
        refuse(checkpoint, f"is quantised by the method 'lynn_native' and lacks its {LYNN_FILE}")
    manifest = checkpoint.side_files[LYNN_FILE]
    schema = manifest.get("schema_version", manifest.get("schema"))
    if schema not in LYNN_SCHEMAS:
        refuse(checkpoint, f"has a {LYNN_FILE} of the unknown schema {schema!r}")
    details = manifest.get("quantization", {})
    if not isinstance(details, Mapping):
        refuse(checkpoint, f"has a {LYNN_FILE} whose quantization is no object but {details!r}")
    for name, expected in (("format", LYNN_FORMAT), ("group_size", GROUP)):
        if details.get(name, expected) != expected:
            refuse(checkpoint, f"has a {LYNN_FILE} with the {name} {details[name]!r}")
    if not isinstance(manifest.get("quantized_tensors"), Mapping):
        refuse(checkpoint, f"has a {LYNN_FILE} without quantized_tensors")
    needs_fp8 = mapping(manifest.get("runtime_contract")).get("inference_path_required") == "w4a8"
    return Recognised(SourceKind.LYNN, f"Lynn-native {schema}", "fp8" if needs_fp8 else "bf16")
