"""What error feedback has kept goes into a checkpoint and comes back."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

import dpfuse
from tests.distributed.random_models import same_bits
from tests.distributed.wires.hard_gradients import Given
from tests.distributed.wires.test_error_feedback import FACES, NUMELS, given, wrapped


def saved_and_loaded(rank, size, folder):
    """Bits are those of a run that was not interrupted, where the buckets are: they are not rebuilt here."""

    def trained_on(model, steps):
        bits = []
        for step in steps:
            model.zero_grad()
            model(given(rank, step)).backward()
            bits += [weight.grad.clone() for weight in model.module.weights]
        return bits

    for face in FACES:
        options = {"face": face, "deterministic": True}
        model = wrapped(Given(NUMELS), **options)
        trained_on(model, range(3))
        torch.save(model.error_feedback.state_dict(), f"{folder}/own-{rank}.pt")
        dcp.save({"error_feedback": model.error_feedback}, checkpoint_id=f"{folder}/{face.__name__}")
        expected = trained_on(model, range(3, 6))
        again, other, without = (wrapped(Given(NUMELS), **options) for _ in range(3))
        dcp.load({"error_feedback": again.error_feedback}, checkpoint_id=f"{folder}/{face.__name__}")
        assert all(map(same_bits, trained_on(again, range(3, 6)), expected))
        # A second time, into buffers that are in use.
        dcp.load({"error_feedback": again.error_feedback}, checkpoint_id=f"{folder}/{face.__name__}")
        assert all(map(same_bits, trained_on(again, range(3, 6)), expected))
        other.error_feedback.load_state_dict(torch.load(f"{folder}/own-{rank}.pt", weights_only=True))
        assert all(map(same_bits, trained_on(other, range(3, 6)), expected))
        assert not all(map(same_bits, trained_on(without, range(3, 6)), expected))
        # Copies begin at zero.
        assert all(
            not value.any() for value in copy.deepcopy(model).error_feedback.state_dict()[f"rank{rank}"].values()
        )
        state = model.error_feedback.state_dict()
        assert set(state) == {"world_size", f"rank{rank}"}
        assert set(state[f"rank{rank}"]) == {"weights.0", "weights.1", "weights.2", "other"}
        for wrong in ({**state, "world_size": size + 1}, {"world_size": size, f"rank{rank + 1}": {}}):
            with pytest.warns(UserWarning, match=rf"rank {rank}: error feedback begins at zero: the state is that of"):
                other.error_feedback.load_state_dict(wrong)
            assert all(not value.any() for value in other.error_feedback.state_dict()[f"rank{rank}"].values())
        state[f"rank{rank}"]["weights.1"] = torch.ones(5)
        del state[f"rank{rank}"]["other"]
        with pytest.warns(UserWarning, match="error feedback of 'weights.1', 'other' begins at zero"):
            other.error_feedback.load_state_dict(state)
        loaded = other.error_feedback.state_dict()[f"rank{rank}"]
        assert torch.equal(loaded["weights.0"], state[f"rank{rank}"]["weights.0"])
        assert not loaded["weights.1"].any()


def test_a_checkpoint_goes_on_bit_by_bit(ranks, tmp_path):
    ranks(saved_and_loaded, str(tmp_path))


def gone_back(rank, size, folder):
    for face in FACES:
        trained, fresh = (wrapped(Given(NUMELS), face=face, deterministic=True) for _ in range(2))
        place = f"{folder}/{face.__name__}"
        dpfuse.save_checkpoint(place, trained, step=1)
        trained([1e6 * grad for grad in given(rank, 0)]).backward()  # a training that goes astray
        trained.zero_grad()
        assert any(value.any() for value in trained.error_feedback.state_dict()[f"rank{rank}"].values())
        for model in (trained, fresh):
            dpfuse.load_checkpoint(place, model)
            assert not any(value.any() for value in model.error_feedback.state_dict()[f"rank{rank}"].values())
            model(given(rank, 1)).backward()
        for one, other in zip(trained.module.weights, fresh.module.weights, strict=True):
            assert same_bits(one.grad, other.grad)


def test_what_is_kept_of_a_training_gone_astray_is_not_sent_after_going_back(ranks, tmp_path):
    ranks(gone_back, str(tmp_path))


def saved(rank, size, folder):
    model = wrapped(Given(NUMELS))
    model(given(rank, 0)).backward()
    dcp.save({"error_feedback": model.error_feedback}, checkpoint_id=folder)


def loaded_by_others(rank, size, folder):
    model = wrapped(Given(NUMELS))
    model(given(rank, 0)).backward()
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with pytest.warns(UserWarning, match=r"begins at zero: the state is that of 2 ranks .*, expected 3 ranks"):
        dcp.load({"error_feedback": model.error_feedback}, checkpoint_id=folder, planner=planner)
    assert not any(value.any() for value in model.error_feedback.state_dict()[f"rank{rank}"].values())


def test_another_number_of_ranks_begins_at_zero(ranks, tmp_path):
    ranks(saved, str(tmp_path), size=2)
    ranks(loaded_by_others, str(tmp_path), size=3)
