"""Writes ``nvfp4_decoding.safetensors``: how compressed-tensors and ModelOpt themselves decode and quantise.

Nothing is decoded here: each value comes out of a function of those packages, on the CPU. To make the file again, the
same bytes as before::

    pip install compressed-tensors==0.20.1 nvidia-modelopt==0.47.0 requests torch==2.13.0
    python tests/data/make_nvfp4_decoding.py

(ModelOpt imports ``requests`` without asking for it.) Tensors; G is 6, numbers per tool:

- ``nvfp4.scales`` uint8 [16, 16] are the 256 bytes of a block scale, NaN ones included, one for each 16 columns;
  ``nvfp4.packed`` uint8 [16, 128] holds every code in every block, in an order that differs by block.
- ``divisors``, ``multipliers`` FP32 [G]: global scales of compressed-tensors and of ModelOpt, and FP8 scales. The last
  ones are powers of two and exact reciprocals of each other.
- ``compressed_tensors.bf16``, ``.f32``, ``modelopt.bf16``, ``.f32`` [G, 16, 256]: the values.
- ``fp8.data`` uint8 [16, 16], all bytes, and ``modelopt.fp8.bf16``, ``.f32`` [G, 16, 16] for ``multipliers``.
- ``matrix.NAME`` FP32 [8, 64], and ``TOOL.NAME.packed``, ``.scales`` (uint8), ``.global``: how each tool quantises it.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from safetensors.torch import save_file

OUTPUT = Path(__file__).with_name("nvfp4_decoding.safetensors")
PACKAGES = ("compressed-tensors", "nvidia-modelopt", "torch")
SCHEME = preset_name_to_scheme("NVFP4A16", ["Linear"])
GROUP = 16
E4M3 = torch.float8_e4m3fn
DIVISORS = torch.tensor([1344.7, 0.37, 18813.2, 448 * 6 / 0.0123, 448 * 6 / 3.7, 2.0**11])
MULTIPLIERS = torch.tensor([3.1e-5, 0.00731, 2.7, 0.0123 / 2688, 1.0 / 1344.7, 2.0**-11])


def every_scale_and_code() -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes ``[16, 16]`` and packed codes ``[16, 128]``."""
    block, element = torch.arange(256)[:, None], torch.arange(GROUP)
    codes = (5 * element + block) % 16
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    return torch.arange(256, dtype=torch.uint8).reshape(16, 16), pairs.to(torch.uint8).reshape(16, 128)


def decode_by_compressed_tensors(packed: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """BF16 values are those of its decompressor; FP32 values those of the same steps asked for FP32."""
    narrow, wide = [], []
    for divisor in DIVISORS.split(1):
        stored = {"weight_packed": packed, "weight_scale": scales.view(E4M3), "weight_global_scale": divisor}
        narrow.append(NVFP4PackedCompressor.decompress(stored, SCHEME)["weight"])
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
        scale = scales.view(E4M3).float()
        wide.append(dequantize(codes, scale, args=SCHEME.weights, dtype=torch.float32, global_scale=divisor))
    return {"compressed_tensors.bf16": torch.stack(narrow), "compressed_tensors.f32": torch.stack(wide)}


def decode_by_modelopt(packed: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {}
    shape = torch.Size([packed.shape[0], 2 * packed.shape[1]])
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        matrix = NVFP4QTensor(shape, dtype, packed)
        found[f"modelopt.{name}"] = torch.stack(
            [
                matrix.dequantize(scale=scales.view(E4M3), double_scale=number, block_sizes={-1: GROUP})
                for number in MULTIPLIERS
            ]
        )
        data = FP8QTensor(scales.shape, dtype, scales.view(E4M3))
        found[f"modelopt.fp8.{name}"] = torch.stack([data.dequantize(scale=number) for number in MULTIPLIERS])
    return found


def matrices() -> dict[str, torch.Tensor]:
    """What quantisers may take differently: ordinary weights, zeros, tiny blocks beside large ones, and ties."""
    generator = torch.Generator().manual_seed(20)
    normal = torch.randn(8, 64, generator=generator) * 0.02
    zeros = torch.randn(8, 64, generator=generator)
    zeros[1], zeros[2, 16:32] = 0, 0
    wide = torch.randn(8, 64, generator=generator) * 2.0 ** torch.arange(4, -28, -1).reshape(8, 4).repeat_interleave(
        16, 1
    )
    ties = torch.randint(-24, 25, [8, 64], generator=generator) / 4.0
    ties[:, ::GROUP] = 6.0  # every block's scale is 1,
    ties[0, 0] = 6.0 * 448  # and the global scale is 1 too
    return {"normal": normal, "zeros": zeros, "wide": wide, "ties": ties}


def quantise_by_compressed_tensors(name: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    divisor = generate_gparam(matrix.min(), matrix.max())
    scales, _ = compute_dynamic_scales_and_zp(matrix, SCHEME.weights, torch.nn.Module(), global_scale=divisor)
    stored = {"weight": matrix, "weight_scale": scales, "weight_global_scale": divisor}
    packed = NVFP4PackedCompressor.compress(stored, SCHEME)
    return named(f"compressed_tensors.{name}", packed["weight_packed"], packed["weight_scale"], divisor)


def quantise_by_modelopt(name: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    packed, scales, multiplier = NVFP4QTensor.quantize(matrix.clone(), GROUP)
    return named(f"modelopt.{name}", packed._quantized_data, scales, multiplier)


def named(prefix: str, packed: torch.Tensor, scales: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
    stored = scales.to(E4M3).view(torch.uint8)
    return {f"{prefix}.packed": packed, f"{prefix}.scales": stored, f"{prefix}.global": number.reshape(1)}


def main() -> None:
    scales, packed = every_scale_and_code()
    tensors = {"nvfp4.scales": scales, "nvfp4.packed": packed, "divisors": DIVISORS, "multipliers": MULTIPLIERS}
    tensors |= decode_by_compressed_tensors(packed, scales)
    tensors |= {"fp8.data": scales.clone()} | decode_by_modelopt(packed, scales)
    for name, matrix in matrices().items():
        tensors[f"matrix.{name}"] = matrix
        tensors |= quantise_by_compressed_tensors(name, matrix) | quantise_by_modelopt(name, matrix)
    versions = " ".join(f"{name}=={version(name).partition('+')[0]}" for name in PACKAGES)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, OUTPUT, metadata={"made_with": versions})


if __name__ == "__main__":
    main()
