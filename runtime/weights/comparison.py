"""How far two matrices are apart: sums over their values, a window of rows at a time.

In: matrices as stored. Out: ``Sums``, from which come relative L2 error and cosine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lynnc.runtime.weights.matrix import Matrix, decode, row_windows, select_rows

VALUES = 1 << 19
"""Values that are decoded at a time."""


@dataclass(slots=True)
class Sums:
    """Sums over values: squares of the expected ones, of the found ones, of their difference; their products."""

    elements: int = 0
    squares: float = 0.0
    found_squares: float = 0.0
    products: float = 0.0
    error: float = 0.0

    def add(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Adds the values of two tensors of one shape."""
        a, b = expected.flatten().double(), found.flatten().double()
        difference = a - b
        self.elements += a.numel()
        self.squares += float(a.dot(a))
        self.found_squares += float(b.dot(b))
        self.products += float(a.dot(b))
        self.error += float(difference.dot(difference))

    def join(self, other: Sums) -> None:
        """Adds the sums over other values."""
        self.elements += other.elements
        self.squares += other.squares
        self.found_squares += other.found_squares
        self.products += other.products
        self.error += other.error

    @property
    def relative_l2(self) -> float:
        """Norm of the difference over the norm of the expected values; 0 where these are all 0."""
        return float((self.error / self.squares) ** 0.5) if self.squares else 0.0

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two; 1 where one is all 0."""
        norm = (self.squares * self.found_squares) ** 0.5
        return self.products / norm if norm else 1.0


def compare(expected: Matrix, found: Matrix) -> tuple[bool, Sums]:
    """Whether all values are equal bit for bit, and the sums over them."""
    sums, is_exact = Sums(), True
    for window in row_windows(expected, VALUES):
        a, b = decode(select_rows(expected, window)), decode(select_rows(found, window))
        is_exact = is_exact and torch.equal(bits(a), bits(b))
        sums.add(a, b)
    return is_exact, sums


def bits(values: torch.Tensor) -> torch.Tensor:
    """Bytes, so that NaN equals itself and -0.0 does not equal 0.0."""
    return values.contiguous().view(torch.uint8)
