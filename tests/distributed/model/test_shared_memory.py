"""Parameters in memory that ranks share are an error where a model is wrapped; what only looks like it is none."""

from __future__ import annotations

import copy
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.one_in import one_in

FACES = [dpfuse.DataParallel, dpfuse.DistributedDataParallel]
OWN = "expected memory of its own on each rank: .* Make the model inside of the function that spawn"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train_given(model, face):
    dpfuse.init_parallel_env()
    face(model)


def file_tensor(path, count, *, shared=True):
    return torch.from_file(str(path), shared=shared, size=count)


def refused(face, model, text):
    with pytest.raises(dpfuse.DPFuseError, match=f"{text}, {OWN}"):
        face(model)


def is_silent(face, model):
    """Train, and be told of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = face(model)
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.1)
        for step in range(3):
            wrapped(torch.full((2, 3), 1.0 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.usefixtures("warm_spawn")
@pytest.mark.parametrize("face", one_in(2, FACES))
def test_a_model_that_is_passed_to_spawned_ranks_is_refused(face):
    with pytest.raises(dpfuse.DPFuseError, match=f"the ranks 0, 1 share the memory of the parameter '0.weight', {OWN}"):
        dpfuse.spawn(train_given, args=(net(), face), nprocs=2, backend="gloo")


@pytest.mark.ranks(size=3)
@pytest.mark.parametrize("face", FACES)
def test_one_parameter_that_all_ranks_have_is_refused(rank, size, face, shared):
    model = net()
    model[1].weight = nn.Parameter(shared)  # the ranks have got it from one process
    refused(face, model, "the ranks 0, 1, 2 share the memory of the parameter '1.weight'")


@pytest.fixture
def shared():
    return torch.ones(2, 4)


@pytest.mark.parametrize("face", FACES)
def test_a_parameter_of_a_file_that_ranks_map_is_refused(rank, size, face, tmp_path):
    model = net()
    model[0].weight = nn.Parameter(file_tensor(tmp_path / "weights", 12).view(4, 3))
    refused(face, model, "the ranks 0, 1 share the memory of the parameter '0.weight'")


@pytest.mark.ranks(size=3)
def test_parts_that_overlap_are_refused_also_under_other_names(rank, size, tmp_path):
    memory, model = file_tensor(tmp_path / "weights", 100), net()
    model[0].weight = nn.Parameter(memory[20 * rank : 20 * rank + 12].view(4, 3))
    if rank == 2:
        model[1].weight = nn.Parameter(memory[31:39].view(2, 4))  # its first element is the last one of rank 1
    refused(dpfuse.DataParallel, model, "the memory of the parameter '0.weight' on rank 1, '1.weight' on rank 2")


@pytest.mark.parametrize("face", FACES)
def test_memory_of_each_rank_is_no_error(rank, size, face):
    model = net().share_memory()
    model[1].bias = nn.Parameter(model[0].bias.data[:2])  # also what a rank has twice
    is_silent(face, model)


@pytest.mark.parametrize("face", FACES)
def test_a_shared_parameter_that_is_not_trained_is_no_error(rank, size, face, shared):
    model = net()
    model[1].weight = nn.Parameter(shared, requires_grad=False)
    model.register_buffer("table", shared)
    is_silent(face, model)


@pytest.mark.parametrize("face", FACES)
def test_a_copy_is_no_error(rank, size, face, shared):
    model = net()
    model[1].weight = nn.Parameter(shared)
    is_silent(face, copy.deepcopy(model))


def test_a_file_that_each_rank_writes_alone_is_no_error(rank, size, tmp_path):
    path = tmp_path / "weights"
    if rank == 0:
        path.write_bytes(bytes(48))
    dist.barrier()  # no rank maps a file that another one is writing
    model = net()
    model[0].weight = nn.Parameter(file_tensor(path, 12, shared=False).view(4, 3))
    is_silent(dpfuse.DataParallel, model)


@pytest.mark.parametrize("what", ["rows", "columns", "pages"])
def test_other_elements_of_one_memory_are_no_error(rank, size, what, tmp_path):
    memory, model = file_tensor(tmp_path / "weights", 4096), net()
    if what == "rows":
        part = memory[:24].view(2, 4, 3)[rank]
    elif what == "columns":
        part = memory[:24].view(4, 3, 2)[..., rank]
    else:
        part = torch.from_numpy(numpy.memmap(tmp_path / "weights", "float32", "r+", 8192 * rank, (4, 3)))
    model[0].weight = nn.Parameter(part)
    is_silent(dpfuse.DataParallel, model)


def test_memory_of_numpy_is_looked_at(rank, size, tmp_path):
    file_tensor(tmp_path / "weights", 4096)
    model = net()
    part = numpy.memmap(tmp_path / "weights", "float32", "r+", 8192, (4, 3))
    model[0].weight = nn.Parameter(torch.from_numpy(part))
    refused(dpfuse.DataParallel, model, "the ranks 0, 1 share the memory of the parameter '0.weight'")
