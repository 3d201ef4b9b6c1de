"""``lynnc tune`` on a GPU: a small model within a short budget, and what is left of it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from lynnc.autotune.benchmessages import KernelTask
from lynnc.cli.main import cli
from lynnc.record import RecordOrigin, parse_records
from lynnc.report.tuning import TuneSummary

pytestmark = pytest.mark.gpu
PROGRAMS = ("decode/1", "decode/2", "decode/8", "prefill/16")
ARGUMENTS = ("tune", "tiny-moe", "--device", "cuda:0", "--programs", ",".join(PROGRAMS))


def lynnc(*arguments: object):
    return CliRunner().invoke(cli, [str(word) for word in arguments], prog_name="lynnc")


@pytest.fixture(scope="module", autouse=True)
def packages():
    pytest.importorskip("optuna", reason="the extra tune is not installed")


def test_a_small_model_is_tuned_resumed_and_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wanted = (*ARGUMENTS, "--kernels", "gdn_step,embed,gemm", "--json")
    first = lynnc(*wanted, "--budget", "60s", "--trials", 30)
    assert first.exit_code == 0, first.output
    summary = TuneSummary.from_dict(json.loads(first.stdout))
    assert not summary.is_simulated and summary.counts["timed"] >= 10
    assert {study.kernel for study in summary.kernels} <= {"gdn_step", "embed", "gemm"}
    for study in summary.kernels:
        assert study.best_seconds <= 1.02 * study.default_seconds
    assert {step.program for step in summary.steps} | set(summary.not_measured) == set(PROGRAMS)
    for step in summary.steps:
        assert step.best_seconds <= 1.02 * step.before_seconds
        assert step.best_seconds <= 1.02 * step.default_seconds
    second = lynnc(*wanted, "--trials", 10, "--resume")
    assert second.exit_code == 0, second.output
    more = TuneSummary.from_dict(json.loads(second.stdout))
    assert sum(more.counts.values()) >= sum(summary.counts.values())
    files = list((tmp_path / "cache" / "lynnc" / "records").glob("*/*.json"))
    (record, *_) = parse_records(files[0].read_text())
    assert record.origin is RecordOrigin.MEASURED and record.seconds


def test_rows_are_compared_where_one_row_alone_was_asked_for(tmp_path, monkeypatch):
    """The records of such a run serve steps of more rows all the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[KernelTask] = []
    monkeypatch.setattr(
        "lynnc.autotune.gpubench.KernelTask", lambda *parts: asked.append(KernelTask(*parts)) or asked[-1]
    )
    wanted = ("tune", "tiny-moe", "--device", "cuda:0", "--programs", "decode/1", "--kernels", "gdn_step")
    result = lynnc(*wanted, "--trials", 6, "--json")
    assert result.exit_code == 0, result.output
    summary = TuneSummary.from_dict(json.loads(result.stdout))
    assert summary.counts["timed"] >= 2 and [step.program for step in summary.steps] == ["decode/1"]
    assert asked and all([variant.program for variant in task.partners] == ["decode/8"] for task in asked)
