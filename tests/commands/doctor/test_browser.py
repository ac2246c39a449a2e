"""The page in a real browser, where one is installed: on a phone it is as wide as the screen, and text is legible."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html import escape

import pytest

from dpfuse.commands.doctor.page import page
from tests.commands.doctor.test_report import DIFFERENT, FINDING, report
from tests.patience import patience

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
BROWSER = os.environ.get("BROWSER_FOR_TESTS") or next(filter(None, map(shutil.which, NAMES)), None)
AROUND = """<!doctype html>
<iframe id="page" style="width: {width}px; height: 800px; border: 0" srcdoc="{page}"></iframe>
<pre id="found"></pre>
<script>
const frame = document.getElementById("page");
frame.onload = () => {{
  const shown = frame.contentDocument, root = shown.documentElement;
  const small = [...shown.querySelectorAll("svg text")].filter((one) => one.getBoundingClientRect().height < 8);
  document.getElementById("found").textContent = `found ${{root.scrollWidth}} ${{small.length}} ${{shown.title}}`;
}};
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed; BROWSER_FOR_TESTS may name one")
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_fits_a_screen(width, tmp_path):
    long = {"run 1, torch DDP": [f"/home/user/{'folder' * 20}/checkpoint{number}.pt" for number in range(3)]}
    text = page(report(DIFFERENT, [FINDING], changed=long))
    around = tmp_path / "around.html"
    around.write_text(AROUND.format(width=width, page=escape(text)), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"file://{around}"], capture_output=True, text=True, timeout=patience(120), check=False
    )
    found = re.search(r"found (\d+) (\d+) (.*?)<", done.stdout)
    assert found is not None, done.stderr[-2000:]
    assert (int(found[1]), int(found[2]), found[3]) == (width, 0, "dpfuse doctor")
