"""Checkpoints that are broken or contradict themselves: each refused, with the tensor and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Written, edit_json, edit_tensors, write_checkpoint
from reference import UNPRUNED, Case
from safetensors.torch import save_file
from storedformats import Flavour, Tensors

from lynnc.errors import WeightError
from lynnc.modelfile import load_model
from lynnc.runtime.checkpoints.source import Source, open_source
from lynnc.runtime.weights.matrix import decode
from lynnc.tensors import Format

FULL, TIED = Case("tiny-full"), Case("tiny-dense", "tied", tied=True)
PLAIN, FUSED = Flavour(), Flavour(fused=True)
PACKED, LYNN = Flavour("compressed-tensors"), Flavour("lynn-v1", fused=True)
OPT, FP8 = Flavour("modelopt"), Flavour("modelopt", fp8=("attention_in",))
HEAD, Q = "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"
UP, DOWN = (f"model.layers.1.mlp.experts.2.{part}_proj.weight" for part in ("up", "down"))
FUSED_UP, FUSED_DOWN = (f"model.layers.1.mlp.experts.{part}_proj" for part in ("gate_up", "down"))
NAN, INF, BF16 = float("nan"), float("inf"), torch.bfloat16


def opened(written: Written, **changes: Any) -> Source:
    return open_source(written.folder, replace(written.spec, **changes))


@dataclass(frozen=True)
class Broken:
    """A change of one tensor of a flavour of tiny-full, and what reading ``name`` says of it."""

    label: str
    flavour: Flavour
    name: str
    tensor: str
    change: Callable[[torch.Tensor], torch.Tensor | None]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return self.label


def put(place: tuple[int, ...], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sets one element; a byte where the tensor is E4M3."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = (tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor).clone()
        changed[place] = value
        return changed.view(tensor.dtype)

    return change


def const(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.float().to(dtype)


def repeated(*times: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.repeat(*times)


def cut(rows: int | None, columns: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor[:rows, :columns]


def gone(_tensor: torch.Tensor) -> None:
    return None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.view(torch.uint8) ^ 0x80).view(tensor.dtype)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten()


def twice(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.view(torch.uint8)] * 2).view(tensor.dtype)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    bits = torch.nn.functional.pad(tensor.view(torch.uint8), (0, -tensor.shape[1] % 4, 0, -tensor.shape[0] % 128))
    return bits.view(tensor.dtype)


BROKEN = (
    Broken("nan-scale", PACKED, Q, f"{Q}_scale", put((3, 5), 0x7F), (f"{Q}_scale is NaN", "row 3, column 5")),
    Broken("negative-nan", OPT, Q, f"{Q}_scale", put((9, 0), 0xFF), (f"{Q}_scale is NaN", "row 9, column 0")),
    Broken("fp8-nan", FP8, Q, Q, put((2, 77), 0xFF), (f"{Q} is NaN", "row 2, column 77")),
    Broken("fp16-nan", LYNN, Q, f"{Q}.scale", put((1, 2), NAN), (f"{Q}.scale is not finite", "row 1, column 2")),
    Broken("fp16-inf", LYNN, Q, f"{Q}.scale", put((1, 2), INF), (f"{Q}.scale is not finite",)),
    Broken("fp16-negative", LYNN, Q, f"{Q}.scale", put((4, 3), -1), (f"{Q}.scale is negative", "row 4, column 3")),
    Broken("global-nan", PACKED, Q, f"{Q}_global_scale", const(NAN), (f"{Q}_global_scale is nan", "above zero")),
    Broken("global-inf", OPT, Q, f"{Q}_scale_2", const(INF), (f"{Q}_scale_2 is inf", "above zero")),
    Broken("global-zero", PACKED, Q, f"{Q}_global_scale", const(0), (f"{Q}_global_scale is 0.0", "above zero")),
    Broken("global-negative", LYNN, Q, f"{Q}.global_scale", const(-2), (f"{Q}.global_scale is -2.0", "above zero")),
    Broken("tiny-divisor", PACKED, Q, f"{Q}_global_scale", const(1e-40), ("too small a divisor",)),
    Broken("large", PACKED, Q, f"{Q}_global_scale", const(1e-37), (f"{Q}_global_scale makes values", "FP32 hold")),
    Broken("large-factor", OPT, Q, f"{Q}_scale_2", const(1e37), (f"{Q}_scale_2 makes values", "FP32 hold")),
    Broken("fp8-large", FP8, Q, f"{Q}_scale", const(1e37), (f"{Q}_scale makes values", "FP32 hold")),
    Broken("flushed", OPT, Q, f"{Q}_scale_2", const(1e-38), (f"{Q}_scale_2 is 9.99", "which is subnormal", "GPUs")),
    Broken("large-divisor", PACKED, Q, f"{Q}_global_scale", const(2e38), ("whose reciprocal is subnormal",)),
    Broken("fp8-flushed", FP8, Q, f"{Q}_scale", const(1e-45), (f"{Q}_scale is", "which is subnormal")),
    Broken("fp8-zero", FP8, Q, f"{Q}_scale", const(0), (f"{Q}_scale is 0.0", "above zero")),
    Broken("no-global", PACKED, Q, f"{Q}_global_scale", gone, (f"{Q}_packed without {Q}_global_scale",)),
    Broken("no-scale", OPT, Q, f"{Q}_scale", gone, (f"{Q} without {Q}_scale",)),
    Broken("no-factor", OPT, Q, f"{Q}_scale_2", gone, (f"{Q} without {Q}_scale_2",)),
    Broken("no-fp8-scale", FP8, Q, f"{Q}_scale", gone, (f"{Q} without {Q}_scale",)),
    Broken("no-data", PACKED, Q, f"{Q}_packed", gone, (f"lacks {Q}",)),
    Broken("lynn-no-scale", LYNN, Q, f"{Q}.scale", gone, (f"lacks {Q}.scale", "manifest.json names for")),
    Broken("two-globals", OPT, Q, f"{Q}_scale_2", repeated(2), (f"{Q}_scale_2 has the shape [2]", "one scale")),
    Broken("fp8-channels", FP8, Q, f"{Q}_scale", repeated(256, 1), ("shape [256, 1]", "channel or block")),
    Broken("bf16-global", PACKED, Q, f"{Q}_global_scale", to(BF16), (f"{Q}_global_scale is of type BF16",)),
    Broken("bf16-scale", PACKED, Q, f"{Q}_scale", to(BF16), (f"{Q}_scale is of type BF16", "F8_E4M3")),
    Broken("e8m0-scale", OPT, Q, f"{Q}_scale", as_bytes, (f"{Q}_scale is of type U8",)),
    Broken("f32-scale", LYNN, Q, f"{Q}.scale", to(torch.float32), (f"{Q}.scale is of type F32", "F16")),
    Broken("i8-codes", PACKED, Q, f"{Q}_packed", to(torch.int8), (f"{Q}_packed is of type I8",)),
    Broken("i8-plain", OPT, HEAD, HEAD, to(torch.int8), ("lm_head.weight is of type I8",)),
    Broken("e5m2", OPT, Q, Q, to(torch.float8_e5m2), (f"{Q} is of type F8_E5M2", "nothing says how")),
    Broken("more-scales", OPT, Q, f"{Q}_scale", twice, (f"{Q}_scale has the shape [512, 8]", "one scale for each 16")),
    Broken("fewer-scales", PACKED, Q, f"{Q}_scale", cut(None, 4), ("the shape [256, 4]", "[256, 8] is needed")),
    Broken("flat-scales", PACKED, Q, f"{Q}_scale", flat, ("has the shape [2048]",)),
    Broken("odd", PACKED, Q, f"{Q}_packed", cut(None, 63), (f"{Q}_packed holds rows of 126 columns", "multiple")),
    Broken("flat-codes", PACKED, Q, f"{Q}_packed", flat, ("shape [16384]", "two dimensions")),
    Broken("rank-3", OPT, Q, Q, lambda t: t[None], (f"{Q} has the shape [1, 256, 64]", "two dimensions")),
    Broken("lynn-rows", LYNN, DOWN, f"{FUSED_DOWN}.packed", cut(-1, None), ("shape [895, 32]", "[896, 32] is needed")),
    Broken("fused-rank", FUSED, DOWN, FUSED_DOWN, lambda t: t.flatten(0, 1), ("[experts, rows, columns]",)),
    Broken("fused-odd", FUSED, UP, FUSED_UP, lambda t: t[:, :-1], ("[experts, gate and up rows, columns]",)),
    Broken("plain-rank", PLAIN, Q, Q, lambda t: t[None, None], (f"{Q} has the shape [1, 1, 256, 128]",)),
    Broken("missing", PLAIN, Q, Q, gone, (f"lacks {Q}", "model file of this checkpoint")),
    Broken("missing-expert", PLAIN, DOWN, DOWN, gone, (f"lacks {DOWN}", "7 experts in layer 1")),
    Broken("no-head", PLAIN, HEAD, HEAD, gone, ("lacks lm_head.weight", "tied_embeddings")),
)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Flavour], tuple[Written, Mapping[str, bytes]]]:
    """A checkpoint of tiny-full in each flavour, written once, and its files."""
    known: dict[Flavour, tuple[Written, dict[str, bytes]]] = {}

    def make(flavour: Flavour) -> tuple[Written, Mapping[str, bytes]]:
        if flavour not in known:
            written = write_checkpoint(tmp_path_factory.mktemp("flavour") / "c", FULL, flavour)
            known[flavour] = written, {path.name: path.read_bytes() for path in written.folder.iterdir()}
        return known[flavour]

    return make


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_broken_tensors(broken: Broken, contents: Callable[[Flavour], Any], tmp_path: Path) -> None:
    written, files = contents(broken.flavour)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)

    def change(tensors: Tensors) -> None:
        changed = broken.change(tensors.pop(broken.tensor))
        if changed is not None:
            tensors[broken.tensor] = changed

    with closing(open_source(tmp_path, written.spec)) as source:
        source.read(source.locate(broken.name))
    edit_tensors(tmp_path, change)
    with pytest.raises(WeightError) as found, closing(open_source(tmp_path, written.spec)) as source:
        source.read(source.locate(broken.name))
    for word in broken.words:
        assert word in str(found.value)


def test_values_up_to_the_limit_are_read(tmp_path: Path) -> None:
    """What is refused is too large; FP16 scales and a divisor that only together are."""
    written = write_checkpoint(tmp_path / "c", FULL, LYNN)
    for scale, divisor, is_read in ((65504.0, 1.2e-33, True), (65504.0, 1.1e-33, False), (0.0, 1e-36, True)):

        def change(tensors: Tensors, scale: float = scale, divisor: float = divisor) -> None:
            tensors[f"{Q}.scale"].fill_(scale)
            tensors[f"{Q}.global_scale"].fill_(divisor)
            tensors[f"{Q}.packed"].fill_(0x77)

        edit_tensors(written.folder, change)
        with closing(opened(written)) as source:
            located = source.locate(Q)
            if is_read:
                assert decode(source.read(located)).isfinite().all()
                continue
            with pytest.raises(WeightError, match=r"q_proj\.weight\.global_scale makes values of up to 3\.57e\+38"):
                source.read(located)


def test_negative_e4m3_scales_are_read(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", FULL, PACKED)
    with closing(opened(written)) as source:
        before = decode(source.read(source.locate(Q)))
    edit_tensors(written.folder, lambda t: t.update({f"{Q}_scale": negated(t[f"{Q}_scale"])}))
    with closing(opened(written)) as source:
        assert torch.equal(decode(source.read(source.locate(Q))), -before)


def test_swizzled_scales_are_explained(tmp_path: Path) -> None:
    """Rows padded to 128 and groups to 4, as one engine's kernels read them."""
    written = write_checkpoint(tmp_path / "c", FULL, OPT)
    scale = "model.layers.0.mlp.experts.0.gate_proj.weight_scale"  # [64, 8]
    edit_tensors(written.folder, lambda tensors: tensors.update({scale: padded(tensors[scale])}))
    with pytest.raises(WeightError, match=r"\[128, 8\] where \[64, 8\] is needed: .*padded.*swizzled"):
        opened(written).locate(scale.removesuffix("_scale"))
    edit_tensors(written.folder, lambda tensors: tensors.update({scale: tensors[scale].view(256, 4)}))
    with pytest.raises(WeightError, match=r"\[256, 4\] where \[64, 8\] is needed, one scale for each"):
        opened(written).locate(scale.removesuffix("_scale"))


def test_experts_must_be_as_many_as_the_router_has_rows(tmp_path: Path) -> None:
    router, last = "model.layers.2.mlp.gate.weight", UNPRUNED - 1
    for number, fused in enumerate((False, True)):
        written = write_checkpoint(tmp_path / str(number), FULL, Flavour(fused=fused))
        assert opened(written).experts(2) == UNPRUNED
        edit_tensors(written.folder, lambda tensors: tensors.update({router: tensors[router][:last]}))
        words = (
            r"experts\.\w+ holds .*router has 6 rows" if fused else r"has expert 6 in layer 2, whose router .* 6 rows"
        )
        with pytest.raises(WeightError, match=words):
            opened(written).experts(2)
    written = write_checkpoint(tmp_path / "less", FULL)
    edit_tensors(written.folder, lambda t: [t.pop(name) for name in list(t) if "layers.2.mlp.experts.3." in name])
    with pytest.raises(WeightError, match="lacks expert 3 in layer 2"):
        opened(written).experts(2)


def test_an_expert_that_fused_tensors_lack(tmp_path: Path) -> None:
    source = opened(write_checkpoint(tmp_path / "c", FULL, LYNN))
    with pytest.raises(WeightError, match=r"holds 7 experts and expert 7 is asked for"):
        source.locate("model.layers.0.mlp.experts.7.up_proj.weight")


@pytest.mark.parametrize(
    ("flavour", "added", "words"),
    [
        (Flavour(), "model.language_model.norm.weight", "the same tensor as"),
        (Flavour(), "model.language_model.layers.9.input_layernorm.weight", "holds tensors as"),
        (Flavour(), "model.lm_head.weight", "holds lm_head.weight and model.lm_head.weight"),
        (Flavour(), FUSED_DOWN, "experts of layer 1 twice"),
        (Flavour(fused=True), f"{FUSED_DOWN}.weight", f"{FUSED_DOWN}.weight"),
        (PACKED, Q, f"holds {Q} twice, plain and as {Q}_packed"),
        (LYNN, Q, f"holds {Q} twice, plain and as {Q}.packed"),
    ],
)
def test_two_of_the_same(
    flavour: Flavour, added: str, words: str, contents: Callable[[Flavour], Any], tmp_path: Path
) -> None:
    written, files = contents(flavour)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    edit_tensors(tmp_path, lambda tensors: tensors.update({added: torch.ones(7, 2, 2)}))
    with pytest.raises(WeightError) as found:
        open_source(tmp_path, written.spec)
    assert words in str(found.value)


def test_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"transformer.h.0.attn.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"no text model lynnc knows, but transformer\.h\.0\.attn\.weight"):
        open_source(tmp_path, load_model("tiny-full"))


def test_what_is_tied(tmp_path: Path) -> None:
    """A head beside tied embeddings is left out if it is the same table, and refused if not."""
    written = write_checkpoint(tmp_path / "c", TIED)
    source = opened(written)
    source.check_tied()
    assert not source.skipped() and source.formats_by_class()["lm_head"] == {Format.BF16}
    with pytest.raises(WeightError, match=r"lacks lm_head\.weight and the model does not tie it"):
        opened(written, tied_embeddings=False).locate("lm_head.weight")
    table = written.values["model.embed_tokens.weight"].bfloat16()
    edit_tensors(written.folder, lambda tensors: tensors.update({"lm_head.weight": table.clone()}))
    source = opened(written)
    source.check_tied()
    assert list(source.skipped()) == ["lm_head.weight"] and "embedding" in source.skipped()["lm_head.weight"]
    for other in (table + 1, table.float(), table[:-1]):
        edit_tensors(written.folder, lambda tensors, other=other: tensors.update({"lm_head.weight": other}))
        with pytest.raises(WeightError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            opened(written).check_tied()
    opened(written, tied_embeddings=False).check_tied()


def test_a_quantised_tensor_that_is_ignored(tmp_path: Path) -> None:
    """Known from the field: lists in fused spelling that no longer fit what was quantised."""
    for number, (flavour, file, ignored) in enumerate(
        (
            (PACKED, "config.json", "re:.*qkv_proj"),
            (PACKED, "config.json", Q.removesuffix(".weight")),
            (Flavour("modelopt", metadata="hf_quant_config.json"), "hf_quant_config.json", "*.self_attn*"),
        )
    ):
        written = write_checkpoint(tmp_path / str(number), FULL, flavour)

        def ignore(content: dict[str, Any], entry: str = ignored) -> None:
            section = content.get("quantization_config") or content["quantization"]
            section["ignore" if "ignore" in section else "exclude_modules"].append(entry)

        opened(written).locate(Q)
        edit_json(written.folder / file, ignore)
        with pytest.raises(WeightError, match=r"q_proj.* is stored as nvfp4, but .* among the modules that are not"):
            opened(written).locate(Q)


def test_another_format_than_declared(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", FULL, FP8)
    change = {Q.removesuffix(".weight"): {"quant_algo": "NVFP4", "group_size": 16}}
    for file, section in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        edit_json(written.folder / file, lambda content, s=section: content[s]["quantized_layers"].update(change))
    with pytest.raises(WeightError, match=r"q_proj\.weight is stored as fp8, but .* declares .* as nvfp4"):
        opened(written).locate(Q)
