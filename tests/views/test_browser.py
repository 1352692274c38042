"""The tuner in a real browser: JupyterLab in Debian's chromium, driven by playwright.

A missing browser fails in CI; elsewhere the test is skipped with the reason in the summary.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from hicache_lab.base.resources import notebooks_dir
from hicache_lab.preflight import explain
from hicache_lab.views.figures import tuner_data
from hicache_lab.views.widgets import TunerSettings, judge, launch_line

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.browser

START = TunerSettings()
PATIENCE_MS = 90_000
# what plotly has drawn, read back from the page: bar heights, the marked setting and the axis titles
READ_PLOT = """() => {
  const plots = [...document.querySelectorAll('.jp-OutputArea .js-plotly-plot')];
  const plot = plots[plots.length - 1], traces = plot?._fullData ?? [];
  const setting = traces.find(trace => trace.name === 'this setting');
  return setting ? {
    host: traces.filter(trace => trace.type === 'bar').map(trace => trace.y[1]).reduce((a, b) => a + b, 0),
    text: setting.text[0],
    gb: setting.x[0],
    painted: plot.querySelectorAll('.bars .point path').length,
  } : null;
}"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab on loopback with a token, in a folder of its own; its address with the token."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copy(notebooks_dir() / "03_tuner.ipynb", folder)
    # by default JupyterLab draws only the cells in view, and asks about news; it gives a kernel 3 s for its first
    # answer, and on a busy machine, where that was not enough, updates of the figure never reached the page
    for extension, name, text in (
        ("notebook-extension", "tracker", '{"windowingMode": "none"}'),
        ("apputils-extension", "notification", '{"fetchNews": "false"}'),
        ("apputils-extension", "kernels-settings", '{"kernelInfoTimeout": 60000}'),
    ):
        setting = folder / "settings" / "@jupyterlab" / extension / f"{name}.jupyterlab-settings"
        setting.parent.mkdir(parents=True, exist_ok=True)
        setting.write_text(text)
    port, token = free_port(), secrets.token_hex(16)
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTER_TOKEN": token,
        "PYTHONPATH": str(ROOT),
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    with (
        (folder / "lab.log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as server,
    ):
        try:
            wait_for_server(f"http://127.0.0.1:{port}/api", server, folder / "lab.log")
            yield f"http://127.0.0.1:{port}/lab/tree/03_tuner.ipynb?token={token}"
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()


def wait_for_server(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(PATIENCE_MS // 250):
        assert server.poll() is None, log.read_text()
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.25)
    raise AssertionError(f"JupyterLab did not answer:\n{log.read_text()}")


def wait_for_kernel(lab: str) -> None:
    """Until the notebook's kernel is idle and the page is connected to it; before, "run all" is lost."""
    address, token = lab.split("/lab/", maxsplit=1)[0], lab.rpartition("=")[2]
    request = urllib.request.Request(f"{address}/api/kernels", headers={"Authorization": f"token {token}"})
    kernels = None
    for _ in range(PATIENCE_MS // 250):
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
            kernels = json.load(answer)
        if kernels and all(one["execution_state"] == "idle" and one["connections"] for one in kernels):
            return
        time.sleep(0.25)
    raise AssertionError(f"the kernel was not ready: {kernels}")


@pytest.fixture(scope="module")
def page(browser_or_skip: str, lab: str) -> Iterator[Any]:
    """The notebook open in chromium, every cell run."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_or_skip, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1500, "height": 1900})
        # generous: the machine may be busy with other things
        page.set_default_timeout(PATIENCE_MS)
        page.goto(lab)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        wait_for_kernel(lab)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name=re.compile("^Run All Cells")).click()
        page.wait_for_selector(".hicache-verdict")
        # JupyterLab asks a newly connected kernel for the widgets it has and draws them anew when it has heard; on a
        # busy machine widgets born meanwhile stay empty or stand still. So the tuner's cell runs once more, late.
        page.wait_for_timeout(3000)
        cell = page.locator(".jp-CodeCell", has_text="tuner = Tuner(settings)")
        before = cell.locator(".jp-InputPrompt").inner_text()
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+Enter")
        page.wait_for_function(
            "([cell, before]) => ![before, '[*]:'].includes(cell.querySelector('.jp-InputPrompt').innerText)",
            arg=[cell.element_handle(), before],
        )
        page.wait_for_function(f"({READ_PLOT})()?.painted > 0")
        yield page
        browser.close()


def shown(page: Any, css_class: str) -> str:
    return unescape(page.locator(f".{css_class}").last.inner_text()).strip()


def slider(page: Any, text: str) -> Any:
    return page.locator(".widget-slider", has_text=text)


def expect(page: Any, settings: TunerSettings) -> None:
    """Bars, words and line on the page are what the library computes for ``settings``."""
    answer, advice = judge(settings)
    data = tuner_data(answer, advice)
    words = explain(answer, advice).strip()
    for _ in range(PATIENCE_MS // 200):
        drawn = page.evaluate(READ_PLOT)
        seen = drawn and (drawn["gb"], drawn["text"], shown(page, "hicache-verdict"))
        if seen == (data.per_rank_gb, answer.verdict, words):
            break
        page.wait_for_timeout(200)
    assert shown(page, "hicache-verdict") == words
    assert drawn is not None, "the figure has no traces"
    assert drawn["gb"] == data.per_rank_gb
    assert drawn["host"] == pytest.approx(sum(host for _, _, host in data.pools) + data.overhead_gb)
    assert drawn["text"] == answer.verdict
    assert shown(page, "hicache-line") == launch_line(answer)


def test_the_tuner_starts_with_the_static_answer(page: Any) -> None:
    expect(page, START)


def test_dragging_a_slider_moves_bars_verdict_and_line(page: Any) -> None:
    handle = slider(page, "--hicache-size").locator(".noUi-handle")
    handle.scroll_into_view_if_needed()
    box, track = handle.bounding_box(), slider(page, "--hicache-size").locator(".noUi-target").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    for step in range(1, 11):
        page.mouse.move(box["x"] + step * 0.05 * track["width"], box["y"] + box["height"] / 2)
    page.mouse.up()
    size = int(slider(page, "--hicache-size").locator(".widget-readout").inner_text())
    assert size > 100, "the handle was dragged to the right"
    expect(page, replace(START, hicache_size=size))
    assert judge(replace(START, hicache_size=size))[0].verdict == "OOM_RISK"


def test_typing_and_choosing_work_too(page: Any) -> None:
    readout = slider(page, "--hicache-size").locator(".widget-readout")
    readout.click()
    page.keyboard.press("Control+A")
    page.keyboard.type("43")
    page.keyboard.press("Enter")
    expect(page, replace(START, hicache_size=43))
    page.locator(".widget-dropdown", has_text="SGLang release").locator("select").last.select_option("0.5.19")
    expect(page, replace(START, hicache_size=43, sglang_version="0.5.19"))
    page.get_by_role("button", name="ratio", exact=True).click()
    expect(page, replace(START, hicache_size=43, sglang_version="0.5.19", mode="ratio"))
    (ROOT / "reports").mkdir(exist_ok=True)
    page.locator(".hicache-verdict").last.scroll_into_view_if_needed()
    page.screenshot(path=ROOT / "reports" / "03_tuner_browser.png")
    assert (ROOT / "reports" / "03_tuner_browser.png").stat().st_size > 20_000
