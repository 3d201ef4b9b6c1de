"""The page of ``lynnc report``: its structure, and every figure against one computed from the plan another way."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from reporting import (
    CONTEXT,
    Element,
    Page,
    large_plan,
    plan_without_code,
    read_page,
    records_for,
    summary_for,
    write_records,
)

from lynnc.compiler import graph_of, model_of
from lynnc.cost import costs, evaluate_formula
from lynnc.explain import Question, ceilings
from lynnc.modelfile import load_model
from lynnc.plan import Plan
from lynnc.report.contents import Report, Sources, make_report
from lynnc.report.measured import read_measurements
from lynnc.report.page import render_page
from lynnc.report.tuning import SCHEMA, TuneSummary
from lynnc.report.wording import number_text, pairs_text, percent, time_text
from lynnc.runtime.budget import Room, budget_of
from lynnc.target import find_device
from lynnc.units import amount, size

H200 = find_device("h200")
PLAIN = Sources(H200)


def small_plan() -> Plan:
    """A tiny model, where a test needs no other."""
    return plan_without_code("tiny-moe")


@cache
def full_report() -> Report:
    """Everything that a page can show, of the pruned model."""
    plan = large_plan()
    with TemporaryDirectory() as folder:
        measured = read_measurements([write_records(Path(folder) / "h200.json", records_for(plan))], plan)
    return make_report(plan, Sources(H200, measured=measured, tuning=summary_for(plan)))


@cache
def full_page() -> Page:
    return read_page(render_page(full_report()))


@cache
def plain_page() -> Page:
    """The page of a plan alone."""
    return read_page(render_page(make_report(large_plan(), PLAIN)))


# Structure


def pages() -> Iterator[tuple[str, Page]]:
    yield "full", full_page()
    yield "plain", plain_page()
    yield "dense", read_page(render_page(make_report(plan_without_code("tiny-dense"), PLAIN)))


@pytest.fixture(params=("full", "plain", "dense"))
def page(request: pytest.FixtureRequest) -> Page:
    return dict(pages())[request.param]


def test_page_needs_no_other_file(page: Page) -> None:
    for element in page.root.walk():
        for name in ("src", "href", "srcset", "data", "action"):
            assert element.attributes.get(name, "#").startswith(("#", "data:,")), element
        assert element.tag not in ("script", "iframe", "object", "embed", "base")
        assert not [name for name in element.attributes if name.startswith("on")], element
    (style,) = page.root.find("style")
    assert not re.search(r"url\(|@import|https?:", style.text)


def test_page_has_landmarks_and_an_order_of_headings(page: Page) -> None:
    for tag in ("header", "nav", "main", "footer", "h1", "title"):
        assert len(page.root.find(tag)) == 1 or tag == "title", tag
    (html,) = page.root.find("html")
    assert html.attributes["lang"] == "en"
    levels = [int(one.tag[1]) for one in page.root.walk() if re.fullmatch(r"h[1-6]", one.tag)]
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))
    for section in page.root.find("section"):
        assert page.by_id(section.attributes["aria-labelledby"]).tag == "h2"


def test_ids_are_unique_and_every_reference_leads_to_one(page: Page) -> None:
    ids = [one.attributes["id"] for one in page.root.walk() if "id" in one.attributes]
    assert len(set(ids)) == len(ids)
    wanted = [one.attributes["href"][1:] for one in page.root.find("a")]
    for one in page.root.walk():
        wanted += one.attributes.get("aria-labelledby", "").split()
    assert set(wanted) <= set(ids)


def test_tables_have_captions_and_scopes(page: Page) -> None:
    assert len(page.root.find("table")) >= 6
    for table in page.root.find("table"):
        assert len(table.find("caption")) == 1
        assert all(cell.attributes["scope"] in ("col", "row") for cell in table.find("th"))
        widths = {len([cell for cell in row.children if isinstance(cell, Element)]) for row in table.find("tr")}
        assert len(widths) == 1, table.find("caption")[0].text
    for region in page.root.find("div", cls="scroll"):
        assert region.attributes["tabindex"] == "0" and region.attributes["role"] == "region"
        assert region.attributes["aria-label"]


def test_charts_are_told_in_words_and_bars_stand_beside_their_figures(page: Page) -> None:
    charts = 0
    for svg in page.root.find("svg"):
        if svg.attributes.get("aria-hidden") == "true":
            assert svg.is_within(**{"class": "legend"}) or any(svg.parent is cell for cell in page.root.find("td"))
            continue
        charts += 1
        title, desc = (page.by_id(name) for name in svg.attributes["aria-labelledby"].split())
        assert svg.attributes["role"] == "img" and title.tag == "title" and desc.tag == "desc"
        assert title.text and desc.text and title.parent is svg and desc.parent is svg
    assert charts >= 3 or "tiny-dense" in page.root.text


def test_bars_stay_inside(page: Page) -> None:
    for svg in page.root.find("svg", cls="bar-cell"):
        ends = [float(rect.attributes["x"]) + float(rect.attributes["width"]) for rect in svg.find("rect")]
        assert all(float(rect.attributes["width"]) >= 0 for rect in svg.find("rect")) and max(ends) <= 100.01


def test_same_report_gives_the_same_bytes() -> None:
    assert render_page(make_report(small_plan(), PLAIN)) == render_page(make_report(small_plan(), PLAIN))


def test_text_from_files_is_escaped() -> None:
    plan = small_plan()
    summary = summary_for(plan, reason="<script>alert(1)</script>")
    page = read_page(render_page(make_report(plan, Sources(H200, tuning=summary))))
    assert not page.root.find("script") and "<script>alert(1)</script>" in page.by_id("tuning").text


# Layers


def test_each_layer_has_its_experts_and_a_bar_as_high_as_they_are_many() -> None:
    plan, page = large_plan(), plain_page()
    spec = load_model("lynn-27b-a3b")
    rows = page.table("layers-table")
    assert [(row[1], int(row[2])) for row in rows] == list(zip(map(str, spec.layers), spec.moe.experts, strict=True))
    in_layers = [weight for weight in plan.weights.values() if weight.name.startswith("layers.7.")]
    assert rows[7][3] == size(sum(array.bytes for weight in in_layers for array in weight.arrays))
    bars = page.by_id("layers").find("rect", cls="bar")
    heights = [float(bar.attributes["height"]) for bar in bars]
    assert len(bars) == 40
    for height, experts in zip(heights, spec.moe.experts, strict=True):
        assert height / heights[0] == pytest.approx(experts / spec.moe.experts[0], abs=0.002)
    assert f"{sum(spec.moe.experts):,} in all" in page.by_id("layers").text
    assert "is representative: a plausible map, not a published one" in page.by_id("layers").text


def test_published_experts_are_not_called_representative() -> None:
    page = read_page(render_page(make_report(small_plan(), PLAIN)))
    assert not load_model("tiny-moe").representative and "representative" not in page.root.text


def test_a_dense_model_has_no_bars() -> None:
    page = read_page(render_page(make_report(plan_without_code("tiny-dense"), PLAIN)))
    assert not page.by_id("layers").find("rect", cls="bar")
    assert len(page.table("layers-table")) == len(load_model("tiny-dense").layers)


# Launches


@pytest.mark.parametrize("name", ["decode/1", "decode/4", "prefill"])
def test_every_launch_is_in_a_box(name: str) -> None:
    plan = large_plan()
    part = next(part for part in full_report().programs if part.name == name)
    launches = plan.programs[name].launches
    assert sum(box.count for block in part.blocks for box in block.boxes) == len(launches)
    layers = [layer for block in part.blocks for layer in block.layers]
    assert sorted(layers) == list(range(40))
    shown = [(box.op, box.kind) for block in part.blocks for box in block.boxes]
    assert set(shown) == {(re.sub(r"^layers\.\d+\.", "", launch.op), launch.kind) for launch in launches}
    assert sum(box.share for block in part.blocks for box in block.boxes) == pytest.approx(1)


def test_a_box_says_what_its_launch_is() -> None:
    plan = large_plan()
    graph = graph_of(plan, "decode/1")
    boxes = {
        box.find("span", cls="op")[0].text: box for box in full_page().by_id("decode-1").find("details", cls="box")
    }
    launch = next(launch for launch in plan.programs["decode/1"].launches if launch.op == "layers.4.experts_down")
    op = next(op for op in graph.ops if op.name == launch.op)
    entry, text = plan.kernels[launch.kernel], boxes["experts_down"].text
    assert f"{op.kind}: {' + '.join(type(inner).__name__ for inner in op.body)}" in text
    assert f"{entry.name} {pairs_text(entry.knobs)}" in text and f"(from: {entry.origin})" in text
    reads = {name: facts_of(box)["Reads"] for name, box in boxes.items()}
    assert reads["experts_down"] == "experts_up, logits_shared_gate_proj, out_proj"
    assert reads["qkv_z_b_a_proj"] == "embed, experts_down of the layer before"
    assert reads["q_k_v_proj"] == "experts_down of the layer before"


def facts_of(box: Element) -> dict[str, str]:
    terms, facts = box.find("dt"), box.find("dd")
    return {term.text: fact.text for term, fact in zip(terms, facts, strict=True)}


def test_programs_that_another_lynnc_compiled_are_left_out() -> None:
    plan = small_plan()
    program = plan.programs["decode/4"]
    other = replace(program, launches=program.launches[:-1])
    old = replace(plan, programs={**plan.programs, "decode/4": other})
    page = read_page(render_page(make_report(old, PLAIN)))
    assert "Left out: decode/4." in page.root.text
    assert [one.text for one in page.by_id("programs").find("h3")] == ["decode/1", "prefill"]


# Kernels and rooflines


def test_kernels_have_the_bytes_and_flops_of_their_launches() -> None:
    plan = large_plan()
    formulas = costs(graph_of(plan, "decode/1"))
    launches: dict[str, list[str]] = {}
    for launch in plan.programs["decode/1"].launches:
        launches.setdefault(launch.kernel, []).append(launch.op)
    rows = plain_page().table("decode-1-kernels")
    assert len(rows) == len(launches)
    for row, ops in zip(rows, launches.values(), strict=True):
        moved = [evaluate_formula(formulas[op].bytes, 1, 4096) for op in ops]
        flops = [evaluate_formula(formulas[op].flops, 1, 4096) for op in ops]
        assert row[3:6] == [str(len(ops)), size(sum(moved) / len(ops)), amount(sum(flops) / len(ops))]


def test_measured_kernels_stand_beside_their_limits() -> None:
    headings, rows = full_page().headings("decode-1-kernels"), full_page().table("decode-1-kernels")
    measured, share = headings.index("one measured"), headings.index("of the limit")
    formulas = costs(graph_of(large_plan(), "decode/1"))
    head = next(row for row in rows if row[1] == "lm_head")
    least = evaluate_formula(formulas["lm_head"].bytes, 1, CONTEXT) / H200.bandwidth_bytes_per_s
    assert all(row[measured] == "5.50 µs" for row in rows)
    assert head[share] == percent(least / 5.5e-6)
    assert "one measured" not in plain_page().headings("decode-1-kernels")


def test_marks_stand_where_their_figures_are() -> None:
    """On logarithmic axes, differences of places are differences of logarithms."""
    part = full_report().programs[0]
    chart = next(svg for svg in full_page().root.find("svg") if "roofline-decode-1-title" in str(svg.attributes))
    rings, diamonds = chart.find("circle", cls="limit"), chart.find("polygon", cls="measured")
    uses = [use for use in part.uses if use.mean.flops]
    assert len(rings) == len(diamonds) == len(uses) and len(uses) < len(part.uses)
    places = [(float(ring.attributes["cx"]), float(ring.attributes["cy"])) for ring in rings]
    tops = [float(diamond.attributes["points"].split(",")[1].split()[0]) + 5 for diamond in diamonds]
    by_intensity = sorted(range(len(uses)), key=lambda index: uses[index].mean.intensity)
    first, last = by_intensity[0], by_intensity[-1]
    decades = math.log10(uses[last].mean.intensity / uses[first].mean.intensity)
    scale = (places[last][0] - places[first][0]) / decades
    for (x, y), top, use in zip(places, tops, uses, strict=True):
        decades = math.log10(use.mean.intensity / uses[first].mean.intensity)
        assert x - places[first][0] == pytest.approx(scale * decades, abs=0.2)
        slower = math.log10(5.5e-6 / use.mean.seconds)
        assert (top - y) == pytest.approx(slower * _decade(chart), abs=0.3)


def _decade(chart: Element) -> float:
    """The height of a factor of ten: the distance between two lines across."""
    rows = sorted({float(line.attributes["y1"]) for line in chart.find("line", cls="grid")} - {22.0})
    return rows[1] - rows[0]


def test_no_kernel_is_above_the_roof() -> None:
    for part in full_report().programs:
        for use in part.uses:
            roof = min(use.mean.intensity * H200.bandwidth_bytes_per_s, H200.flops_per_s)
            assert use.mean.flops / use.mean.seconds <= roof * 1.0001


# Time


def test_estimated_steps_take_what_explain_says() -> None:
    plan = large_plan()
    limits = {limit.program: limit for limit in ceilings(model_of(plan), Question(H200, 4096))}
    rows = {row[0]: row for row in plain_page().table("decode-time")}
    for name in ("decode/1", "decode/4"):
        row, limit = rows[f"{name} at 4,096"], limits[name]
        assert row[1] == "estimated" and row[7] == number_text(limit.tokens_per_s)
        assert row[3] == time_text(limit.bytes / H200.bandwidth_bytes_per_s / limit.rows)
        assert row[4] == time_text(limit.launch_s / limit.rows)
    assert all(row[1] == "estimated" for row in plain_page().table("prompt-time"))
    assert "Nothing was measured" in plain_page().root.text


def test_measured_steps_are_split_into_bytes_launches_and_the_rest() -> None:
    plan = large_plan()
    limit = ceilings(model_of(plan), Question(H200, CONTEXT))[0]
    measured, least = full_page().table("decode-time")[:2]
    moving = limit.bytes / H200.bandwidth_bytes_per_s
    assert measured[:2] == ["decode/1 at 128", "measured"] and least[:2] == ["decode/1 at 128", "estimated"]
    assert measured[3:] == [
        time_text(moving),
        time_text(limit.launch_s),
        time_text(979.25e-6 - moving - limit.launch_s),
        "979.25 µs",
        "1,021",
    ]
    assert full_page().table("decode-time")[2][:2] == ["decode/4 at 4,096", "estimated"]
    prompt = full_page().table("prompt-time")[0]
    assert prompt[:2] == ["prompt of 2,048", "measured"] and prompt[6] == time_text(30e-3 / 2048)


def test_a_step_that_is_faster_than_its_parts_in_turn_is_still_split_whole(tmp_path: Path) -> None:
    plan = small_plan()
    records = write_records(tmp_path / "fast.json", records_for(plan, step_us=20.0))
    report = make_report(plan, Sources(H200, measured=read_measurements([records], plan)))
    fast = report.decode[0]
    assert fast.is_overlapped and fast.parts.seconds == pytest.approx(20e-6) and fast.parts.other_s == 0
    assert "launches overlapped" in read_page(render_page(report)).by_id("time").text


# Memory


def test_memory_is_what_the_runtime_counts() -> None:
    plan = large_plan()
    rows = {row[0]: row for row in plain_page().table("memory-table")}
    weights = sum(array.bytes for weight in plan.weights.values() for array in weight.arrays)
    for need in budget_of(plan, plan.programs, Room(context=4096), 0).needs:
        assert rows[need.what][3] == size(need.bytes)
    experts = [weight for weight in plan.weights.values() if weight.tensor_class == "experts"]
    assert rows["experts weights"][3] == size(sum(array.bytes for weight in experts for array in weight.arrays))
    assert rows["GPU memory"][3] == size(budget_of(plan, plan.programs, Room(context=4096), weights).gpu_bytes)
    assert ["weights", "GPU", "18.47 GB"] in full_page().table("memory-measured")


# Tuning


def test_tuning_shows_what_was_tried_and_gained() -> None:
    page = full_page()
    one, eight = page.table("tuning-steps")
    assert one == ["decode/1", "128", "979.00 µs", "960.00 µs", "950.00 µs", f"{979 / 950:.3f}×"]
    assert eight[0] == "decode/8" and eight[-1] == f"{6.2 / 6.1:.3f}×"
    linear, embed = page.table("tuning-gains")
    assert linear[:3] == ["linear", "decode/1", "k=2048 n=12352"] and linear[3] == f"{5.8 / 5.0:.3f}×"
    assert linear[4:] == ["5.80 µs", "5.00 µs", time_text(30 * 0.8e-6), "6", "2", "3"]
    assert embed[3] == "1.000×" and embed[6] == "–"
    counts = dict(zip(page.headings("tuning-counts"), page.table("tuning-counts")[0], strict=True))
    expected = {"timed": "4", "refused": "3", "not compiled": "0", "wrong": "1", "crashed": "0", "hung": "1"}
    assert counts == expected
    text = page.by_id("tuning").text
    assert "No step of prefill is compared: not confirmed: there was no time left." in text
    assert "Measured on NVIDIA H200. Seed 7, budget 10m, 583 s spent" in text
    assert "BLOCK_N 8 → 16" in text and "refused: shared memory N > N3" in text and "wrong: row N differs1" in text
    assert "The default stays." in text and "Verdict: confirmed in the step of decode/1." in text


def test_a_summary_of_the_schema_before_is_read() -> None:
    """One that is in the repository; it says nothing of steps that were not measured."""
    text = (Path(__file__).parents[1] / "benchmarks" / "results" / "h200-tune-summary.json").read_text()
    data = json.loads(text)
    assert data["schema"] == 2 and "not_measured" not in data
    summary = TuneSummary.from_dict(data)
    assert summary.schema == SCHEMA and not summary.not_measured
    assert summary.steps[0].program == "decode/1" and len(summary.kernels) > 40
    with pytest.raises(ValueError, match="its schema is 1"):
        TuneSummary.from_dict({**data, "schema": 1})


def test_a_simulated_run_is_called_one() -> None:
    plan = small_plan()
    summary = replace(summary_for(plan), is_simulated=True)
    page = read_page(render_page(make_report(plan, Sources(H200, tuning=summary))))
    assert "Simulated for h200" in page.by_id("tuning").text and "Measured on" not in page.by_id("tuning").text


def test_history_falls_to_the_best_and_slices_have_every_candidate() -> None:
    tuning = full_page().by_id("tuning")
    charts = {svg.attributes["aria-labelledby"].split("-title")[0]: svg for svg in tuning.find("svg", role="img")}
    assert list(charts) == ["study-1-history", "study-1-slice-BLOCK_N", "study-1-slice-num_warps"]
    stair = [
        tuple(map(float, corner.split(",")))
        for corner in charts["study-1-history"].find("polyline")[0].attributes["points"].split()
    ]
    heights = [y for _, y in stair]
    assert heights == sorted(heights) and len(set(heights)) == 3
    lowest = max(float(dot.attributes["cy"]) for dot in charts["study-1-history"].find("circle"))
    assert heights[-1] == pytest.approx(lowest, abs=0.1)
    for svg in charts.values():
        assert len(svg.find("circle", cls="trial")) == 4


def test_without_a_tuning_run_nothing_is_said_of_one() -> None:
    assert not [one for one in plain_page().root.walk() if one.attributes.get("id") == "tuning"]


def test_a_tiny_model_at_other_proportions(tmp_path: Path) -> None:
    """A tiny model: every part of the page at other proportions."""
    plan = small_plan()
    records = write_records(tmp_path / "tiny.json", records_for(plan, step_us=90.0))
    page = read_page(render_page(make_report(plan, Sources(H200, measured=read_measurements([records], plan)))))
    assert [row[0] for row in page.table("decode-time")][:2] == ["decode/1 at 128"] * 2
