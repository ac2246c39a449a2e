"""`dpfuse diff`: what it prints, as text and as JSON, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpfuse.commands.command_line import main
from tests.trace.training import PLANTS, train


def runs(rank: int, size: int, folder: Path) -> None:
    train(folder / "a", "dpfuse")
    train(folder / "b", "dpfuse", PLANTS["one_number_of_a_batch"][-1])
    train(folder / "c", "dpfuse", PLANTS["a_state_of_the_optimizer_on_rank_1"][-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


def test_text_json_and_exit_codes(folder, ranks, capsys):
    ranks(runs, folder)
    a, b, c = (str(folder / name) for name in "abc")
    assert main(["diff", a, a]) == 0
    assert "no difference in 5 steps" in capsys.readouterr().out.splitlines()[-1]
    assert main(["diff", a, b]) == 1
    text = capsys.readouterr().out
    for fact in (f"{a}: 2 ranks", f"{b}: 2 ranks", "step 3, micro-batch 0 of 2, rank 1", "the inputs of the forward"):
        assert fact in text
    assert main(["diff", a, c, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["steps"]) == (False, [5, 5])
    difference = found["difference"]
    assert (difference["step"], difference["rank"], difference["ranks"]) == (4, 1, [1])
    assert (difference["parameter"], difference["parameters"], difference["bucket"]) == ("first.weight", 1, 0)
    assert (difference["cause"], difference["what"]) == ("optimizer", "the parameter after the step")
    assert difference["batch"] is None
    assert main(["diff", a, b, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["difference"]["batch"] == [0, 2]


def test_a_folder_without_a_trace_is_trouble(tmp_path, capsys):
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
    assert "dpfuse diff: " in capsys.readouterr().err
