"""Installs a wheel into a fresh environment, without network, and trains on two ranks with it: `make wheel`.

`python -m tests.check_wheel WHEEL`. The environment sees the torch of this Python, and dpfuse from the wheel only. A
program that knows nothing of dpfuse is run under torchrun, and by `dpfuse run`; the trained weights must be equal.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from tests.commands.programs import PROGRAMS

__all__ = ["check", "fresh_environment", "run_outside"]

LINE = re.compile(r"^rank \d weights \w+", re.MULTILINE)
WHERE = "import dpfuse, dpfuse_kernels; print(dpfuse.__file__, dpfuse_kernels.__file__)"


def run_outside(*command: object, cwd: Path, timeout: float = 300, **environ: str) -> str:
    """Run a command without the variables of this tree or of a job, and return what it prints.

    Raises:
        RuntimeError: it failed.
    """
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env=clean | environ, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def fresh_environment(folder: Path) -> Path:
    """Make an environment that sees torch, and what else is installed here, but not this tree; return its Python."""
    venv.create(folder, with_pip=False)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    Path(paths["purelib"], "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def check(wheel: Path, folder: Path) -> list[str]:
    """Install and train.

    Args:
        wheel: the file.
        folder: an empty one, for the environment.

    Returns:
        The lines of both ranks, which hold a number for the trained weights.

    Raises:
        RuntimeError: a command has failed, dpfuse is not that of the wheel, or weights differ.
    """
    python = fresh_environment(folder)
    flags = ["--quiet", "--no-deps", "--no-index", "--force-reinstall"]
    run_outside(python, "-m", "pip", "install", *flags, wheel.resolve(), cwd=folder)
    places = run_outside(python, "-c", WHERE, cwd=folder).split()
    if not all(Path(place).is_relative_to(folder.resolve()) for place in places):
        raise RuntimeError(f"dpfuse was imported from {places}, expected the environment {folder}")
    program = PROGRAMS / "language_model.py"
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    under_torch = LINE.findall(run_outside(*launcher, program, cwd=folder))
    under_ours = LINE.findall(run_outside(python.parent / "dpfuse", "run", "--ranks", 2, program, cwd=folder))
    if len(under_ours) != 2 or sorted(under_ours) != sorted(under_torch):
        raise RuntimeError(f"the trained weights are {under_ours} with the wheel, and {under_torch} under torch's DDP")
    return sorted(under_ours)


def main(wheel: str) -> None:
    """Check a wheel, and print what was done."""
    with tempfile.TemporaryDirectory() as folder:
        lines = check(Path(wheel), Path(folder))
    print(f"{wheel}: installed into a fresh environment, without network; two ranks have trained a language model")
    print(f"the weights equal those under torch's DDP bit for bit: {'; '.join(lines)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
