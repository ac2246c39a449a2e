"""`python -m dpfuse.launch`: real jobs on fresh processes, each under a time limit."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import pytest
import torch.distributed as dist

from dpfuse.launch import main
from tests.distributed.processes import (
    SCRIPTS,
    all_gone,
    free_port,
    is_loopback,
    launch,
    listening_addresses,
    pids_in,
    python,
    run,
    start,
)
from tests.patience import patience

SCRIPT = str(SCRIPTS / "join.py")


def reports(text):
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda seen: seen["rank"])


def test_two_ranks_meet_and_the_console_stays_clean():
    # As if started by a rank of a larger job, on a card that this one may not have.
    around = {"PADDLE_TRAINER_ID": "7", "PADDLE_TRAINERS_NUM": "9", "PADDLE_TRAINER_ENDPOINTS": "a:1,b:2"}
    around |= {"FLAGS_selected_gpus": "7", "RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "7", "GROUP_RANK": "3"}
    done = launch("--nproc_per_node", 2, SCRIPT, "--lr", "0.1", "–x", "--gpus", warm=False, **around)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    seen = reports(done.stdout)
    assert [(s["rank"], s["sum"]) for s in seen] == [(0, 3.0), (1, 3.0)]
    for s in seen:
        assert s["argv"] == ["--lr", "0.1", "–x", "--gpus"]
        assert s["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
        assert int(s["environment"]["OMP_NUM_THREADS"]) == s["threads"] >= 1
        master = s["paddle"]["PADDLE_MASTER"]
        endpoints = [master, f"127.0.0.1:{int(master.removeprefix('127.0.0.1:')) + 1}"]
        assert s["paddle"] == {
            "PADDLE_TRAINER_ID": str(s["rank"]),
            "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_CURRENT_ENDPOINT": endpoints[s["rank"]],
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_MASTER": master,
            "PADDLE_GLOBAL_RANK": str(s["rank"]),
            "PADDLE_GLOBAL_SIZE": "2",
            "PADDLE_LOCAL_RANK": str(s["rank"]),
            "PADDLE_LOCAL_SIZE": "2",
            "PADDLE_NNODES": "1",
            "PADDLE_RANK_IN_NODE": str(s["rank"]),
            "PADDLE_DISTRI_BACKEND": "gloo",
        }


def test_a_script_finds_itself_as_under_python():
    seen = reports(launch("--nproc_per_node=1", SCRIPT).stdout)[0]
    assert (seen["name"], seen["file"], seen["path"]) == ("__main__", SCRIPT, str(SCRIPTS))
    assert not seen["torch_came_first"]
    assert seen["environment"]["OMP_NUM_THREADS"] is None


@pytest.mark.slow
def test_a_module_runs_and_variables_of_the_user_stay():
    done = launch("--nproc_per_node=1", "-m", "tests.distributed.scripts.join", "a", OMP_NUM_THREADS="3")
    seen = reports(done.stdout)[0]
    assert (seen["name"], seen["argv"]) == ("__main__", ["a"])
    assert seen["environment"]["OMP_NUM_THREADS"] == "3"


def test_without_a_count_one_rank_starts_and_a_hint_is_given():
    done = launch(SCRIPTS / "main_module.py")
    assert (done.returncode, done.stdout) == (0, "[4, 9]\n")
    assert done.stderr.startswith("dpfuse.launch: no GPU is visible")
    assert "--nproc_per_node N" in done.stderr


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        pytest.param("raise", 1, "raised ValueError: planted", marks=pytest.mark.slow),
        ("raise-while-peer-sleeps", 1, "raised ValueError: planted"),
        ("exit", 3, "ended with exit code 3"),
        pytest.param("_exit", 4, "ended with exit code 4", marks=pytest.mark.slow),
        pytest.param("kill", 137, "was killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_ends_the_job_is_named_and_gives_its_exit_code(how, code, text):
    began = time.monotonic()
    own = how in ("raise", "kill")  # interpreters; for the others, processes will do that have imported torch
    done = launch("--nproc_per_node", 2, SCRIPTS / "fail.py", how, warm=how != "kill", warm_ranks=not own)
    assert time.monotonic() - began < patience(20)  # most of it is importing torch
    assert done.returncode == code
    last = done.stderr.splitlines()[-1]
    assert last.startswith("dpfuse.launch: rank 1 (pid ")
    assert text in last
    pids = pids_in(done.stdout)
    assert len(pids) == 2
    assert all_gone(pids, within=1)
    if how.startswith("raise"):
        assert "ValueError: planted" in done.stderr.replace(last, "")  # the rank's own traceback
        assert "rank_program.py" not in done.stderr  # without frames of dpfuse


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("return", 0, None),
        pytest.param("0", 0, None, marks=pytest.mark.slow),
        ("raise", 1, "raised ValueError: planted"),
        pytest.param("text", 1, "raised SystemExit: planted", marks=pytest.mark.slow),
        pytest.param("3", 3, "ended with exit code 3", marks=pytest.mark.slow),
        pytest.param("300", 300 & 0xFF, "raised SystemExit: 300", marks=pytest.mark.slow),
    ],
)
def test_a_rank_does_what_python_does_at_its_end_but_is_not_taken_apart(tmp_path, how, code, text):
    """Otherwise threads of libraries may still run and abort the process, and its exit code would be the signal's."""
    done = launch("--nproc_per_node", 1, SCRIPTS / "leave.py", how, tmp_path / "log")
    assert done.returncode == code, done.stderr
    assert done.stdout.split() == ["thread", "atexit"]
    assert [(tmp_path / name).read_text() for name in ("log", "log.c")] == ["buffered"] * 2
    if text is not None:
        assert text in done.stderr.splitlines()[-1]
    if how == "text":
        assert done.stderr.startswith("planted\n")


@pytest.mark.slow
def test_redirected_output_shows_the_traceback_of_the_first_failure(tmp_path):
    done = launch(
        "--nproc_per_node=2", "--redirects=3", "--log_dir", tmp_path, SCRIPTS / "fail.py", "raise", warm_ranks=True
    )
    assert done.returncode == 1
    assert 'raise ValueError("planted")' in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.glob("**/stdout.log"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_log_dir_keeps_a_log_per_rank_and_the_first_failure_is_still_reported(how, tmp_path):
    logs = tmp_path / "new" / "logs"
    done = launch("--nproc_per_node=2", "--log_dir", logs, SCRIPTS / "fail.py", how, TEST_SECRET="hunter2")
    assert done.returncode == (137 if how == "kill" else 1)
    assert sorted(log.name for log in logs.iterdir()) == ["workerlog.0", "workerlog.1"]
    first, second = ((logs / f"workerlog.{rank}").read_text() for rank in (0, 1))
    pids = pids_in(first + second)
    assert len(pids) == 2
    # Rank 0's are on the console too.
    assert done.stdout == "".join(f"[default0]:{line}" for line in first.splitlines(keepends=True))
    if how == "raise":  # stdout and stderr, in the order in which they were written
        assert second.index("pid=") < second.index("Traceback (most recent call last)")
    report = done.stderr.partition("dpfuse.launch: ")[2]
    assert report.startswith(f"rank 1 (pid {pids[1]})")
    assert f"Its log is {logs / 'workerlog.1'}." in report
    # For a rank without a record, the end of its log is shown.
    assert ('raise ValueError("planted")' if how == "raise" else f"pid={pids[1]}") in report
    assert "hunter2" not in first + second + done.stdout + done.stderr


@pytest.mark.slow
def test_a_restart_keeps_the_log_of_the_failed_attempt(tmp_path):
    words = ("--nproc_per_node=1", "--max_restarts=1", "--log_dir", tmp_path, SCRIPT)
    done = launch(*words, warm_ranks=True, TEST_FAIL_UNTIL_RESTART="1")
    assert done.returncode == 0, done.stderr
    assert [s["sum"] for s in reports((tmp_path / "workerlog.0").read_text())] == [1.0]
    assert "planted: first attempt" in (tmp_path / "workerlog.0.attempt0").read_text()


def test_a_log_dir_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.touch()
    done = launch("--nproc_per_node=1", "--log_dir", path, SCRIPT)
    assert done.returncode == 1
    assert f"dpfuse.launch: the job could not be started or supervised: [Errno 17] File exists: '{path}'" in done.stderr


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGKILL, signal.SIGINT))],
)
def test_no_rank_outlives_the_launcher(number):
    words = ("-m", "dpfuse.launch", "--nproc_per_node=2", SCRIPTS / "fail.py", "sleep")
    warm = number != signal.SIGKILL
    job = start(*words, warm=warm, **({"PYTHON_EXEC": python(warm=True)} if warm else {}))
    assert job.stdout is not None
    pids = pids_in(job.stdout.readline() + job.stdout.readline())
    job.send_signal(number)
    assert all_gone([*pids, job.pid], within=10)
    _, told = job.communicate(timeout=patience(10))
    if number != signal.SIGKILL:
        assert job.returncode == 128 + number
        assert f"dpfuse.launch: got {number.name}" in told


@pytest.mark.slow
def test_nothing_listens_beyond_loopback():
    done = launch("--nproc_per_node", 2, SCRIPTS / "listeners.py")
    assert done.returncode == 0, done.stderr
    addresses = json.loads(done.stdout)
    assert len(addresses) >= 2  # the store, and gloo's sockets
    assert all(map(is_loopback, addresses)), addresses


def test_the_check_for_listeners_sees_an_open_one():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert not all(map(is_loopback, listening_addresses([os.getpid()])))
    del store


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True])
def test_a_restarted_job_starts_afresh(given):
    port = free_port()
    words = ["--nproc_per_node=2", "--max_restarts=2", *([f"--master_port={port}"] if given else [])]
    done = launch(*words, SCRIPT, warm_ranks=True, TEST_FAIL_UNTIL_RESTART="2")
    assert done.returncode == 0, done.stderr
    seen = reports(done.stdout)
    assert [s["sum"] for s in seen] == [3.0, 3.0]
    assert {s["paddle"]["PADDLE_MASTER"] == f"127.0.0.1:{port}" for s in seen} == {given}


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launch("--nproc_per_node=1", "--master_port", port, SCRIPT)
    assert done.returncode == 1
    assert f"port {port} of 127.0.0.1 cannot be used" in done.stderr
    assert "Give another port" in done.stderr


@pytest.mark.parametrize("rank", [["--rank=0"], []])
def test_a_taken_port_of_several_machines_is_named(rank):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        conf = "is_host=1,read_timeout=2"  # torchrun alone would treat the other program as a launcher for a minute
        done = launch("--nproc_per_node=1", "--master", place, "--nnodes=2", f"--rdzv_conf={conf}", *rank, SCRIPT)
    assert done.returncode == 1
    assert "A port that this job needs is taken: give another one, the same on every machine." in done.stderr


@pytest.mark.slow
def test_two_machines_meet_by_torchruns_own_flags():
    flags = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    ranks = {"PYTHON_EXEC": python(warm=True)}
    nodes = [start("-m", "dpfuse.launch", *flags, f"--node_rank={n}", SCRIPT, warm=True, **ranks) for n in (0, 1)]
    told = [node.communicate(timeout=patience(60)) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    seen = reports(told[0][0] + told[1][0])
    assert [s["sum"] for s in seen] == [3.0, 3.0]
    assert [s["paddle"]["PADDLE_NNODES"] for s in seen] == ["2", "2"]
    assert not {"PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINER_ENDPOINTS"}.intersection(*(s["paddle"] for s in seen))


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["–nproc_per_node", "2", SCRIPT], ["'–nproc_per_node'", "typographic dash", "--nproc_per_node?"]),
        (["—gpus", "0,1", SCRIPT], ["'—gpus'", "typographic dash", "Did you mean --gpus?"]),
        (["–selected_gpus=0,1", SCRIPT], ["'–selected_gpus=0,1'", "dash", "Did you mean --selected_gpus?"]),
        (["--selected_gpu_s", "0", SCRIPT], ["unknown flag '--selected_gpu_s'", "mean --selected_gpus?"]),
        (["--nproc_per_node=2", "-–gpus=0", SCRIPT], ["'-–gpus=0'", "typographic dash", "--gpus?"]),
        (["-nproc_per_node", "2", SCRIPT], ["'-nproc_per_node'", "one hyphen", "Write --nproc_per_node"]),
        (["--nproc_per_nod_e=2", SCRIPT], ["unknown flag '--nproc_per_nod_e=2'", "mean --nproc_per_node?"]),
        (["--gpu_s", "0", SCRIPT], ["unknown flag '--gpu_s'", "Did you mean --gpus?"]),
        (["--zzz", SCRIPT], ["unknown flag '--zzz'", "--help"]),
        (["--nproc=2", SCRIPT], ["unknown flag '--nproc=2'", "Did you mean --nproc_per_node?"]),
        (["--gpu=0", SCRIPT], ["unknown flag '--gpu=0'", "Did you mean --gpus?"]),
        (["--run_mode=ps", SCRIPT], ["--run_mode", "'ps'", "expected 'collective'", "Leave the flag out"]),
        (["--log-level", "loud", SCRIPT], ["--log_level", "'LOUD'", "expected DEBUG, INFO"]),
        ([], ["got no script to start, expected its name after the flags. Write `python -m dpfuse.launch train.py`"]),
        (["--nproc_per_node", "2"], ["got no script", "Write `python -m dpfuse.launch --nproc_per_node 2 train.py`"]),
        (["-m"], ["got no script", "Write `python -m dpfuse.launch -m train`"]),
        (["--zzz"], ["unknown flag '--zzz'"]),
        (["no_such_file.py"], ["there is no script 'no_such_file.py'", "-m"]),
        (["--nproc_per_node=0", SCRIPT], ["--nproc_per_node", "'0'", "at least 1"]),
        (["--nproc_per_node=two", SCRIPT], ["--nproc_per_node", "'two'", "a number, gpu, cpu or auto"]),
        (["--gpus=0,x", SCRIPT], ["--gpus", "'0,x'", "card numbers separated by commas"]),
        (["--devices=0,0", SCRIPT], ["card 0 is named twice"]),
        (["--selected-gpus=", SCRIPT], ["got ''", "card numbers separated by commas"]),
        (["--selected_gpus=0", "--nproc_per_node=2", SCRIPT], ["1 card(s)", "--nproc_per_node is 2", "Leave"]),
        (["--gpus=0,1", "--nproc_per_node=3", SCRIPT], ["2 card(s)", "--nproc_per_node is 3", "Leave"]),
    ],
)
def test_a_wrong_command_line_is_refused_with_a_remedy(words, texts, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    told = capsys.readouterr().err
    for text in texts:
        assert text in told


def test_cards_without_gpus_become_ranks_on_the_cpu():
    done = launch("--gpus", "4,5", SCRIPT, warm_ranks=True)
    assert [s["backend"] for s in reports(done.stdout)] == ["gloo", "gloo"]
    assert done.stderr.count("no GPU here") == 1


@pytest.mark.slow
def test_ranks_of_a_rank_see_their_own_job():
    done = launch("--nproc_per_node=2", SCRIPTS / "nested.py", warm_ranks=True)
    outer, inner, torchruns = json.loads(done.stdout)
    assert (outer[0], outer[2]) == (outer[1][1], 2)
    assert (inner[0], len(inner[1]), inner[2]) == (inner[1][0], 1, 1)
    assert inner[0] not in outer[1]
    assert torchruns == ["", [], 1]  # torchrun sets no endpoints, and those around are another job's


@pytest.mark.slow
def test_starting_up_does_not_import_torchrun():
    code = "import dpfuse.job, sys; print([m for m in sys.modules if m.startswith('torch.distributed.run')])"
    assert run("-c", code, warm=False).stdout == "[]\n"
