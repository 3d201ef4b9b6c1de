"""Model files: YAML text to a ``ModelSpec`` and back.

In: the name of a shipped model or the path of a ``.yaml`` file. Out: a checked ``ModelSpec``, or a ``ModelError`` that
names file and field. ``models/README.md`` documents the fields.

Example::

    spec = load_model("tiny-moe")
    dump_model(replace(spec, name="mine"))     # YAML text that load_model reads back to the same spec

Scalars are read as YAML 1.2 reads them: ``1e-6`` is a number, ``yes`` is text, ``010`` is ten. A key given twice and
aliases are errors.
"""

from __future__ import annotations

import re
from collections import Counter
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from lynnc.errors import ModelError
from lynnc.fields import Place
from lynnc.model import Mixer, ModelSpec, PrecisionSpec
from lynnc.modelshape import KEPT_BF16, default_format, from_dict
from lynnc.tensors import Format

_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars; aliases refused, so that the content is a tree."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "an alias, which model files do not have", self.get_mark())
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else."""


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _SCALARS:
    for _tool in (_Loader, _Dumper):
        _resolver = re.compile(f"(?:{_pattern})$")
        _tool.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _resolver, [c.replace("\0", "") for c in _first])
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def shipped_models() -> tuple[str, ...]:
    """The names of the models that come with lynnc, sorted."""
    names = (entry.name for entry in files("lynnc.models").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_model(name_or_path: str | Path) -> ModelSpec:
    """The model of a shipped name, or of the file at a path ending in ``.yaml``; raises ``ModelError``."""
    wanted = str(name_or_path)
    if wanted in shipped_models():
        return parse_model(files("lynnc.models").joinpath(f"{wanted}.yaml").read_text("utf-8"), f"{wanted}.yaml")
    path = Path(wanted)
    if path.suffix not in (".yaml", ".yml"):
        near = get_close_matches(wanted, shipped_models(), n=1)
        known = f"write {near[0]} instead" if near else f"write one of {', '.join(shipped_models())}"
        raise ModelError(f"{wanted} is neither a shipped model nor the path of a .yaml file; {known}, or such a path.")
    return parse_model(read_text(path), wanted)


def model_name_from(text: str) -> str:
    """A model name that is like a text, such as a folder's name: ``my model (2)`` gives ``my-model-2``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-").rstrip("-") or "model"


def read_text(path: Path) -> str:
    """The UTF-8 text of a file; raises ``ModelError`` where there is none."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file; check the path") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: byte {error.start} is not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise ModelError(f"{path}: the file cannot be read ({error.strerror}); check the path and its rights") from None


def parse_model(content: str, file: str) -> ModelSpec:
    """The model that YAML text describes; ``file`` names it in messages. Raises ``ModelError``."""
    return from_dict(_parse_yaml(content, file), Place(file))


def _parse_yaml(content: str, file: str) -> object:
    loader = None
    try:
        loader = _Loader(content)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_duplicates(node, Place(file))
        value: object = loader.construct_document(node)
        return value
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "the content"
        raise ModelError(f"{file}: {line} cannot be read as YAML ({error.problem}); correct it") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{file}: the content cannot be read as YAML ({reason}); correct it") from None
    finally:
        if loader:
            loader.dispose()


def _refuse_duplicates(node: yaml.Node, place: Place) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            _refuse_duplicates(entry, place.item(index))
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[object, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        name = key.value if isinstance(key, yaml.ScalarNode) else str(line)
        if name in lines:
            place.field(name).fail(f"is given on line {lines[name]} and again on line {line}", "keep one of them")
        lines[name] = line
        _refuse_duplicates(value, place.field(name))


def dump_model(spec: ModelSpec) -> str:
    """YAML text that ``load_model`` reads back to an equal spec; the same spec always gives the same text."""
    return yaml.dump(_as_dict(spec), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)


def _as_dict(spec: ModelSpec) -> dict[str, Any]:
    attention = spec.attention
    values: dict[str, Any] = {
        "name": spec.name,
        "description": spec.description,
        "family": str(spec.family),
        "representative": spec.representative,
        "hidden": spec.hidden,
        "vocabulary": spec.vocabulary,
        "context": spec.max_context,
        "tied_embeddings": spec.tied_embeddings,
        "norm": {"eps": spec.norm_eps, "weight": "shifted" if spec.norm_shifted else "plain"},
        "layers": _compact_layers(spec.layers),
        "attention": {
            "heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "output_gate": attention.output_gate,
            "rope": {"theta": attention.rope_theta, "dims": attention.rotary_dim},
        },
    }
    for section in ("gdn", "moe", "dense"):
        part = getattr(spec, section)
        if part:
            values[section] = {name: getattr(part, name) for name in part.__slots__}
    if spec.moe:
        same = len(set(spec.moe.experts)) == 1
        values["moe"]["experts"] = spec.moe.experts[0] if same else list(spec.moe.experts)
    values["mtp"] = {"layers": spec.mtp_layers}
    return values | {"precision": _compact_precision(spec.precision), "tensor_prefix": spec.tensor_prefix}


def _compact_layers(layers: tuple[Mixer, ...]) -> dict[str, Any]:
    """The shortest pattern that, repeated, gives ``layers``."""
    length = next(size for size in range(1, len(layers) + 1) if layers == layers[:size] * (len(layers) // size))
    return {"pattern": [str(mixer) for mixer in layers[:length]], "repeat": len(layers) // length}


def _compact_precision(precision: PrecisionSpec) -> dict[str, str]:
    """The most frequent format as the default, then the tensor classes that would otherwise be read differently."""
    formats = precision.formats
    default: Format = Counter(formats[name] for name in formats if name not in KEPT_BF16).most_common(1)[0][0]
    named = {name: str(formats[name]) for name in formats if formats[name] != default_format(name, default)}
    return {"default": str(default), **named, "activations": precision.activations}
