"""Sizes that depend on the rows T of a step and the context S, as text that needs no sympy to evaluate.

In: text such as ``floor(T/16 + 15/16)*3``. Out: an integer for given T and S. Only numbers, the two names, ``+ - * /
**``, ``floor``, ``Max`` and ``Min`` are understood; everything is exact.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import floor
from types import MappingProxyType

from lynnc.errors import PlanError

Dimension = int | str
"""A size: a number, or text in T and S."""

_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.Pow: lambda base, power: base ** int(power),
    }
)
_CALLS: Mapping[str, Callable[..., Fraction]] = MappingProxyType(
    {"floor": lambda x: Fraction(floor(x)), "Max": max, "Min": min}
)


def evaluate(dimension: Dimension, rows: int = 0, context: int = 0) -> int:
    """The size for T = ``rows`` and S = ``context``; PlanError if the text is not understood or not whole."""
    if isinstance(dimension, int):
        return dimension
    try:
        value = _value(ast.parse(dimension, mode="eval").body, {"T": Fraction(rows), "S": Fraction(context)})
    except (SyntaxError, KeyError, ZeroDivisionError, TypeError) as error:
        raise PlanError(f"The size {dimension!r} is not understood ({error}): compile the plan again.") from error
    if value.denominator != 1:
        raise PlanError(
            f"The size {dimension!r} is {value} for T={rows}, S={context}, not whole: compile the plan again."
        )
    return int(value)


def _value(node: ast.expr, names: Mapping[str, Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=name), args=args):
            return _CALLS[name](*(_value(arg, names) for arg in args))
        case _:
            raise KeyError(ast.dump(node))
