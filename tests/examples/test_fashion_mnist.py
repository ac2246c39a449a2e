"""The demonstration: on two real ranks through the launcher, and its checks, each of which must be able to fail."""

from __future__ import annotations

import gzip
import inspect
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import checks
import display
import fashion_mnist
import images
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from tests.patience import patience
from tests.warm import warm_python

ROOT = Path(__file__).resolve().parents[2]
FEW = ["--limit", "300", "--epochs", "2", "--batch-size", "16"]
FEWER = ["--limit", "64", "--epochs", "1", "--batch-size", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of Fashion-MNIST's shape; each picture is as bright as its label is high."""
    folder = tmp_path_factory.mktemp("data")
    for name, (shape, _) in images.FILES.items():
        labels = torch.arange(shape[0]) % images.CLASSES
        content = labels.to(torch.uint8)
        if len(shape) == 3:
            content = (25 * content)[:, None, None].expand(shape)
        header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
        (folder / name).write_bytes(gzip.compress(header + content.contiguous().numpy().tobytes(), compresslevel=1))
    return folder


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command of `make demo`, on few images."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))
    }
    environment |= {"DPFUSE_DATA": str(folder), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    environment["PYTHON_EXEC"] = warm_python()  # of the ranks
    command = [warm_python(), "-m", "dpfuse.launch", "--nproc_per_node", "2", "examples/fashion_mnist.py"]
    return subprocess.run(
        [*command, *FEW, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience(90)
    )


@pytest.mark.slow
def test_two_ranks_train_and_rank_0_alone_reports(folder: Path) -> None:
    done = demo(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines.count(f"Training on Fashion-MNIST, read from {folder}") == 1
    modes = len(fashion_mnist.ddp_modes())
    assert f"2 ranks train one network {1 + modes} times, in turns of 20 steps, 18 steps each:" in lines
    assert f"once with dpfuse, and with torch's DDP in {modes} modes. All must end with the same bits." in lines
    assert "epoch 2 of 2" in done.stdout
    assert lines.count(f"{'':6} │epoch 1 │epoch 2") == 1  # under the curve
    assert "images         300 to train on, 300 to test" in lines
    assert "ranks          2 on cpu, 16 images per rank and step" in lines
    assert "added up over 36 all-reduces" in done.stdout  # two in each of 18 steps
    assert "exposed" in done.stdout
    assert "times that of DDP with default arguments" in done.stdout
    rows = [line.split("│")[1].strip() for line in lines if line.count("│") == 5]
    assert rows == ["dpfuse", *fashion_mnist.ddp_modes()]
    assert sum(line.startswith("order") for line in lines) == 1
    assert [line for line in lines if line.startswith(("passed", "FAILED"))] == [
        "passed  all 2 ranks hold bitwise equal weights and BatchNorm statistics",
        "passed  all 18 losses of every rank equal DDP's bitwise, in each mode",
        "passed  the trained weights equal DDP's bitwise, in each mode",
    ]
    assert "\x1b" not in done.stdout, "colours where nobody can see them"


@pytest.mark.slow
def test_a_failed_check_fails_the_command(folder: Path) -> None:
    done = demo(folder, "--required-accuracy", "1.01")
    assert done.returncode != 0
    assert "is at least 101%" in done.stdout
    assert done.stdout.count("FAILED") == 1


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a launcher would set for a single rank."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    # The script sets these for its own process.
    for name in ("DPFUSE_BACKEND", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, os.environ.get(name, "gloo" if name == "DPFUSE_BACKEND" else "lo"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_one_rank_is_enough(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fashion_mnist.main([*FEWER, "--data", str(folder)]) == 0
    assert capsys.readouterr().out.count("passed") == 3


@pytest.mark.usefixtures("one_rank")
def test_another_result_than_ddps_is_noticed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = fashion_mnist.network
    seeds = chain([0], repeat(1))
    monkeypatch.setattr(fashion_mnist, "network", lambda device, seed: network(device, next(seeds)))
    assert fashion_mnist.main([*FEWER, "--data", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "FAILED  all 4 losses of every rank equal DDP's bitwise, in each mode (on rank 0 they differ from" in out
    assert "FAILED  the trained weights equal DDP's bitwise, in each mode" in out


def test_the_demo_says_plainly_who_is_faster() -> None:
    modes = {"torch DDP": 12.0, "torch DDP, view": 11.0}
    assert fashion_mnist.verdict(10.0, modes) == (
        "1.20 times that of DDP with default arguments, 1.10 times that of its fastest mode here (view)"
    )
    assert fashion_mnist.verdict(11.5, modes).endswith("(view): dpfuse is NOT the fastest on this machine")
    assert fashion_mnist.verdict(13.0, {"torch DDP": 12.0, "torch DDP, view": 12.5}) == (
        "0.92 times that of DDP with default arguments: dpfuse is NOT the fastest on this machine"
    )


def test_every_mode_of_this_ddp_takes_part() -> None:
    modes = fashion_mnist.ddp_modes()
    assert next(iter(modes.items())) == ("torch DDP", {})
    for arguments in modes.values():
        assert arguments.keys() <= inspect.signature(DistributedDataParallel).parameters.keys()
    assert len({tuple(sorted(arguments)) for arguments in modes.values()}) == len(modes) in (2, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_all_of_fashion_mnist_has_to_reach_the_accuracy(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = images.load(folder)
    monkeypatch.setattr(images, "load", lambda *_, **__: whole.first(300))
    assert fashion_mnist.main(["--epochs", "1", "--learning-rate", "0"]) == 1
    assert "is at least 87%" in capsys.readouterr().out


@pytest.mark.usefixtures("one_rank")
def test_too_few_images_for_one_step_is_said(folder: Path) -> None:
    with pytest.raises(SystemExit, match="10 images are too few for a batch of 16 on each of 1 ranks"):
        fashion_mnist.main(["--limit", "10", "--batch-size", "16", "--data", str(folder)])


@pytest.mark.parametrize(
    "wrong",
    ["--epochs=0", "--batch-size=-1", "--limit=0", "--seed=x"],
)
def test_wrong_arguments_end_with_code_2(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        fashion_mnist.parse([wrong])
    assert end.value.code == 2
    assert wrong.partition("=")[0] in capsys.readouterr().err


def _shares(rank: int, size: int) -> tuple[list[list[int]], bool, bool, bool]:
    sys.path.append(str(ROOT / "examples"))
    import checks
    from fashion_mnist import shuffled_batches

    batches = [batch.tolist() for batch in shuffled_batches(23, 5, seed=3)]
    cpu = torch.device("cpu")
    rows = torch.arange(6.0).view(2, 3).t()  # not contiguous
    equal = checks.equal_everywhere([rows, torch.tensor(7)], cpu)
    different = checks.equal_everywhere([rows, torch.tensor(rank)], cpu)
    return batches, equal, different, checks.true_everywhere(rank == 0, cpu)


def test_each_rank_takes_its_own_part_of_one_order_and_all_see_the_same_verdicts(ranks) -> None:
    (first, *verdicts), (second, *same_verdicts) = ranks(_shares)
    assert [len(batch) for batch in first + second] == [5, 5, 5, 5]
    assert len({index for batch in first + second for index in batch}) == 20
    assert verdicts == same_verdicts == [True, False, False]


def test_equal_bits_are_stricter_than_equal_numbers() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert checks.same_bits(nan, nan.clone())
    assert not checks.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not checks.same_bits(torch.zeros(1), torch.zeros(1, dtype=torch.int32))
    assert checks.first_difference(nan, nan.clone()) is None
    assert checks.first_difference(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0])) == 2


def race(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance by 50 steps, each of which takes 100 ms of the clock."""
    clock = [0.0]
    monkeypatch.setattr(display, "monotonic", lambda: clock[0])
    with display.RaceDisplay(console, 50) as progress:
        for done in range(1, 51):
            clock[0] += 0.1
            progress.advance(1, "epoch 1", {"ours": done / 40, "theirs": done / 20})


def test_the_speed_of_each_training_is_a_table_on_a_terminal_and_elsewhere_a_few_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = "By the time of the first 1 steps of each, this takes 5 s on this machine."
    race(Console(force_terminal=True, width=100), monkeypatch)
    out = capsys.readouterr().out
    assert first in out
    assert re.search(r"│ ours +│ +40\.0 │", out)
    assert re.search(r"│ theirs +│ +20\.0 │", out)
    assert "step 30 of 50, 2 s to go" in out

    race(Console(force_terminal=False, width=100), monkeypatch)
    rates = "steps/s: ours 40.0, theirs 20.0"
    assert capsys.readouterr().out.splitlines() == [
        first,
        f"epoch 1, step 1 of 50; {rates}",
        f"epoch 1, step 50 of 50; {rates}",
    ]

    race(Console(quiet=True), monkeypatch)
    assert capsys.readouterr().out == ""
