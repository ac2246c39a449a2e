"""The page in a real browser, if one is installed: on a phone it is as wide as the screen, and text is legible."""

from __future__ import annotations

import os
import shutil

import pytest

from dpfuse.commands.doctor.page import page
from tests.commands.doctor.test_report import DIFFERENT, FINDING, report

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
BROWSER = os.environ.get("BROWSER_FOR_TESTS") or next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ["--no-sandbox", "--single-process", "--no-zygote", "--disable-dev-shm-usage"]  # for containers
LEGIBLE = 11  # pixels: the height of a line of text
CUT = '() => [...document.querySelectorAll(".wide")].filter((one) => one.scrollWidth > one.clientWidth).length'
SMALL = f"""() => [...document.querySelectorAll("p, td, th, li, figcaption, svg text")]
    .filter((one) => one.textContent && one.getBoundingClientRect().height < {LEGIBLE}).length"""


WITHOUT = (
    "NOT LOOKED AT: no browser is installed, so nothing has seen the doctor's page; BROWSER_FOR_TESTS may name one"
)


@pytest.mark.skipif(BROWSER is None, reason=WITHOUT)
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_fits_a_screen_and_fetches_nothing(width, tmp_path):
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="NOT LOOKED AT: there is a browser, and no playwright to drive it"
    )
    long = {"run 1, torch DDP": [f"/home/user/{'folder' * 20}/checkpoint{number}.pt" for number in range(3)]}
    (tmp_path / "page.html").write_text(page(report(DIFFERENT, [FINDING], changed=long)), encoding="utf-8")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=FLAGS)
        tab = browser.new_page(viewport={"width": width, "height": 800})
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto((tmp_path / "page.html").as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.evaluate(SMALL) == 0
        assert tab.evaluate(CUT) == 0
        assert tab.title() == "dpfuse doctor"
        assert len(asked) == 1
        browser.close()
