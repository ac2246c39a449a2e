"""`python -m tests.pretended_gpu RELEASE FOLDER`: builds the pretended device for a release of torch, and tests on it.

It makes an environment with torch's build for CUDA (3 GB) in FOLDER, once. It needs g++ and the network. Where that is
impossible, it says so, runs nothing, and ends with an error. With `--ranks` it runs only the tests whose ranks are
processes. With `--shard` it makes no environment, runs a few of these where there is one, and writes no record.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.pretended_gpu.device import LIBRARY

ROOT = Path(__file__).parents[2]
HEADERS = ("nvidia-cuda-crt", "nvidia-cuda-cccl")  # which torch's packages lack
TESTS = ["numpy", "pytest", "pytest-timeout", "pytest-benchmark"]


class BuildError(Exception):
    """The pretended device cannot be built here."""


SHARD = "ours-views or ours-private or ours-sharded or drop-in-face or sources or another"


def main(release: str, place: str, how: str = "") -> int:
    """Build, run the tests, write a record, and return the exit code of pytest; 2 if nothing was run."""
    folder = Path(place).resolve()
    if how == "--shard" and not Path(_python(folder)).exists():
        print("NOT RUN: the tests on pretended GPUs. `make test-pretended` makes what they need.")
        return 0
    try:
        library = _build(release, folder)
    except (BuildError, OSError) as error:
        print(f"NOT RUN: no test of the pretended GPU was run with torch {release}.\n{error}", file=sys.stderr)
        return 2
    paths = {"TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": str(folder), "LD_PRELOAD": str(library)}
    environment = {**os.environ, **paths, LIBRARY: str(library), "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    tests = (
        [f"tests/pretended_gpu/test_{name}.py" for name in ("two_ranks", "plants")] if how else ["tests/pretended_gpu"]
    )
    options = ["--timeout", "120", "-q"]
    if how == "--shard":
        command = [_python(folder), "-m", "pytest", *tests, *options, "-k", SHARD]
    else:
        record = f"bench/results/pretended-gpu-torch-{release}.txt"
        command = [_python(folder), "-m", "tests.recorded", record, *tests, *options, "--durations=10"]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def _build(release: str, folder: Path) -> Path:
    python, library = _python(folder), folder / "libcuda.so.1"
    if not Path(python).exists():
        _run(sys.executable, "-m", "venv", str(folder))
        _run(python, "-m", "pip", "install", "--quiet", f"torch=={release}")
    _run(python, "-m", "pip", "install", "--quiet", *TESTS)
    # The headers of CUDA must have the version of its runtime.
    seen = _run(python, "-c", "import torch; print(torch.version.cuda); print(torch.__path__[0])").split("\n")
    if seen[0] == "None":
        raise BuildError(f"torch {release} of this package index is a build without CUDA; take another release.")
    _run(python, "-m", "pip", "install", "--quiet", "--no-deps", *(f"{name}=={seen[0]}.*" for name in HEADERS))
    nvidia = Path(seen[1]).parent / "nvidia"
    include = [f"-I{nvidia / name / 'include'}" for name in (f"cu{seen[0].split('.')[0]}", "nccl")]
    options = ["-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"]
    sources = sorted(map(str, Path(__file__).parent.glob("*.cpp")))
    _run("g++", *options, "-o", str(library), *sources, *include, "-ldl", "-lpthread")
    return library


def _python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:5])} … failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
