"""A signal to one rank saves and ends the trainings of Lightning, transformers and accelerate on all ranks together."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

import dpfuse
from dpfuse.integrations.stopping import FitStopping
from tests.distributed.processes import launch

PROGRAMS = Path(__file__).parent / "programs"


def ends_well(program, package, *arguments, size=2):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make test-all` does it")
    done = launch("--nproc_per_node", size, PROGRAMS / program, *arguments, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine") == size


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_signal_to_one_rank_ends_a_fit_and_another_one_goes_on_with_the_same_bits(package, tmp_path):
    ends_well("stopping_fits.py", package, package, tmp_path, "cases")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fit_goes_on_with_other_ranks_and_trains_each_sample_once(tmp_path):
    ends_well("stopping_fits.py", "lightning", "lightning", tmp_path, "first")
    for size in (3, 1):
        ends_well("stopping_fits.py", "lightning", "lightning", tmp_path, "rest", size=size)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2])  # accelerate leaves the model of one process as it is
def test_a_signal_to_one_rank_ends_a_trainer_and_another_one_goes_on_with_the_same_bits(size, tmp_path):
    ends_well("stopping_trainer.py", "transformers", tmp_path, size=size)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("way", "package"), [("accelerate", "accelerate"), ("fabric", "lightning")])
def test_a_signal_to_one_rank_ends_a_loop_of_the_program(way, package, tmp_path):
    ends_well("stopping_loops.py", package, way, tmp_path)


class EndOfFitError(Exception):
    """As Lightning's exception."""


class Stopping(FitStopping):
    """As the callback."""

    end_of_fit = EndOfFitError


def trainer_of(**strategy):
    batches = SimpleNamespace(is_last_batch=False)
    return SimpleNamespace(
        strategy=SimpleNamespace(model=nn.Linear(1, 1), **strategy),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches)),
        global_step=3,
        world_size=1,
        max_steps=-1,
    )


def test_a_stop_that_is_known_inside_a_window_waits_for_its_end():
    """As it is after `dpfuse.agree_to_stop()` in a validation."""
    saved, ended = [], []
    module = SimpleNamespace(on_train_batch_end=lambda outputs, batch, number: ended.append(number))
    trainer, stop = trainer_of(), Stopping("stopped.ckpt")
    trainer.save_checkpoint = saved.append
    stop.on_train_start(trainer, None)
    dpfuse.request_stop()
    try:
        stop.on_train_batch_end(trainer, module, None, None, 0)
        assert (saved, stop.stopped) == ([], False)
        trainer.global_step += 1
        with pytest.raises(EndOfFitError):
            stop.on_train_batch_end(trainer, module, None, None, 1)
        assert ended == [1]  # the module's own hook, which Lightning would call after the callbacks
    finally:
        dpfuse.forget_stop()
    assert (saved, stop.stopped) == (["stopped.ckpt"], True)


def test_ranks_that_lightning_starts_as_functions_are_refused():
    with pytest.raises(dpfuse.DPFuseError, match=r"\(start_method='spawn'\), expected a program of each rank"):
        Stopping("stopped.ckpt").setup(trainer_of(_start_method="spawn"), None, "fit")


def test_without_signals_all_handlers_stay():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    stop = Stopping("stopped.ckpt", signals=())
    stop.setup(trainer_of(), None, "fit")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
