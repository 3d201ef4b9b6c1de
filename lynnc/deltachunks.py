"""The gated delta rule by chunks of rows, in torch: the meaning of DeltaChunk and DeltaScan.

In: q, k [T, H, K] and v [T, H, V] as the convolution left them, one key per value head; beta, g [T, H]; position and
slot of each row. Chunks are fixed multiples of rows of the step. A *run* is rows of one slot that follow each other;
rows of different runs do not meet. Out: what ``lynnc.promptops`` says of the two ops. Together they are GatedDelta.

Example::

    chunks = delta_chunk(q, k, beta, g, [(0, 1), (1, 1)], chunk=64)
    out = delta_scan((q, k, v), chunks, [(0, 1), (1, 1)], state)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

NORM_EPS = 1e-6

Places = Sequence[tuple[int, int]]
"""Position and slot of each row."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """inverse and scores FP32 [T, H, chunk], scales FP32 [T, H, 4]: see ``lynnc.promptops.DeltaChunk``."""

    inverse: torch.Tensor
    scores: torch.Tensor
    scales: torch.Tensor


def runs(places: Places) -> Iterator[tuple[int, int]]:
    """First row and end of every run that is not padding."""
    begin = 0
    while begin < len(places):
        position, slot = places[begin]
        end = begin + 1
        while end < len(places) and position >= 0 and places[end][1] == slot and places[end][0] > 0:
            end += 1
        if position >= 0:
            yield begin, end
        begin = end


def pieces(begin: int, end: int, chunk: int) -> Iterator[tuple[int, int]]:
    """The parts of a run that lie in different chunks."""
    while begin < end:
        until = min(end, (begin // chunk + 1) * chunk)
        yield begin, until
        begin = until


def delta_chunk(
    q: torch.Tensor, k: torch.Tensor, beta: torch.Tensor, g: torch.Tensor, places: Places, chunk: int
) -> Chunks:
    """Every piece of a run within a chunk by itself; ``g`` is cut to what counts."""
    rows, heads, key_dim = q.shape
    squares = torch.zeros(2, rows, heads, chunk)
    scales = torch.zeros(rows, heads, 4)
    q_norm, k_norm = (torch.rsqrt(x.square().sum(-1) + NORM_EPS) for x in (q, k))
    q_norm = q_norm * key_dim**-0.5
    for piece in (slice(*at) for run in runs(places) for at in pieces(*run, chunk)):
        decay = g[piece].cumsum(0)
        columns = slice(piece.start % chunk, piece.start % chunk + len(decay))
        weight = (decay[:, None] - decay[None]).exp().permute(2, 0, 1).tril() * k_norm[piece].T[:, None]
        norms = (beta[piece] * k_norm[piece]).T[:, :, None]
        lower = torch.einsum("ihk,jhk->hij", k[piece], k[piece]) * weight * norms
        system = lower.tril(-1) + torch.eye(len(decay))
        right = torch.diag_embed(beta[piece].T)
        inverse = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        scores = torch.einsum("ihk,jhk->hij", q[piece], k[piece]) * weight * q_norm[piece].T[:, :, None]
        squares[0, piece, :, columns] = inverse.transpose(0, 1)
        squares[1, piece, :, columns] = scores.transpose(0, 1)
        grown, left = decay.exp(), (decay[-1] - decay).exp()
        own = (grown * k_norm[piece], grown * q_norm[piece], left * k_norm[piece], grown[-1].expand_as(grown))
        scales[piece] = torch.stack(own, dim=-1)
    return Chunks(squares[0], squares[1], scales)


def delta_scan(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], chunks: Chunks, places: Places, state: torch.Tensor
) -> torch.Tensor:
    """Outputs [T, H, V]; ``state`` [slots, H, K, V] is updated in place."""
    q, k, v = qkv
    chunk = chunks.inverse.shape[2]
    out = torch.zeros_like(v)
    for begin, end in runs(places):
        position, slot = places[begin]
        s = state[slot] if position > 0 else torch.zeros_like(state[slot])
        for piece in (slice(*at) for at in pieces(begin, end, chunk)):
            columns = slice(piece.start % chunk, piece.start % chunk + piece.stop - piece.start)
            scales = chunks.scales[piece]
            left = v[piece] - scales[:, :, 0, None] * torch.einsum("ihk,hkv->ihv", k[piece], s)
            change = torch.einsum("ihj,jhv->ihv", chunks.inverse[piece, :, columns], left)
            found = scales[:, :, 1, None] * torch.einsum("ihk,hkv->ihv", q[piece], s)
            out[piece] = found + torch.einsum("ihj,jhv->ihv", chunks.scores[piece, :, columns], change)
            new = torch.einsum("ihk,ihv->hkv", k[piece], scales[:, :, 2, None] * change)
            s = scales[0, :, 3, None, None] * s + new
        state[slot] = s
    return out
