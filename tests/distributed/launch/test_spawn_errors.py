"""What `spawn` and the launcher tell of any exception: its type, its rank, its text, and where a long text is whole."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from dpfuse.errors import DPFuseError
from dpfuse.job import spawn
from tests.distributed.processes import SCRIPTS, launch
from tests.distributed.scripts import raising

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

MOST = 20 * 1024


@pytest.fixture(autouse=True)
def no_job_around(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def error_of(kind: str, ranks: int = 1) -> str:
    with pytest.raises(DPFuseError) as caught:
        spawn(raising.fails_with, args=(kind,), nprocs=ranks, start_method="fork")
    return str(caught.value)


def whole_text(error: str) -> str:
    """The content of the file that an error names."""
    (path,) = set(re.findall(r"the whole text is in ([^\];]+)", error))
    assert Path(path).stat().st_mode & 0o777 == 0o600
    return Path(path).read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", raising.NO_EXCEPTIONS)
def test_what_is_no_exception_is_told_with_its_type_and_its_text(kind):
    told = error_of(kind)
    name, text = raising.NO_EXCEPTIONS[kind]
    assert re.match(rf"spawn: rank 0 \(pid \d+\) raised {name}{': ' + re.escape(text) if text else ''};", told)
    assert "func" not in told.partition("\n")[0]  # nothing about a failure before func
    if name != "SystemExit":
        assert "in fails_with" in told


@pytest.mark.parametrize("kind", raising.ENDS_WELL)
def test_a_rank_that_ends_itself_with_a_success_has_not_failed(kind):
    context = spawn(raising.fails_with, args=(kind,), nprocs=1, start_method="fork")
    assert context.join() is True
    with pytest.raises(DPFuseError, match=r"left no return value: it ended with exit code 0\. func ended it"):
        context.return_queues[0].get()


@pytest.mark.parametrize("kind", raising.UNUSUAL)
def test_an_exception_of_an_unusual_kind_is_told(kind):
    told = error_of(kind)
    for part in raising.UNUSUAL[kind]:
        assert part in told
    told.encode()  # it can be written to a file
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", told)
    assert len(told.encode()) < 2 * MOST + 1000


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", raising.LONG)
def test_a_long_message_is_cut_once_and_a_file_has_the_whole(kind):
    told = error_of(kind)
    begins, unit, count = raising.LONG[kind]
    name = "LongError" if kind == "long of an own class" else "ValueError"
    assert f"raised {name}: {begins}{unit}" in told
    assert told.count(f"{begins}{unit}") == 2  # at the beginning, and a few letters at the end of the traceback
    assert told.encode().count(unit.encode()) > (MOST - 500) // len(unit.encode())
    assert len(told.encode()) < MOST + 4000
    assert "raise " in told
    assert "in fails_with" in told
    assert whole_text(told).endswith(f"{name}: {begins}{unit * count}\n")


@pytest.mark.parametrize("kind", raising.LONG_TRACEBACKS)
def test_a_long_traceback_keeps_its_beginning_and_its_end(kind):
    told = error_of(kind)
    first, last, inside = raising.LONG_TRACEBACKS[kind]
    assert first in told.partition("are left out")[0]
    assert last in told.partition("are left out")[2]
    assert len(told.encode()) < MOST + 2000
    whole = whole_text(told)
    assert inside in whole
    assert len(whole.encode()) > MOST


@pytest.mark.parametrize("kind", ["long", pytest.param("own", marks=pytest.mark.slow)])
def test_the_job_ends_at_once_and_not_when_the_other_rank_does(kind):
    began = time.monotonic()
    told = error_of(f"{kind}, on rank 1", ranks=2)
    assert time.monotonic() - began < raising.SLEEP / 2
    assert told.startswith("spawn: rank 1 (pid ")
    assert told.count("it was the first of 2 ranks to fail, and the others were ended") == 1


def test_a_rank_that_ends_without_an_exception_is_not_blamed_on_the_start():
    for kind, code in (("_exit 1", 1), ("_exit 7", 7)):
        assert re.match(
            rf"spawn: rank 0 \(pid \d+\) ended with exit code {code} in func, without an exc", error_of(kind)
        )


@pytest.mark.slow
def test_a_rank_that_fails_before_func_says_so(capfd):
    with pytest.raises(DPFuseError, match="ended with exit code 1 before func; its own output above says why"):
        spawn(raising.fails_with, args=(raising.CannotBeRead(),), nprocs=1)
    assert "planted: cannot be read" in capfd.readouterr().err


@pytest.mark.parametrize("logs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_launcher_cuts_a_long_message_too(logs, tmp_path):
    words = ["--log_dir", tmp_path / "logs"] if logs else []
    done = launch("--nproc_per_node=1", *words, SCRIPTS / "raising.py", "long", warm_ranks=True, TMPDIR=str(tmp_path))
    report = done.stderr.partition("dpfuse.launch: ")[2]
    assert re.match(r"rank 0 \(pid \d+\) raised ValueError: long-text xxx", report)
    assert done.returncode == 1
    assert len(report) < MOST + 4000
    begins, unit, count = raising.LONG["long"]
    assert f"ValueError: {begins}{unit * count}" in whole_text(report)
    assert list((tmp_path / "logs" if logs else tmp_path).glob("dpfuse-error-of-rank-0-*.txt"))
    assert not list(tmp_path.glob("dpfuse-launch-*"))


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        ("keyboard", 130, "raised KeyboardInterrupt: keyboard-text; it was the first rank to fail"),
        pytest.param("own", 1, "raised Skip: skip-text; it was", marks=pytest.mark.slow),
        pytest.param(
            "no str",
            1,
            "raised NoTextError: <str() of it raised ZeroDivisionError>; it was",
            marks=pytest.mark.slow,
        ),
        pytest.param("exit 256", 0, "", marks=pytest.mark.slow),
    ],
)
def test_the_launcher_tells_any_exception(kind, code, text):
    done = launch("--nproc_per_node=1", SCRIPTS / "raising.py", kind, warm_ranks=True)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
