"""`dpfuse plan`: two tables, of which torch itself confirms one."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import dpfuse
from dpfuse.commands.command_line import main
from tests.commands import models
from tests.commands.models import PLACE


def test_it_prints_the_plan_and_ddps(capsys):
    assert main(["plan", f"{PLACE}:large", "--comm-buffer-size", "30", "--last_comm_buffer_size", "12.5"]) == 0
    printed = capsys.readouterr().out
    module = models.large()
    assert dpfuse.plan_buckets(module, 30, 12.5).explain() in printed
    assert "18 trainable parameters, 109.2 MB" in printed
    ddp = printed.partition("torch DDP")[2]
    rows = [line.split() for line in ddp.splitlines() if line[:1].isdecimal()]
    params = [*module.parameters()][::-1]
    groups, _ = dist._compute_bucket_assignment_by_size(params, [1 << 20, 25 << 20])
    assert [int(row[3]) for row in rows] == [len(group) for group in groups]
    assert [float(row[1]) for row in rows] == pytest.approx(
        [sum(params[index].nbytes for index in group) / (1 << 20) for group in groups], rel=1e-3
    )


def test_without_sizes_they_are_those_of_the_wrapper(capsys):
    assert main(["plan", f"{PLACE}:build"]) == 0
    assert "dpfuse, 25 MB, the last 1 MB: 1 bucket\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["number", "frozen", "biuld"])
def test_a_bad_model_is_one_line_and_exit_code_1(capsys, name):
    assert main(["plan", f"{PLACE}:{name}"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dpfuse plan: ")
    assert PLACE in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plot", "a:b"], "invalid choice"),
        (["plan"], "module:factory"),
        (["plan", "a:b", "--comm_buffer_size", "-1"], "got '-1', expected MB from 0 on"),
        (["plan", "a:b", "--last_comm_buffer_size", "nan"], "got 'nan', expected MB from 0 on"),
        (["plan", "a:b", "--comm_buffer_size", "x"], "got 'x', expected MB from 0 on"),
        (["plan", "a:b", "--comm_buffer", "2"], "unrecognized arguments"),
        (["tune", "a:b"], "invalid choice"),
        (["bench", "a:b"], "invalid choice"),
        (["doctor", "--steps", "0", "train.py"], "got '0', expected a whole number from 1 on"),
        (["doctor", "--steps", "-1", "train.py"], "got '-1', expected a whole number from 1 on"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(capsys, arguments, text):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
