"""Files that services read: each fits its schema, and says the same as the project does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / ".github").exists(), reason="not a checkout")
SCHEMAS = {
    ".github/workflows/*.yml": "github-workflows",
    ".github/dependabot.yml": "dependabot",
    ".github/ISSUE_TEMPLATE/[bfg]*.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
    ".readthedocs.yaml": "readthedocs",
    "CITATION.cff": "citation-file-format",
}
FILES = [(path, schema) for pattern, schema in SCHEMAS.items() for path in sorted(ROOT.glob(pattern))]


def content(path):
    return pytest.importorskip("yaml").safe_load((ROOT / path).read_text())


def project():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def check(path, schema):
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)


# One for each schema.
QUICK = ("ci.yml", "bug.yml", "CITATION.cff", "dependabot.yml", "config.yml", ".readthedocs.yaml")


@pytest.mark.parametrize(
    ("path", "schema"),
    [pytest.param(*file, marks=() if file[0].name in QUICK else pytest.mark.slow) for file in FILES],
    ids=[path.name for path, _ in FILES],
)
def test_each_file_fits_its_schema(path, schema):
    done = check(path, schema)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_files_of_each_kind_and_a_wrong_one_is_seen(tmp_path):
    assert {schema for _, schema in FILES} == {*SCHEMAS.values()}
    wrong = tmp_path / "ci.yml"
    wrong.write_text((ROOT / ".github/workflows/ci.yml").read_text().replace("runs-on", "run-on"))
    assert check(wrong, "github-workflows").returncode == 1


def found_by_zizmor(folder):
    """Look for known mistakes of workflows, such as permissions that are too wide. Nothing is downloaded."""
    program = shutil.which("zizmor", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("zizmor is not installed")
    command = [program, "--offline", "--no-progress", "--config", str(ROOT / ".github/zizmor.yml"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)


def test_no_known_mistake_is_in_the_workflows():
    done = found_by_zizmor(ROOT / ".github")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mistake_in_a_workflow_is_found(tmp_path):
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    (folder / "ci.yml").write_text(text.replace("- run: make test\n", "- run: echo ${{ github.head_ref }}\n"))
    done = found_by_zizmor(tmp_path / ".github")
    assert done.returncode != 0
    assert "template-injection" in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_ask_for_few_permissions_end_in_time_and_call_targets_that_exist(path):
    workflow = content(path)
    assert workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 60
        assert job.get("permissions", {}) == ({"id-token": "write"} if name == "publish" else {})
        for step in job["steps"]:
            assert {*re.findall(r"^make ([\w-]+)", step.get("run", ""), re.MULTILINE)} <= targets
            assert re.search(r"@(v\d+|release/v\d+)$", step.get("uses", "@v0"))


def test_ci_runs_every_python_that_the_package_names_and_every_torch_that_was_recorded():
    jobs = content(".github/workflows/ci.yml")["jobs"]
    pairs = jobs["versions"]["strategy"]["matrix"]["include"]
    asked = [step["with"] for step in jobs["test"]["steps"] if "with" in step]
    ours = {each["python-version"] for each in asked if "python-version" in each}
    named = {text.rpartition(" ")[2] for text in project()["classifiers"] if re.search(r":: 3\.\d+$", text)}
    assert {pair["python"] for pair in pairs} | ours == named
    torches = {path.stem.removeprefix("torch-") for path in (ROOT / "bench/results").glob("torch-2*.txt")}
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group(1)
    assert {pair["torch"] for pair in pairs} | {pinned} == torches


def test_a_bug_report_asks_for_the_environment():
    for name in ("bug", "feature"):
        labels = [part["attributes"]["label"] for part in content(f".github/ISSUE_TEMPLATE/{name}.yml")["body"]]
        assert any("`dpfuse env`" in label for label in labels)


def test_the_citation_is_of_this_version():
    from dpfuse import __version__

    assert content("CITATION.cff")["version"] == __version__


def test_a_machine_without_a_gpu_installs_no_triton():
    facts = project()
    assert not any("triton" in each for each in facts["dependencies"])
    assert any("triton" in each for each in facts["optional-dependencies"]["triton"])


@pytest.mark.slow
def test_the_package_page_renders(tmp_path):
    pytest.importorskip("twine")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, capture_output=True, timeout=patience(300), check=True)
    files = [str(path) for path in tmp_path.iterdir()]
    assert len(files) == 2
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2
