"""A small kernel for the tests of compilation; text is read from this file, never imported by the tests."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def scaled(a, b):
    return a * b + a


@triton.jit
def kernel(x, BLOCK: tl.constexpr, w, out, rows, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < rows
    a = tl.load(x + index, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(w + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + index, scaled(a, b).to(tl.bfloat16), mask=mask)
