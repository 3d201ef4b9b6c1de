"""Digests of what was read from a checkpoint, so that a packed folder can be told to belong to it.

In: matrices as they are read. Out: XXH3-128 for each; a weight's is that of its parts' in order, a checkpoint's SHA-256
over all weights.
The digest is of contents: the same tensors in other shards have the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256

import torch
import xxhash

from lynnc.runtime.weights.matrix import Fp8Matrix, Matrix, PlainMatrix


def matrix_digest(matrix: Matrix) -> bytes:
    """XXH3-128 of the types, shapes and stored bits of a matrix."""
    digest = xxhash.xxh3_128()
    for tensor in _stored(matrix):
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(stored_bytes(tensor))
    return digest.digest()


def stored_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's elements in order, without a copy where it lies so on the CPU."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return memoryview(flat.numpy().data)


def _stored(matrix: Matrix) -> tuple[torch.Tensor, ...]:
    if isinstance(matrix, PlainMatrix):
        return (matrix.values,)
    if isinstance(matrix, Fp8Matrix):
        return matrix.data, matrix.scale.reshape(1)
    return matrix.words, matrix.scales, matrix.global_scale.reshape(1)


def weight_digest(parts: Iterable[bytes]) -> str:
    """XXH3-128 over the digests of the matrices that make a weight, in the order of its rows."""
    return xxhash.xxh3_128(b"".join(parts)).hexdigest()


def source_digest(weights: Mapping[str, str]) -> str:
    """SHA-256 over the digests of what was read for each weight."""
    return sha256("".join(f"{name} {weights[name]}\n" for name in sorted(weights)).encode()).hexdigest()
