"""A checkpoint keeps of every wrapper what the next step needs, whatever its face and wherever it is in the model."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from dpfuse.errors import WeightsWarning

COUNT = 4
compiled = partial(torch.compile, backend="eager")  # nothing is compiled before the first call


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 1))


def patched(net, **options):
    with dpfuse.patch():
        return TorchDDP(net, **options)


def inside(wrap):
    def make(net, **options):
        return nn.ModuleDict({"module": wrap(net, **options), "head": nn.Linear(2, 2)})

    return make


def compiled_around(wrap):
    return lambda net, **options: compiled(wrap(net, **options))


FACES = {
    "DataParallel": dpfuse.DataParallel,
    "DistributedDataParallel": dpfuse.DistributedDataParallel,
    "patched": patched,
    "replicate": dpfuse.replicate,
    "compiled": compiled_around(dpfuse.DataParallel),
    "replicate, compiled": compiled_around(dpfuse.replicate),
    "DataParallel inside": inside(dpfuse.DataParallel),
    "DistributedDataParallel inside": inside(dpfuse.DistributedDataParallel),
    "replicate inside": inside(dpfuse.replicate),
    "compiled inside": inside(compiled_around(dpfuse.DistributedDataParallel)),
}


def made(face, **options):
    """Return the model that a checkpoint is given, and its wrapper."""
    model = FACES[face](network(), **options)
    own = model["module"] if "inside" in face else model
    own = getattr(own, "_orig_mod", own)
    return model, own.replicated_by if "replicate" in face else own


def steps(wrapper, optimizer, begin, end):
    for step in range(begin, end):
        for number in wrapper.micro_batches():
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(COUNT * step + number))
            wrapper(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def training(face):
    model, wrapper = made(face, fixed_micro_batches=COUNT)
    return model, wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.05)


def numbers(wrapper):
    return [param.tolist() for param in wrapper.parameters()]


def resumed(rank, size, folder, there, here):
    model, wrapper, optimizer = training(there)
    steps(wrapper, optimizer, 0, 2)
    dpfuse.save_checkpoint(folder, model, optimizer, step=2)
    steps(wrapper, optimizer, 2, 4)
    model, other, optimizer = training(here)
    steps(other, optimizer, 0, 1)  # it has gone on by itself
    assert dpfuse.load_checkpoint(folder, model, optimizer).step == 2
    steps(other, optimizer, 2, 4)
    return numbers(other) == numbers(wrapper)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
def test_fixed_micro_batches_go_on_with_their_seed_and_step(ranks, tmp_path, face):
    assert ranks(resumed, str(tmp_path), face, face) == [True] * 2


@pytest.mark.parametrize(
    ("there", "here"),
    [("DataParallel", "replicate"), ("replicate", "compiled"), ("replicate inside", "DataParallel inside")],
)
def test_one_face_goes_on_where_another_has_saved(ranks, tmp_path, there, here):
    assert ranks(resumed, str(tmp_path), there, here) == [True] * 2


def saved_by_one_rank(rank, size, folder, face, saving):
    model, wrapper, optimizer = training(face)
    if saving:
        steps(wrapper, optimizer, 0, 2)
        dpfuse.save_checkpoint(folder, model, optimizer, step=2)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no word of random states: with fixed micro-batches all ranks have the same
            dpfuse.load_checkpoint(folder, model, optimizer)
    steps(wrapper, optimizer, 2, 4)
    return numbers(wrapper), torch.rand(1).item()


@pytest.mark.parametrize("face", ["replicate", "replicate inside"])
def test_another_number_of_ranks_goes_on_with_the_same_bits(ranks, tmp_path, face):
    (whole,) = ranks(saved_by_one_rank, str(tmp_path), face, True, size=1)
    assert ranks(saved_by_one_rank, str(tmp_path), face, False, size=2) == [whole] * 2


class Two(nn.Module):
    """As a pair of adversaries: each part has a wrapper of its own, with numbers of its own."""

    def __init__(self):
        super().__init__()
        self.first = dpfuse.replicate(network(), fixed_micro_batches=3)
        self.second = dpfuse.DistributedDataParallel(network(), fixed_micro_batches=2)

    def wrappers(self):
        return self.first.replicated_by, self.second


def two_resumed(rank, size, folder):
    def go_on(model, optimizer, begin, end):
        for wrapper in model.wrappers():
            steps(wrapper, optimizer, begin, end)

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    go_on(model, optimizer, 0, 2)
    dpfuse.save_checkpoint(folder, model, optimizer, step=2)
    go_on(model, optimizer, 2, 4)
    again = Two()
    optimizer = torch.optim.SGD(again.parameters(), lr=0.05)
    dpfuse.load_checkpoint(folder, again, optimizer)
    go_on(again, optimizer, 2, 4)
    return numbers(again) == numbers(model)


def test_each_of_two_wrappers_goes_on_with_its_own_numbers(ranks, tmp_path):
    assert ranks(two_resumed, str(tmp_path)) == [True] * 2


class Unordered(nn.Module):
    """Uses its layers in another order than it registers them, so that buckets change after the first backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(5))

    def forward(self, inputs):
        for place in (4, 1, 0, 3, 2):
            inputs = inputs + torch.tanh(self.layers[place](inputs))
        return inputs


def layouts(rank, size, folder, face):
    def unordered():
        model = FACES[face](Unordered(), bucket_cap_mb=0.004)
        own = model["module"] if "inside" in face else model
        return model, getattr(own, "replicated_by", own)

    model, wrapper = unordered()
    first = wrapper.bucket_plan.layout
    wrapper(torch.ones(2, 17)).sum().backward()
    dpfuse.save_checkpoint(folder, model, step=1)
    again, other = unordered()
    dpfuse.load_checkpoint(folder, again)
    return first != wrapper.bucket_plan.layout == other.bucket_plan.layout


@pytest.mark.parametrize("face", ["replicate", "patched", "DistributedDataParallel inside", "replicate inside"])
def test_a_resumed_training_begins_with_its_buckets(ranks, tmp_path, face):
    assert ranks(layouts, str(tmp_path), face) == [True] * 2


def open_window(rank, size, folder, face):
    model, wrapper = made(face)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05)
    wrapper(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with wrapper.no_sync():
        wrapper(torch.ones(2, 8)).sum().backward()
    with pytest.warns(UserWarning, match="a window of no_sync"):
        dpfuse.save_checkpoint(folder, model, step=1)
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dpfuse.save_checkpoint(folder, model, step=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
def test_an_open_window_is_told_of(ranks, tmp_path, face):
    ranks(open_window, str(tmp_path), face)


def other_weights(rank, size, folder, face):
    model, wrapper = made(face, check_training="warn")
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(70):  # all are compared within 64
            if step == 2:
                next(wrapper.parameters()).data.add_(rank)
            wrapper(torch.full((2, 8), rank + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.warns(WeightsWarning, match=f"DPF-W01: rank {rank}: a checkpoint is saved while the weights"):
        dpfuse.save_checkpoint(folder, model, step=1)


@pytest.mark.parametrize("face", ["replicate", "compiled", "DataParallel inside"])
def test_weights_that_differ_are_told_of(ranks, tmp_path, face):
    ranks(other_weights, str(tmp_path), face)


def residuals(rank, size, folder, face):
    model, wrapper = made(face, wire_dtype=torch.float8_e4m3fn, error_feedback=True)
    dpfuse.save_checkpoint(folder, model, step=1)
    wrapper(torch.randn(2, 8)).square().sum().backward()

    def kept():
        return any(value.any() for value in wrapper.error_feedback.state_dict()[f"rank{rank}"].values())

    before = kept()
    dpfuse.load_checkpoint(folder, model)
    return before, kept()


@pytest.mark.parametrize("face", ["replicate", "compiled", "replicate inside"])
def test_loading_sets_the_residuals_to_zero(ranks, tmp_path, face):
    assert ranks(residuals, str(tmp_path), face) == [(True, False)] * 2


def of_its_own_ranks(rank, size, folder):
    groups = [dist.new_group([each]) for each in range(size)]
    net = dpfuse.replicate(network(), process_group=groups[rank])
    path = dpfuse.save_checkpoint(f"{folder}/{rank}", net, step=1)
    dist.barrier()
    return path.exists()


def test_a_replicated_modules_checkpoint_is_of_its_own_ranks(ranks, tmp_path):
    assert ranks(of_its_own_ranks, str(tmp_path)) == [True] * 2


class NamedAsWrappers(nn.Module):
    """Its children have the names that wrappers and torch.compile use, and another one beside them."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self._orig_mod, self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs):
        return self.head(self.module(self._orig_mod(inputs)))


WRAPS = {
    "bare": lambda module: module,
    "torch": TorchDDP,
    "dp": dpfuse.DataParallel,
    "ddp": dpfuse.DistributedDataParallel,
    "compiled": lambda module: compiled(dpfuse.DataParallel(module)),
}


def saved_whole(rank, size, folder):
    for there, wrap in WRAPS.items():
        source = NamedAsWrappers(0)
        path = dpfuse.save_checkpoint(f"{folder}/{there}", wrap(source), step=1)
        for here in WRAPS.values():
            target = NamedAsWrappers(1)
            assert dpfuse.load_checkpoint(path, here(target)).step == 1
            for one, other in zip(source.parameters(), target.parameters(), strict=True):
                assert torch.equal(one, other)
    return True


def test_children_with_the_names_of_wrappers_are_saved_and_loaded(ranks, tmp_path):
    assert ranks(saved_whole, str(tmp_path)) == [True] * 2


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, *_):
        for name in ("weight", "bias"):
            if f"{prefix}backbone.{name}" in state:
                state[f"{prefix}encoder.{name}"] = state.pop(f"{prefix}backbone.{name}")


def old_names(rank, size, folder):
    old = nn.ModuleDict({"backbone": nn.Linear(2, 2)})
    dpfuse.save_checkpoint(folder, dpfuse.DataParallel(old), step=1)
    new = Renamed()
    dpfuse.load_checkpoint(folder, dpfuse.DistributedDataParallel(new))
    assert torch.equal(new.encoder.weight, old["backbone"].weight)
    with pytest.raises(ValueError, match=r"'encoder.weight' is missing in the file; .*Nothing was loaded"):
        dpfuse.load_checkpoint(folder, nn.ModuleDict({"encoder": nn.Linear(2, 2)}))


def test_a_load_hook_renames_what_an_older_model_saved(ranks, tmp_path):
    ranks(old_names, str(tmp_path))


PLACES = ["run", "run.pt", "run.v1", "a/b/run.pt", "run.pt/", "./run", "run.damaged", "~/run", "~/run.pt"]


def there_and_back(rank, size, folder, place, kind):
    """Save, load, save again, load the newest: only the first rank sees the folder."""
    own = f"{folder}/{rank}"
    os.makedirs(own, exist_ok=True)
    before, os.environ["HOME"] = (os.getcwd(), os.environ.get("HOME")), own
    os.chdir(own)
    try:
        name = kind(place)
        model = nn.Linear(2, 2)
        found = []
        for step in range(1, 5):
            path = dpfuse.save_checkpoint(name, model, step=step, keep=2)
            newest = dpfuse.load_checkpoint(name, model)
            assert (newest.step, newest.path) == (step, path)
            assert dpfuse.load_checkpoint(path, model) == newest
            found.append(os.path.relpath(path, own))
        kept = [os.path.relpath(os.path.join(at, file), own) for at, _, files in os.walk(own) for file in files]
        return found[-2:], sorted(kept)
    finally:
        os.chdir(before[0])
        os.environ["HOME"] = before[1]


def absolute(place):
    return Path(place).expanduser().absolute()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [str, os.path.normpath, absolute], ids=["str", "normal", "absolute Path"])
@pytest.mark.parametrize("place", PLACES)
def test_every_kind_of_folder_is_found_again(ranks, tmp_path, place, kind):
    first, second = ranks(there_and_back, str(tmp_path), place, kind)
    assert first[0] == second[0] == first[1]
    assert second[1] == []
    folder = os.path.normpath(place.removeprefix("~/"))
    assert first[1] == [f"{folder}/step-000000000{step}.pt" for step in (3, 4)]


def refused(rank, size, folder):
    model = nn.Linear(2, 2)
    told = {}

    def caught(what, function, *arguments, **named):
        try:
            told[what] = function(*arguments, **named)
        except Exception as error:
            told[what] = type(error).__name__, str(error)

    path = dpfuse.save_checkpoint(f"{folder}/run", model, step=1)
    if rank == 0:
        torch.save({}, f"{folder}/run.pt")
        torch.save({}, f"{folder}/run.ckpt")
    dist.barrier()
    caught("nothing yet", dpfuse.load_checkpoint, f"{folder}/new", model)
    caught("no file", dpfuse.load_checkpoint, f"{folder}/new.pt", model)
    for name in ("run.pt", "run.ckpt"):
        caught(f"save over {name}", dpfuse.save_checkpoint, f"{folder}/{name}", model, step=2)
        caught(f"load {name}", dpfuse.load_checkpoint, f"{folder}/{name}", model)
    caught("save over a checkpoint", dpfuse.save_checkpoint, path, model, step=2)
    caught("the name of a checkpoint", dpfuse.save_checkpoint, f"{folder}/step-0000000007.pt", model, step=2)
    caught("below a file", dpfuse.save_checkpoint, f"{folder}/run.pt/more", model, step=2)
    return told


def test_a_file_in_the_place_of_a_folder_is_told_of_and_stays(ranks, tmp_path):
    first, second = ranks(refused, str(tmp_path))
    for told in (first, second):
        assert told["nothing yet"].step == 0
        assert "new.pt" in told["no file"][1]
        for name in ("run.pt", "run.ckpt"):
            assert f"run.{name[4:]}, which is a file, expected a folder" in told[f"save over {name}"][1]
        assert "was not written by dpfuse.save_checkpoint" in told["load run.pt"][1]
        assert "expected a folder, or a file whose name ends in .pt" in told["load run.ckpt"][1]
        assert "which is a file, expected a folder. Pass the folder" in told["save over a checkpoint"][1]
        assert "which is the name of a file, expected a folder" in told["the name of a checkpoint"][1]
        assert told["below a file"][0] == "DPFuseError"
    assert first["no file"][0] == "FileNotFoundError"
    assert first["save over run.pt"][0] == "ValueError"
    assert sorted(os.listdir(tmp_path)) == ["run", "run.ckpt", "run.pt"]
    assert torch.load(tmp_path / "run.pt") == {}
