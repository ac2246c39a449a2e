"""What the environment says: init_parallel_env, ParallelEnv, get_rank, get_world_size."""

from __future__ import annotations

import json
import os
import re
from datetime import timedelta

import pytest
import torch.distributed as dist

import dpfuse.job as distributed
from dpfuse.engine import messages
from dpfuse.job.devices import device_variables, select_gpus
from dpfuse.job.failure import RankFailure, first_failure
from dpfuse.job.rank_program import set_paddle_variables
from dpfuse.job.read_environment import environment, read_environment
from tests.distributed.processes import JOB_VARIABLES, ROOT, SCRIPTS, free_port, run, start
from tests.patience import patience

TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
PADDLE_TWO = {"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2"}
ENDPOINTS = "10.0.0.1:6170,10.0.0.2:6170,10.0.0.2:6171"


@pytest.fixture
def variables(monkeypatch):
    """`variables(NAME="value")` sets them, in an environment without any job; a group made is destroyed."""
    for name in list(os.environ):
        if JOB_VARIABLES.match(name) or name == "NCCL_SOCKET_IFNAME":
            monkeypatch.delenv(name)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # remembered by monkeypatch, so that what init sets does not stay
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    yield put
    if dist.is_initialized():
        dist.destroy_process_group()


def test_without_an_environment_one_warning_and_no_group(variables):
    with pytest.warns(UserWarning, match="RANK and WORLD_SIZE.*dpfuse.launch --nproc_per_node") as caught:
        assert distributed.init_parallel_env() is None
    assert len(caught) == 1
    assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
    assert not dist.is_initialized()


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")])
def test_one_rank_needs_no_address_and_a_second_call_gives_the_same_group(variables, names):
    variables(**{names[0]: "0", names[1]: "1"})
    group = distributed.init_parallel_env(timeout=30)
    assert group is not None
    assert distributed.init_parallel_env() is group is dist.group.WORLD
    assert (dist.get_backend(), group.size()) == ("gloo", 1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_an_interface_that_the_user_chose_stays(variables):
    variables(RANK="0", WORLD_SIZE="1", GLOO_SOCKET_IFNAME="lo,eth0")
    distributed.init_parallel_env(timeout=timedelta(seconds=30))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo,eth0"


@pytest.mark.parametrize(
    ("backend", "set_before", "then"),
    [("nccl", None, "1"), ("cpu:gloo,cuda:nccl", None, "1"), ("nccl", "0", "0"), ("gloo", None, None)],
)
def test_collectives_of_nccl_have_priority_unless_the_user_says_no(variables, monkeypatch, backend, set_before, then):
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", set_before or "")
    if set_before is None:
        monkeypatch.delenv("TORCH_NCCL_HIGH_PRIORITY")
    seen = []
    monkeypatch.setattr("dpfuse.job.env.choose_backend", lambda: backend)
    monkeypatch.setattr("dpfuse.job.env._bind_device", lambda job, backend: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get("TORCH_NCCL_HIGH_PRIORITY"))
    )
    variables(RANK="0", WORLD_SIZE="1")
    distributed.init_parallel_env()
    assert seen == [then]


def test_paddles_variables_start_a_job():
    common = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_MASTER": f"127.0.0.1:{free_port()}"}
    ranks = [start(SCRIPTS / "join.py", warm=True, PADDLE_TRAINER_ID=str(rank), **common) for rank in (0, 1)]
    told = [rank.communicate(timeout=patience(60)) for rank in ranks]
    assert [json.loads(out)["sum"] for out, _ in told] == [3.0, 3.0], told


@pytest.mark.slow
def test_torchs_own_launcher_works_too():
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", SCRIPTS / "join.py")
    assert json.loads(done.stdout)["sum"] == 1.0, done.stderr


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"WORLD_SIZE": "2"}, ["RANK is not set although WORLD_SIZE='2'", "dpfuse.launch"]),
        ({"RANK": "0"}, ["WORLD_SIZE is not set although RANK='0'", "set both"]),
        ({"LOCAL_RANK": "0"}, ["RANK is not set although LOCAL_RANK='0'"]),
        ({**TWO, "RANK": "one"}, ["RANK: got 'one'", "expected an integer", "Correct the variable"]),
        ({**TWO, "RANK": "2"}, ["RANK: got '2'", "less than WORLD_SIZE=2"]),
        ({**TWO, "RANK": "-1"}, ["RANK: got '-1'", "at least 0"]),
        ({**TWO, "WORLD_SIZE": "0"}, ["WORLD_SIZE: got '0'", "at least 1"]),
        ({**TWO, "LOCAL_RANK": "x"}, ["LOCAL_RANK: got 'x'"]),
        ({**TWO, "MASTER_PORT": "70000"}, ["MASTER_PORT: got '70000'", "below 65536"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR and MASTER_PORT are not set", "WORLD_SIZE=2"]),
        ({**TWO, "MASTER_PORT": ""}, ["MASTER_PORT is not set although MASTER_ADDR='127.0.0.1'"]),
        ({"PADDLE_TRAINERS_NUM": "2"}, ["PADDLE_TRAINER_ID is not set although PADDLE_TRAINERS_NUM='2'"]),
        (PADDLE_TWO, ["are not set although PADDLE_TRAINERS_NUM=2", "PADDLE_MASTER"]),
        ({**PADDLE_TWO, "PADDLE_MASTER": "host"}, ["PADDLE_MASTER: got 'host'", "expected host:port"]),
        (
            {**PADDLE_TWO, "PADDLE_TRAINER_ENDPOINTS": ENDPOINTS},
            ["PADDLE_TRAINER_ENDPOINTS names 3 addresses", "PADDLE_TRAINERS_NUM=2"],
        ),
    ],
)
def test_half_an_environment_is_named(variables, values, texts):
    variables(**values)
    for call in (distributed.init_parallel_env, distributed.ParallelEnv, distributed.get_rank):
        with pytest.raises(ValueError) as caught:
            call()
        for text in texts:
            assert text in str(caught.value)


@pytest.mark.parametrize(
    ("timeout", "error", "text"),
    [
        (0, ValueError, "above 0 s, got 0"),
        (float("nan"), ValueError, "got nan"),
        (timedelta(seconds=-1), ValueError, "got -1"),
        ("30", TypeError, "seconds or a timedelta, got str"),
        (True, TypeError, "got bool"),
    ],
)
def test_a_wrong_timeout_is_refused(variables, timeout, error, text):
    with pytest.raises(error, match=text):
        distributed.init_parallel_env(timeout)


@pytest.mark.parametrize(
    ("backend", "text"),
    [("glooo", "DPFUSE_BACKEND: got 'glooo'.*did you mean 'gloo'"), ("nccl", "torch sees no GPU.*Use 'gloo'")],
)
def test_a_wrong_backend_is_refused(variables, backend, text):
    variables(RANK="0", WORLD_SIZE="1", DPFUSE_BACKEND=backend)
    with pytest.raises(ValueError, match=text):
        distributed.init_parallel_env()


def test_parallel_env_reads_torchs_variables(variables):
    variables(**TWO, LOCAL_RANK="0")
    env = distributed.ParallelEnv()
    assert (env.rank, env.local_rank, env.world_size, env.nranks) == (1, 0, 2, 2)
    assert (env.device_id, env.dev_id, env.device_type) == (0, 0, "cpu")
    assert (env.trainer_endpoints, env.current_endpoint) == ([], "")
    assert (distributed.get_rank(), distributed.get_world_size()) == (1, 2)
    assert repr(env) == "ParallelEnv(rank=1, local_rank=0, world_size=2, device='cpu')"


def test_parallel_env_reads_paddles_variables(variables):
    variables(PADDLE_TRAINER_ID="2", PADDLE_TRAINERS_NUM="3", PADDLE_TRAINER_ENDPOINTS=ENDPOINTS)
    env = distributed.ParallelEnv()
    assert (env.rank, env.local_rank, env.world_size) == (2, 1, 3)  # the second rank of 10.0.0.2
    assert env.trainer_endpoints == ENDPOINTS.split(",")
    assert env.current_endpoint == "10.0.0.2:6171"
    job = read_environment()
    assert job is not None
    assert (job.master, job.one_machine) == (("10.0.0.1", 6170), False)  # Paddle's rank 0 serves the store
    variables(FLAGS_selected_gpus="5", PADDLE_CURRENT_ENDPOINT="here:1")
    env = distributed.ParallelEnv()
    assert (env.device_id, env.current_endpoint) == (5, "here:1")


def test_torchs_variables_come_before_paddles(variables):
    variables(**TWO, PADDLE_TRAINER_ID="5", PADDLE_TRAINERS_NUM="9", FLAGS_selected_gpus="7")
    job = read_environment()
    assert job is not None
    assert (job.rank, job.world_size, job.master, job.one_machine) == (1, 2, ("127.0.0.1", 29500), True)
    assert job.device_id == 1


def test_parallel_env_shows_no_endpoints_of_a_job_around_this_one(variables):
    variables(**TWO, PADDLE_TRAINER_ID="1", PADDLE_TRAINERS_NUM="3", PADDLE_TRAINER_ENDPOINTS=ENDPOINTS)
    env = distributed.ParallelEnv()
    assert (env.trainer_endpoints, env.current_endpoint) == ([], "")
    variables(PADDLE_TRAINERS_NUM="2", PADDLE_TRAINER_ENDPOINTS="a:1,b:2")
    env = distributed.ParallelEnv()
    assert (env.trainer_endpoints, env.current_endpoint) == (["a:1", "b:2"], "b:2")


def rank_variables(rank, size, local_rank, local_size, node, nodes):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    numbers = dict(zip(names, map(str, (rank, size, local_rank, local_size, node, nodes)), strict=True))
    return {**numbers, "MASTER_ADDR": "fd00::7", "MASTER_PORT": "6170"}


def test_paddles_variables_say_what_torchs_say():
    environ = rank_variables(3, 4, 1, 2, 1, 2)
    set_paddle_variables(environ, 2, ["fd00::7", "10.0.0.8"], "10.0.0.8")
    assert {name: value for name, value in environ.items() if name.startswith(("PADDLE_", "FLAGS_"))} == {
        "PADDLE_TRAINER_ID": "3",
        "PADDLE_TRAINERS_NUM": "4",
        "PADDLE_CURRENT_ENDPOINT": "10.0.0.8:6171",
        "PADDLE_TRAINER_ENDPOINTS": "[fd00::7]:6170,[fd00::7]:6171,10.0.0.8:6170,10.0.0.8:6171",
        "PADDLE_MASTER": "[fd00::7]:6170",
        "PADDLE_GLOBAL_RANK": "3",
        "PADDLE_GLOBAL_SIZE": "4",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_LOCAL_SIZE": "2",
        "PADDLE_NNODES": "2",
        "PADDLE_RANK_IN_NODE": "1",
        "FLAGS_selected_gpus": "1",
    }


@pytest.mark.parametrize(
    ("numbers", "hosts", "host", "own"),
    [
        ((1, 2, 0, 1, 1, 2), [], "b", "b:6170"),  # the other machine's address is not known here
        ((1, 2, 0, 1, 1, 2), [], "", None),
        ((1, 3, 0, 2, 1, 2), ["a", "b"], "b", "b:6170"),  # one rank on a, two on b
        ((1, 6, 0, 2, 1, 3), ["a", "b", "c"], "b", "b:6170"),  # one, two, three: as many as if two on each
    ],
)
def test_endpoints_that_are_not_known_are_not_told(numbers, hosts, host, own):
    around = {"PADDLE_TRAINER_ENDPOINTS": "x:1,y:2", "PADDLE_CURRENT_ENDPOINT": "x:1", "FLAGS_selected_gpus": "5"}
    environ = {**around, **rank_variables(*numbers)}
    set_paddle_variables(environ, 0, hosts, host)
    assert "PADDLE_TRAINER_ENDPOINTS" not in environ
    assert environ.get("PADDLE_CURRENT_ENDPOINT") == own
    assert "FLAGS_selected_gpus" not in environ
    assert environ["PADDLE_DISTRI_BACKEND"] == "gloo"


def test_ranks_that_share_a_card_name_one_that_is_there():
    environ = rank_variables(2, 3, 2, 3, 0, 1)
    set_paddle_variables(environ, 2)
    assert environ["FLAGS_selected_gpus"] == "0"


def test_several_machines_are_recognised(variables):
    variables(**{**TWO, "MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "1"})
    job = read_environment()
    assert job is not None
    assert not job.one_machine


def test_a_group_that_does_not_exist_is_refused(variables):
    for call in (distributed.get_rank, distributed.get_world_size):
        with pytest.raises(ValueError, match=r"no process group exists; call init_parallel_env\(\) first"):
            call(object())


def ranks_in_a_subgroup(rank, size):
    group = dist.new_group([0])
    return (
        distributed.get_rank(),
        distributed.get_world_size(),
        distributed.get_rank(group),
        distributed.get_world_size(group),
        distributed.init_parallel_env() is dist.group.WORLD,
    )


def test_ranks_and_sizes_of_groups(ranks):
    assert ranks(ranks_in_a_subgroup) == [(0, 2, 0, 1, True), (1, 2, -1, -1, True)]


def test_variables_are_restored(monkeypatch):
    monkeypatch.setenv("DPFUSE_A", "old")
    monkeypatch.delenv("DPFUSE_B", raising=False)
    with environment({"DPFUSE_A": "new", "DPFUSE_B": "new"}):
        assert (os.environ["DPFUSE_A"], os.environ["DPFUSE_B"]) == ("new", "new")
    assert os.environ["DPFUSE_A"] == "old"
    assert "DPFUSE_B" not in os.environ


def test_cores_and_cards_are_shared_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("dpfuse.job.devices.cpu_count", lambda: 9)
    assert device_variables(1, None) == {}
    assert device_variables(2, ["4", "7"]) == {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "4,7"}
    assert device_variables(10_000, None) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert device_variables(2, None) == {}


@pytest.mark.parametrize(
    ("visible", "gpus", "chosen"),
    [(None, "0,1", ["0", "1"]), ("4, 5,6", [5, "4"], ["5", "4"]), ("GPU-a,GPU-b", "GPU-b", ["GPU-b"])],
)
def test_cards_are_checked_against_the_visible_ones(monkeypatch, visible, gpus, chosen):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert select_gpus(gpus, "--gpus") == chosen
    with pytest.raises(ValueError, match=r"--gpus: got '9', but card 9 is not there: .* Name cards"):
        select_gpus("9", "--gpus")


def test_every_variable_in_the_code_is_in_the_documentation():
    sources = "".join(path.read_text() for path in (ROOT / "dpfuse" / "job").glob("*.py"))
    exported = "LOOPBACK_HOSTS|CLEANUP_SECONDS|KEPT_SIGNALS|STARTED_PORT|SECONDS_TO_END"
    sources = re.sub(f'"({exported})"', "", sources)
    names = set(re.findall(r'"((?:[A-Z]+_[A-Z_]+|RANK|FLAGS_selected_gpus))"', sources))
    assert len(names) > 15
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    of_paddle = (ROOT / "docs" / "move" / "from_paddle.md").read_text()
    assert sorted(name for name in names if f"`{name}`" not in page + of_paddle) == []
    assert "Paddle" not in page.replace("[From Paddle]", "").replace("has Paddle's names", "")


def peer(rank):
    """What a rank raises whose peer has failed."""
    return messages.failed(0, 2, (rank,), False, None, (), out_of_memory=False)


# (rank, exit code, seen at, error) of each failure in one look of the launcher
@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([(0, 1, 5.0, f"DPFuseError: {peer(1)}"), (1, 1, 5.1, "ValueError: planted")], 1),
        ([(0, 1, 5.1, "RuntimeError: closed"), (1, 1, 5.0, "ValueError: planted")], 1),
        ([(0, 1, 5.0, "RuntimeError: closed"), (1, -9, 5.1, "")], 1),  # killed: its peer's error is secondary
        ([(0, -15, 5.0, ""), (1, 1, 5.1, "ValueError: planted")], 1),  # ended by the launcher
        ([(0, 1, 5.0, "ValueError: planted"), (1, -9, 35.0, "")], 0),  # ignored SIGTERM for 30 s
        ([(0, 4, 6.0, ""), (1, 7, 5.0, "")], 1),
        ([(0, -15, 6.0, "")], 0),
    ],
)
def test_the_cause_is_distinguished_from_secondary_failures(failures, first):
    failures = [RankFailure(rank, 1, code, seen, error) for rank, code, seen, error in failures]
    assert first_failure(failures).rank == first
