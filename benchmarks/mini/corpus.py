"""The text that lynn-mini learns: the standard library of CPython, as code, documentation, JSON and tool calls.

In: the folder of a standard library. Out: documents by name, divided into those to learn and those held out. Prose is
the library's own reference (``pydoc_data``); JSON and tool calls are made from the signatures of its functions. The
licence of all of it is CPython's (PSF-2.0).

Example::

    learned, held_out = divide(collect(Path(sysconfig.get_paths()["stdlib"])))
"""

from __future__ import annotations

import ast
import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

MOST_BYTES = 200_000
"""Larger files are tables rather than text."""
LEFT_OUT = ("site-packages", "encodings", "__pycache__", "lib2to3/tests", "idlelib/Icons", "pydoc_data")
HELD_OUT = 25
"""One document of so many is held out."""
END = "<|endoftext|>"
"""Stands behind every document."""


def collect(library: Path) -> dict[str, str]:
    """All documents by name: ``code/...``, ``prose/...``, ``json/...`` and ``tools/...``."""
    found: dict[str, str] = {}
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        text = _text(path)
        if text is None or any(part in f"{name}" for part in LEFT_OUT):
            continue
        found[f"code/{name}"] = text
        functions = list(_functions(text))
        if functions:
            found[f"json/{name}"] = json.dumps({"module": name, "functions": functions}, indent=2) + "\n"
            found[f"tools/{name}"] = "".join(_calls(functions))
    found.update({f"prose/{name}": text for name, text in _topics(library).items()})
    return found


def divide(documents: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Documents to learn and documents to evaluate on; all that was made of one file is on one side."""
    held_out = {name: text for name, text in documents.items() if _number(name.partition("/")[2]) % HELD_OUT == 0}
    return {name: text for name, text in documents.items() if name not in held_out}, held_out


def sample(documents: Mapping[str, str], sizes: Mapping[str, int]) -> str:
    """Some bytes of each kind of document, in a fixed order that depends on their names alone."""
    parts = []
    for kind, most in sizes.items():
        chosen = sorted((name for name in documents if name.startswith(f"{kind}/")), key=_number)
        text = "".join(documents[name] for name in chosen)
        parts.append(text[:most].rpartition("\n")[0] + "\n")
    return "".join(parts)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def _text(path: Path) -> str | None:
    data = path.read_bytes()
    if not 200 <= len(data) <= MOST_BYTES:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text.replace("\r\n", "\n")


def _functions(text: str) -> Iterator[dict[str, object]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if isinstance(node, ast.FunctionDef) and said:
            yield {"name": node.name, "description": said.partition("\n")[0], "parameters": _parameters(node.args)}


def _parameters(arguments: ast.arguments) -> dict[str, object]:
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args) if argument.arg != "self"]
    given = [ast.unparse(value) for value in arguments.defaults]
    required = dict.fromkeys(names)
    return {**required, **dict(zip(reversed(names), reversed(given), strict=False))}


def _calls(functions: list[dict[str, object]]) -> Iterator[str]:
    for function in functions:
        tool = {"type": "function", "function": function}
        call = {"name": function["name"], "arguments": function["parameters"]}
        yield f"<tools>\n{json.dumps(tool)}\n</tools>\n{function['description']}\n"
        yield f"<tool_call>\n{json.dumps(call)}\n</tool_call>\n"


def _topics(library: Path) -> dict[str, str]:
    path = library / "pydoc_data" / "topics.py"
    assigned = ast.parse(path.read_text("utf-8")).body[-1]
    assert isinstance(assigned, ast.Assign), f"{path} is not one table of topics"
    found: dict[str, str] = ast.literal_eval(assigned.value)
    return found
