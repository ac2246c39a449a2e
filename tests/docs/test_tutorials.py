"""Every tutorial does what it shows when a reader saves its files and types its commands."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.docs.pages import ROOT, tutorials
from tests.docs.tutorials import IMAGES, commands_of, files_of, fits, run
from tests.patience import patience

MAX_BYTES = 100_000  # of a picture
IMAGE = re.compile(r"!\[[^\]]+\]\(\.\./images/([\w.-]+)\)")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", tutorials(), ids=lambda page: page.stem)
def test_a_tutorial_prints_what_it_shows(page, tmp_path):
    for command, (code, printed) in zip(commands_of(page), run(page, tmp_path, timeout=patience(280)), strict=True):
        assert (code != 0) == command.fails, f"{command.text}\n{printed}"
        if "varies:" not in command.marker:
            assert fits(command.shown, printed), f"{command.text}\nprinted:\n{printed}\nbut shown:\n{command.shown}"


@pytest.mark.parametrize("page", tutorials(), ids=lambda page: page.stem)
def test_a_tutorial_has_a_picture_and_uses_each_of_its_files(page):
    text = page.read_text(encoding="utf-8")
    pictures = [IMAGES / name for name in IMAGE.findall(text)]
    assert pictures
    assert [picture.name for picture in pictures if picture.stat().st_size > MAX_BYTES] == []
    commands = " ".join(command.text for command in commands_of(page))
    sources = "\n".join(files_of(page).values())
    for name in files_of(page):
        module = name.removesuffix(".py")
        used = name in commands or f"{module}:" in commands or f"import {module}" in sources
        assert used or f"from {module} import" in sources or not name.endswith(".py"), name


def test_other_numbers_are_the_same_output_and_other_words_are_not():
    shown = "epoch 1: loss 0.25\n…\nrank 0 (pid …) ends"
    assert fits(shown, "epoch 1: loss 12.5\nrank 0 (pid 7) ends\n")
    assert fits(shown, "epoch 1: loss 1.5e-7\nmore\nand more\nrank 0 (pid 7) ends\n")
    assert not fits(shown, "epoch 2: loss 0.25\nrank 0 (pid 7) ends\n")
    assert not fits(shown, "epoch 1: loss 0.25\nrank 1 (pid 7) ends\n")
    assert fits("", "\n")
    assert not fits("", "a word\n")


def test_the_batch_file_is_a_shell_script_and_the_manifest_is_yaml(tmp_path):
    yaml = pytest.importorskip("yaml")
    files = files_of(ROOT / "docs/train/launch.md")
    script = tmp_path / "train.sbatch"
    script.write_text(files["train.sbatch"])
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False).stderr == ""
    assert files["train.sbatch"].startswith("#!/bin/bash\n")
    service, job = yaml.safe_load_all(files["train.yaml"])
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = spec["template"]["spec"]["containers"]
    words = " ".join(container["command"])
    assert f"--nnodes {spec['completions']}" in words
    assert spec["completions"] == spec["parallelism"]
    assert f"{job['metadata']['name']}-0.{service['metadata']['name']}" in words


def test_the_diagrams_are_those_of_their_program(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    namespace = {"__name__": "diagrams", "__file__": str(IMAGES / "draw_step.py")}
    exec((IMAGES / "draw_step.py").read_text(encoding="utf-8"), namespace)
    namespace["IMAGES"] = tmp_path
    for draw in ("step", "accumulation", "machines"):
        namespace[draw]()
    assert {path.name for path in tmp_path.iterdir()} == {"step.png", "accumulation.png", "machines.png"}
    for path in tmp_path.iterdir():
        drawn, kept = (image.imread(place) for place in (path, IMAGES / path.name))
        assert drawn.shape[1] == kept.shape[1]  # the layout's height depends on the fonts
