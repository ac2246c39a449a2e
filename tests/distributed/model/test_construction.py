"""Wrapping a module: what the ranks must have in common, what rank 0 hands out, and groups of every size."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse import DataParallel, DPFuseError


class Named(nn.Module):
    """Two parameters under chosen names, in the chosen order."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(2)))


def net(change: Callable[[nn.Sequential], Any] = lambda _: None) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 4))
    change(module)
    return module


def tie(module: nn.Sequential) -> None:
    module[3].weight = module[0].weight


# Name: (rank 0's arguments, rank 1's arguments, what rank 0 has, what rank 1 has).
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "name": (
        {"layers": lambda: Named("a", "b")},
        {"layers": lambda: Named("a", "c")},
        "parameter b ",
        "parameter c ",
    ),
    "order": (
        {"layers": lambda: Named("a", "b")},
        {"layers": lambda: Named("b", "a")},
        "parameter a ",
        "parameter b ",
    ),
    "one more": ({"layers": lambda: Named("a")}, {"layers": lambda: Named("a", "b")}, "nothing", "parameter b "),
    "one less": ({"layers": lambda: Named("a", "b")}, {"layers": lambda: Named("a")}, "parameter b ", "nothing"),
    "shape": (
        {"layers": lambda: nn.Linear(4, 4)},
        {"layers": lambda: nn.Linear(4, 5)},
        "parameter weight shape=(4, 4)",
        "parameter weight shape=(5, 4)",
    ),
    "stride order": (
        {"layers": net},
        {"layers": lambda: net().to(memory_format=torch.channels_last)},
        "parameter 1.weight shape=(2, 2, 3, 3) strides=(18, 9, 3, 1)",
        "parameter 1.weight shape=(2, 2, 3, 3) strides=(18, 1, 6, 2)",
    ),
    "dtype": (
        {"layers": net},
        {"layers": lambda: net(lambda module: module[3].double())},
        "parameter 3.weight shape=(4, 4) strides=(4, 1) dtype=float32",
        "parameter 3.weight shape=(4, 4) strides=(4, 1) dtype=float64",
    ),
    "requires_grad": (
        {"layers": net},
        {"layers": lambda: net(lambda module: module[2].requires_grad_(False))},
        "parameter 2.weight shape=(2,) strides=(1,) dtype=float32 requires_grad=True",
        "parameter 2.weight shape=(2,) strides=(1,) dtype=float32 requires_grad=False",
    ),
    "tying": (
        {"layers": net},
        {"layers": lambda: net(tie)},
        "parameter 3.weight shape",
        "3.weight is tied to 0.weight",
    ),
    "buffer missing": (
        {"layers": lambda: nn.BatchNorm1d(2)},
        {"layers": lambda: nn.BatchNorm1d(2, track_running_stats=False)},
        "buffer running_mean",
        "nothing",
    ),
    "buffer dtype": (
        {"layers": net},
        {"layers": lambda: net(lambda module: module[2].register_buffer("running_var", torch.ones(2).half()))},
        "buffer 2.running_var shape=(2,) strides=(1,) dtype=float32",
        "buffer 2.running_var shape=(2,) strides=(1,) dtype=float16",
    ),
    "comm_buffer_size": (
        {"layers": net},
        {"layers": net, "comm_buffer_size": 12.5},
        "comm_buffer_size = None",
        "comm_buffer_size = 12.5",
    ),
    "last_comm_buffer_size": (
        {"layers": net, "last_comm_buffer_size": float("inf")},
        {"layers": net},
        "last_comm_buffer_size = inf",
        "last_comm_buffer_size = 1",
    ),
    **{
        option: ({"layers": net}, {"layers": net, option: not default}, f"{option} = {default}", f"{option} = ")
        for option, default in {
            "find_unused_parameters": False,
            "gradient_as_bucket_view": True,
            "broadcast_buffers": False,
        }.items()
    },
}


def wrap_differently(rank: int, size: int, name: str) -> str:
    arguments = dict(DIFFERENCES[name][min(rank, 1)])
    layers = arguments.pop("layers")()
    before = [value.clone() for value in layers.state_dict().values()]
    with pytest.raises(DPFuseError) as caught:
        DataParallel(layers, **arguments)
    assert all(map(torch.equal, layers.state_dict().values(), before))

    model = DataParallel(nn.Linear(2, 2))
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 2), (size + 1) / 2))
    return str(caught.value)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_models_that_differ_are_the_same_error_everywhere_naming_the_first_difference(ranks, name):
    texts = ranks(wrap_differently, name)
    assert texts[0] == texts[1]
    _, _, ours, theirs = DIFFERENCES[name]
    pattern = f"rank 1 has '[^']*{re.escape(theirs)}.*rank 0 has '[^']*{re.escape(ours)}.*expected.*same model"
    assert re.search(pattern, texts[0]), texts[0]


def test_the_first_rank_that_differs_from_rank_0_is_named(ranks):
    texts = ranks(wrap_differently, "shape", size=3)
    assert len(set(texts)) == 1
    assert "rank 1 has" in texts[0]


def test_a_size_may_be_an_integer_on_one_rank_and_a_float_on_another(rank: int, size: int) -> None:
    DataParallel(nn.Linear(2, 2), comm_buffer_size=25 if rank else 25.0)


class Everything(nn.Module):
    """Parameters and buffers of all kinds, filled from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.linear = nn.Linear(5, 3)
        self.linear.weight.data, self.linear.bias.data = noise(3, 5).float(), noise(3).float()
        self.transposed = nn.Parameter(noise(4, 3).t())
        self.channels_last = nn.Parameter(noise(2, 3, 2, 2).float().to(memory_format=torch.channels_last))
        self.float16_weight = nn.Parameter(noise(7).half())
        self.bfloat16_weight = nn.Parameter(noise(3).bfloat16())
        self.frozen = nn.Parameter(noise(3, 3), requires_grad=False)
        self.frozen_integer = nn.Parameter((noise(3) * 100).long(), requires_grad=False)
        self.scalar = nn.Parameter(noise().float())
        self.empty = nn.Parameter(noise(0, 3).float())
        for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64):
            self.register_buffer(f"buffer_{str(dtype)[6:]}", (noise(5) * 3 + 3).abs().to(dtype))
        self.register_buffer("complex64", torch.complex(noise(3), noise(3)).to(torch.complex64))
        self.register_buffer("float8", noise(3).to(torch.float8_e4m3fn))
        self.register_buffer("empty_buffer", noise(0))
        self.register_buffer("zero_dim", noise())
        self.register_buffer("every_other", noise(6)[::2])
        self.register_buffer("nan", torch.tensor([float("nan"), -0.0, float("inf"), float(seed)]))
        self.register_buffer("not_persistent", noise(2), persistent=False)
        self.register_buffer("nothing", None)


def as_bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).clone().view(torch.uint8)


def test_rank_0_hands_out_every_parameter_and_buffer_bit_by_bit(rank: int, size: int) -> None:
    module, source = Everything(seed=rank), Everything(seed=0)
    tensors = [*module.parameters(), *module.buffers()]
    strides = [tensor.stride() for tensor in tensors]
    DataParallel(module)
    assert all(map(lambda one, other: one is other, tensors, [*module.parameters(), *module.buffers()]))
    assert [tensor.stride() for tensor in tensors] == strides
    names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    for name, got, expected in zip(names, tensors, [*source.parameters(), *source.buffers()], strict=True):
        assert torch.equal(as_bits(got), as_bits(expected)), name


def expanded(value: float) -> Tensor:
    return torch.full((1,), value).expand(4)


def conjugated(value: float) -> Tensor:
    return torch.full((2,), complex(value, value)).conj()


@pytest.mark.parametrize("make", [expanded, conjugated])
@pytest.mark.ranks(timeout=10)
def test_a_buffer_that_cannot_be_written_in_one_piece_is_a_named_error_everywhere(
    rank: int, size: int, make: Callable[[float], Tensor]
) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("unusual", make(rank + 1.0))
    with pytest.raises(ValueError, match=r"buffer 'unusual' is .* expected memory of its own for each element"):
        DataParallel(module)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.embed(index))


def test_tied_parameters_stay_tied_and_are_averaged_once(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model = DataParallel(Tied())
    assert model.head.weight is model.embed.weight
    assert [bucket.params for bucket in model.bucket_plan.buckets] == [(0,)]
    index = torch.tensor([rank, 3])
    for _ in range(3):
        model.zero_grad()
        model(index).square().sum().backward()
        twin = Tied()
        twin.load_state_dict(model.state_dict())
        for source in range(size):
            (twin(torch.tensor([source, 3])).square().sum() / size).backward()
        torch.testing.assert_close(model.embed.weight.grad, twin.embed.weight.grad)


def test_a_group_of_one_rank_and_a_second_group_of_all_ranks(rank: int, size: int) -> None:
    alone = [dist.new_group([source]) for source in range(size)][rank]
    together = dist.new_group(list(range(size)))
    for group, expected_weight, expected_grad in ((alone, rank, rank + 1.0), (together, 0, 1.5)):
        module = nn.Linear(2, 1)
        with torch.no_grad():
            module.weight.fill_(rank)
        model = DataParallel(module, group=group)
        assert torch.equal(module.weight, torch.full((1, 2), float(expected_weight)))
        for _ in range(3):
            model.zero_grad()
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
            assert torch.equal(module.weight.grad, torch.full((1, 2), expected_grad))


@pytest.mark.ranks(size=3)
def test_a_group_without_global_rank_0(rank: int, size: int) -> None:
    pair = dist.new_group([1, 2])
    if rank == 0:
        return
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.fill_(rank)
    model = DataParallel(module, group=pair)
    assert torch.equal(module.weight, torch.full((1, 2), 1.0))  # of the group's first rank, which is 1
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 2), float(rank))).sum().backward()
        assert torch.equal(module.weight.grad, torch.full((1, 2), 1.5))


@pytest.mark.usefixtures("group")
def test_a_group_of_one_runs_the_whole_engine():
    model = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), comm_buffer_size=0, last_comm_buffer_size=0)
    buffers = []
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        buffers.append({p.grad.untyped_storage().data_ptr() for p in model.parameters()})
    assert all(p.grad._base is not None for p in model.parameters())
    assert len(buffers[-1]) == 4
    assert buffers[-1] == buffers[-2]  # after the rebuild the buffers stay


@pytest.mark.usefixtures("group")
def test_repr_shows_rank_back_end_buckets_and_module():
    text = repr(DataParallel(nn.Linear(1024, 256)))
    assert text.startswith("DataParallel(")
    assert "rank=0, world_size=1, backend=gloo, buckets=[0.000977, 1] MB" in text or "MB" in text
    assert "Linear(in_features=1024, out_features=256, bias=True)" in text


@pytest.mark.usefixtures("group")
def test_what_the_wrapper_does_not_have_comes_from_the_module():
    module = nn.Linear(2, 3)
    module.note = "here"
    model = DataParallel(module)
    assert model.note == "here"
    assert model.out_features == 3
    assert model.weight is module.weight
    assert model.module is module
    assert not hasattr(model, "absent")
    with pytest.raises(AttributeError, match="absent"):
        _ = model.absent
    assert model.eval().module.training is False
    assert [name for name, _ in model.named_parameters()] == ["module.weight", "module.bias"]


@pytest.mark.usefixtures("group")
def test_strategy_is_accepted_in_its_place_and_deprecated():
    with pytest.warns(DeprecationWarning, match="strategy.*ignored") as caught:
        model = DataParallel(nn.Linear(2, 2), object(), 0, 0)
    assert caught[0].filename == __file__
    assert len(model.bucket_plan.buckets) == 2


@pytest.fixture
def no_ranks_announced(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("PADDLE_TRAINERS_NUM", raising=False)


@pytest.mark.usefixtures("no_ranks_announced")
def test_without_a_process_group_calls_pass_through_after_one_warning():
    with pytest.warns(UserWarning, match="no process group.*init_parallel_env") as caught:
        model = DataParallel(nn.Linear(2, 2))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((2, 2), 2.0))
        assert "no process group" in repr(model)
        assert [bucket.params for bucket in model.bucket_plan.buckets] == [(0, 1)]


@pytest.mark.parametrize("value", ["1", "", "two"])
def test_a_world_size_that_announces_nothing_is_no_error(monkeypatch, value):
    monkeypatch.delenv("PADDLE_TRAINERS_NUM", raising=False)
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.warns(UserWarning, match="no process group"):
        DataParallel(nn.Linear(2, 2))
