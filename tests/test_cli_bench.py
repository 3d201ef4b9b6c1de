"""``lynnc bench`` from the command line: its tables on a simulated device, and one sentence for what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from executing import executor_on, plan_for
from reference import Case
from simulated import SimulatedDevice, record_only

from lynnc.cli import bench as bench_command
from lynnc.cli.main import cli
from lynnc.planfile import save_plan
from lynnc.runtime import drivercalls
from lynnc.runtime.budget import Room
from lynnc.runtime.executor import Executor
from lynnc.runtime.loading.weightsource import WeightSource

PEER = """
import json
result = {"build_commit": "c46583b", "build_number": 7123, "backends": "CPU", "gpu_info": "", "n_gen": 128}
print(json.dumps([{**result, "n_depth": depth, "avg_ts": 100.0, "stddev_ts": 0.5} for depth in (8, 40)]))
"""


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)])


def complaint(result: Result, code: int = 2) -> str:
    assert result.exit_code == code, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("lynnc: ") and result.stdout == ""
    return line


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def cuDriverGetVersion(self) -> None:
            raise RuntimeError("no libcuda")

    monkeypatch.setattr(drivercalls, "import_module", lambda name: Nothing())
    drivercalls.driver.cache_clear()


@pytest.fixture(autouse=True)
def forget_driver() -> None:
    """Whatever a test put in its place."""
    drivercalls.driver.cache_clear()


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan folder without machine code, and a simulated device that takes it."""
    folder, plan = tmp_path / "tiny.plan", plan_for(Case("tiny-moe"))
    save_plan(plan, {}, folder)

    def load(_: Path, source: WeightSource, room: Room, gpu: int, progress: object) -> Executor:
        return executor_on(plan, source, room, SimulatedDevice(runs=record_only))

    monkeypatch.setattr("lynnc.bench.session.load", load)
    monkeypatch.setattr(bench_command, "open_device", lambda number: SimulatedDevice(runs=record_only))
    return folder


QUICK = ("--random-weights", "--contexts", "8,40", "--repeats", "2", "--steps", "3")


def test_tables_of_everything(plan: Path, tmp_path: Path) -> None:
    output = tmp_path / "records.json"
    result = bench(plan, *QUICK, "--breakdown", "--memory", "--census", "-o", output)
    assert result.exit_code == 0, result.output
    for words in (
        "loading",
        "generated",
        "key/value caches",
        "weights in memory: 1.",
        "28 nodes in the graph",
        "layers.*.experts_down",
        "kernels at context 8, h200",
        "step without",
        "kernels alone add up to 28.00 us, the step takes 28.00 us",
    ):
        assert words in result.stdout, words
    records = json.loads(output.read_text())
    assert {record["params"]["context"] for record in records if record["metric"] == "decode_tokens_per_s"} == {8, 40}
    assert {"graph_nodes", "kernel_us", "kernel_marginal_us", "resident_bytes"} <= {item["metric"] for item in records}


def test_json_is_the_records_and_nothing_else(plan: Path) -> None:
    result = bench(plan, *QUICK, "--programs", "decode/1,decode/4", "--seed", 7, "--json")
    assert result.exit_code == 0, result.output
    records = json.loads(result.stdout)
    steps = [record["params"] for record in records if record["metric"] == "decode_step_us"]
    assert [(step["rows"], step["context"]) for step in steps] == [(1, 8), (1, 40), (4, 8), (4, 40)]
    assert {record["params"]["weights"] for record in records} == {"random, seed 7"}


def test_the_gpu_is_given_back_before_a_peer_runs(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(runs=record_only)
    was_closed = []

    def measure(*arguments: object) -> tuple[()]:
        was_closed.append(device.is_closed)
        return ()

    monkeypatch.setattr(bench_command, "open_device", lambda number: device)
    monkeypatch.setattr(bench_command, "import_writer", lambda: None)
    monkeypatch.setattr(bench_command, "measure_peer", measure)
    result = bench(plan, *QUICK, *peer_option(tmp_path, ""))
    assert result.exit_code == 0, result.output
    assert was_closed == [True]


def test_a_program_of_more_rows_alone(plan: Path) -> None:
    result = bench(plan, *QUICK, "--programs", "decode/4")
    assert result.exit_code == 0, result.output
    assert "decode" in result.stdout


def test_prompts_of_given_lengths(plan: Path, tmp_path: Path) -> None:
    output = tmp_path / "records.json"
    result = bench(plan, *QUICK, "--prefill", "5,20,81", "--kernels", "-o", output)
    assert result.exit_code == 0, result.output
    for words in (
        "1 x prefill/16 of 16 rows",
        "1 x prefill of 64 rows, 1 x prefill of 32 rows",
        "of workspace, inputs and outputs; while prompts ran",
        "kernels of the last step (prefill, 17 tokens) of 81 tokens, h200",
        "kernels at context 8",
    ):
        assert words in result.stdout, words
    records = json.loads(output.read_text())
    found = {(item["metric"], item["params"].get("tokens")): item for item in records}
    nodes = {name: len(plan_for(Case("tiny-moe")).programs[name].launches) for name in ("prefill/16", "prefill")}
    assert found["prefill_gpu_us", 5]["value"] == pytest.approx(nodes["prefill/16"])
    assert found["prefill_gpu_us", 81]["value"] == pytest.approx(2 * nodes["prefill"])
    assert found["prefill_tokens_per_s", 20]["runs"] == 2 and found["prefill_first_use_us", 20]["value"] > 0
    memory = {item["params"]["what"]: item["value"] for item in records if item["metric"] == "prefill_memory_bytes"}
    assert memory["shrank during prompts"] == 0 < memory["workspace, inputs and outputs"]
    kernels = [item["params"] for item in records if item["metric"] == "prefill_kernel_us"]
    assert {item["limit"] for item in kernels} == {"memory"} and {item["rows"] for item in kernels} == {5, 20, 17}
    assert sum(item["launches"] for item in kernels) == sum(nodes.values()) + nodes["prefill"]


def test_prompts_alone_by_a_program_that_is_named(plan: Path) -> None:
    result = bench(plan, *QUICK, "--programs", "prefill/16", "--prefill", "40", "--kernels")
    assert result.exit_code == 0, result.output
    assert "3 x prefill/16 of 16 rows" in result.stdout and "with host" not in result.stdout


def test_a_plan_without_programs_for_prompts(tmp_path: Path) -> None:
    tiny = plan_for(Case("tiny-moe"))
    programs = {name: program for name, program in tiny.programs.items() if name.startswith("decode")}
    save_plan(replace(tiny, programs=programs), {}, tmp_path / "tiny.plan")
    line = complaint(bench(tmp_path / "tiny.plan", *QUICK, "--prefill", "16"))
    assert line.endswith("tiny.plan has no program for prompts: compile it with --programs decode/1,prefill.")


def peer_option(folder: Path, text: str) -> tuple[str, str]:
    program = folder / "llama-bench"
    program.write_text(f"#!{sys.executable}\n{text}")
    program.chmod(0o755)
    return "--peer", f"llama-bench={program}"


def test_a_peer_stands_beside_with_its_build_and_backends(plan: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra `bench` is not installed")
    result = bench(plan, *QUICK, *peer_option(tmp_path, PEER), "--peer-folder", tmp_path)
    assert result.exit_code == 0, result.output
    table = result.stdout.split("tokens/s beside llama.cpp")[1]
    assert "7123 c46583b" in table and "CPU" in table and "357.14" in table


def test_what_was_measured_is_written_even_if_the_peer_fails(plan: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra `bench` is not installed")
    failing = peer_option(tmp_path, "raise SystemExit(3)")
    output = tmp_path / "records.json"
    result = bench(plan, *QUICK, *failing, "--peer-folder", tmp_path, "-o", output)
    assert result.exit_code == 1 and "failed with exit code 3" in result.stderr
    assert "decode_step_us" in {record["metric"] for record in json.loads(output.read_text())}


@dataclass(frozen=True)
class Refused:
    """Arguments that are refused, and words of the sentence."""

    label: str
    arguments: tuple[str, ...]
    says: str
    code: int = 2

    def __str__(self) -> str:
        return self.label


RANDOM = ("tiny-moe", "--random-weights", "--contexts", "128")
REFUSED = (
    Refused("no driver", RANDOM, "No CUDA driver was found on this machine: plans run where an NVIDIA GPU is.", 1),
    Refused("no weights", ("tiny-moe",), "give --weights FOLDER or --random-weights"),
    Refused("two weights", (*RANDOM, "--weights", "packed"), "give --weights FOLDER or --random-weights"),
    Refused("contexts of words", (*RANDOM, "--contexts", "8,many"), "--contexts 8,many: write numbers above 0"),
    Refused("context 0", (*RANDOM, "--contexts", "0"), "--contexts 0: write numbers above 0, such as 128,4096"),
    Refused("context too long", (*RANDOM, "--contexts", "8,500"), "needs 560 positions and tiny-moe has 512"),
    Refused("unknown model", ("nope", *RANDOM[1:]), "nope is neither a shipped model nor the path of a .yaml file"),
    Refused("its full stop", ("nope", *RANDOM[1:]), ", or such a path."),
    Refused("unknown plan", ("nope.plan", *RANDOM[1:]), "nope.plan is not a plan folder"),
    Refused("unknown program", (*RANDOM, "--programs", "decode/9"), "'decode/9' is no program"),
    Refused("no one-row step", (*RANDOM, "--programs", "decode/2", "--census"), "belong to decode/1; add it"),
    Refused("existing output", (*RANDOM, "-o", "README.md"), "README.md exists already"),
    Refused("peer unknown", (*RANDOM, "--peer", "vllm=/bin/true"), "--peer vllm=/bin/true is not understood"),
    Refused("peer missing", (*RANDOM, "--peer", "llama-bench=/nowhere"), "there is no file /nowhere"),
    Refused(
        "peer a folder", (*RANDOM, "--peer", "llama-bench=/"), "--peer: / is a folder: name the llama-bench in it."
    ),
    Refused(
        "folder without peer", (*RANDOM, "--peer-folder", "/tmp"), "--peer-folder /tmp is where the model of --peer"
    ),
    Refused("seed of nothing", ("tiny-moe", "--weights", "packed", "--seed", "0"), "--seed 0 is the seed of --random-"),
    Refused("context twice", (*RANDOM, "--contexts", "8,128,8"), "--contexts 8,128,8: 8 is given twice; name it once."),
    Refused("no contexts", (*RANDOM, "--contexts", ""), "--contexts : write numbers above 0, such as 128,4096."),
    Refused("prompts of words", (*RANDOM, "--prefill", "a"), "--prefill a: write numbers above 0, such as 128,4096."),
    Refused("prompt twice", (*RANDOM, "--prefill", "8,8"), "--prefill 8,8: 8 is given twice; name it once."),
    Refused("prompt too long", (*RANDOM, "--prefill", "16,511"), "--prefill 16,511: tiny-moe has 512 positions"),
    Refused("no lengths", (*RANDOM, "--programs", "decode/1,prefill"), "prompts are measured by --prefill"),
    Refused(
        "census of prompts",
        (*RANDOM, "--programs", "prefill", "--prefill", "16", "--census"),
        "belong to decode/1; add it",
    ),
    Refused("usage", (*RANDOM, "--repeats", "0"), "0 is not in the range x>=1. Run `lynnc bench --help`."),
)


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_is_wrong_is_one_sentence(case: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)
    assert case.says in complaint(bench(*case.arguments), case.code)


def test_help_shows_every_option() -> None:
    text = bench("--help").stdout
    for option in (
        "--weights",
        "--random-weights",
        "--contexts",
        "--prefill",
        "--breakdown",
        "--census",
        "--peer",
        "--loads",
        "--gpu",
    ):
        assert option in text


def test_a_measured_plan_needs_its_programs(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command, "open_device", lambda number: pytest.fail("the driver was opened"))
    line = complaint(bench(plan, *QUICK, "--programs", "decode/8"))
    assert line.endswith("has no program decode/8: it has decode/1, decode/2, decode/4, prefill, prefill/16.")


WITHOUT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
from lynnc.cli.main import main
main()
"""


@dataclass(frozen=True)
class Missing:
    """Packages that are not there, a command that needs one, and the extra that it is told to install."""

    package: str
    names: tuple[str, ...]
    arguments: tuple[str, ...]
    extra: str


MISSING = (
    Missing("cuda-bindings", ("cuda",), ("bench", *RANDOM), "[runtime]"),
    Missing("gguf", ("gguf",), ("bench", *RANDOM, "--peer", f"llama-bench={sys.executable}"), "[bench]"),
    Missing("numpy", ("numpy",), ("bench", *RANDOM, "--peer", f"llama-bench={sys.executable}"), "[bench]"),
    Missing("xxhash", ("xxhash",), ("pack", "checkpoint", "-o", "packed"), "[weights]"),
    Missing("torch", ("torch",), ("pack", "checkpoint", "-o", "packed"), "[weights]"),
    Missing("torch", ("torch",), ("run", "packed", "--prompt", "a"), "[run]"),
    Missing("tokenizers", ("tokenizers",), ("run", "packed", "--prompt", "a"), "[run]"),
    Missing("safetensors", ("safetensors",), ("eval", "packed", "--text", "a.txt"), "[run]"),
)


@pytest.mark.parametrize("case", MISSING, ids=lambda case: case.package)
def test_a_missing_package_is_named_with_its_extra(case: Missing, tmp_path: Path) -> None:
    code = WITHOUT.format(names=case.names)
    command = [sys.executable, "-c", code, *case.arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert f"needs the Python package {case.package}: install lynnc with its extra" in line and case.extra in line


def test_help_needs_none_of_them() -> None:
    code = WITHOUT.format(names=("cuda", "gguf", "numpy", "torch", "triton", "xxhash", "safetensors"))
    run = subprocess.run([sys.executable, "-c", code, "bench", "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
