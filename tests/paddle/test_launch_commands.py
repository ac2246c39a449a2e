"""Every command line of Paddle's data-parallel documents, word for word, through a shell."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest
import torch

import dpfuse.launch
import dpfuse.paddle
from dpfuse.job import nodes
from dpfuse.job.paddle_launch_flags import parse
from tests.distributed.processes import SCRIPTS, shell

IPS = "python -m paddle.distributed.launch --gpus=0,1,2,3 --ips=192.168.1.2,192.168.1.3 train_with_fleet.py"
CLUSTER_NODE_IPS = (
    "python -m paddle.distributed.launch --cluster_node_ips=192.168.1.2,192.168.1.3 --node_ip=192.168.1.2 "
    "--started_port=6170 --selected_gpus=0,1,2,3 train_with_fleet.py"
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path):
    """A folder with the scripts that the documents launch."""
    for name in ("train.py", "demo.py", "train_with_fleet.py"):
        shutil.copy(SCRIPTS / "train.py", tmp_path / name)
    return tmp_path


def run(command, folder, door="dpfuse.launch", **variables):
    return shell(command.replace("paddle.distributed.launch", door), folder, **variables)


def reports(text):
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda seen: seen["rank"])


@pytest.mark.slow
def test_python_alone_runs_on_one_process(folder):
    done = run("python train.py", folder)
    assert [(s["rank"], s["world_size"], s["sum"]) for s in reports(done.stdout)] == [(0, 1, 1.0)], done.stderr
    assert "found no job in the environment" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "size", "door"),
    [
        ("python -m paddle.distributed.launch train.py", 1, "dpfuse.launch"),
        ("python -m paddle.distributed.launch --gpus='0,1' train.py", 2, "dpfuse.paddle.distributed.launch"),
        ("python -m paddle.distributed.launch --gpus '0,1' train.py", 2, "dpfuse.launch"),
        ("python -m paddle.distributed.launch --selected_gpus=0,1 demo.py", 2, "dpfuse.launch"),
        ("python -m paddle.distributed.launch --gpus=0,1,2,3 train_with_fleet.py", 4, "dpfuse.launch"),
    ],
)
def test_the_launcher_starts_as_many_ranks_as_cards(command, size, door, folder):
    done = run(command, folder, door)
    assert done.returncode == 0, done.stderr
    seen = reports(done.stdout)
    total = size * (size + 1) / 2
    assert [(s["rank"], s["world_size"], s["sum"]) for s in seen] == [(rank, size, total) for rank in range(size)]
    (warning,) = done.stderr.splitlines()
    assert ("no GPU is visible: starting one rank" if size == 1 else f"no GPU here, so {size} gloo rank") in warning
    for rank, s in enumerate(seen):
        assert len(set(s["endpoints"])) == size
        assert s["endpoint"] == s["endpoints"][rank] == s["paddle"]["PADDLE_CURRENT_ENDPOINT"]
        assert s["paddle"]["PADDLE_TRAINER_ID"] == str(rank)
        assert s["paddle"]["PADDLE_TRAINERS_NUM"] == str(size)
        assert s["paddle"]["PADDLE_DISTRI_BACKEND"] == "gloo"


def test_the_launcher_is_reached_by_name():
    assert dpfuse.paddle.distributed.launch.main is dpfuse.launch.main


@pytest.mark.slow
def test_cards_made_visible_by_export_count(folder):
    done = run("export CUDA_VISIBLE_DEVICES=0,1\npython -m paddle.distributed.launch train.py", folder)
    assert done.returncode == 0, done.stderr
    assert len(reports(done.stdout)) == max(1, min(2, torch.cuda.device_count()))


@pytest.mark.slow
def test_the_typographic_dash_of_the_page_is_explained(folder):
    done = run("python -m paddle.distributed.launch –selected_gpus=0,1 demo.py", folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'–selected_gpus=0,1' begins with a typographic dash" in done.stderr
    assert "Did you mean --selected_gpus?" in done.stderr


@pytest.mark.slow
def test_log_dir_gets_one_log_per_rank(folder):
    done = run("python -m paddle.distributed.launch --gpus=0,1 --log_dir logs train.py", folder)
    assert done.returncode == 0, done.stderr
    logs = folder / "logs"
    assert sorted(log.name for log in logs.iterdir()) == ["workerlog.0", "workerlog.1"]
    assert [reports((logs / f"workerlog.{rank}").read_text())[0]["sum"] for rank in (0, 1)] == [3.0, 3.0]
    assert done.stdout == "[default0]:" + (logs / "workerlog.0").read_text()


@pytest.mark.slow
def test_spawn_in_its_four_usages(folder):
    shutil.copy(SCRIPTS / "demo_spawn.py", folder / "demo.py")
    done = run("python demo.py", folder)
    assert done.returncode == 0, done.stderr
    *printed, results = done.stdout.splitlines()
    assert printed == ["total 1.0", "total 3.0", "total 3.0"]
    alone, pair = [[0, 1, 1.0, ""]], [[0, 2, 3.0, ""], [1, 2, 3.0, ""]]
    assert json.loads(results) == [alone, alone, pair, [[*rank[:3], "4,5"] for rank in pair]]
    assert done.stderr.count("torch sees no GPU here, so 2 gloo rank(s) run on the CPU") == 1


# Both run for real on two machines in tests/distributed/launch/test_two_nodes.py, where the test may create them.


def parsed(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    args = parse(shlex.split(command)[3:])
    assert (args.training_script, args.gpus, args.nproc_per_node) == ("train_with_fleet.py", ["0", "1", "2", "3"], "4")
    return args.nodes


@pytest.mark.parametrize(("own", "rank"), [("192.168.1.2", 0), ("192.168.1.3", 1)])
def test_ips_is_the_same_command_on_every_machine(own, rank, folder, monkeypatch):
    monkeypatch.setattr(nodes, "is_own_address", lambda address: address == own)
    found = parsed(IPS, folder, monkeypatch)
    assert (found.count, found.host, found.port, found.rank, found.own_address) == ("2", "192.168.1.2", 6170, rank, own)


@pytest.mark.parametrize(("own", "rank"), [("192.168.1.2", 0), ("192.168.1.3", 1)])
def test_cluster_node_ips_names_the_machine(own, rank, folder, monkeypatch):
    command = CLUSTER_NODE_IPS.replace("--node_ip=192.168.1.2", f"--node_ip={own}")
    found = parsed(command, folder, monkeypatch)
    assert (found.count, found.host, found.port, found.rank, found.own_address) == ("2", "192.168.1.2", 6170, rank, own)


@pytest.mark.parametrize("dash", ["_", "-"])
def test_paddles_flags_for_any_job_are_accepted(dash, folder, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = ["--run_mode", "collective", "--job_id=nightly", "--log_level", "debug", "--use_paddlecloud"]
    words = [word.replace("_", dash) for word in flags]
    args = parse([*words, "--nproc_per_node=2", str(folder / "train.py")])
    assert (args.rdzv_id, args.log_level, args.nproc_per_node) == ("nightly", "DEBUG", "2")
    assert "--use_paddlecloud is ignored; give the machines with --master or --ips" in capsys.readouterr().err
    args = parse(["--nproc_per_node=2", str(folder / "train.py")])
    assert (args.run_mode, args.job_id, args.log_level) == (None, None, None)


@pytest.mark.slow
def test_the_log_level_reaches_torchrun(folder):
    quiet, loud = (
        run(f"python -m paddle.distributed.launch {flag} --nproc_per_node 1 train.py", folder)
        for flag in ("", "--log_level INFO")
    )
    assert [len(reports(done.stdout)) for done in (quiet, loud)] == [1, 1]
    assert "nproc_per_node           : 1" not in quiet.stderr
    assert "nproc_per_node           : 1" in loud.stderr
