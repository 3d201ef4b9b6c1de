"""The page of ``lynnc report`` in headless Chromium, from a file: an empty console, no request, both colour schemes,
the keyboard, a narrow screen, and print."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reporting import CONTEXT, large_plan, records_for, summary_for, write_records

from lynnc.report.contents import Sources, make_report
from lynnc.report.measured import read_measurements
from lynnc.report.page import render_page
from lynnc.target import find_device

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install -e '.[test]'")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not BROWSER or not DRIVER, reason="Chromium is not installed: apt-get install chromium chromium-driver"
)

WIDE, NARROW = 1280, 360
LEAST_CONTRAST = 4.5
CONTRASTS = """
const parts = text => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = node => {
    for (; node; node = node.parentElement) {
        const colour = parts(getComputedStyle(node).backgroundColor);
        if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
};
const found = {};
for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || ['TITLE', 'DESC'].includes(node.tagName.toUpperCase())) continue;
    const style = getComputedStyle(node);
    const one = light(parts(node instanceof SVGElement ? style.fill : style.color)), two = light(behind(node));
    const contrast = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    const name = node.tagName + '.' + (node.getAttribute('class') || '');
    found[name] = Math.min(found[name] ?? 99, contrast);
}
return found;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything that one can show."""
    plan, folder = large_plan(), tmp_path_factory.mktemp("page")
    measured = read_measurements([write_records(folder / "bench.json", records_for(plan))], plan)
    report = make_report(plan, Sources(find_device("h200"), measured=measured, tuning=summary_for(plan)))
    path = folder / "report.html"
    path.write_text(render_page(report), "utf-8")
    return path


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def browser(started: Any, page: Path) -> Any:
    """A browser that has just opened the page on a wide screen, with what it logged before forgotten."""
    for log in ("browser", "performance"):
        started.get_log(log)
    show(started, WIDE)
    started.get(page.as_uri())
    return started


def show(browser: Any, width: int, scheme: str = "light", media: str = "") -> None:
    """Sets the screen and what the user prefers."""
    screen = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def open_all(browser: Any) -> None:
    browser.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")


def focused(browser: Any) -> dict[str, Any]:
    """What has the focus, where it stands, and whether that shows."""
    script = """
    const node = document.activeElement, style = getComputedStyle(node), box = node.getBoundingClientRect();
    return {tag: node.tagName, text: node.textContent.trim().slice(0, 40), label: node.ariaLabel,
            outline: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2, height: box.height,
            index: [...document.querySelectorAll('*')].indexOf(node)};
    """
    return dict(browser.execute_script(script))


def press(browser: Any, key: str) -> None:
    browser.switch_to.active_element.send_keys(key)


def test_console_is_empty_and_nothing_is_requested(browser: Any, page: Path) -> None:
    open_all(browser)
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
    assert page.as_uri() in requests
    assert [url for url in requests if url != page.as_uri() and not url.startswith("data:")] == []


def test_a_console_that_is_not_empty_would_show(browser: Any) -> None:
    browser.execute_script("console.error('wrong')")
    assert len(browser.get_log("browser")) == 1


def test_elements_are_there_and_visible(browser: Any) -> None:
    def seen(selector: str) -> list[Any]:
        return [one for one in browser.find_elements("css selector", selector) if one.is_displayed()]

    assert browser.title == "lynn-27b-a3b.h200: lynnc report"
    assert [one.text for one in seen("h2")] == [
        "Layers",
        "Time of a token",
        "Launches and rooflines",
        "Memory",
        "Tuning",
        "About this plan",
    ]
    assert len(seen("#layers rect.bar")) == 40
    assert len(seen("#decode-1 .box summary")) == 17 and not seen("#decode-4 .box summary")
    assert seen("#decode-1 svg[aria-labelledby^=roofline]") and len(seen("#decode-1-kernels tbody tr")) == 13
    row = seen("#decode-time tbody tr")[0]
    assert row.text.startswith(f"decode/1 at {CONTEXT} measured") and "1,021" in row.text
    parts = row.find_elements("css selector", "rect")
    assert len(parts) == 3 and all(part.rect["width"] > 20 for part in parts)
    assert len(seen("#memory-table tbody tr")) > 10 and len(seen("#tuning-gains tbody tr")) == 2


def test_a_reader_of_the_screen_is_told_the_charts(browser: Any) -> None:
    browser.execute_cdp_cmd("Accessibility.enable", {})
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = {(node["role"]["value"], node["name"]["value"]) for node in nodes if node.get("name", {}).get("value")}
    roles = {node["role"]["value"] for node in nodes}
    assert {"banner", "navigation", "main", "contentinfo", "region"} <= roles
    assert any(role == "image" and "Experts in each layer" in name for role, name in named), named
    assert ("navigation", "Sections") in named
    assert any(role == "table" and name.startswith("Memory by class") for role, name in named)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(browser: Any, scheme: str) -> None:
    show(browser, WIDE, scheme)
    open_all(browser)
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 20, 25)"}[scheme]
    contrasts = browser.execute_script(CONTRASTS)
    assert len(contrasts) > 20 and min(contrasts.values()) < 20
    assert {name: value for name, value in contrasts.items() if value < LEAST_CONTRAST} == {}


def test_keyboard_reaches_everything_in_order_and_the_focus_shows(browser: Any) -> None:
    tab, enter = "\ue004", "\ue007"
    browser.find_element("css selector", "body").send_keys(tab)
    first = focused(browser)
    assert first["text"] == "Skip to the content" and first["height"] > 10
    found = [first]
    while len(found) < 300:
        press(browser, tab)
        now = focused(browser)
        if now["index"] <= found[-1]["index"]:
            break
        found.append(now)
    assert all(one["outline"] for one in found)
    expected = browser.execute_script(
        "return [...document.querySelectorAll('a, summary, [tabindex=\"0\"]')].filter(e => e.checkVisibility()).length"
    )
    assert len(found) == expected > 30
    summary = browser.find_element("css selector", "#decode-1 .box summary")
    summary.send_keys(enter)
    box = browser.find_element("css selector", "#decode-1 .box")
    assert box.get_attribute("open") is not None and "record h200" in box.text


def test_a_link_leads_to_its_section(browser: Any) -> None:
    browser.find_element("link text", "Memory").click()
    top = browser.execute_script("return document.getElementById('memory').getBoundingClientRect().top")
    assert browser.current_url.endswith("#memory") and abs(top) < 200


@pytest.mark.parametrize("width", [NARROW, 768, WIDE])
def test_no_page_is_wider_than_its_screen(browser: Any, width: int) -> None:
    show(browser, width)
    for _ in range(2):
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        open_all(browser)
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('td, dd, p, .op')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 11


def test_print_shows_what_is_folded_in(browser: Any) -> None:
    table = "return document.getElementById('layers-table').checkVisibility()"
    assert not browser.execute_script(table)
    show(browser, WIDE, "dark", media="print")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.execute_script(table)
    assert not browser.find_element("css selector", "nav").is_displayed()
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"]
    assert len(pdf) > 50_000
