"""Triton source of a kernel: a Jinja template whose control lines are Python comments.

In: a choice and the structure its op needs. Out: text. Jinja decides structure alone (programmatic dependent launch,
the interpreter's plain twins of inline PTX); tunables and shapes are ``tl.constexpr`` arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import jinja2

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
