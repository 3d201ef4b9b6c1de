"""The command line: what commands print, exit codes, and one clear line for every kind of bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import lynnc.compile
from lynnc.cli.main import COMMANDS, cli
from lynnc.errors import CompileError
from lynnc.modelfile import dump_model, load_model, shipped_models
from lynnc.plan import SCHEMA
from lynnc.planfile import load_plan
from lynnc.summary import summarize
from lynnc.tools import Gpu, Tools

LYNNC = [sys.executable, "-P", "-m", "lynnc.cli"]
COMPILE = ("compile", "tiny-full", "--target", "sm_90", "--programs", "decode/1")


def lynnc_cli(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def complaint(result: Result, code: int = 2) -> str:
    """The one line on standard error of a command that failed as it should."""
    assert result.exit_code == code, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("lynnc: ") and result.stdout == ""
    return lines[0]


@pytest.fixture(scope="session")
def store(kernels_of_this_run) -> Path:
    return kernels_of_this_run


@pytest.fixture(scope="session")
def compiled(tmp_path_factory, store) -> Path:
    """A plan of one program, with PTX; never changed by a test."""
    folder = tmp_path_factory.mktemp("plan") / "tiny.plan"
    result = lynnc_cli(*COMPILE, "--ptx", "--store", store, "-o", folder)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def plan(compiled, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(compiled, tmp_path / "copy.plan"))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    for module in ("lynnc.cli.parameters", "lynnc.doctor"):
        __import__(module)
        monkeypatch.setattr(f"{module}.detect_gpu", lambda: None)


# The group


def test_help_names_every_command_without_importing_any():
    code = (
        "import sys\nfrom lynnc.cli.main import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = ('sympy', 'rich', 'jinja2', 'triton', 'torch', 'yaml', 'lynnc.compiler')\n"
        "print([module for module in heavy if module in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(name in found and entry.help in found for name, entry in COMMANDS.items())
    assert found.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_has_an_example(name):
    result = lynnc_cli(name, "--help")
    assert result.exit_code == 0
    assert "Example:" in result.stdout and "lynnc " in result.stdout


def test_version():
    assert lynnc_cli("--version").stdout == f"lynnc {lynnc.__version__}\n"


def test_no_command_imports_torch_or_triton(store, compiled, tmp_path):
    arguments = [*COMPILE, "--store", store, "-o", tmp_path / "p.plan"]
    code = (
        "import sys\nfrom lynnc.cli.main import cli\n"
        f"for arguments in ({list(map(str, arguments))!r}, ['doctor'], ['explain', {str(compiled)!r}]):\n"
        "    try: cli.main(arguments)\n    except SystemExit as end: assert end.code == 0, end\n"
        "print([m for m in ('triton', 'torch') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.splitlines()[-1] == "[]"


def test_debug_shows_the_error_itself():
    result = lynnc_cli("--debug", "show", "nothing")
    assert type(result.exception).__name__ == "ModelError"


def test_broken_pipe_is_quiet():
    show = subprocess.Popen(
        [*LYNNC, "show", "qwen3.6-35b-a3b"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert show.stdout and show.stderr
    assert show.stdout.readline().startswith("graph qwen3.6-35b-a3b")
    show.stdout.close()
    assert show.stderr.read() == ""
    assert show.wait() == 0


# compile


def test_compile_reports_kernels_programs_precision_and_sizes(compiled, store, tmp_path):
    result = lynnc_cli(*COMPILE, "--store", store, "-o", tmp_path / "p.plan")
    assert result.exit_code == 0
    for words in ("AttentionStep", "spills", "activations meet weights in bf16", "nvfp4", "0 compiled", "workspace"):
        assert words in result.stdout


def test_compile_is_the_same_each_time(compiled, store, tmp_path):
    lynnc_cli(*COMPILE, "--ptx", "--store", store, "-o", tmp_path / "p.plan")
    names = sorted(path.relative_to(compiled) for path in compiled.rglob("*"))
    assert names == sorted(path.relative_to(tmp_path / "p.plan") for path in (tmp_path / "p.plan").rglob("*"))
    for name in names:
        if (compiled / name).is_file():
            assert (compiled / name).read_bytes() == (tmp_path / "p.plan" / name).read_bytes()


def test_compile_json(compiled, store, tmp_path):
    result = lynnc_cli(*COMPILE, "--store", store, "-o", tmp_path / "p.plan", "--json")
    document = json.loads(result.stdout)
    plan = load_plan(tmp_path / "p.plan", "sm_90a")
    assert document["plan"] == str(tmp_path / "p.plan") and document["compiled"] == 0
    assert sum(row["launches"]["decode/1"] for row in document["kernels"]) == len(plan.programs["decode/1"].launches)
    assert document["activations"] == "bf16"
    assert {row["tensor_class"]: row["formats"] for row in document["precision"]}["experts"] == ["nvfp4"]
    state, context = document["state"], load_model("tiny-full").max_context
    assert state["bytes_at_max"] * 1000 == state["fixed_bytes"] * 1000 + state["bytes_per_1k"] * context


def test_default_output_is_named_after_model_and_device(store, compiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lynnc_cli(*COMPILE, "--store", store).exit_code == 0
    assert (
        lynnc_cli("compile", "tiny-full", "--device", "h200", "--programs", "decode/1", "--store", store).exit_code == 0
    )
    assert load_plan("tiny-full.sm_90.plan").device == ""
    assert load_plan("tiny-full.h200.plan").device == "h200"


def test_gpu_of_this_machine_is_used_and_named(store, compiled, tmp_path, monkeypatch):
    gpu = Gpu("NVIDIA H100", 90, 132, 80 << 30, 50 << 20, "13.0", 1)
    monkeypatch.setattr("lynnc.cli.parameters.detect_gpu", lambda: gpu)
    arguments = ("compile", "tiny-full", "--programs", "decode/1", "--store", store, "-o", tmp_path / "p.plan")
    result = lynnc_cli(*arguments)
    assert result.exit_code == 0 and "sm_90, the architecture of this machine's NVIDIA H100" in result.stderr
    assert load_plan(tmp_path / "p.plan").arch == "sm_90a"


def test_options_are_kept_in_the_plan(store, compiled, tmp_path):
    arguments = ("--without", "fuse_norm,fuse_residual", "--knob", "add.num_warps=2", "--prefill-rows", 64)
    assert lynnc_cli(*COMPILE, *arguments, "--store", store, "-o", tmp_path / "p.plan").exit_code == 0
    options = load_plan(tmp_path / "p.plan").options
    assert options.without == ("fuse_norm", "fuse_residual")
    assert options.knobs == {"add": {"num_warps": 2}} and options.prefill_rows == 64
    shown = lynnc_cli("show", tmp_path / "p.plan", "--stage", "choices", "--op", "*mixer_add").stdout
    assert shown and all("num_warps=2" in line and "(option)" in line for line in shown.splitlines())


def test_model_file_of_the_models_folder_may_be_written_literally(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in shipped_models():
        assert lynnc_cli("show", f"models/{name}.yaml").exit_code == 0


def test_packed_folder_stands_for_the_model_that_it_holds(tmp_path):
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "model.yaml").write_text(dump_model(load_model("tiny-dense")))
    assert lynnc_cli("show", packed).stdout == lynnc_cli("show", "tiny-dense").stdout != ""
    on = ("--device", "spark")
    assert lynnc_cli("explain", packed, *on).stdout == lynnc_cli("explain", "tiny-dense", *on).stdout != ""


def test_knob_that_no_program_uses_is_named(store, compiled, tmp_path):
    arguments = ("--knob", "gemm.BLOCK_M=32", "--store", store, "-o", tmp_path / "p.plan")
    result = lynnc_cli(*COMPILE, *arguments)
    assert result.exit_code == 0 and "no effect" in result.stderr and "gemm" in result.stderr


def test_spills_in_decode_are_warned_of(store, compiled, tmp_path, monkeypatch):
    def spilling(*arguments):
        found = summarize(*arguments)
        return replace(found, kernels=(replace(found.kernels[0], spill_bytes=48), *found.kernels[1:]))

    monkeypatch.setattr("lynnc.cli.compile.summarize", spilling)
    result = lynnc_cli(*COMPILE, "--store", store, "-o", tmp_path / "p.plan")
    assert result.exit_code == 0
    assert "warning" in result.stderr and "Embed (embed, 48 bytes a thread)" in result.stderr


def test_kernel_that_does_not_compile_gives_1(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise CompileError("Kernel X (template y, target sm_90)\ndoes not compile.")

    monkeypatch.setattr("lynnc.cli.compile.compile_model", refuse)
    line = complaint(lynnc_cli(*COMPILE, "-o", tmp_path / "p.plan"), code=1)
    assert line == "lynnc: Kernel X (template y, target sm_90) does not compile."


@dataclass(frozen=True)
class Bad:
    name: str
    arguments: tuple[object, ...]
    words: tuple[str, ...]


LARGE = ("BLOCK_M=128", "BLOCK_N=256", "BLOCK_K=128", "num_stages=4")
LARGE_TILES = tuple(word for knob in LARGE for word in ("--knob", f"gemm.{knob}"))
SHOW_90 = ("show", "tiny-moe", "--target", "sm_90", "--stage")
BAD = (
    Bad("command", ("complie",), ("no command complie", "Did you mean compile?")),
    Bad("option", ("compile", "tiny-moe", "--tragt", "sm_90"), ("--tragt", "lynnc compile --help")),
    Bad("no model", ("compile",), ("MODEL", "lynnc compile --help")),
    Bad("model", ("compile", "tiny-mo", "--target", "sm_90"), ("tiny-mo ", "tiny-moe")),
    Bad("long model", ("compile", "m" * 300, "--target", "sm_90"), ("neither a shipped model nor the path",)),
    Bad("long subject", ("explain", "m" * 300, "--device", "h200"), ("neither a shipped model nor the path",)),
    Bad("model path", ("compile", "no/such.yaml", "--target", "sm_90"), ("no/such.yaml", "no such file")),
    Bad("target", ("compile", "tiny-moe", "--target", "sm_91"), ("sm_91", "sm_90")),
    Bad("device", ("compile", "tiny-moe", "--device", "h20"), ("h20", "h200")),
    Bad("disagree", ("compile", "tiny-moe", "--target", "sm_90", "--device", "spark"), ("disagree", "sm_121")),
    Bad("neither", ("compile", "tiny-moe"), ("--target", "--device")),
    Bad("pass", (*COMPILE, "--without", "fuse_nrom"), ("fuse_nrom", "fuse_norm")),
    Bad("knob form", (*COMPILE, "--knob", "num_warps=4"), ("KERNEL.NAME=VALUE",)),
    Bad("kernel", (*COMPILE, "--knob", "liner.num_warps=4"), ("liner", "linear")),
    Bad("knob", (*COMPILE, "--knob", "linear.num_wraps=4"), ("num_wraps", "num_warps")),
    Bad("knob value", (*COMPILE, "--knob", "linear.num_warps=3"), ("num_warps", "1, 2, 4, 8, 16")),
    Bad("knob text", (*COMPILE, "--knob", "linear.num_warps=four"), ("num_warps", "1, 2, 4, 8, 16")),
    Bad("knob twice", (*COMPILE, "--knob", "add.BLOCK=64", "--knob", "add.BLOCK=128"), ("twice",)),
    Bad("shared memory", ("compile", "tiny-full", "--device", "spark", *LARGE_TILES), ("shared memory", "sm_121")),
    Bad("program", (*COMPILE[:-1], "decode/9"), ("decode/9", "decode/8")),
    Bad("program twice", (*COMPILE[:-1], "decode/1,decode/1"), ("twice",)),
    Bad("no program", (*COMPILE[:-1], ""), ("no program",)),
    Bad("rows", (*COMPILE, "--prefill-rows", "0"), ("--prefill-rows",)),
    Bad("op", (*SHOW_90, "fused", "--op", "layers.0.delt"), ("layers.0.delt", "layers.0.delta")),
    Bad("op glob", (*SHOW_90, "choices", "--op", "layers.9.*"), ("layers.9.*", "nearest")),
    Bad("show program", (*SHOW_90, "model", "--program", "decode/0"), ("decode/0",)),
    Bad("show target", ("show", "tiny-moe", "--stage", "source"), ("--target", "--device")),
    Bad("stage", (*SHOW_90, "sauce"), ("sauce", "lynnc show --help")),
    Bad("explain device", ("explain", "tiny-moe"), ("--device",)),
    Bad("explain program", ("explain", "tiny-moe", "--device", "h200", "--program", "x"), ("no program",)),
    Bad("no plan", ("show", "nothing.plan"), ("nothing.plan", "lynnc compile")),
)


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_bad_input_gives_one_line_and_2(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = complaint(lynnc_cli(*case.arguments))
    assert all(words in line for words in case.words), line
    assert list(tmp_path.iterdir()) == []


def test_unknown_field_of_a_model_file(tmp_path):
    lynnc_cli("import-config", make_config(tmp_path), "-o", tmp_path / "m.yaml")
    (tmp_path / "m.yaml").write_text((tmp_path / "m.yaml").read_text() + "hiden: 3\n")
    line = complaint(lynnc_cli("compile", tmp_path / "m.yaml", "--target", "sm_90"))
    assert "m.yaml: hiden" in line and "hidden" in line


def test_output_that_exists_is_refused_before_compiling(plan, tmp_path):
    line = complaint(lynnc_cli(*COMPILE, "--store", tmp_path / "store", "-o", plan))
    assert "exists already" in line and "--force" in line
    assert not (tmp_path / "store").exists()


def test_output_that_is_no_plan_is_never_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    line = complaint(lynnc_cli(*COMPILE, "--force", "-o", tmp_path / "mine"))
    assert "not a plan folder" in line
    assert (tmp_path / "mine").is_dir()


def test_output_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in complaint(lynnc_cli(*COMPILE, "-o", tmp_path / "file" / "p.plan"))


def test_force_replaces_a_plan(plan, store):
    (plan / "kernels" / "stray").write_text("")
    assert lynnc_cli(*COMPILE, "--store", store, "-o", plan, "--force").exit_code == 0
    assert not (plan / "kernels" / "stray").exists()
    assert [path.name for path in plan.parent.iterdir()] == [plan.name]


def test_tools_that_cannot_serve_the_target(tmp_path, monkeypatch):
    nothing = Tools(None, None, ())
    monkeypatch.setattr(lynnc.compile, "find_tools", lambda: nothing)
    line = complaint(lynnc_cli(*COMPILE, "--store", tmp_path / "store", "-o", tmp_path / "p.plan"))
    assert "pip install" in line and not (tmp_path / "p.plan").exists()


# Damaged plans


def damage_cubin(plan: Path) -> None:
    cubin = next((plan / "kernels").glob("*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"?")


def damage_schema(plan: Path) -> None:
    edit(plan, lambda values: values.update(schema=SCHEMA + 1))


def damage_json(plan: Path) -> None:
    text = (plan / "plan.json").read_text()
    (plan / "plan.json").write_text(text[: len(text) // 2])


def damage_model(plan: Path) -> None:
    edit(plan, lambda values: values["model"].update(context=values["model"]["context"] * 2))


def damage_field(plan: Path) -> None:
    edit(plan, lambda values: values.pop("target"))


def remove_source(plan: Path) -> None:
    next((plan / "kernels").glob("*.py")).unlink()


def edit(plan: Path, change) -> None:
    values = json.loads((plan / "plan.json").read_text())
    change(values)
    (plan / "plan.json").write_text(json.dumps(values))


DAMAGES = (damage_cubin, damage_schema, damage_json, damage_model, damage_field, remove_source)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("command", [("show",), ("explain",), ("show", "--stage", "source")], ids="-".join)
def test_damaged_plan_is_refused_with_what_to_do(plan, damage, command):
    damage(plan)
    line = complaint(lynnc_cli(command[0], plan, *command[1:]))
    assert str(plan) in line and ("compile" in line)


# show and explain


@pytest.mark.parametrize("stage", ["model", "fused", "choices", "source"])
def test_plan_shows_what_its_model_shows(compiled, stage):
    of_model = lynnc_cli("show", "tiny-full", "--stage", stage, "--target", "sm_90")
    of_plan = lynnc_cli("show", compiled, "--stage", stage)
    assert of_model.exit_code == of_plan.exit_code == 0
    assert of_model.stdout == of_plan.stdout != ""


def test_ptx_of_a_plan_is_that_of_the_store(compiled, store):
    kept = lynnc_cli("show", compiled, "--stage", "ptx", "--op", "lm_head")
    again = lynnc_cli("show", "tiny-full", "--stage", "ptx", "--op", "lm_head", "--target", "sm_90", "--store", store)
    assert kept.stdout == again.stdout and ".target sm_90a" in kept.stdout and kept.stdout.startswith("// lm_head\n")


def test_op_with_its_tensors():
    shown = lynnc_cli("show", "tiny-moe", "--op", "layers.*.delta").stdout
    assert shown.count("GdnStep(") == 3 and "layers.0.delta_state: f32[slot, " in shown


@pytest.mark.parametrize("options", [("--target", "sm_90"), ("--without", "fuse_norm")], ids="=".join)
def test_plan_has_its_own_target_and_passes(compiled, options):
    assert "leave --" in complaint(lynnc_cli("show", compiled, *options))


def test_plan_in_which_the_program_is_missing(compiled):
    line = complaint(lynnc_cli("show", compiled, "--stage", "choices", "--program", "prefill"))
    assert "holds decode/1" in line


def test_explain_says_that_nothing_was_measured():
    result = lynnc_cli("explain", "tiny-moe", "--device", "spark")
    assert result.exit_code == 0
    assert "not measurements" in result.stdout and "tokens/s at most" in result.stdout


def test_explain_json(compiled):
    document = json.loads(lynnc_cli("explain", compiled, "--device", "h200", "--json").stdout)
    assert "not measurements" in document["notice"]
    assert [(step["program"], step["rows"]) for step in document["ceilings"]] == [
        *((f"decode/{rows}", rows) for rows in (1, 2, 4, 8)),
        *(("prefill", rows) for rows in (16, 64, 512, 2048)),
    ]
    assert sum(group["launches"] for group in document["groups"]) == document["step"]["launches"]


def test_explain_a_plan_on_a_device_it_does_not_run_on(compiled):
    assert "does not run on spark" in complaint(lynnc_cli("explain", compiled, "--device", "spark"))


# The small commands


def make_config(folder: Path) -> Path:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "vocab_size": 384,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def test_import_config_takes_the_expert_counts_beside_it(tmp_path):
    config = make_config(tmp_path)
    counts = {"remaining_experts_by_layer": {"0": 5, "1": 3}}
    (tmp_path / "lynn_engine_variable_expert_spec.json").write_text(json.dumps(counts))
    result = lynnc_cli("import-config", config, "-o", tmp_path / "mine.yaml")
    assert result.exit_code == 0 and "lynn_engine_variable_expert_spec.json" in result.stderr
    spec = load_model(tmp_path / "mine.yaml")
    assert spec.name == "mine" and spec.moe is not None and spec.moe.experts == (5, 3)
    assert "--force" in complaint(lynnc_cli("import-config", config, "-o", tmp_path / "mine.yaml"))
    assert lynnc_cli("import-config", config, "-o", tmp_path / "mine.yaml", "--force", "--name", "a").exit_code == 0
    assert load_model(tmp_path / "mine.yaml").name == "a"


def test_import_config_refusals(tmp_path):
    config = make_config(tmp_path)
    assert ".yaml" in complaint(lynnc_cli("import-config", config, "-o", tmp_path / "mine.json"))
    assert "no such file" in complaint(lynnc_cli("import-config", tmp_path / "x.json", "-o", tmp_path / "m.yaml"))
    line = complaint(lynnc_cli("import-config", config, "-o", tmp_path / "m.yaml", "--name", "a b"))
    assert "--name" in line
    assert "cannot be written" in complaint(lynnc_cli("import-config", config, "-o", tmp_path / "no" / "m.yaml"))


def test_models_targets_and_doctor(tmp_path):
    assert all(name in lynnc_cli("models").stdout for name in shipped_models())
    models = {row["name"]: row for row in json.loads(lynnc_cli("models", "--json").stdout)["models"]}
    assert models["lynn-27b-a3b"]["experts"] == 9230 and models["lynn-27b-a3b"]["representative"]
    assert models["qwen3.6-35b-a3b"]["parameters"] == pytest.approx(34.66e9, rel=1e-3)
    assert "sm_121a" in lynnc_cli("targets").stdout
    assert len(json.loads(lynnc_cli("targets", "--json").stdout)["targets"]) == 8
    result = lynnc_cli("doctor", "--store", tmp_path / "store")
    assert result.exit_code == 0 and "no GPU" in result.stdout and "can be written" in result.stdout
    document = json.loads(lynnc_cli("doctor", "--json").stdout)
    assert document["can_compile"] and all(target["is_served"] for target in document["targets"])


def test_doctor_without_tools(monkeypatch):
    nothing = Tools(None, None, ())
    monkeypatch.setattr("lynnc.doctor.find_tools", lambda: nothing)
    result = lynnc_cli("doctor")
    assert result.exit_code == 1 and "Triton is not installed" in result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell):
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0 and "_LYNNC_COMPLETE" in result.stdout
