"""`error_feedback=True`: what rounding takes from a gradient arrives with the next one, whatever happens in between."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.distributed.random_models import same_bits
from tests.distributed.wires.hard_gradients import Given, alike_everywhere, hard_gradients, warnings_are_errors

FACES = (dpfuse.DataParallel, dpfuse.DistributedDataParallel)
NUMELS = [700, 33, 260]
WIRES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def wrapped(net, face=dpfuse.DataParallel, wire=torch.bfloat16, megabytes=1500 / 2**20, *, pair=True, **options):
    sizes = {"bucket_cap_mb": megabytes}
    if face is dpfuse.DataParallel:
        sizes = {"comm_buffer_size": megabytes, "last_comm_buffer_size": megabytes}
    wire_dtype = (wire, torch.float32) if pair else wire
    return face(net, wire_dtype=wire_dtype, error_feedback=True, find_unused_parameters=True, **{**sizes, **options})


def given(rank, step, numels=NUMELS):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(numel, generator=generator) for numel in numels]


def residuals(model, rank, name):
    """The residual of a parameter, summed over the ranks."""
    total = model.error_feedback.state_dict()[f"rank{rank}"][name].double()
    dist.all_reduce(total)
    return total


def nothing_is_lost(rank, size, wires, steps=30):
    """Sum of what arrived = sum of true means + sum over ranks of (first residual - last residual), through a rebuild,
    accumulation, and parameters that some or all ranks leave out."""
    for order, wire in enumerate(wires):
        face = FACES[(order + size) % 2]  # each of them with each wire, on some number of ranks
        model = wrapped(Given(NUMELS), face, wire)
        weights = model.module.weights
        arrived = [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS]
        true = copy.deepcopy(arrived)
        largest = 0.0
        for step in range(steps):
            everybody = [given(peer, step) for peer in range(size)]
            for peer, gradients in enumerate(everybody):
                if step % 5 == 2 and peer != 1:
                    gradients[1] = None  # only one rank has it
                if step % 5 == 4:
                    gradients[2] = None  # nobody has
            model.zero_grad()
            if step % 3 == 2:
                with model.no_sync():
                    model(everybody[rank]).backward()
            model(everybody[rank]).backward()
            times = 2 if step % 3 == 2 else 1
            for place, weight in enumerate(weights):
                if step % 5 == 4 and place == 2:
                    assert weight.grad is None
                    continue
                assert alike_everywhere(weight.grad)
                arrived[place] += weight.grad.double()
                for gradients in everybody:
                    if gradients[place] is not None:
                        true[place] += gradients[place].double() * times / size
                        largest = max(largest, gradients[place].abs().max().item() * times)
        for place in range(len(NUMELS)):
            kept = residuals(model, rank, f"weights.{place}")
            assert kept.abs().max() > 0
            # What is computed in float32, per rank and step: a product, a sum and a difference.
            tolerance = 3 * steps * size * 2.0**-24 * (largest + 1)
            error = (arrived[place] + kept - true[place]).abs().max()
            assert error <= tolerance, (wire, face, place, error, tolerance)
            # Without what is kept the identity does not hold: the check is one.
            assert (arrived[place] - true[place]).abs().max() > 2 * tolerance


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_what_arrives_is_the_true_sum_but_for_what_is_kept(ranks, size):
    ranks(nothing_is_lost, WIRES, size=size)


def drift(rank, size, wire, steps, numel=2000):
    """Mean distance of the sum of what arrived from the true sum, without error feedback and with it."""
    distances = []
    for feedback in (False, True):
        model = dpfuse.DataParallel(
            nn.Linear(numel, 1, bias=False), wire_dtype=(wire, torch.float32), error_feedback=feedback
        )
        arrived = torch.zeros(numel, dtype=torch.float64)
        true = torch.zeros(numel, dtype=torch.float64)
        for step in range(steps):
            everybody = [given(peer, step, [numel])[0] for peer in range(size)]
            model.zero_grad()
            model(everybody[rank]).sum().backward()
            arrived += model.weight.grad[0].double()
            true += torch.stack(everybody).double().mean(0)
        distances.append((arrived - true).abs().mean().item())
    return distances


def test_the_drift_of_many_steps_does_not_grow(ranks):
    ((without, kept),) = {tuple(result) for result in ranks(drift, torch.bfloat16, 60, size=2)}
    assert kept < without / 5


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_the_drift_of_400_steps_is_about_20_times_smaller(ranks, wire):
    ((without, kept),) = {tuple(result) for result in ranks(drift, wire, 400, size=4, timeout=240)}
    print(f"{wire}: {without:.3g} without, {kept:.3g} with error feedback, {without / kept:.1f} times smaller")
    assert kept < without / 15


@warnings_are_errors()  # nothing is announced without a reason
def what_goes_wrong(rank, size):
    own = f"rank{rank}"
    # Values that are not finite reach all ranks, and leave no trace.
    for pair in (False, True):
        model, twin = (wrapped(Given(NUMELS), pair=pair) for _ in range(2))
        for step in range(4):
            gradients = given(rank, step)
            for one in (model, twin):
                one.zero_grad()
                if step == 2 and one is model and rank == 1:
                    gradients[0][5], gradients[0][6], gradients[2][0] = float("nan"), float("inf"), float("-inf")
            twin(given(rank, step)).backward()
            model(gradients).backward()
            if step == 2:
                got = model.module.weights[0].grad
                assert got[5].isnan()
                assert got[6] == float("inf")
                assert got.isfinite().sum() == len(got) - 2
                assert model.module.weights[2].grad[0] == float("-inf")
                state = model.error_feedback.state_dict()[own]
                assert all(value.isfinite().all() for value in state.values())
                assert rank != 1 or not state["weights.0"][5:7].any()
        for ours, theirs in zip(model.module.weights, twin.module.weights, strict=True):
            assert ours.grad.isfinite().all()
            differ = (ours.grad != theirs.grad).sum()
            assert differ <= 2  # where the residual of step 2 is zero, at most
        assert model.error_feedback.state_dict()[own]["weights.0"].any()

    # A backward that every rank interrupts.
    model = wrapped(Given(NUMELS), megabytes=0)
    for step in range(2):
        model.zero_grad()
        model(given(rank, step)).backward()
    handle = model.module.weights[0].register_hook(planted)
    with pytest.raises(KeyError, match="planted"):
        model(given(rank, 2)).backward()
    handle.remove()
    model.zero_grad()
    with pytest.warns(UserWarning, match=rf"rank {rank}: error feedback begins at zero: a backward failed, or was"):
        model(given(rank, 3)).backward()
    fresh = wrapped(Given(NUMELS), megabytes=0)
    fresh(given(rank, 0)).backward()
    for weight in fresh.module.weights:
        weight.grad = None
    fresh.error_feedback.load_state_dict({"world_size": size, own: zeros_of(fresh)})
    fresh(given(rank, 3)).backward()
    assert all(same_bits(a.grad, b.grad) for a, b in zip(model.module.weights, fresh.module.weights, strict=True))

    # One that fails on one rank only.
    handle = model.module.weights[0].register_hook(planted) if rank == 1 else None
    model.zero_grad()
    with pytest.raises((dpfuse.DPFuseError, KeyError)[rank]):
        model(given(rank, 4)).backward()
    if rank == 1:
        handle.remove()
    model.zero_grad()
    with pytest.warns(UserWarning, match="error feedback begins at zero: a backward failed"):
        state = model.error_feedback.state_dict()[own]
    assert not any(value.any() for value in state.values())
    model(given(rank, 5)).backward()
    dist.barrier()


def planted(_grad):
    raise KeyError("planted")


def zeros_of(model):
    return {name: torch.zeros(param.shape) for name, param in model.module.named_parameters()}


def test_nothing_stays_of_what_did_not_arrive(ranks):
    ranks(what_goes_wrong)


@pytest.mark.ranks(size=3)
def test_an_interrupted_rank_adds_no_error_of_what_the_others_sent(rank, size):
    """Who has sent nothing keeps what was there, and nothing of a sum that nobody got."""
    model = wrapped(Given(NUMELS), megabytes=1)
    for step in range(2):
        model.zero_grad()
        model(given(rank, step)).backward()
    before = model.error_feedback.state_dict()[f"rank{rank}"]
    handle = model.module.weights[0].register_hook(planted) if rank == 1 else None
    with pytest.raises((dpfuse.DPFuseError, KeyError)[rank == 1]):
        model(given(rank, 2)).backward()
    if rank != 1:
        return
    handle.remove()
    model(given(rank, 3))  # completes that backward
    after = model.error_feedback.state_dict()["rank1"]
    assert any(value.any() for value in after.values())
    assert all(map(same_bits, after.values(), before.values()))


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)
        self.wide = nn.Linear(4, 3, dtype=torch.float64)
        self.pair = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.small = nn.Linear(4, 3, dtype=torch.bfloat16)
        self.strided = nn.Parameter(torch.randn(8, 6).t())

    def forward(self, words):
        x = self.table(words)
        total = self.wide(x.double()).sum() + self.small(x.bfloat16()).sum().double()
        return total + (self.pair * self.pair.conj()).real.sum() * 1.1 + (self.strided * self.strided).sum() * 1.1


@warnings_are_errors()  # nothing is announced without a reason
def after_changes(rank, size):
    own = f"rank{rank}"
    # Only dense gradients that travel narrowed have a residual.
    model = wrapped(Several())
    words = torch.tensor([rank, 7, 7])
    for _ in range(3):
        model.zero_grad()
        model(words).backward()
    state = model.error_feedback.state_dict()[own]
    assert {name: tuple(value.shape) for name, value in state.items()} == {"pair": (5, 2), "strided": (6, 8)}
    assert state["pair"].any()
    assert state["strided"].any()
    # Parameters without a gradient anywhere, such as frozen ones, keep theirs for later.
    model = wrapped(Given(NUMELS))
    weights = model.module.weights
    for step in range(3):
        model.zero_grad()
        model(given(rank, step)).backward()
    before = model.error_feedback.state_dict()[own]
    assert all(before[f"weights.{place}"].any() for place in range(3))
    model.zero_grad()
    weights[1].requires_grad_(False)
    others = given(rank, 3)
    model([others[0], None, None]).backward()
    after = model.error_feedback.state_dict()[own]
    for place, kept in enumerate([False, True, True]):
        assert torch.equal(after[f"weights.{place}"], before[f"weights.{place}"]) == kept
    # Another shape under an old name begins at zero, by name; the others keep theirs in the new buckets.
    model.zero_grad()
    weights[1] = nn.Parameter(torch.zeros(50))
    with pytest.warns(UserWarning, match=rf"rank {rank}: error feedback of 'weights.1' is lost: the parameter is no"):
        model([None, given(rank, 4, [50])[0], None]).backward()
    changed = model.error_feedback.state_dict()[own]
    assert changed["weights.1"].shape == (50,)
    assert changed["weights.1"].any()
    assert torch.equal(changed["weights.2"], before["weights.2"])
    assert torch.equal(changed["weights.0"], after["weights.0"])
    # A rank without input sends what it kept, and then has nothing more to send.
    model = wrapped(Given(NUMELS), dpfuse.DistributedDataParallel)
    arrived = torch.zeros(NUMELS[0], dtype=torch.float64)
    true = torch.zeros_like(arrived)
    for step in range(2 + 3 * rank):
        everybody = [given(peer, step)[0] for peer in range(size) if step < 2 + 3 * peer]
        true += torch.stack(everybody).double().sum(0) / size
    with model.join():
        for step in range(2 + 3 * rank):
            model.zero_grad()
            model(given(rank, step)).backward()
            arrived += model.module.weights[0].grad.double()
    kept = residuals(model, rank, "weights.0")
    assert rank == 0 or (arrived + kept - true).abs().max() < 1e-5
    # Without the option there is nothing.
    assert dpfuse.DataParallel(nn.Linear(2, 2), wire_dtype=torch.bfloat16).error_feedback is None
    with pytest.raises(dpfuse.DPFuseError, match=r"option error_feedback = (True|False)"):
        dpfuse.DataParallel(nn.Linear(2, 2), wire_dtype=torch.bfloat16, error_feedback=rank == 0)
    model = dpfuse.DistributedDataParallel(nn.Linear(2, 2), wire_dtype=torch.bfloat16, error_feedback=True)
    with pytest.raises(dpfuse.DPFuseError, match="a communication hook was registered with error_feedback=True"):
        model.register_comm_hook(None, lambda state, bucket: None)
    dist.barrier()


def test_residuals_belong_to_parameters(ranks):
    ranks(after_changes)


@pytest.mark.slow
@pytest.mark.ranks(size=3)
def test_equal_steps_average_what_one_step_rounds_away(rank, size):
    """Two steps with the same gradients: together they miss the true sum by one rounding, not by two."""
    for name, parts in hard_gradients(size, 800):
        for wire in WIRES:
            errors = []
            for feedback in (False, True):
                options = {"find_unused_parameters": True, "error_feedback": feedback}
                model = dpfuse.DataParallel(Given([800]), wire_dtype=(wire, torch.float32), **options)
                total = torch.zeros(800, dtype=torch.float64)
                for _ in range(16):
                    model.zero_grad()
                    model([parts[rank]]).backward()
                    total += model.module.weights[0].grad.double()
                errors.append((total / 16 - torch.stack(parts).double().mean(0)).abs().mean())
            assert errors[1] <= errors[0] / 4, (name, wire, errors)


def test_what_cannot_be_meant_is_named(group):
    for face in FACES:
        for wire in (None, torch.float32):
            with pytest.raises(ValueError, match=rf"error_feedback=True was passed with wire_dtype={wire}, expected a"):
                face(nn.Linear(2, 2), wire_dtype=wire, error_feedback=True)
        with pytest.raises(TypeError, match="error_feedback must be True or False, got 1 of type int"):
            face(nn.Linear(2, 2), wire_dtype=torch.bfloat16, error_feedback=1)
