"""The machines of a job on the launcher's command line: which flags are accepted, which are rejected."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import pytest

from dpfuse.job import interfaces, launcher
from dpfuse.job.launcher import main
from dpfuse.job.nodes import Nodes

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "join.py")
TWO = "10.9.8.7,10.9.8.6"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.fixture
def jobs(monkeypatch):
    """What main() would hand to torchrun, and the variables of its ranks."""
    seen = []
    monkeypatch.setattr(launcher, "_run", lambda args, signals, records: seen.append((args, dict(launcher.os.environ))))
    return seen


def configured(jobs, *words):
    assert main([*words, "--nproc_per_node=2", SCRIPT]) == 0
    return jobs.pop()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--master=10.9.8.7:8090", "--nnodes=2", "--rank=1"], ("static", "", "2", 1, "10.9.8.7", 8090)),
        (["--master", "http://10.9.8.7:8", "--nnodes", "2", "--rank", "0"], ("static", "", "2", 0, "10.9.8.7", 8)),
        (["--master=node0", "--nnodes=3", "--rank=2"], ("static", "", "3", 2, "node0", 29500)),
        (["--master=[fd00::7]:81", "--nnodes=2", "--rank=1"], ("static", "", "2", 1, "[fd00::7]", 81)),
        (["--master=fd00::7", "--nnodes=2", "--rank=1"], ("static", "", "2", 1, "[fd00::7]", 29500)),
        ([f"--cluster_node_ips={TWO}", "--node_ip=10.9.8.6"], ("static", "", "2", 1, "10.9.8.7", 6170)),
        ([f"--cluster-node-ips={TWO}", "--node-ip=10.9.8.7"], ("static", "", "2", 0, "10.9.8.7", 6170)),
        ([f"--ips={TWO}", "--started-port=71"], ("static", "", "2", 1, "10.9.8.7", 71)),
        ([f"--ips={TWO}", "--start_port=71"], ("static", "", "2", 1, "10.9.8.7", 71)),
        ([f"--ips={TWO}", "--nnodes=2"], ("static", "", "2", 1, "10.9.8.7", 6170)),
        ([f"--ips={TWO}", "--node_ip=10.9.8.7"], ("static", "", "2", 0, "10.9.8.7", 6170)),
        ([f"--cluster_node_ips={TWO}"], ("static", "", "2", 1, "10.9.8.7", 6170)),
    ],
)  # fmt: skip
def test_paddles_flags_become_torchruns(words, expected, jobs, monkeypatch):
    monkeypatch.setattr("dpfuse.job.nodes.is_own_address", lambda address: address == "10.9.8.6")
    args, _ = configured(jobs, *words)
    assert (
        args.rdzv_backend, args.rdzv_endpoint, args.nnodes, args.node_rank, args.master_addr, args.master_port
    ) == expected  # fmt: skip


@pytest.mark.parametrize(
    ("words", "endpoint", "nnodes", "conf"),
    [
        (["--master=10.9.8.7:8090", "--nnodes=2"], "10.9.8.7:8090", "2", "is_host=0"),
        (["--master=10.9.8.6", "--nnodes=2:4"], "10.9.8.6:29500", "2:4", "is_host=1"),
        (["--master=10.9.8.6", "--nnodes=2", "--rank=-1"], "10.9.8.6:29500", "2", "is_host=1"),
        (["--master=10.9.8.7", "--nnodes=2", "--rdzv_conf=timeout=5"], "10.9.8.7:29500", "2", "timeout=5,is_host=0"),
        (["--master=10.9.8.7", "--nnodes=2", "--rdzv_conf=is_host=1"], "10.9.8.7:29500", "2", "is_host=1"),
        (["--master=127.0.0.1:81", "--nnodes=2"], "127.0.0.1:81", "2", ""),  # the first launcher serves
        (["--master=node0:81", "--nnodes=2"], "node0:81", "2", ""),  # torchrun decides by host names
    ],
)
def test_machines_without_rank_use_c10d(words, endpoint, nnodes, conf, jobs, monkeypatch):
    monkeypatch.setattr("dpfuse.job.nodes.is_own_address", lambda address: address == "10.9.8.6")
    args, _ = configured(jobs, *words)
    assert (args.rdzv_backend, args.rdzv_endpoint, args.nnodes, args.rdzv_conf) == ("c10d", endpoint, nnodes, conf)


MACHINES = {"PADDLE_NNODES": "2", "PADDLE_MASTER": "10.9.8.7:81"}


@pytest.mark.parametrize(
    ("variables", "words", "expected"),
    [
        (MACHINES | {"PADDLE_RANK": "1"}, [], ("static", "", "2", 1, "10.9.8.7", 81)),
        (MACHINES, [], ("c10d", "10.9.8.7:81", "2", 0)),
        (MACHINES, ["--master=10.9.8.6:82", "--nnodes=3", "--rank=2"], ("static", "", "3", 2, "10.9.8.6", 82)),
        (MACHINES, ["--standalone"], ("dpfuse-loopback", "127.0.0.1:0", "1")),
        (MACHINES | {"LOCAL_RANK": "0"}, [], ("dpfuse-loopback", "127.0.0.1:0", "1")),  # inside a rank
        ({"PADDLE_MASTER": "10.9.8.7:81"}, [], ("dpfuse-loopback", "127.0.0.1:0", "1")),
        ({"PADDLE_MASTER": "10.9.8.7:81", "PADDLE_NNODES": "1"}, [], ("dpfuse-loopback", "127.0.0.1:0", "1")),
    ],
)
def test_paddles_variables_stand_for_flags_that_are_not_written(variables, words, expected, jobs, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    args, _ = configured(jobs, *words)
    got = args.rdzv_backend, args.rdzv_endpoint, args.nnodes, args.node_rank, args.master_addr, args.master_port
    assert got[: len(expected)] == expected


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"PADDLE_NNODES": "2"}, "PADDLE_NNODES: got '2', but neither PADDLE_MASTER nor flags"),
        (MACHINES | {"PADDLE_RANK": "first"}, "PADDLE_RANK: got 'first', expected the number of this machine"),
        (MACHINES | {"PADDLE_RANK": "2"}, "--rank: got 2, expected 0 to 1"),
    ],
)
def test_variables_that_make_no_sense(variables, text, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        main([SCRIPT])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "port"),
    [
        (["--ips=127.0.0.1"], "0"),
        (["--ips=127.0.0.1", "--started_port=8171"], "8171"),
        (["--cluster_node_ips=127.0.0.1", "--node_ip=127.0.0.1", "--started_port=6171"], "6171"),
        (["--master=10.9.8.7:8090", "--nnodes=1", "--rank=0"], "8090"),
        (["--master=10.9.8.7:8090", "--nnodes=1:1"], "8090"),
        (["--nnodes=1", "--node_rank=0"], "0"),
        (["--standalone"], "0"),
    ],
)
def test_a_single_machine_stays_on_loopback(words, port, jobs):
    args, variables = configured(jobs, *words)
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("dpfuse-loopback", f"127.0.0.1:{port}")
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"


def test_torchruns_own_flags_are_left_as_they_are(jobs):
    words = ["--nnodes=2", "--node_rank=1", "--master_addr=10.9.8.7", "--master_port=81"]
    args, variables = configured(jobs, *words)
    assert (args.rdzv_backend, args.nnodes, args.node_rank) == ("static", "2", 1)
    assert (args.master_addr, args.master_port) == ("10.9.8.7", 81)
    assert "GLOO_SOCKET_IFNAME" not in variables
    args, _ = configured(jobs, "--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=10.9.8.7:81", "--rdzv_id=a")
    assert (args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id) == ("c10d", "10.9.8.7:81", "a")


def test_the_command_line_wins_over_torchruns_variables(jobs, monkeypatch):
    for name, value in {"NNODES": "9", "NODE_RANK": "7", "RDZV_BACKEND": "c10d", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    args, _ = configured(jobs, f"--cluster_node_ips={TWO}", "--node_ip=10.9.8.7")
    assert (args.rdzv_backend, args.nnodes, args.node_rank, args.master_port) == ("static", "2", 0, 6170)


def test_gloo_gets_the_interface_of_the_machines_address(jobs, monkeypatch):
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: {"lo": "127.0.0.1", "eth7": "10.9.8.7"})
    words = [f"--cluster_node_ips={TWO}", "--node_ip=10.9.8.7"]
    assert configured(jobs, *words)[1]["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert configured(jobs, *words)[1]["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    # No interface has this address, so gloo chooses.
    _, variables = configured(jobs, f"--cluster_node_ips={TWO}", "--node_ip=10.9.8.6")
    assert "GLOO_SOCKET_IFNAME" not in variables


def test_a_host_name_that_is_loopback_at_home_is_not_the_machines_address(monkeypatch):
    monkeypatch.setattr("dpfuse.job.nodes.address_towards", lambda host, port: "127.0.1.1")
    assert Nodes("2", "node0", 29500).own_address is None
    assert Nodes("2", "127.0.0.1", 29500).own_address == "127.0.1.1"
    assert Nodes("2", "node0", 29500, local_address="10.9.8.7").own_address == "10.9.8.7"


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["--rank=1", "--nnodes=2"], ["--rank: got 1, but no --master", "--master host:port --nnodes N"]),
        (["--master=10.9.8.7:81", "--rank=1"], ["--nnodes is missing", "Leave --master out"]),
        (["--master=10.9.8.7:81", "--nnodes=2", "--rank=2"], ["--rank: got 2, expected 0 to 1"]),
        (["--master=10.9.8.7:81", "--nnodes=2", "--rank=-2"], ["--rank: got -2, expected 0 to 1"]),
        (["--master=10.9.8.7:81", "--nnodes=2", "--rank=one"], ["--rank", "invalid int value: 'one'"]),
        (["--master=10.9.8.7:81", "--nnodes=2:4", "--rank=1"], ["--nnodes 2:4", "Leave --rank out"]),
        (["--master=10.9.8.7:0", "--nnodes=2"], ["--master: got port '0'", "1 to 65535"]),
        (["--master=10.9.8.7:port", "--nnodes=2"], ["--master: got port 'port'"]),
        (["--master=10.9.8.7:", "--nnodes=2"], ["--master: got port ''"]),
        (["--master=etcd://10.9.8.7:81", "--nnodes=2"], ["got 'etcd://10.9.8.7:81'", "no other service"]),
        (["--master=", "--nnodes=2"], ["--master: got ''", "host:port of node 0"]),
        (["--nnodes=two"], ["--nnodes: got 'two'", "a range such as 2:4"]),
        (["--nnodes=0"], ["--nnodes: got '0'"]),
        (["--nnodes=3:2"], ["--nnodes: got '3:2'"]),
        ([f"--ips={TWO}", "--master=10.9.8.7:81"], ["--master and --ips are of two ways", "use one of them"]),
        ([f"--ips={TWO}", "--master_port=81"], ["--ips cannot be mixed with --master_port", "torchrun's way"]),
        ([f"--ips={TWO}", "--nnodes=3"], ["--ips names 2 machine(s), but --nnodes is 3", "Leave --nnodes out"]),
        (["--master=10.9.8.7:81", "--node_rank=0", "--nnodes=2"], ["--master cannot be mixed with --node_rank"]),
        (["--master=10.9.8.7:81", "--rdzv_endpoint=a:1", "--nnodes=2"], ["cannot be mixed with --rdzv_endpoint"]),
        (["--master=10.9.8.7:81", "--standalone"], ["--master cannot be mixed with --standalone"]),
        (["--started_port=6170"], ["--started_port: got 6170, but no --ips", "the addresses of all machines"]),
        (["--master=a", "--nnodes=2", "--started_port=81"], ["--master and --started_port are", "--master host"]),
        (["--node_ip=10.9.8.7"], ["--node_ip: got 10.9.8.7, but no --ips", "the addresses of all machines"]),
        ([f"--cluster_node_ips={TWO}", "--node_ip=10.9.8.5"], [f"got 10.9.8.5, expected one of --ips={TWO}"]),
        ([f"--cluster_node_ips={TWO}", "--node_ip=me"], ["--node_ip: got 'me', expected the IP address"]),
        ([f"--ips={TWO},10.9.8.7"], ["--ips: 10.9.8.7 is named twice"]),
        (["--ips=10.9.8.7,node1"], ["--ips: got 'node1', expected the IP address"]),
        (["--ips=10.9.8.7,"], ["--ips: got '', expected the IP address"]),
        (["--ips=0.0.0.0,10.9.8.7"], ["--ips: got '0.0.0.0', expected the IP address"]),
        ([f"--ips={TWO}", "--started_port=66000"], ["--started_port: got port '66000'"]),
        ([f"--ips={TWO}", "--started_port=x"], ["--started_port: got port 'x'"]),
        (["--cluster_node_ips=a", "--nodeip=b"], ["unknown flag '--nodeip=b'", "Did you mean --node_ip?"]),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit_are_refused_with_a_remedy(words, texts, capsys):
    with pytest.raises(SystemExit) as end:
        main([*words, "--nproc_per_node=1", SCRIPT])
    assert end.value.code == 2
    told = capsys.readouterr().err
    for text in texts:
        assert text in told


@pytest.mark.parametrize(
    ("own", "texts"),
    [
        ((), ["none of them is an address of this machine, which has 127.0.0.1 (lo)", "--node_ip=…"]),
        (tuple(TWO.split(",")), ["of which 10.9.8.7, 10.9.8.6 are all addresses of this machine; expected one"]),
    ],
)
def test_a_machine_that_cannot_find_itself_says_what_it_found(own, texts, monkeypatch, capsys):
    monkeypatch.setattr("dpfuse.job.nodes.is_own_address", lambda address: address in own)
    monkeypatch.setattr("dpfuse.job.nodes.interface_addresses", lambda: {"lo": "127.0.0.1"})
    with pytest.raises(SystemExit) as end:
        main([f"--ips={TWO}", "--nproc_per_node=1", SCRIPT])
    assert end.value.code == 2
    told = capsys.readouterr().err
    for text in [f"dpfuse.launch: error: --ips: got {TWO}", *texts]:
        assert text in told


@pytest.mark.parametrize("own", ["10.9.8.6", "10.9.8.7"])
def test_a_node_ip_that_this_machine_does_not_have_is_warned_of(own, jobs, monkeypatch, capsys):
    monkeypatch.setattr("dpfuse.job.nodes.is_own_address", lambda address: address == own)
    monkeypatch.setattr("dpfuse.job.nodes.interface_addresses", lambda: {"eth7": own})
    configured(jobs, f"--cluster_node_ips={TWO}", "--node_ip=10.9.8.6")
    told = capsys.readouterr().err
    text = "warning: --node_ip: got 10.9.8.6, which is no address of this machine, which has 10.9.8.7 (eth7); expected"
    assert (text in told) == (own == "10.9.8.7")


def test_this_machine_knows_its_addresses():
    assert interfaces.interface_addresses()["lo"] == "127.0.0.1"
    assert interfaces.interface_of("127.0.0.1") == "lo"
    assert interfaces.interface_of("192.0.2.77") is None  # reserved for documents
    for address, own in {"127.0.0.1": True, "192.0.2.77": False, "2001:db8::77": False}.items():
        assert interfaces.is_own_address(address) is own
    assert interfaces.address_towards("127.0.0.1", 80) == "127.0.0.1"
    assert interfaces.address_towards("no.such.host.invalid", 80) is None
    for name, address in interfaces.interface_addresses().items():
        assert name in {known for _, known in socket.if_nameindex()}
        assert ipaddress.ip_address(address).version == 4


def test_ranks_are_told_what_is_known(jobs):
    def told(*words):
        args, _ = configured(jobs, *words)
        return launcher.json.loads(args.training_script_args[0])

    alone = told()
    assert (alone["hosts"], alone["host"], alone["gpus"], alone["one_log"]) == (["127.0.0.1"], "127.0.0.1", 0, False)
    old = told(f"--cluster_node_ips={TWO}", "--node_ip=10.9.8.6")
    assert (old["hosts"], old["host"]) == (TWO.split(","), "10.9.8.6")
    new = told("--master=127.0.0.1:81", "--nnodes=2")
    assert (new["hosts"], new["host"]) == ([], "127.0.0.1")
    torchruns = told("--nnodes=2", "--master_addr=10.9.8.7", "--master_port=81")
    assert (torchruns["hosts"], torchruns["host"]) == ([], "")


@pytest.mark.parametrize(("words", "gpus"), [([], 3), (["--gpus=0,2", "--nproc_per_node=2"], 2)])
def test_ranks_are_told_how_many_cards_they_see(words, gpus, jobs, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main([*words, SCRIPT]) == 0
    args, variables = jobs.pop()
    assert (args.nproc_per_node, launcher.json.loads(args.training_script_args[0])["gpus"]) == (str(gpus), gpus)
    assert variables.get("CUDA_VISIBLE_DEVICES") == ("0,2" if words else None)


def test_a_card_that_is_not_visible_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(SystemExit):
        main(["--selected_gpus=4,6", SCRIPT])
    assert "card 6 is not there: CUDA_VISIBLE_DEVICES='4,5' shows 4, 5" in capsys.readouterr().err


def test_programs_other_than_python_keep_torchruns_logs(jobs, tmp_path):
    args, _ = configured(jobs, "--log_dir", str(tmp_path), "--no-python")
    assert (args.worker_logs, args.log_dir, args.training_script) == (None, str(tmp_path), SCRIPT)
    args, _ = configured(jobs, "--log_dir", str(tmp_path), "--tee=3")
    assert (args.worker_logs, args.log_dir) == (None, str(tmp_path))
    args, _ = configured(jobs, "--log_dir", str(tmp_path))
    assert args.worker_logs == str(tmp_path) != args.log_dir
