"""The commands on a machine with GPUs: one NCCL rank for each, and the model on them."""

from __future__ import annotations

import json

import pytest
import torch

from dpfuse.commands.command_line import main
from tests.commands.models import PLACE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("arguments", [["tune", "--steps=2"], ["bench", "--rounds=2", "--steps=2"]])
def test_every_visible_card_gets_a_rank(arguments, tmp_path):
    command, *flags = arguments
    assert main([command, f"{PLACE}:build", *flags, f"--out={tmp_path}"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ranks"], report["backend"]) == (torch.cuda.device_count(), "nccl")
    assert report["machine"]["gpu"] == torch.cuda.get_device_name(0)
    if command == "tune":
        assert {param["device"].partition(":")[0] for param in report["timeline"]["params"]} == {"cuda"}
