"""The compiled engine, `lynnc run` and `lynnc eval` on a GPU: ``--device cuda``. Tiny models are compiled for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from executing import HostWeights
from harness import assert_close
from reference import FAMILIES, LIMIT, PROMPT, Case, judged, make
from runners import CONTEXT, Followed, check
from running import make_packed

from lynnc.cli.localplan import compile_here, device_of, records_of
from lynnc.cli.main import cli
from lynnc.engines.compiled import Compiled, compiled_engine
from lynnc.engines.interpreted import Interpreted
from lynnc.runtime.budget import Room
from lynnc.runtime.cudadevice import open_device
from lynnc.runtime.loader import load

pytestmark = pytest.mark.gpu

PROGRAMS = ("decode/1", "decode/8", "prefill")


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def engine(case: Case, tmp_path_factory) -> Iterator[Compiled]:
    with closing(open_device()) as opened:
        device, records = device_of(opened.facts), records_of(opened.facts)
    with compile_here(case.spec, device, records, PROGRAMS, tmp_path_factory.mktemp("store")) as plan:
        engine = compiled_engine(load(plan, HostWeights(make(case).packed), Room(1, CONTEXT)))
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").reset()


def test_logits_and_stream_are_those_of_transformers(case: Case, engine: Compiled) -> None:
    run = judged(case)
    tokens = len(run.tokens)
    logits = torch.cat([engine.append(run.tokens[:PROMPT]), engine.append(run.tokens[PROMPT:])])
    check(Followed(list(range(tokens)), logits, logits.argmax(-1)), run, LIMIT, str(case))
    engine.reset()
    found = engine.trace(run.tokens)
    assert torch.equal(found.logits, logits), "a launch at a time gives the bits of the graph"
    expected = Interpreted(case.spec, make(case).values, "", CONTEXT).trace(run.tokens)
    for layer, (ours, interpreted) in enumerate(zip(found.hidden, expected.hidden, strict=True)):
        assert_close(ours, interpreted, LIMIT, f"{case} after {layer} layers")


def test_greedy_tokens_are_the_likeliest_of_the_logits(case: Case, engine: Compiled) -> None:
    prompt = judged(case).tokens[:PROMPT]
    tokens = list(engine.decode(prompt, 40))
    engine.reset()
    logits = engine.begin(prompt)
    for token in tokens:
        assert token == int(logits.argmax())
        logits = engine.append([token])[-1]


def test_the_commands_agree_with_the_interpreter(tmp_path: Path) -> None:
    made = make_packed(tmp_path)
    (tmp_path / "text.txt").write_text("Der Maulwurf gräbt. " * 5, "utf-8")

    def document(*arguments: object) -> dict:
        result = CliRunner().invoke(cli, [str(argument) for argument in (*arguments, "--json")])
        assert result.exit_code == 0, (result.output, result.exception)
        return json.loads(result.stdout)

    common = ("--store", tmp_path / "store")
    run = ("run", made.folder, "--prompt", "def é(n):20", "--tokens", 50, *common)
    on_gpu, on_cpu = document(*run), document(*run, "--device", "cpu")
    assert "compiled for sm_" in on_gpu["engine"] and "interpreted" in on_cpu["engine"]
    assert len(on_gpu["ids"]) == 50 and on_gpu["ids"][:12] == on_cpu["ids"][:12]
    assert on_gpu["ids"] == document(*run, "--temperature", 1, "--top-k", 1)["ids"]
    scores = [document("eval", made.folder, "--text", tmp_path / "text.txt", *common, *more) for more in ((), CPU)]
    assert scores[0]["nll"] == pytest.approx(scores[1]["nll"], rel=1e-2)


CPU = ("--device", "cpu")
