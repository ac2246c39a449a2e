"""save_checkpoint and load_checkpoint on real ranks: resumed trainings, and ranks that do not agree."""

from __future__ import annotations

import os
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dpfuse
from dpfuse.checkpoint.save_load import Checkpoint

STEPS, INTERRUPTED, PER_EPOCH = 12, 7, 5  # the interruption is within the second epoch


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


WRAPPERS = {
    "DataParallel": dpfuse.DataParallel,
    "DistributedDataParallel": dpfuse.DistributedDataParallel,
    "torch": TorchDDP,
    "bare": lambda module: module,
}
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True),
}


class Training:
    """One whole training of a rank, which can be left and resumed at any step."""

    def __init__(self, wrapper, optimizer, rank):
        self.model = WRAPPERS[wrapper](network())
        self.by_hand = wrapper == "bare"
        # A file has rank 0's buffers. Without broadcasts the other ranks have had buffers of their own.
        self.buffers = list(self.model.buffers()) if rank == 0 or "Distributed" in type(self.model).__name__ else []
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=STEPS)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
        inputs = torch.randn(2 * PER_EPOCH * 4, 6, generator=torch.Generator().manual_seed(5))
        self.sampler = DistributedSampler(inputs, 2, rank, seed=1)
        # Its own generator: otherwise each iterator would draw from the generator of dropout.
        self.loader = DataLoader(TensorDataset(inputs), 4, sampler=self.sampler, generator=torch.Generator())
        self.losses = []
        self.state = {"scheduler": self.scheduler, "scaler": self.scaler, "sampler": self.sampler}

    def train(self, start, stop):
        for step in range(start, stop):
            epoch, skipped = divmod(step, PER_EPOCH)
            self.sampler.set_epoch(epoch)
            (inputs,) = list(self.loader)[skipped]
            noise = random.random() + np.random.rand()
            loss = self.model(inputs * noise).square().mean()
            self.scaler.scale(loss).backward()
            if self.by_hand:
                dpfuse.fused_allreduce_gradients(self.model.parameters())
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def result(self):
        """Everything that must be the same to the bit."""
        tensors = [*self.model.parameters(), *self.buffers]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        numbers = [self.scheduler.get_last_lr()[0], self.scaler.get_scale(), self.sampler.epoch]
        randoms = [torch.rand(1).item(), random.random(), np.random.rand()]
        return [tensor.tolist() for tensor in tensors], numbers, randoms


def seed(rank):
    torch.manual_seed(100 + rank)
    random.seed(rank)
    np.random.seed(rank)


def resumed(rank, size, folder, wrapper, optimizer):
    whole = Training(wrapper, optimizer, rank)
    seed(rank)
    whole.train(0, STEPS)
    expected = whole.result()
    first = Training(wrapper, optimizer, rank)
    seed(rank)
    first.train(0, INTERRUPTED)
    path = dpfuse.save_checkpoint(
        folder, first.model, first.optimizer, step=INTERRUPTED, extra={"a": [1]}, **first.state
    )
    first.train(INTERRUPTED, INTERRUPTED + 1)  # steps that are lost, and move every state on
    second = Training(wrapper, optimizer, rank)
    seed(7)
    found = dpfuse.load_checkpoint(folder, second.model, second.optimizer, **second.state)
    assert found == Checkpoint(INTERRUPTED, path, {"a": [1]})
    second.train(found.step, STEPS)
    assert first.losses[:INTERRUPTED] + second.losses == whole.losses
    assert second.result() == expected
    return [loss for loss in whole.losses if loss != 0], path


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_training_equals_an_uninterrupted_one_to_the_bit(wrapper, optimizer, ranks, tmp_path):
    """With dropout, a schedule, a GradScaler, and random numbers of Python and NumPy, from within an epoch."""
    results = ranks(resumed, tmp_path / "new" / "folder", wrapper, optimizer)
    (path,) = (tmp_path / "new" / "folder").iterdir()
    assert path.name == "step-0000000007.pt"
    assert [found for _, found in results] == [path, path]
    assert results[0][0] != results[1][0]  # each rank had its own dropout and data
    content = torch.load(path, weights_only=True)
    assert set(content["model"]) == set(network().state_dict())  # no prefix


def one_state(rank, size, folder, part):
    """Is the test above able to fail? Without this part, the resumed training must differ."""
    training = Training("DataParallel", "adam", rank)
    seed(rank)
    training.train(0, INTERRUPTED)
    given = {"optimizer": training.optimizer, **training.state}
    dpfuse.save_checkpoint(folder, training.model, step=INTERRUPTED, **given)
    training.train(INTERRUPTED, STEPS)
    expected = training.result()
    second = Training("DataParallel", "adam", rank)
    seed(7)
    given = {"optimizer": second.optimizer, **second.state, "random_state": True}
    given[part] = False if part == "random_state" else None
    dpfuse.load_checkpoint(folder, second.model, **given)
    second.train(INTERRUPTED, STEPS)
    return second.result() == expected


@pytest.mark.parametrize("part", ["optimizer", "scheduler", "scaler", "random_state"])
def test_every_part_of_the_state_is_needed(part, ranks, tmp_path):
    assert ranks(one_state, tmp_path, part) == [False, False]


def crossed(rank, size, folder):
    """Saved under one wrapper, loaded under each other one."""
    source = network()
    with torch.no_grad():
        for tensor in source.state_dict().values():
            tensor.copy_(torch.full_like(tensor, 2))
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    dpfuse.save_checkpoint(f"{folder}/compiled", compiled, step=1)
    dpfuse.load_checkpoint(f"{folder}/compiled", nn.Linear(2, 2))
    for number, (name, wrap) in enumerate(WRAPPERS.items()):
        dpfuse.save_checkpoint(folder, wrap(source) if name != "bare" else source, step=number)
        for other in WRAPPERS.values():
            target = other(network())
            parameters = list(target.parameters())
            assert dpfuse.load_checkpoint(folder, target).step == number
            assert all(map(lambda a, b: a is b, parameters, target.parameters()))
            assert all(bool((tensor == 2).all()) for tensor in target.state_dict().values())
    return True


def test_checkpoints_are_the_same_under_every_wrapper(ranks, tmp_path):
    assert all(ranks(crossed, tmp_path))


def only_rank_0_sees_the_folder(rank, size, folder):
    own = f"{folder}/{rank}"  # as on machines without a common disk
    model = nn.Linear(3, 3)
    torch.nn.init.constant_(model.weight, rank)
    dpfuse.save_checkpoint(own, model, step=4)
    found = dpfuse.load_checkpoint(own, model)
    assert dpfuse.load_checkpoint(found.path, model) == found
    return found.step, model.weight.max().item(), sorted(os.listdir(folder))


def test_only_rank_0_needs_the_disk(ranks, tmp_path):
    assert ranks(only_rank_0_sees_the_folder, tmp_path) == [(4, 0.0, ["0"])] * 2


class Position:
    """A sampler with a state that differs between ranks."""

    def __init__(self, rank):
        self.at = 10 * rank

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def each_its_own(rank, size, folder):
    dpfuse.save_checkpoint(folder, nn.Linear(1, 1), step=1, sampler=Position(rank))
    sampler = Position(5)
    dpfuse.load_checkpoint(folder, nn.Linear(1, 1), sampler=sampler)
    return sampler.at


def test_a_sampler_with_a_state_gets_its_own_ranks(ranks, tmp_path):
    assert ranks(each_its_own, tmp_path) == [0, 10]


def caught(function, *arguments, **named):
    try:
        return function(*arguments, **named)
    except Exception as error:
        return type(error).__name__, str(error)


def misfits(rank, size, folder):
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    dpfuse.save_checkpoint(folder, model, adam, step=1)
    told = {}
    before = model.weight.clone()
    load = dpfuse.load_checkpoint
    other = nn.Linear(2, 3 if rank == 1 else 2)
    told["one rank's model"] = caught(load, folder, other)
    told["all ranks' model"] = caught(load, folder, nn.Linear(2, 2, bias=False))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    told["optimizer"] = caught(load, folder, model, sgd)
    told["groups"] = caught(load, folder, model, torch.optim.Adam([model.weight]))
    told["scaler"] = caught(load, folder, model, adam, scaler=torch.amp.GradScaler("cpu"))
    told["sampler"] = caught(load, folder, model, adam, sampler=Position(0))
    told["asked"] = caught(load, folder, model, adam if rank == 0 else None)
    if rank == 0:
        open(f"{folder}-notes.txt", "w").close()
    told["notes"] = caught(load, f"{folder}-notes.txt", model)
    told["file"] = caught(load, f"{folder}/none.pt", model)
    assert torch.equal(before, model.weight)
    save = dpfuse.save_checkpoint
    told["step"] = caught(save, folder, model, step=2 + rank)
    told["negative"] = caught(save, folder, model, step=-1)
    told["text"] = caught(save, folder, model, step="1")
    told["keep"] = caught(save, folder, model, step=2, keep=0)
    told["no sampler"] = caught(save, folder, model, step=2, sampler=[1])
    told["later"] = caught(save, folder, model, step=0)
    told["lambda"] = caught(save, folder, model, step=2, extra={"f": np.zeros(2)})
    told["no folder"] = caught(save, "/dev/null/folder", model, step=2)
    told["files"] = sorted(os.listdir(folder))
    return told


def test_what_does_not_fit_is_refused_on_every_rank(ranks, tmp_path):
    first, second = ranks(misfits, tmp_path)
    shape = "'weight' has shape (2, 2) in the file, expected (3, 2)"
    assert second["one rank's model"][0] == "ValueError"
    assert first["one rank's model"][0] == "DPFuseError"
    told = second["one rank's model"][1]
    assert first["one rank's model"][1] == f"load_checkpoint failed on rank 1: {told}"
    assert shape in second["one rank's model"][1]
    for told in (first, second):
        assert "'bias' is not in the model. Nothing was loaded." in told["all ranks' model"][1]
        assert told["optimizer"][1] == "optimizer: the checkpoint has the state of Adam, got SGD. Nothing was loaded."
        assert "has groups of [2] parameters, expected [1]" in told["groups"][1]
        assert told["scaler"][1].startswith("scaler: the checkpoint was saved without one; save it as well")
        assert told["sampler"][1].startswith("sampler: the checkpoint was saved without one; save it as well")
        assert "load_checkpoint differs between ranks: rank 1 has 'loads [], random_state=False'" in told["asked"][1]
        assert "none.pt" in told["file"][1]
        assert "expected a folder, or a file whose name ends in .pt" in told["notes"][1]
        assert "save_checkpoint differs between ranks: rank 1 has 'step=3 keep=3'" in told["step"][1]
        assert told["negative"] == ("ValueError", "step must be at least 0, got -1")
        assert told["text"] == ("TypeError", "step must be an integer, got '1' of type str")
        assert told["keep"] == ("ValueError", "keep must be at least 1, got 0")
        assert "got a list, which has neither state_dict() nor an epoch" in told["no sampler"][1]
        assert "later than step 0 which is to be saved" in told["later"][1]
        assert "extra: has numpy" in told["lambda"][1]
        assert "torch.from_numpy" in told["lambda"][1]
        assert told["files"] == ["step-0000000001.pt"]
    assert first["file"][0] == "FileNotFoundError"
    assert first["no folder"] == second["no folder"]
    assert first["no folder"][0] == "DPFuseError"
    assert "save_checkpoint failed on rank 0: [Errno 20] Not a directory" in first["no folder"][1]


def damaged(rank, size, folder):
    model = nn.Linear(4, 4)
    for step in (1, 2, 3):
        torch.nn.init.constant_(model.weight, step)
        path = dpfuse.save_checkpoint(folder, model, step=step)
        dist.barrier()
        if rank == 0 and step > 1:
            data = bytearray(path.read_bytes())
            spot = data.index(model.weight.detach().numpy().tobytes())
            data[spot + 2] ^= 64  # another, but finite number, which torch.load does not notice
            path.write_bytes(data if step == 3 else data[: len(data) // 2])
        dist.barrier()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = dpfuse.load_checkpoint(folder, model)
    dist.barrier()
    names = sorted(os.listdir(folder))
    dist.barrier()
    if rank == 0:
        found.path.write_bytes(b"PK")
    dist.barrier()
    told = caught(dpfuse.load_checkpoint, folder, model)
    return found.step, model.weight.max().item(), [str(warning.message) for warning in seen], names, told


@pytest.mark.filterwarnings("ignore:.*going back")
def test_a_damaged_file_is_told_of_and_the_one_before_is_loaded(ranks, tmp_path):
    first, second = ranks(damaged, tmp_path)
    assert first[:2] == second[:2] == (1, 1.0)
    two, three = (f"step-000000000{step}.pt" for step in (2, 3))
    assert [text.partition(": ")[0] for text in first[2]] == [f"{tmp_path / name} is damaged" for name in (three, two)]
    assert "its content does not match its checksum" in first[2][0]
    assert first[2][0].endswith("loading the checkpoint before it")
    assert second[2] == []
    assert first[3] == second[3] == ["step-0000000001.pt", f"{two}.damaged", f"{three}.damaged"]
    assert first[4] == second[4]
    assert first[4][0] == "DPFuseError"
    assert f"load_checkpoint failed on rank 0: every checkpoint in {tmp_path} is damaged: " in first[4][1]


def other_size(rank, size, folder, saving):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    if saving:
        dpfuse.save_checkpoint(folder, model, optimizer, step=1, sampler=DistributedSampler(range(4), size, rank))
        return None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sampler = DistributedSampler(range(4), size, rank)
        dpfuse.load_checkpoint(folder, model, optimizer, sampler=sampler)
        dpfuse.load_checkpoint(folder, model, optimizer, random_state=False)
        dpfuse.load_checkpoint(folder, model)
    return [str(warning.message) for warning in seen], caught(
        dpfuse.load_checkpoint, folder, model, sampler=Position(0)
    )


def test_another_number_of_ranks_is_told_of(ranks, tmp_path):
    ranks(other_size, tmp_path, True, size=2)
    for seen, _ in ranks(other_size, tmp_path, False, size=1):
        (text,) = seen
        assert text.startswith(
            "the checkpoint is of 2 rank(s), this job has 1: each rank gets random states that follow"
        )


def drawn(rank, size, folder, saving):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    if saving:
        torch.manual_seed(3 + rank)
        dpfuse.save_checkpoint(folder, model, optimizer, step=1)
        return None
    found = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="of 2 rank"):
            dpfuse.load_checkpoint(folder, model, optimizer)
        found.append((torch.rand(1).item(), random.random(), np.random.rand()))
    return found


def test_on_another_number_of_ranks_random_states_follow_from_the_file_and_the_rank(ranks, tmp_path):
    ranks(drawn, tmp_path, True, size=2)
    found = ranks(drawn, tmp_path, False, size=3)
    assert all(first == second for first, second in found)
    assert len({first for first, _ in found}) == 3


def test_without_a_process_group(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for step in range(5):
        dpfuse.save_checkpoint(tmp_path, model, optimizer, step=step, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-0000000003.pt", "step-0000000004.pt"]
    expected = torch.rand(3)
    twin = nn.Linear(2, 2)
    second = torch.optim.Adam(twin.parameters())
    assert dpfuse.load_checkpoint(tmp_path / "step-0000000003.pt", twin, second).step == 3
    assert torch.equal(twin.weight, model.weight)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(second.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_a_model_alone_leaves_random_numbers_as_they_are(tmp_path):
    model = nn.Linear(2, 2)
    dpfuse.save_checkpoint(tmp_path, model, step=0)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    dpfuse.load_checkpoint(tmp_path, model)
    assert torch.equal(torch.rand(3), expected)
