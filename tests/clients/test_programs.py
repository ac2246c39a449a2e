"""Twelve programs in the shape of public ones have the same weights with dpfuse as with torch's class, bit for bit."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import pytest

from dpfuse.startup import startup_variables
from tests.clients.programs import CLIENTS
from tests.commands.programs import PROGRAMS
from tests.commands.side_by_side import assert_same, lines_of, python
from tests.distributed.processes import clean_environment, free_port

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PORT, SETTINGS = object(), object()  # a free port, and a file of settings


@dataclass(frozen=True)
class Client:
    """A program, and how it is started.

    Args:
        words: its command line; a script lies in one of the two folders.
        first: the class of the module that it wraps first.
        starts_ranks: whether it starts its ranks itself.
    """

    words: tuple[object, ...]
    first: str
    starts_ranks: bool = False

    def command(self, folder):
        """Return its command line for a new working folder."""
        folder.mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps({"seed": 3, "lr": 0.002, "steps": 5}))
        words = [free_port() if word is PORT else "settings.json" if word is SETTINGS else word for word in self.words]
        if words[0] == "-m":
            return words
        return [next(root / words[0] for root in (CLIENTS, PROGRAMS) if (root / words[0]).exists()), *words[1:]]


CLIENTS_BY_SHAPE = {
    "nanoGPT": Client(("language_model.py",), "Model"),
    "build-nanogpt": Client(("pretraining.py", 5), "OptimizedModule"),
    "imagenet": Client(("image_classes.py", ".", "--port", PORT), "Sequential", starts_ranks=True),
    "mnist": Client(("digits.py", "--save-model", "."), "Net"),
    "dcgan": Client(("two_backwards.py", 5), "Sequential"),
    "other gan": Client(("gan.py", SETTINGS), "Sequential"),
    "StyleGAN2": Client(("style_gan.py", 7), "Generator"),
    "HiFi-GAN": Client(("vocoder.py", "--port", PORT, "--checkpoint_path", "."), "Generator", starts_ranks=True),
    "MoCo": Client(("momentum_encoder.py", 2, PORT, 6), "Pair", starts_ranks=True),
    "DETR": Client(("detection.py",), "DETR"),
    "open_clip": Client(("-m", "contrast", "--steps", 8), "Towers"),
    "transformers": Client(("trainer.py", "--epochs", 2, "--workers", 1), "Sequential"),
    "torchtnt": Client(("unit.py", 2), "Sequential"),
}


def variables():
    roots = [clean_environment()["PYTHONPATH"], str(PROGRAMS)]  # with `weights` and `contrast`
    return {"PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"}


def with_torch(client, folder, **more):
    start = () if client.starts_ranks else ("-m", "dpfuse.launch", "--nproc_per_node", 2)
    warm = {"warm": True, "warm_ranks": True}  # with the variables of `patch()`, ranks are usual processes
    return python(*start, *client.command(folder), folder=folder, **warm, **variables() | more)


@pytest.mark.parametrize("shape", CLIENTS_BY_SHAPE)
def test_the_weights_are_those_of_torchs_class(shape, tmp_path):
    client = CLIENTS_BY_SHAPE[shape]
    plain = with_torch(client, tmp_path / "torch" / "work")
    start = ("-m", "dpfuse", "run", *(() if client.starts_ranks else ("--ranks", 2)))
    folder = tmp_path / "dpfuse" / "work"
    ours = python(*start, *client.command(folder), folder=folder, **variables())
    assert_same(plain, ours, client.first)
    checked = with_torch(
        client, tmp_path / "checked" / "work", **startup_variables("tests.clients.everything_on", variables())
    )
    assert lines_of(checked) == lines_of(plain)


def test_a_runner_with_a_class_of_its_own_has_the_same_weights(tmp_path):
    """In the shape of mmengine: its class derives from the one that it is told to."""
    torch, ours = (
        with_torch(Client(("runner.py", base, 3), "Model"), tmp_path / base.partition(":")[0] / "work")
        for base in ("torch.nn.parallel:DistributedDataParallel", "dpfuse:DistributedDataParallel")
    )
    assert lines_of(ours) == lines_of(torch)
