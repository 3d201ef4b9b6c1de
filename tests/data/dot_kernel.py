"""A matrix product whose pipeline stages fill shared memory; for the tests of compilation."""

import triton
import triton.language as tl


@triton.jit
def kernel(a, b, out, K, TILE: tl.constexpr):
    row = tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, K, TILE):
        left = tl.load(a + row[:, None] * K + k + row[None, :])
        right = tl.load(b + row[None, :] * K + k + row[:, None])
        total = tl.dot(left, right, total)
    tl.store(out + row[:, None] * TILE + row[None, :], total)
