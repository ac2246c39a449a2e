"""`spawn`: one function on several fresh processes of this machine."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from dpfuse.errors import DPFuseError
from dpfuse.job import spawn
from dpfuse.job.devices import cpu_count
from tests.distributed.processes import SCRIPTS, all_gone, is_loopback, pids_in, run, start
from tests.distributed.scripts import functions
from tests.patience import patience

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(autouse=True)
def no_job_around(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def pids_left(folder):
    return pids_in(" ".join(os.listdir(folder)))


def test_every_rank_returns_its_value_and_the_parents_environment_stays():
    before = dict(os.environ)
    context = spawn(functions.add_up, args=(2.0,), nprocs=2)
    results = [queue.get() for queue in context.return_queues]
    assert [result[:2] for result in results] == [(0, 6.0), (1, 6.0)]
    assert [result[2] for result in results] == [max(1, cpu_count() // 2)] * 2
    assert [process.exitcode for process in context.processes] == [0, 0]
    assert context.join() is True
    assert dict(os.environ) == before


@pytest.mark.usefixtures("warm_spawn")
@pytest.mark.parametrize("start_method", [pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_ranks_know_themselves_by_paddles_variables(start_method, monkeypatch):
    # As if spawned by a rank of a larger job.
    for name, value in {"TRAINER_ID": "7", "TRAINERS_NUM": "9", "TRAINER_ENDPOINTS": "a:1,b:2"}.items():
        monkeypatch.setenv(f"PADDLE_{name}", value)
    monkeypatch.setenv("FLAGS_selected_gpus", "7")
    context = spawn(functions.paddle_variables, nprocs=2, start_method=start_method)
    for rank, seen in enumerate(queue.get() for queue in context.return_queues):
        endpoints = seen["PADDLE_TRAINER_ENDPOINTS"].split(",")
        assert seen == {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_MASTER": endpoints[0],
            "PADDLE_GLOBAL_RANK": str(rank),
            "PADDLE_GLOBAL_SIZE": "2",
            "PADDLE_LOCAL_RANK": str(rank),
            "PADDLE_LOCAL_SIZE": "2",
            "PADDLE_NNODES": "1",
            "PADDLE_RANK_IN_NODE": str(rank),
            "PADDLE_DISTRI_BACKEND": "gloo",
        }
        assert len(set(endpoints)) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("warm_spawn")
def test_join_false_returns_at_once_and_large_results_wait_in_their_queue():
    context = spawn(functions.large_result, nprocs=2, join=False)
    assert context.join(timeout=0.01) is False
    assert torch.equal(context.return_queues[1].get(), torch.ones(1_000_000))  # waits for the rank's end
    while not context.join():
        pass
    assert torch.equal(context.return_queues[0].get(), torch.zeros(1_000_000))


@pytest.mark.usefixtures("warm_spawn")
@pytest.mark.parametrize("start_method", [pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_plain_torch_initialisation_works_inside(start_method):
    context = spawn(functions.plain_torch, nprocs=2, start_method=start_method)
    assert [queue.get() for queue in context.return_queues] == [(0, 2, "lo"), (1, 2, "lo")]


def test_ranks_may_leave_right_after_they_joined():
    # gloo alone fails 3 % of these: the first rank to be connected closes its socket while the other connects.
    for _ in range(20):
        spawn(functions.only_joins, nprocs=2, start_method="fork")


def test_forked_ranks_leave_what_their_parent_needs(tmp_path):
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        spawn(functions.variable, args=("RANK",), nprocs=2, start_method="fork")
        assert Path(folder).exists()


@pytest.mark.slow
def test_nothing_listens_beyond_loopback():
    addresses = spawn(functions.addresses, nprocs=2).return_queues[0].get()
    assert len(addresses) >= 2
    assert all(map(is_loopback, addresses)), addresses


@pytest.mark.parametrize(
    ("how", "text"),
    [
        pytest.param("raise", "raised ValueError: planted", marks=pytest.mark.slow),
        ("exit", "ended with exit code 5"),
        pytest.param("kill", "was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param("raise-while-peer-ignores-sigterm", "raised ValueError: planted", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_ends_the_others_and_is_named(how, text, tmp_path, request):
    if how != "kill":
        request.getfixturevalue("warm_spawn")
    began = time.monotonic()
    with pytest.raises(DPFuseError, match=rf"spawn: rank 1 \(pid \d+\) {text}") as caught:
        spawn(functions.fails, args=(how, str(tmp_path)), nprocs=2)
    # torch's own error, of the rank that torch saw end first; it may be a secondary failure.
    assert isinstance(caught.value.__cause__, (ProcessRaisedException, ProcessExitedException))
    assert time.monotonic() - began < patience(20)  # most of it is importing torch
    pids = pids_left(tmp_path)
    assert len(pids) == 2
    assert all_gone(pids, within=1)


def test_no_folder_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context = spawn(functions.variable, args=("RANK",), nprocs=2, start_method="fork")
    (folder,) = tmp_path.glob("dpfuse-spawn-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    queues = context.return_queues
    del context
    assert [queue.get() for queue in queues] == ["0", "1"]  # the queues alone keep the values
    del queues
    gc.collect()
    assert not list(tmp_path.glob("dpfuse-spawn-*"))


@pytest.mark.usefixtures("warm_spawn")
def test_a_failed_rank_has_no_value():
    context = spawn(functions.no_result, nprocs=1, join=False)
    with pytest.raises(DPFuseError, match="rank 0 left no return value: it ended with exit code 1"):
        context.return_queues[0].get()
    with pytest.raises(DPFuseError, match="rank 0: func returned a function, which cannot be sent back"):
        context.join()


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGKILL, signal.SIGINT))],
)
def test_no_rank_outlives_a_parent_that_is_ended(number, tmp_path):
    parent = start(SCRIPTS / "spawn_and_wait.py", tmp_path, warm=number != signal.SIGKILL)
    try:
        began = time.monotonic()
        while len(pids_left(tmp_path)) < 2 and time.monotonic() < began + patience(30):
            time.sleep(0.05)
        pids = pids_left(tmp_path)
        assert len(pids) == 2
        parent.send_signal(number)
        assert all_gone([*pids, parent.pid], within=20)
    finally:
        parent.kill()
        told = parent.communicate(timeout=patience(10))[1]
    assert parent.returncode == -number
    assert told.endswith("KeyboardInterrupt\n") is (number == signal.SIGINT)


def test_without_a_count_every_core_gets_a_rank(monkeypatch):
    module = importlib.import_module("dpfuse.job.spawn")  # the package's attribute is the function
    monkeypatch.setattr(module, "cpu_count", lambda: 1)
    assert len(spawn(functions.variable, args=("RANK",), start_method="fork").processes) == 1


def test_gpus_without_a_gpu_give_as_many_ranks_on_the_cpu():
    with pytest.warns(UserWarning, match=r"spawn: gpus: torch sees no GPU here, so 2 gloo rank"):
        context = spawn(functions.variable, args=("CUDA_VISIBLE_DEVICES",), gpus=[4, 5], start_method="fork")
    assert [queue.get() for queue in context.return_queues] == ["4,5", "4,5"]


@pytest.mark.parametrize("name", ["selected_gpus", "selected_devices"])
def test_older_names_of_gpus_are_deprecated(name):
    with (
        pytest.warns(UserWarning, match="so 1 gloo rank"),
        pytest.warns(DeprecationWarning, match=f"{name} is Paddle's older name of gpus; write gpus="),
    ):
        context = spawn(functions.variable, args=("CUDA_VISIBLE_DEVICES",), start_method="fork", **{name: "5"})
    assert [queue.get() for queue in context.return_queues] == ["5"]


def test_cards_are_counted_among_the_visible_ones(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    context = spawn(functions.paddle_variables, gpus="4,6", backend="gloo", start_method="fork")
    assert [queue.get()["FLAGS_selected_gpus"] for queue in context.return_queues] == ["0", "1"]
    with pytest.raises(ValueError, match=r"card 7 is not there: CUDA_VISIBLE_DEVICES='4,5,6' shows 4, 5, 6"):
        spawn(functions.paddle_variables, gpus="4,7", nprocs=2)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    with pytest.raises(ValueError, match=r"nprocs is 4, but only 3 GPU\(s\) are visible and NCCL needs one for each"):
        spawn(functions.paddle_variables, nprocs=4)


def test_the_backend_is_handed_on():
    context = spawn(functions.variable, args=("DPFUSE_BACKEND",), nprocs=1, backend="gloo", start_method="fork")
    assert context.return_queues[0].get() == "gloo"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"func": lambda: 1}, ValueError, "'<lambda>' or its args cannot be sent .* top level of a module"),
        ({"args": (lambda: 1,)}, ValueError, "or its args cannot be sent to another process"),
        ({"func": 3}, TypeError, "func must be callable, got int"),
        ({"args": "text"}, TypeError, r"args must be a tuple or a list.*write args=\(value,\)"),
        ({"nprocs": 0}, ValueError, "nprocs must be at least 1, or -1 .* got 0"),
        ({"nprocs": 2.0}, TypeError, "nprocs must be an integer, got 2.0"),
        ({"start_methd": "fork"}, ValueError, "option 'start_methd', expected only .*mean 'start_method'?"),
        ({"start_method": "thread"}, ValueError, "start_method='thread', expected one of .*spawn"),
        ({"backend": "glo"}, ValueError, "spawn: backend: got 'glo', .* did you mean 'gloo'?"),
        ({"backend": "nccl"}, ValueError, "got 'nccl', but torch sees no GPU here .* Use 'gloo'"),
        ({"ips": "10.0.0.1"}, ValueError, "option 'ips' of Paddle's spawn .* this machine only.*dpfuse.launch --ips"),
        ({"cluster_node_ips": "a,b"}, ValueError, "'cluster_node_ips' .* use `python -m dpfuse.launch"),
        ({"node_ip": "a"}, ValueError, "'node_ip' .* use `python -m dpfuse.launch"),
        ({"started_port": 6170}, ValueError, "'started_port' .* takes a free port by itself"),
        ({"use_paddlecloud": True}, ValueError, "'use_paddlecloud' .* leave the option out"),
        ({"xpus": "0"}, ValueError, r"'xpus' .* GPUs \(name cards with gpus=\)"),
        ({"print_config": True}, ValueError, r"'print_config' .* print ParallelEnv\(\)"),
        ({"gpus": "0,1", "selected_gpus": "0,1"}, ValueError, "got selected_gpus beside another name of gpus"),
        ({"gpus": "a,b"}, ValueError, "spawn: gpus: got 'a,b', expected card numbers"),
        ({"gpus": 3}, TypeError, "spawn: gpus: got 3, expected cards such as"),
    ],
)
def test_wrong_arguments_are_refused_with_a_remedy(arguments, error, text):
    with pytest.raises(error, match=text):
        spawn(**{"func": functions.variable, "args": ("RANK",), "nprocs": 2, **arguments})


def test_as_many_cards_as_ranks():
    with (
        pytest.warns(UserWarning, match="no GPU"),
        pytest.raises(ValueError, match=r"gpus names 2 card\(s\), but nprocs is 3"),
    ):
        spawn(functions.variable, args=("RANK",), nprocs=3, gpus="0,1")


@pytest.mark.slow
def test_a_function_from_the_prompt_is_explained():
    code = "from dpfuse.job import spawn\ndef f(): pass\nspawn(f, nprocs=1)"
    done = run("-c", code)
    assert "func 'f' was defined at a prompt" in done.stderr
    assert "start_method='fork'" in done.stderr
