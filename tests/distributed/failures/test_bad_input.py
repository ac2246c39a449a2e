"""Input that cannot work: an error that says what, where and what to do, on every rank, and no rank left waiting."""

from __future__ import annotations

import re
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dpfuse
from dpfuse import DataParallel, DPFuseError
from tests.patience import patience

PROMPTLY = 10  # seconds within which a rank must learn that another one failed


class OnDevice(nn.Parameter):
    """A parameter that claims to live on another device than its data."""

    place = "cuda:1"

    @property
    def device(self) -> torch.device:
        return torch.device(self.place)


class OnXpu(OnDevice):
    place = "xpu"


class SparseLookup(nn.Module):
    """An embedding whose sparse gradient no attribute of the module announces."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 2))
        self.head = nn.Linear(2, 1)
        self.sparse_lookup = sparse

    def forward(self, index: Tensor) -> Tensor:
        return self.head(F.embedding(index, self.table, sparse=self.sparse_lookup)).sum()


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))


def lazy_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))


def meta() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def frozen_meta() -> nn.Module:
    module = meta()
    module[1].requires_grad_(False)
    return module


def meta_buffer() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(2, device="meta"))
    return module


def two_devices() -> nn.Module:
    module = nn.Linear(2, 2)
    module.bias = OnDevice(module.bias.data)
    return module


def unreachable_device() -> nn.Module:
    return nn.ParameterList([OnXpu(torch.ones(2))])


def eight_bit_weight() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))])


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def no_module() -> Any:
    return [torch.ones(2)]


def module_class() -> Any:
    return nn.Linear


# What to wrap, with which options, what it raises, and what the text must say.
CASES: dict[str, tuple[Any, dict[str, Any], type[Exception], list[str]]] = {
    "negative size": (linear, {"comm_buffer_size": -1}, ValueError, ["comm_buffer_size", ">= 0", "-1"]),
    "negative last size": (
        linear,
        {"last_comm_buffer_size": -0.5},
        ValueError,
        ["last_comm_buffer_size", ">= 0", "-0.5"],
    ),
    "nan size": (linear, {"comm_buffer_size": float("nan")}, ValueError, ["comm_buffer_size", ">= 0", "nan"]),
    "text size": (linear, {"comm_buffer_size": "25"}, TypeError, ["comm_buffer_size", "number", "'25'", "str"]),
    "no last size": (linear, {"last_comm_buffer_size": None}, TypeError, ["last_comm_buffer_size", "None", "=25"]),
    "boolean size": (linear, {"comm_buffer_size": True}, TypeError, ["comm_buffer_size", "True", "bool"]),
    "number as switch": (
        linear,
        {"find_unused_parameters": 1},
        TypeError,
        ["find_unused_parameters", "True or False", "int"],
    ),
    "no module": (no_module, {}, TypeError, ["layers", "torch.nn.Module", "list", "pass the model"]),
    "module class": (module_class, {}, TypeError, ["layers", "torch.nn.Module", "class Linear", "instance"]),
    "nothing to train": (frozen, {}, ValueError, ["Linear", "requires_grad=True", "without the wrapper"]),
    "lazy parameter": (lazy, {}, ValueError, ["'1.weight'", "uninitialized", "forward"]),
    "lazy buffer": (lazy_buffers, {}, ValueError, ["'1.running_mean'", "uninitialized", "forward"]),
    "meta parameter": (meta, {}, ValueError, ["'1.weight'", "meta", "to_empty"]),
    "frozen meta parameter": (frozen_meta, {}, ValueError, ["'1.weight'", "meta", "to_empty"]),
    "meta buffer": (meta_buffer, {}, ValueError, ["'scale'", "meta", "to_empty"]),
    "two devices": (two_devices, {}, ValueError, ["'weight' on cpu", "'bias' on cuda:1", "one device"]),
    "device without backend": (unreachable_device, {}, ValueError, ["xpu", "gloo", "cpu"]),
    "8-bit parameter": (eight_bit_weight, {}, TypeError, ["'0'", "float8_e4m3fn", "float32", "Freeze"]),
}


def assert_says(error: BaseException, fragments: list[str]) -> None:
    missing = [fragment for fragment in fragments if fragment not in str(error)]
    assert not missing, f"{missing} not in: {error}"


def assert_group_works(rank: int) -> None:
    model = DataParallel(nn.Linear(2, 2))
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((2, 2), 1.5))


def refused_on_one_rank(rank: int, size: int, case: str, failing: int) -> None:
    build, options, expected, fragments = CASES[case]
    began = monotonic()
    if rank == failing:
        with pytest.raises(expected) as caught:
            DataParallel(build(), **options)
    else:
        with pytest.raises(DPFuseError) as caught:
            DataParallel(nn.Linear(2, 2))
        fragments = [f"rank {failing}", *fragments]
    assert monotonic() - began < patience(PROMPTLY)
    assert_says(caught.value, fragments)
    assert_group_works(rank)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ranks(timeout=12)
def test_what_cannot_be_wrapped_is_refused_on_every_rank(rank: int, size: int, case: str) -> None:
    build, options, expected, fragments = CASES[case]
    with pytest.raises(expected) as caught:
        DataParallel(build(), **options)
    assert type(caught.value) is expected
    assert_says(caught.value, fragments)
    assert_group_works(rank)


@pytest.mark.parametrize("case", CASES)
def test_what_one_rank_cannot_wrap_is_an_error_on_the_other_that_names_the_rank_and_the_reason(ranks, case):
    ranks(refused_on_one_rank, case, 1, timeout=12)


def test_a_failure_of_rank_0_is_named_as_well(ranks):
    ranks(refused_on_one_rank, "negative size", 0, timeout=12)


def test_integer_and_complex_parameters_may_be_frozen(rank: int, size: int) -> None:
    module = nn.Linear(2, 2)
    module.count = nn.Parameter(torch.full((3,), rank), requires_grad=False)
    module.phase = nn.Parameter(torch.full((3,), rank * 1j), requires_grad=False)
    model = DataParallel(module)
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module.count, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(module.phase, torch.zeros(3, dtype=torch.complex64))
    assert module.count.grad is None


def test_a_group_that_is_none_is_refused(rank: int, size: int) -> None:
    for group in ("gloo", 0, [0, 1]):
        with pytest.raises(TypeError) as caught:
            DataParallel(nn.Linear(2, 2), group=group)
        assert_says(caught.value, ["group", "ProcessGroup", type(group).__name__, "new_group"])
        with pytest.raises(TypeError) as caught:
            dpfuse.fused_allreduce_gradients([], group)
        assert_says(caught.value, ["group", "ProcessGroup", type(group).__name__, "new_group"])
    assert_group_works(rank)


def test_a_rank_outside_the_group_is_refused_and_those_inside_go_on(rank: int, size: int) -> None:
    group = dist.new_group([0])
    if rank == 0:
        model = DataParallel(nn.Linear(2, 2), group=group)
        model(torch.ones(1, 2)).sum().backward()
    else:
        with pytest.raises(DPFuseError) as caught:
            DataParallel(nn.Linear(2, 2), group=group)
        assert_says(caught.value, ["rank 1", "not a member", "contains this rank"])
        with pytest.raises(DPFuseError, match="rank 1 is not a member"):
            dpfuse.fused_allreduce_gradients([], group)
    assert_group_works(rank)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "PADDLE_TRAINERS_NUM"])
def test_several_announced_ranks_without_a_process_group_are_an_error(monkeypatch, variable):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("PADDLE_TRAINERS_NUM", raising=False)
    monkeypatch.setenv(variable, "2")
    with pytest.raises(DPFuseError) as caught:
        DataParallel(nn.Linear(2, 2))
    assert_says(caught.value, [f"{variable}=2", "no process group", "init_parallel_env"])


@pytest.mark.parametrize("case", [c for c in CASES if c != "device without backend"])
def test_bad_input_is_refused_without_a_process_group_too(case):
    build, options, expected, fragments = CASES[case]
    with pytest.raises(expected) as caught:
        DataParallel(build(), **options)
    assert_says(caught.value, fragments)


@pytest.mark.parametrize("warm", [False, True], ids=["first backward", "after the rebuild"])
@pytest.mark.parametrize("sparse_ranks", [[0, 1], [1]], ids=["both ranks", "rank 1"])
@pytest.mark.ranks(timeout=20)
def test_a_gradient_that_turns_out_sparse_is_an_error_on_every_rank(
    rank: int, size: int, sparse_ranks: list[int], warm: bool
) -> None:
    model = DataParallel(SparseLookup(False))
    index = torch.tensor([rank, 2])
    for _ in range(2 * warm):
        model.zero_grad()
        model(index).backward()
    model.zero_grad()
    model.module.sparse_lookup = rank in sparse_ranks
    began = monotonic()
    with pytest.raises(DPFuseError) as caught:
        model(index).backward()
    assert monotonic() - began < patience(PROMPTLY)
    if rank in sparse_ranks:
        assert_says(caught.value, [f"rank {rank}", "table", "sparse"])
    else:
        assert_says(caught.value, [f"failed on rank {sparse_ranks[0]}"])
    model.zero_grad()
    model.module.sparse_lookup = False
    model(index).backward()
    seen = torch.bincount(torch.tensor([0, 1, 2, 2]), minlength=4) / 2
    torch.testing.assert_close(model.table.grad, seen[:, None] * model.head.weight.detach())
    assert_group_works(rank)


@pytest.mark.parametrize("warm", [False, True], ids=["first backward", "after the rebuild"])
@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["both ranks", "rank 1"])
@pytest.mark.ranks(timeout=20)
def test_a_non_scalar_backward_says_what_torch_says_and_a_skipped_batch_is_noticed(
    rank: int, size: int, failing: list[int], warm: bool
) -> None:
    model = DataParallel(nn.Linear(2, 2))
    batch = torch.full((1, 2), rank + 1.0)
    if warm:
        model(batch).sum().backward()
    model.zero_grad()
    if rank in failing:
        with pytest.raises(RuntimeError) as caught:
            model(batch).backward()
        with pytest.raises(RuntimeError) as torchs:
            nn.Linear(2, 2)(batch).backward()
        assert str(caught.value) == str(torchs.value)
        assert model.weight.grad is None
    if len(failing) < size:
        with pytest.raises(DPFuseError, match="rank 1 has run 1 forward without a backward"):
            model(batch).sum().backward()
    for _ in range(3):
        model.zero_grad()
        model(batch).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((2, 2), 1.5))


def test_a_state_dict_that_does_not_fit_is_refused_and_nothing_is_loaded(rank: int, size: int) -> None:
    model = DataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    other = nn.Linear(2, 3).state_dict()
    with pytest.raises(ValueError) as caught:
        model.set_state_dict(other)
    assert_says(caught.value, ["no key", "'weight'", "'0.weight'", "module."])
    with pytest.raises(ValueError, match="got nothing"):
        model.set_state_dict({})

    wrong = {**before, "0.bias": torch.zeros(3), "1.weight": torch.zeros(4)}
    with pytest.raises(ValueError) as caught:
        model.set_state_dict(wrong)
    assert_says(caught.value, ["'1.weight'", "(4,)", "(3,)", "nothing was loaded"])
    with pytest.raises(TypeError) as caught:
        model.set_state_dict({**before, "0.weight": [[1.0, 2.0]]})
    assert_says(caught.value, ["'0.weight'", "list", "tensor or a numpy array"])
    with pytest.raises(RuntimeError, match=re.escape("size mismatch for 1.weight")):
        model.load_state_dict(wrong)
    model.load_state_dict(before)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
