"""Triton source of a kernel: a Jinja template whose control lines are Python comments.

In: a choice and the structure its op needs. Out: text. Jinja decides structure alone (programmatic dependent launch,
the interpreter's plain twins of inline PTX); tunables and shapes are ``tl.constexpr`` arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache

import jinja2
import jinja2.meta

from lynnc.version import VERSION


@cache
def environment() -> jinja2.Environment:
    """Jinja as the templates are written for: control lines are comments, undefined names are errors."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("lynnc.templates", ""),
        line_statement_prefix="# %",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )


@cache
def _rendered(template: str, structure: tuple[tuple[str, object], ...]) -> str:
    return environment().get_template(template).render(dict(structure))


def render(template: str, structure: Mapping[str, object], header: Mapping[str, str]) -> str:
    """The kernel's source; ``header`` tells op, choice and target in its first lines, with no timestamp."""
    lines = [f"# lynnc {VERSION}: {template}"]
    lines += [f"# {name}: {value}" for name, value in header.items()]
    return "\n".join(lines) + "\n" + _rendered(template, tuple(sorted(structure.items())))


@cache
def template_digest(template: str) -> str:
    """SHA-256 over the text of a template and of all that it includes; comments and blank lines do not count."""
    found: dict[str, str] = {}
    _collect(template, found)
    text = "\0".join(f"{name}\0{found[name]}" for name in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()


def _collect(template: str, found: dict[str, str]) -> None:
    loader = environment().loader
    assert loader is not None
    source = loader.get_source(environment(), template)[0]
    found[template] = "\n".join(_lines_that_count(source))
    for name in jinja2.meta.find_referenced_templates(environment().parse(source)):
        if name is not None and name not in found:
            _collect(name, found)


def _lines_that_count(source: str) -> Iterator[str]:
    for line in map(str.rstrip, source.splitlines()):
        text = line.lstrip()
        if text and (not text.startswith("#") or text.startswith("# %")):
            yield line
