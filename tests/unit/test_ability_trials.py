"""What a group can do is found out by trying it, agreed on, and asked once. The device is pretended."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dpfuse.comm import ability_trials, collective
from dpfuse.comm.abilities import Abilities, abilities_of, answers_of, backend_of
from dpfuse.comm.ability_trials import ask

CPU = torch.device("cpu")
CUDA = SimpleNamespace(type="cuda")


class Work:
    def __init__(self, host_waits=None):
        self.host_waits = host_waits

    def wait(self, timeout):
        if self.host_waits is not None:
            self.host_waits()

    def get_future(self):
        raise RuntimeError("Work::getFuture not implemented.")  # as torch's class says


class Group:
    """Sums over `size` ranks that all send the same; can what it is told."""

    def __init__(self, clock, size=2, *, blocks=False, coalesces=True, multiplies=True, scatters=True, others=None):
        self.clock, self.ranks, self.blocks, self.coalesces, self.multiplies = (
            clock,
            size,
            blocks,
            coalesces,
            multiplies,
        )
        self.scatters = scatters
        self.others = others  # what the other ranks have found, where they differ
        self.open = False

    def size(self):
        return self.ranks

    def rank(self):
        return 0

    def name(self):
        return "pretended"

    def allreduce(self, tensors, options):
        (tensor,) = tensors
        factor = 0.5 if options.reduceOp == dist.ReduceOp.PREMUL_SUM else 1.0
        if factor != 1.0 and self.multiplies == "raises":
            raise RuntimeError("Cannot use ReduceOp.PREMUL_SUM")
        factor = factor if self.multiplies else 1.0
        if self.others is not None and tensor.numel() == len(self.others):
            tensor += torch.tensor(self.others)
        else:
            tensor.mul_(factor * self.ranks)
        return Work(self.clock.finish if self.blocks else None)

    def allreduce_coalesced(self, tensors, options):
        if self.coalesces is not True:
            raise RuntimeError("does not support allreduce_coalesced")
        for tensor in tensors:
            self.allreduce([tensor], options)
        return Work()

    def _reduce_scatter_base(self, out, flat, options):
        if self.scatters == "raises":
            raise RuntimeError("does not support reduce-scatter")
        out.mul_(self.ranks if self.scatters else 1)
        return Work()

    def _start_coalescing(self, device):
        if not self.coalesces:
            raise RuntimeError("does not implement startCoalescing")
        self.open = True

    def _end_coalescing(self, device):
        assert self.open
        self.open = False
        return Work()


@pytest.fixture
def clock(monkeypatch):
    """A device that sleeps until somebody waits for it."""
    state = SimpleNamespace(busy=False)
    state.finish = lambda *_: setattr(state, "busy", False)
    event = SimpleNamespace(query=lambda: not state.busy)
    stands = {
        "_sleep": lambda cycles: setattr(state, "busy", True),
        "synchronize": state.finish,
        "current_stream": lambda device: SimpleNamespace(record_event=lambda: event),
        "device": lambda device: nullcontext(),
    }
    for name, stand in stands.items():
        monkeypatch.setattr(torch.cuda, name, stand)
    ones, tensor = torch.ones, torch.tensor
    monkeypatch.setattr(torch, "ones", lambda *shape, device=None: ones(*shape))
    monkeypatch.setattr(torch, "tensor", lambda values, device=None, **how: tensor(values, **how))
    return state


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ({}, Abilities(True, True, True, True)),
        ({"blocks": True}, Abilities(False, True, True, True)),
        ({"coalesces": False}, Abilities(True, False, True, True)),
        ({"coalesces": "between two ends"}, Abilities(True, False, True, True)),
        ({"multiplies": "raises"}, Abilities(True, True, False, True)),
        ({"multiplies": False}, Abilities(True, True, False, True)),  # it takes the factor and ignores it
        ({"scatters": "raises"}, Abilities(True, True, True, False)),
        ({"scatters": False}, Abilities(True, True, True, False)),  # it adds nothing up
        ({"size": 1}, Abilities(True, True, True, True)),
        ({"others": (0.0, 1.0, 1.0, 1.0)}, Abilities(False, True, True, True)),  # another rank is held up
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_ability_is_what_every_rank_has_found(kind, found, clock):
    group = Group(clock, **kind)
    assert abilities_of(group, CUDA) == Abilities(), "before it was asked"
    assert ask(group, CUDA) == found
    assert abilities_of(group, CUDA) == found
    assert not group.open


@pytest.mark.parametrize(
    ("multicast", "variable", "multiplies"), [(True, "", False), (True, "0", True), (False, "", True)]
)
def test_a_factor_is_left_to_a_pass_of_its_own_where_switches_add_up(
    multicast, variable, multiplies, clock, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        "torch._C._distributed_c10d._SymmetricMemory",
        SimpleNamespace(has_multicast_support=lambda kind, index: asked.append((kind.name, index)) or multicast),
    )
    monkeypatch.setenv("NCCL_NVLS_ENABLE", variable)
    assert ask(Group(clock), torch.device("cuda", 3)).multiplies is multiplies
    assert asked == ([] if variable == "0" else [("CUDA", 3)])


def test_a_torch_that_cannot_tell_of_switches_multiplies(clock, monkeypatch):
    monkeypatch.delattr("torch._C._distributed_c10d._SymmetricMemory")
    assert ask(Group(clock), CUDA).multiplies


def test_a_group_is_asked_once_and_the_answer_is_logged(clock, monkeypatch, caplog):
    group = Group(clock, coalesces=False, multiplies=False, scatters=False)
    with caplog.at_level("INFO", logger="dpfuse"):
        ask(group, CUDA)
        ask(group, CUDA)
    assert caplog.messages == ["rank 0: the group's back end pretended: on streams"]
    assert [(record.name, record.rank) for record in caplog.records] == [("dpfuse.group", 0)]
    monkeypatch.setattr(ability_trials, "_tried", None)  # calling it again would be an error
    assert ask(group, CUDA) == Abilities(on_streams=True)


def test_on_cpus_nothing_is_sent():
    class Silent:
        pass

    group = Silent()
    assert ask(group, CPU) == Abilities()
    assert answers_of(group) == {}


@pytest.mark.parametrize("coalesces", [True, False])
@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_the_same_whatever_a_group_can_do(coalesces, multiplies, dtype, clock):
    group = Group(clock, coalesces=coalesces, multiplies=multiplies)
    answers_of(group)["cpu"] = Abilities(coalesces=coalesces, multiplies=multiplies)
    plain, scaled, other = (torch.full((3,), value, dtype=dtype) for value in (4.0, 6.0, 2.0))
    collective.all_reduce_together([plain], [scaled, other], 0.5, group).wait(collective.NO_LIMIT)
    assert plain.tolist() == [8.0] * 3
    assert scaled.tolist() == [6.0] * 3
    assert other.tolist() == [2.0] * 3
    assert not group.open


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("factor", "together"), [(0.5, True), (1 / 3, False), (0.3, False), (1.0, None)])
def test_a_factor_multiplies_all_tensors_at_once_where_it_is_exact(dtype, factor, together, clock, monkeypatch):
    group, calls, multiply = Group(clock), [], torch._foreach_mul_
    monkeypatch.setattr(torch, "_foreach_mul_", lambda *arguments: (calls.append(1), multiply(*arguments)))
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(100, generator=generator).to(dtype) for _ in range(3)]
    expected = [2 * (tensor * factor) for tensor in tensors]  # both ranks of this group have the same
    collective.all_reduce_together([], tensors, factor, group).wait(collective.NO_LIMIT)
    assert all(map(torch.equal, tensors, expected))
    assert bool(calls) == bool(together)


def test_a_group_has_a_name_though_torch_does_not_know_it():
    class Named(dist.ProcessGroup):
        def getBackendName(self):  # noqa: N802  # torch's name
            return "carrier pigeon"

    assert backend_of(Named(0, 1)) == "carrier pigeon"


def test_abilities_read_as_words():
    assert str(Abilities(on_streams=True, multiplies=True)) == "on streams, multiplies"
    assert str(Abilities()) == "nothing special"
