"""Kills a process that saves checkpoints, at random moments, again and again: is every one that was saved still there?

    python kill_while_saving.py dpfuse|torch.save KILLS

Prints one JSON object: how many kills lost something, how many left a half-written file behind, and how many files were
saved in all. Each process is forked from this one, which has torch imported, so a kill takes a fraction of a second.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

import dpfuse

HOW, KILLS = sys.argv[1], int(sys.argv[2])
ELEMENTS = 1 << 18  # 1 MB, so that most of the time is spent writing


def model_of(step: int) -> torch.nn.Module:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.full((ELEMENTS,), float(step)))
    return model


def save_for_ever(folder: Path, report: int) -> None:
    step = 0
    while True:
        step += 1
        if HOW == "dpfuse":
            dpfuse.save_checkpoint(folder, model_of(step), step=step, keep=1 + step % 2)
        else:
            torch.save(model_of(step).state_dict(), folder / "last.pt")
        os.write(report, step.to_bytes(4, "little"))


def load(folder: Path) -> int:
    """The step that is found; -1 for one that is not whole."""
    if HOW == "dpfuse":
        model = model_of(-1)
        step = dpfuse.load_checkpoint(folder, model).step
        return step if bool((model.weight == step).all()) else -1
    try:
        weight = torch.load(folder / "last.pt", weights_only=True)["weight"]
    except Exception:
        return -1
    return int(weight[0]) if bool((weight == weight[0]).all()) else -1


def kill_once() -> tuple[int, int, bool]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        receiver, report = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(folder, report)
            finally:
                os._exit(1)
        os.close(report)
        first = os.read(receiver, 4)
        assert first, "the process that saves has failed"
        time.sleep(random.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reported = first
        while data := os.read(receiver, 4096):
            reported += data
        os.close(receiver)
        half = any(path.name.endswith(".part") for path in folder.iterdir())
        return int.from_bytes(reported[-4:], "little"), load(folder), half


random.seed(0)
torch.set_num_threads(1)  # before the first fork: threads do not survive it
results = [kill_once() for _ in range(KILLS)]
print(
    json.dumps(
        {
            # The very next step may be there, too: its process was killed before it could tell.
            "lost": sum(found not in (told, told + 1) for told, found, _ in results),
            "half": sum(half for _, _, half in results),
            "saved": sum(told for told, _, _ in results),
        }
    )
)
