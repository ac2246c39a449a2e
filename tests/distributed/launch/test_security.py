"""What SECURITY.md promises: no code from peers runs, no secret is printed, and only known processes can connect."""

from __future__ import annotations

import ast
import os
import pickle
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import dpfuse
from dpfuse.comm import votes
from dpfuse.job import interfaces, launcher, spawn
from dpfuse.job.launcher import main
from tests.distributed.processes import ROOT, SCRIPTS, clean_environment, pids_in, python, start
from tests.distributed.processes import launch as launched
from tests.distributed.scripts import functions
from tests.patience import patience

SOURCES = sorted([*(ROOT / "dpfuse").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
# Calls that run, or may run, code that another process has sent. By the last part of the called name.
DANGEROUS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "rpc_sync", "rpc_async", "Unpickler", "eval", "exec", "execfile", "system", "popen",
    "check_output", "getoutput", "getstatusoutput", "recv_bytes", "run_path", "run_module", "joblib",
}  # fmt: skip
MODULES = {"cloudpickle", "dill", "marshal", "shelve", "joblib", "xmlrpc", "socketserver", "torch.distributed.rpc"}
LOADERS = {"load", "loads"}
PICKLES = ("pickle", "torch", "numpy")
# Each exception, with its reason.
ALLOWED = {
    ("dpfuse/job/spawn_context.py", "pickle.loads"),  # what spawn's own ranks returned, from a folder of mode 0700
    ("dpfuse/job/rank_program.py", "exec"),  # the user's script
    ("dpfuse/job/rank_program.py", "runpy.run_module"),  # the user's module
}


def name_of(function: ast.expr) -> str:
    try:
        return ast.unparse(function)
    except ValueError:
        return ""


def suspects(source: str) -> set[str]:
    """What a file calls or imports that could execute data."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found |= MODULES.intersection(modules)
            if isinstance(node, ast.ImportFrom):  # under its bare name, a call would not be recognised
                loaders = LOADERS if node.module in PICKLES else set()
                found |= {alias.name for alias in node.names if alias.name in DANGEROUS | loaders}
        if not isinstance(node, ast.Call):
            continue
        last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if last not in DANGEROUS | LOADERS and all(keyword.arg != "shell" for keyword in node.keywords):
            continue  # the text of every call would take seconds to make
        name = name_of(node.func)
        owner = name.rpartition(".")[0]
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if last in DANGEROUS and not (last == "eval" and owner):
            found.add(name)
        if (
            (last in LOADERS and owner == "pickle")
            or (name == "torch.load" and given.get("weights_only") != "True")
            or (last == "load" and owner in ("np", "numpy") and given.get("allow_pickle", "False") != "False")
            or given.get("shell", "False") != "False"
        ):
            found.add(name)
    return found


def test_nothing_of_ours_executes_what_it_receives():
    found = {(str(path.relative_to(ROOT)), name) for path in SOURCES for name in suspects(path.read_text())}
    assert found == ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        "dist.broadcast_object_list(x)", "torch.distributed.all_gather_object(a, b)", "pickle.load(file)",
        "from pickle import loads", "from torch.distributed import gather_object", "import dill", "eval(text)",
        "torch.load(path)", "torch.load(path, weights_only=False)", "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)", "os.system(text)", "pickle.Unpickler(file).load()", "exec(code)",
        "from torch.distributed.rpc import rpc_sync",
    ],
)  # fmt: skip
def test_the_search_finds_each_way(line):
    assert suspects(line)


@pytest.mark.parametrize("line", ["model.eval()", "json.load(file)", "torch.load(path, weights_only=True)"])
def test_the_search_leaves_others_alone(line):
    assert not suspects(line)


def test_every_promise_names_tests_that_exist():
    text = (ROOT / "SECURITY.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    there = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) >= 10
    assert named - there == set()
    assert all((ROOT / path).is_file() for path in re.findall(r"`(tests/[\w/]+\.py)`", text))


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def hostile(rank, size, marker):
    """Rank 1 sends a pickle wherever a text or a state is expected."""
    group = dpfuse.comm.collective.resolve_group(None)
    text = pickle.dumps(Planted(marker), protocol=0).decode()
    told = []
    for content in (text, votes.FAILURE + text):
        try:
            votes.agree_on_text(content if rank == 1 else "honest", group, "the text")
        except dpfuse.DPFuseError as error:
            told.append(str(error))
    from torch import nn

    folder = f"{marker}-folder"
    if rank == 1:
        dpfuse.checkpoint.save_load.torch.save = lambda _, file: file.write(pickle.dumps(Planted(marker)))
    dpfuse.save_checkpoint(folder, nn.Linear(1, 1), step=1)
    try:
        dpfuse.load_checkpoint(folder, nn.Linear(1, 1), random_state=True)
    except Exception as error:
        told.append(str(error))
    return told


@pytest.mark.usefixtures("warm_spawn")
def test_a_pickle_from_a_peer_is_text(tmp_path):
    marker = str(tmp_path / "marker")
    context = spawn(functions.in_a_job, args=(hostile, marker), nprocs=2)
    for queue in context.return_queues:
        told = queue.get()
        assert "rank 1 has 'cposix'" in told[0]  # the first line of the pickle, shown and not run
        assert told[1].startswith("the text failed on rank 1: cposix")
        assert "Weights only load failed" in told[2]
        assert len(told) == 3
    assert not os.path.exists(marker)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_spawn")
def test_spawn_reads_nothing_from_a_folder_that_others_can_write_to(tmp_path, monkeypatch):
    """torch's own error files lie in the common one, and their names are known once the ranks run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    marker = tmp_path / "marker"
    names = []

    def seen(**how):
        file = original(**how)
        names.append(Path(file.name))
        return file

    original = tempfile.NamedTemporaryFile
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", seen)
    context = spawn(functions.ends, args=(4,), nprocs=1, join=False)
    (name,) = names
    assert name.parent == tmp_path
    name.write_bytes(pickle.dumps(Planted(str(marker))))
    with pytest.raises(dpfuse.DPFuseError, match="ended with exit code 4"):
        while not context.join():
            pass
    assert not marker.exists()
    with pytest.raises(dpfuse.DPFuseError, match=r"raised ValueError: planted(.|\n)*in fails"):
        spawn(functions.fails_at_once, nprocs=1)
    assert list(tmp_path.glob("pytorch-errorfile*")) == [name]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_the_environment_is_never_printed(how):
    done = launched("--nproc_per_node=2", SCRIPTS / "fail.py", how, TEST_SECRET="hunter2", LOGLEVEL="DEBUG")
    assert done.returncode != 0
    assert "dpfuse.launch: rank 1" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.slow
def test_folders_of_the_launcher_are_the_users_own_and_go_with_it(tmp_path):
    job = start(
        "-m", "dpfuse.launch", "--nproc_per_node=1", SCRIPTS / "fail.py", "sleep", warm=True, TMPDIR=str(tmp_path)
    )
    assert job.stdout is not None
    (pid,) = pids_in(job.stdout.readline())
    folders = [path for path in tmp_path.iterdir() if path.name.startswith("dpfuse")]
    assert folders
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * len(folders)
    os.kill(pid, 9)
    job.communicate(timeout=patience(20))
    assert [path for path in tmp_path.iterdir() if path.name.startswith("dpfuse")] == []


@pytest.mark.slow
def test_two_jobs_on_one_machine_do_not_meet():
    words = ("-m", "dpfuse.launch", "--nproc_per_node=2", SCRIPTS / "join.py")
    jobs = [start(*words, job, warm=True, PYTHON_EXEC=python(warm=True)) for job in ("a", "b")]
    told = [job.communicate(timeout=patience(60)) for job in jobs]
    for name, job, (out, err) in zip("ab", jobs, told, strict=True):
        assert job.returncode == 0, err
        assert out.count('"sum": 3.0') == 2
        assert out.count(f'"argv": ["{name}"]') == 2


def own_network():
    """The command that SECURITY.md names, as a list; it gives a job a network of its own."""
    text = " ".join((ROOT / "SECURITY.md").read_text().split())
    return shlex.split(re.search(r"`(unshare [^`]+)`", text)[1])


def writes_a_key(port):
    """What a stranger does: connect to the job's store, and set a key."""
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=patience(1)))
        store.set("planted", "by a stranger")
    except RuntimeError:
        return False
    return store.get("planted") == b"by a stranger"


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True])
def test_a_network_of_its_own_shuts_strangers_out_of_a_job(tmp_path, closed):
    around = own_network() if closed else []
    if closed and not (
        shutil.which("unshare")
        and subprocess.run([*around, "true"], capture_output=True, timeout=patience(20)).returncode == 0
    ):
        pytest.skip("a user cannot make a network of its own here")
    (tmp_path / "job.py").write_text(
        "import os, time\n"
        "with open('port.part', 'w') as file:\n"
        "    file.write(os.environ['MASTER_PORT'])\n"
        "os.rename('port.part', 'port')\n"
        "while not os.path.exists('done'):\n"
        "    time.sleep(0.02)\n"
    )
    words = [*around, python(warm=False), "-m", "dpfuse.launch", "--nproc_per_node=1", "job.py"]
    with subprocess.Popen(words, cwd=tmp_path, env=clean_environment()) as job:
        try:
            while not (tmp_path / "port").exists():
                assert job.poll() is None
                time.sleep(0.02)
            assert writes_a_key(int((tmp_path / "port").read_text())) is not closed
        finally:
            (tmp_path / "done").touch()
        assert job.wait(timeout=patience(30)) == 0


@pytest.fixture
def settled(monkeypatch):
    monkeypatch.setattr(launcher, "_run", lambda args, signals, records: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(interfaces.socket, "getaddrinfo", resolved)


def resolved(host, port, **_):
    known = {"node0": "10.9.8.7", "example.org": "8.8.4.4"}
    if not host.replace(".", "").replace(":", "").isalnum() or host == "nowhere":
        raise OSError("unknown name")
    return [(0, 0, 0, "", (known.get(host, host), port))]


TWO = ["--nproc_per_node=1", "--nnodes=2"]


@pytest.mark.parametrize(
    ("words", "public"),
    [
        ([*TWO, "--master=8.8.8.8:29500", "--rank=1"], "8.8.8.8"),
        ([*TWO, "--master=example.org", "--rank=1"], "8.8.4.4"),
        ([*TWO, "--master=[2001:4860:4860::8888]:1", "--rank=1"], "2001:4860:4860::8888"),
        ([*TWO, "--master=8.8.8.8:29500"], "8.8.8.8"),
        ([*TWO, "--master_addr=8.8.8.8", "--master_port=1", "--node_rank=1"], "8.8.8.8"),
        ([*TWO, "--rdzv_backend=c10d", "--rdzv_endpoint=8.8.8.8:1"], "8.8.8.8"),
        (["--nproc_per_node=1", "--cluster_node_ips=8.8.8.8,8.8.8.9", "--node_ip=8.8.8.9"], "8.8.8.8"),
        ([*TWO, "--master=10.9.8.7:29500", "--rank=1"], None),
        ([*TWO, "--master=node0", "--rank=1"], None),
        ([*TWO, "--master=nowhere", "--rank=1"], None),
        ([*TWO, "--master=[fd00::7]:81", "--rank=1"], None),
        (["--nproc_per_node=2"], None),
        (["--nproc_per_node=2", "--master_addr=8.8.8.8"], None),  # torchrun ignores it where there is no port
    ],
)
def test_a_public_meeting_point_is_warned_of(words, public, settled, capsys):
    assert main([*words, str(SCRIPTS / "join.py")]) == 0
    told = capsys.readouterr().err
    if public is None:
        assert "public" not in told
    else:
        assert told.count(f"warning: {public} is a public address") == 1
