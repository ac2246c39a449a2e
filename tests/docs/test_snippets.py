"""Every example is run as it stands: the Python blocks of the pages, and the examples in docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import pkgutil
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.docs.pages import ROOT, Program, blocks_of, pages, programs_of
from tests.patience import patience
from tests.warm import warm_python

MAX_NOT_RUN = 2
JOB = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|PADDLE_|FLAGS_|DPFUSE_|TORCHELASTIC_|PET_")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


LONG = ("CONTRIBUTING.md", "docs/train/buckets.md")  # their programs take seconds
FIRST = ("README.md", "docs/start/quickstart.md", "docs/move/from_ddp.md")  # what a newcomer reads


def is_slow(program: Program) -> bool:
    """Whether a program takes seconds, most of them to start ranks, and is on no page that newcomers read first."""
    page = name_of(program.page)
    return page in LONG or ("spawn(" in program.source and page not in FIRST)


PROGRAMS = [
    pytest.param(
        program,
        id=f"{name_of(page)}:{program.blocks[0].line}",
        marks=pytest.mark.slow if is_slow(program) else (),
    )
    for page in pages()
    for program in programs_of(page)
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_page_runs_and_prints_what_it_shows(program: Program, tmp_path):
    script = tmp_path / f"page_{program.page.stem}.py"  # a page may have the name of a module
    script.write_text(program.source, encoding="utf-8")
    environ = {key: value for key, value in os.environ.items() if not JOB.match(key)}
    environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    environ["PYTHON_EXEC"] = warm_python()  # of the ranks that it starts
    command = [warm_python(), script.name]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, encoding="utf-8", timeout=patience(120), check=False
    )
    assert done.returncode == 0, f"{program.page}:\n{done.stderr}"
    printed = program.split(done.stdout)
    for block, got in zip(program.blocks, printed, strict=True):
        assert block.output is None or got.strip() == block.output.strip(), f"{program.page}:{block.line}"


def test_few_blocks_are_not_run_and_each_says_why():
    marked = [
        f"{name_of(page)}:{block.line}: {block.marker}"
        for page in pages()
        for block in blocks_of(page)
        if block.language == "python" and block.marker
    ]
    assert all(re.search(r": no-run: \w", where) for where in marked), marked
    assert len(marked) <= MAX_NOT_RUN
    if marked:
        pytest.skip("; ".join(marked))


LAUNCHES = [
    pytest.param(line, id=f"{name_of(page)}:{block.line + offset}")
    for page in pages()
    for block in blocks_of(page)
    if block.language == "bash"
    for offset, line in enumerate(block.text.replace("\\\n", "  ").splitlines())
    if line.startswith(("python -m dpfuse.launch ", "dpfuse-launch "))
]


@pytest.mark.parametrize("line", LAUNCHES)
def test_the_launcher_understands_every_command_line_shown(line, tmp_path, monkeypatch):
    from dpfuse.job.paddle_launch_flags import parse

    words = shlex.split(line, comments=True)
    words = words[3 if words[0] == "python" else 1 :]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("dpfuse.job.nodes.is_own_address", "192.168.1.2".__eq__)  # of the machine that the page means
    for script in (word for word in words if word.endswith(".py")):
        if "/" in script:
            assert (ROOT / script).exists()
        path = tmp_path / script
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    parse(words)


def docstring_examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = []
    for package in ("dpfuse", "dpfuse_kernels"):
        path = importlib.import_module(package).__path__
        names = [package, *(module.name for module in pkgutil.walk_packages(path, f"{package}."))]
        for name in names:
            if name.startswith("dpfuse.integrations."):
                continue  # each needs its library; what they do is shown in examples/adoption
            module = importlib.import_module(name)
            # By module: a function of the same name may hide it.
            found += [test for test in finder.find(module, name, module=module) if test.examples]
    return found


@pytest.fixture
def own_job(monkeypatch):
    """Examples join jobs of one rank; whatever they leave of them is gone afterwards."""
    for key in filter(JOB.match, list(os.environ)):
        monkeypatch.delenv(key)
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for key in os.environ.keys() - before.keys():
        del os.environ[key]


DOCSTRINGS = docstring_examples()


@pytest.mark.parametrize("example", DOCSTRINGS, ids=lambda example: example.name)
@pytest.mark.usefixtures("own_job", "warm_spawn")
def test_a_docstring_shows_what_happens(example, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    runner = doctest.DocTestRunner()
    report: list[str] = []
    runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


def test_public_names_have_examples():
    """Whatever a user calls or builds shows how; results that only the library makes need not."""
    import dpfuse
    import dpfuse.distributed
    import dpfuse_kernels

    tested = {example.name.rpartition(".")[2] for example in DOCSTRINGS}
    names = {*dpfuse.__all__, *dpfuse.distributed.__all__, *dpfuse_kernels.__all__}
    assert names - tested <= {"__version__", "Bucket", "CommunicationTimes", "SpawnContext"}


def texts_of_the_sources() -> list[str]:
    """Every string of the packages; what an f-string fills in is an ellipsis."""
    found = []
    for path in [*(ROOT / "dpfuse").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.slow
def test_every_error_that_is_explained_exists():
    page = " ".join((ROOT / "docs/wrong/errors.md").read_text(encoding="utf-8").split())  # a phrase may fill two lines
    phrases = re.findall(r"\*\*`(.+?)`\*\*", page)
    assert len(phrases) > 20
    texts = texts_of_the_sources()
    patterns = {phrase: re.compile(".*?".join(map(re.escape, phrase.split("…")))) for phrase in phrases}
    assert [phrase for phrase, pattern in patterns.items() if not any(map(pattern.search, texts))] == []
