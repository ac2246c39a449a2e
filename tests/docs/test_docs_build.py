"""The pages are whole: they build without a warning, links lead somewhere, and no public name is missing."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

import dpfuse
import dpfuse.distributed
import dpfuse_kernels
from tests.docs.pages import ROOT, pages
from tests.patience import patience
from tests.warm import warm_python

LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)")
OURS = "https://github.com/dpfuse/dpfuse/blob/main/"  # the README is also the text of the package's page
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
DIRECTIVE = re.compile(r"^\.\. auto(?:class|function|exception):: ([\w.]+)", re.MULTILINE)


@pytest.mark.slow
def test_sphinx_builds_every_page_without_a_warning(tmp_path):
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    pytest.importorskip("sphinx_reredirects")
    command = [warm_python(), "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    done = subprocess.run(
        [*command, "docs", str(tmp_path / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(300),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "html/reference/wrappers.html").read_text(encoding="utf-8")
    assert "comm_buffer_size" in page


@pytest.mark.parametrize(
    "page",
    [*pages(), *(ROOT / f"{name}.md" for name in ("CHANGELOG", "RELEASING", "SECURITY"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page):
    assert [target for target in LINK.findall(page.read_text(encoding="utf-8")) if not _leads(page, target)] == []


def test_links_of_the_readme_are_absolute_and_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert LINK.findall(text) == []
    ours = re.findall(rf"\]\({re.escape(OURS)}([^)]+)\)", text)
    assert len(ours) > 3
    assert [target for target in ours if not _leads(ROOT / "README.md", target.removesuffix("?raw=true"))] == []


def test_a_dead_link_and_a_dead_anchor_are_seen():
    page = ROOT / "docs/index.md"
    assert not _leads(page, "no_page.md")
    assert not _leads(page, "move/from_ddp.md#no-heading")
    assert not _leads(page, "#no-heading")
    assert _leads(page, "move/from_ddp.md#adoption")


def _leads(page, target):
    """Is there such a file, seen from this page, and in it a heading of that name?"""
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not anchor or not path.exists():
        return path.exists()
    headings = HEADING.findall(path.read_text(encoding="utf-8"))
    return anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_old_addresses_lead_to_pages_that_exist():
    moved = json.loads((ROOT / "docs/redirects.json").read_text(encoding="utf-8"))
    assert moved
    assert [old for old in moved if (ROOT / f"docs/{old}.md").exists()] == []
    targets = {old: target.replace(".html", ".md", 1) for old, target in moved.items()}
    assert {old: to for old, to in targets.items() if not _leads(ROOT / f"docs/{old}.md", to)} == {}


def test_decisions_are_numbered_in_order():
    page = (ROOT / "docs/design/decisions.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^## (\d{4}) ", page, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_public_name_is_in_the_api_pages():
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/reference").glob("*.md"))
    documented = {name.rpartition(".")[2] for name in DIRECTIVE.findall(text)}
    public = {*dpfuse.__all__, *dpfuse.distributed.__all__, *dpfuse_kernels.__all__} - {"__version__"}
    assert public <= documented


@pytest.mark.parametrize("folder", ["comm", "engine"])
def test_the_page_of_the_architecture_lists_every_file(folder):
    page = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    files = [path.name for path in (ROOT / "dpfuse" / folder).glob("*.py") if path.name != "__init__.py"]
    assert [name for name in files if f"`{name}`" not in page] == []
