"""Every program of examples/paddle as its first lines say to run it, on two gloo ranks, and what it must print."""

from __future__ import annotations

import gzip
import os
import re
import runpy
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.processes import ROOT, launch, run

sys.path.append(str(ROOT / "examples" / "paddle"))

import cifar10
import images

EXAMPLES = ROOT / "examples" / "paddle"


def launched(name: str, *arguments: object, **variables: str) -> list[list[str]]:
    """What each of two ranks said."""
    done = launch("--nproc_per_node", 2, EXAMPLES / name, *arguments, timeout=90, warm_ranks=True, **variables)
    return said(done, ranks=2)


def said(done: subprocess.CompletedProcess[str], ranks: int) -> list[list[str]]:
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^rank (\d+): (.*)$", done.stdout, re.MULTILINE)
    assert {int(rank) for rank, _ in lines} == set(range(ranks)), done.stdout
    return [[text for rank, text in lines if int(rank) == number] for number in range(ranks)]


def numbers(name: str, lines: list[str]) -> list[float]:
    """The figures called so, in order."""
    return [float(value) for line in lines for value in re.findall(rf"\b{name} (\d+\.\d+)", line)]


def weights(lines: list[str]) -> str:
    (name,) = re.findall(r"\bweights ([0-9a-f]{8})$", "\n".join(lines), re.MULTILINE)
    return str(name)


def _fingerprint(rank: int, size: int, equal: bool) -> str:
    sys.path.append(str(EXAMPLES))
    from report import fingerprint

    layer = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(layer.bias, 0 if equal else rank)
    try:
        return fingerprint(layer)
    except RuntimeError as error:
        return str(error)


def test_programs_notice_on_every_rank_that_weights_differ(ranks) -> None:
    first, second = ranks(_fingerprint, True)
    assert first == second
    assert re.fullmatch("[0-9a-f]{8}", first)
    first, second = ranks(_fingerprint, False)
    assert first == second
    assert re.fullmatch("the ranks hold different weights: [0-9a-f]{8}, [0-9a-f]{8}", first)


@pytest.fixture
def two_cores() -> Iterator[None]:
    """Where spawn takes all cores, this machine has two."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_the_four_usages_of_spawn() -> None:
    ranks = len(os.sched_getaffinity(0))
    done = run(EXAMPLES / "linear_net_spawn.py", "--usage", 1, 2, 3, 4, warm_ranks=True)
    lines = said(done, ranks=2)
    assert [len(lines_of_rank) for lines_of_rank in lines] == [3, 3]  # the function of usage 1 prints nothing
    losses = numbers("loss", lines[0] + lines[1])
    assert len(set(losses)) == 6
    usages = re.findall(r"^usage (\d): (\d+) ranks hold the weights [0-9a-f]{8}$", done.stdout, re.MULTILINE)
    assert usages == [("1", str(ranks)), ("2", str(ranks)), ("3", "2"), ("4", "2")]
    assert done.stderr.count("torch sees no GPU here, so 2 gloo rank(s) run on the CPU instead") == 1


@pytest.mark.slow
def test_linear_net_under_launch() -> None:
    first, second = launched("linear_net_launch.py")
    assert numbers("loss", first) != numbers("loss", second)
    assert weights(first) == weights(second)


@pytest.mark.slow
def test_a_state_dict_comes_back_as_it_went() -> None:
    first, second = launched("state_dict.py")
    assert first == second == [f"saved and loaded weight, weights {weights(first)}"]


@pytest.mark.slow
def test_gradients_of_a_custom_function_averaged_by_hand_are_those_of_a_plain_backward() -> None:
    first, second = launched("pylayer_fused_allreduce.py")
    assert first == second == [f"10 steps, gradients as of a plain backward, weights {weights(first)}"]


@pytest.mark.slow
def test_what_no_sync_accumulates_is_averaged_once() -> None:
    assert launched("no_sync.py") == [[f"gradient {own} of its own, then 1015 on all"] for own in (10, 20)]


@pytest.mark.slow
def test_fleet_learns_files_in_the_form_of_cifar_10(tmp_path: Path) -> None:
    cifar10.write_made_up(tmp_path, train=640, test=150)
    first, second = launched("fleet_cifar10.py", "--data", tmp_path, "--epochs", 4)
    assert weights(first) == weights(second)
    for lines in (first, second):
        loss, accuracy = numbers("loss", lines), numbers("accuracy", lines)
        assert len(loss) == len(accuracy) == 4
        assert loss[-1] < 0.1 * loss[0]
        assert accuracy[-1] > 0.95


@pytest.mark.slow
def test_fleet_on_one_process_says_that_its_pictures_are_made_up(tmp_path: Path) -> None:
    done = run(EXAMPLES / "fleet_cifar10.py", "--epochs", 1, "--limit", 64, DPFUSE_DATA=str(tmp_path))
    assert len(said(done, ranks=1)[0]) == 2
    assert done.stdout.count("CIFAR-10 is not on this disk: training on made-up pictures") == 1


HOME = Path(os.environ.get("DPFUSE_DATA") or ROOT / "data", cifar10.FOLDER)


@pytest.mark.skipif(not HOME.exists(), reason="CIFAR-10 is not on this disk")
def test_fleet_learns_from_real_pictures() -> None:
    first, second = launched("fleet_cifar10.py", "--data", HOME, "--epochs", 3, "--limit", 4000)
    assert weights(first) == weights(second)
    assert min(numbers("accuracy", first)[-1], numbers("accuracy", second)[-1]) > 0.25


@pytest.mark.slow
def test_fleet_trains_a_resnet() -> None:
    sizes = ["--depth", 14, "--image-size", 32, "--batch-size", 4, "--batch-num", 12]
    first, second = launched("fleet_resnet.py", *sizes)
    assert weights(first) == weights(second)
    for lines in (first, second):
        assert [line[: line.index(",", 10)] for line in lines[:-1]] == [f"epoch 0, batch {n} of 6" for n in (0, 5)]
        assert len(numbers("loss", lines)) == 2, "not a number"
        assert 3 < numbers("loss", lines)[0] < 8  # 4.6 = ln(102) is that of guessing
        assert all(a <= b for a, b in zip(numbers("acc1", lines), numbers("acc5", lines), strict=True))


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with files of Fashion-MNIST's shape: a bright bar, the lower the higher the label.

    Every seventh picture to test has the bar of another label.
    """
    folder = tmp_path_factory.mktemp("data")
    bars = torch.zeros(10, 28, 28, dtype=torch.uint8)
    for label in range(10):
        bars[label, 2 * label : 2 * label + 4] = 200
    for name, (shape, _) in images.FILES.items():
        index = torch.arange(shape[0])
        shown = index + (index % 7 == 0) if "t10k" in name else index
        content = bars[shown % 10] if "images" in name else (index % 10).to(torch.uint8)
        header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
        (folder / name).write_bytes(gzip.compress(header + content.numpy().tobytes(), compresslevel=1))
    return str(folder)


@pytest.mark.slow
def test_the_basic_api_learns_on_two_ranks(mnist: str) -> None:
    first, second = launched("mnist_basic_api.py", "--limit", 512, "--epochs", 3, DPFUSE_DATA=mnist)
    assert weights(first) == weights(second)
    for lines in (first, second):
        loss, accuracy = numbers("loss", lines), numbers("accuracy", lines)
        assert len(loss) == 3
        assert loss[-1] < 0.5 * loss[0]
        assert accuracy[-1] > 0.9


@pytest.mark.slow
def test_the_high_level_api_is_the_same_program_on_one_process_and_on_two_ranks(mnist: str) -> None:
    arguments = ["--limit", 301, "--epochs", 3]  # which two ranks cannot share evenly
    alone = said(run(EXAMPLES / "mnist_high_level_api.py", *arguments, DPFUSE_DATA=mnist), ranks=1)
    words = ("--nproc_per_node", 2, EXAMPLES / "mnist_high_level_api.py", *arguments)
    done = launch(*words, warm_ranks=True, DPFUSE_DATA=mnist)
    first, second = said(done, ranks=2)
    assert first == second
    assert done.stdout.count("Epoch 3/3") == 1, "more than one rank shows its progress"
    for lines in (first, *alone):
        (accuracy,) = numbers("evaluated", lines)
        ((right, count),) = re.findall(r"predicted (\d+) of (\d+)", lines[0])
        assert int(count) == 301
        assert accuracy == pytest.approx(int(right) / 301, abs=1e-4)
        assert 0.8 < accuracy < 0.9  # all but every seventh


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a program of one process prints, run in this one."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_a_parallel_executor_tests_what_it_trains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    out = printed("parallel_executor_train.py", capsys)
    found = re.fullmatch(r"(\d) devices, loss (\d+\.\d+), after 20 steps (\d+\.\d+)\n", out)
    assert found, out
    assert int(found[1]) == (torch.cuda.device_count() or 2)
    assert float(found[3]) < 0.5 * float(found[2])


def test_parallel_executors_are_fed_dicts_and_lists_and_drop_their_scopes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_NUM", "1")  # which both programs change
    assert printed("parallel_executor_feed.py", capsys).splitlines() == [
        "a dict, merged: [(3, 1), (2,), (2, 2)]",
        "a list of 2 and 1 samples: the same",
        "on each device: [[(2, 1), (1, 1)], [(), ()], [(1, 2), (1, 2)]]",
    ]
    out = printed("parallel_executor_scopes.py", capsys)
    assert out.startswith("6 steps, the same whenever scopes are dropped; loss ")


@pytest.mark.slow
def test_parallel_executors_of_two_processes_train_one_model() -> None:
    first, second = launched("parallel_executor_trainers.py", CPU_NUM="2")
    assert weights(first) == weights(second)
    assert first[0].startswith("2 devices, loss ")
    assert numbers("loss", first) != numbers("loss", second)
