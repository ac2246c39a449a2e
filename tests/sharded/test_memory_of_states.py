"""Each byte of the states lies on one rank only: counted by the live tensors of a process, and not by a formula."""

from __future__ import annotations

import gc
import weakref
from time import sleep

import pytest
import torch
from torch import optim
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dpfuse
from dpfuse.errors import DPFuseError
from dpfuse.sharded.gradient import ShardedGradient
from dpfuse.sharded.trial import keeps_elsewhere
from dpfuse.weights.hashing import write_number
from tests.one_in import one_in
from tests.sharded.against_ddp import batch, bits_differ, network, trained_beside
from tests.sharded.test_elementwise import differing
from tests.sharded.test_whole_tensors import halves

RATE = {"lr": 0.01}

write_number(0, torch.zeros(32, 2))  # makes a table once in a process, which is no state


class Eager(optim.Optimizer):
    """Adagrad by hand; its sums are made in the constructor. Where they are kept is up to the classes below."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})
        self.make()

    def make(self):
        for param in self.all():
            self.state[param]["sum"] = torch.zeros_like(param)

    def sum_of(self, param):
        return self.state[param]["sum"]

    def all(self):
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    total = self.sum_of(param).add_(param.grad * param.grad)
                    param.sub_(group["lr"] * param.grad / (total.sqrt() + 1e-8))


class ByParameter(Eager):
    def make(self):
        self.sums = {param: torch.zeros_like(param) for param in self.all()}

    def sum_of(self, param):
        return self.sums[param]


class ById(Eager):
    """Its sums are also in `state`, but it does not look there."""

    def make(self):
        super().make()
        self.sums = {id(param): self.state[param]["sum"] for param in self.all()}

    def sum_of(self, param):
        return self.sums[id(param)]


class InList(Eager):
    def make(self):
        self.sums = [torch.zeros(param.shape, dtype=param.dtype) for param in self.all()]  # names no device

    def sum_of(self, param):
        return next(total for own, total in zip(self.all(), self.sums, strict=True) if own is param)


class Nested(Eager):
    class Sums:
        def __init__(self, optimizer):
            self.optimizer = optimizer  # a cycle of references
            self.inner = {"sums": [(param, torch.zeros_like(param)) for param in optimizer.all()]}

    def make(self):
        self.nested = self.Sums(self)

    def sum_of(self, param):
        return next(total for own, total in self.nested.inner["sums"] if own is param)


class Hooked(Eager):
    """Is in a cycle of references with its hooks."""

    def make(self):
        super().make()
        self.steps = []
        self.register_step_post_hook(self.count)
        self.register_state_dict_pre_hook(lambda optimizer: self.steps.clear())

    def count(self, *_):
        self.steps.append(1)


class WithGroups(Eager):
    """Makes its states when a group is added; the constructor of torch's class adds the first ones."""

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            self.state[param]["sum"] = torch.zeros_like(param)

    def make(self):
        pass


class ReadsNumbers(Eager):
    """Needs the numbers of the parameters, so it cannot be made over tensors without memory."""

    def make(self):
        super().make()
        self.total = sum(param.abs().sum().item() for param in self.all())


TORCH = {
    "Adagrad": (optim.Adagrad, RATE),
    "momentum": (optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "AdamW": (optim.AdamW, RATE),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adadelta": (optim.Adadelta, RATE),
    "ASGD": (optim.ASGD, RATE),
    "NAdam": (optim.NAdam, RATE),
    "RAdam": (optim.RAdam, RATE),
    "Rprop": (optim.Rprop, RATE),
    "Adamax": (optim.Adamax, RATE),
}
OWN = [Eager, ByParameter, ById, InList, Nested, Hooked, WithGroups, ReadsNumbers]
CASES = TORCH | {kind.__name__: (kind, RATE) for kind in OWN}


def live_bytes():
    """The bytes of all memory behind the tensors of this process; a byte that two storages share counts once."""
    for _ in range(2):
        gc.collect()  # does nothing while a thread collects, such as that of the heartbeat
        sleep(0.001)
    found = set()
    without = ShardedGradient, UninitializedTensorMixin  # they have no memory
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and not issubclass(type(each), without) and not each.is_meta:
            storage = each.untyped_storage()
            found.add((storage.data_ptr(), storage.nbytes()))
    total = counted = 0
    for begin, nbytes in sorted(found):
        total += max(0, begin + nbytes - max(begin, counted))
        counted = max(counted, begin + nbytes)
    return total


class Peak(TorchDispatchMode):
    """The largest sum of bytes of tensors that operations in this context have made and that live at one time."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self._made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {id_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and not each.is_meta and id_of(each) not in given:
                storage = each.untyped_storage()
                self._made[id_of(each)] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: one for key, one in self._made.items() if not one[0].expired()}
        self.bytes = max(self.bytes, sum(nbytes for _, nbytes in self._made.values()))
        return result


def id_of(tensor):
    return tensor.untyped_storage()._cdata


def train(model, optimizer, steps, rank, dtype):
    for step in steps:
        model(batch(step, rank, dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def held(make, rank, dtype, wrap=dpfuse.DataParallel):
    """Bytes that an optimizer and its model hold after some steps, and the most bytes while it was made."""
    before = live_bytes()
    model = wrap(network(dtype))
    with Peak() as peak:
        optimizer = make(model)
    train(model, optimizer, range(3), rank, dtype)
    return live_bytes() - before, peak.bytes


def whole(kind, settings):
    """Bytes of all states of a plain optimizer, in float32."""
    return sum(
        sign
        * held(lambda model, kind=one, own=own: kind(model.parameters(), **own), 0, torch.float32, network_alone)[0]
        for sign, one, own in ((1, kind, settings), (-1, optim.SGD, RATE))
    )


def network_alone(net):
    return net


def divided(rank, size, kind, settings, options, dtype):
    """Bytes of this rank's states, bytes of whole ones, and the most bytes of states while the optimizer was made.

    What has no states takes the same memory for parameters and gradients, so the difference is that of the states.
    """
    (own, peak), (others, other_peak) = (
        held(lambda model, kind=one, own=own: dpfuse.ShardedOptimizer(model, kind, **own, **options), rank, dtype)
        for one, own in ((kind, settings), (optim.SGD, RATE))
    )
    return own - others, whole(kind, settings), peak - other_peak


def check(results, size):
    expected = results[0][1]
    assert expected > 300_000
    assert sum(own for own, _, _ in results) == pytest.approx(expected, rel=0.01)
    assert max(own for own, _, _ in results) == pytest.approx(expected / size, rel=0.02)


def with_marks(firsts):
    """Each case on 1, 2 and 3 ranks; all are slow but the first ones on 2."""
    return [
        pytest.param(name, size, marks=() if size == 2 and name in firsts else pytest.mark.slow)
        for name in CASES
        for size in (1, 2, 3)
    ]


@pytest.mark.parametrize(("name", "size"), with_marks({"Adagrad", "AdamW", "InList"}))
def test_all_ranks_together_hold_the_states_of_one_plain_optimizer(ranks, name, size):
    results = ranks(divided, *CASES[name], {}, torch.float32, size=size)
    check(results, size)
    if name != "ReadsNumbers":
        for _, expected, peak in results:  # not even for a moment
            assert peak < 1.05 * expected / size


OPTIONS = [
    {"step_in_backward": True},
    pytest.param({"master_dtype": torch.float32}, marks=pytest.mark.slow),
    {"master_dtype": torch.float32, "step_in_backward": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "name", ["AdamW", *(pytest.param(each, marks=pytest.mark.slow) for each in ("Adagrad", "InList"))]
)
def test_so_they_do_with_every_option(ranks, name, options):
    dtype = torch.bfloat16 if "master_dtype" in options else torch.float32
    check(ranks(divided, *CASES[name], options, dtype), 2)


class Still(optim.SGD):
    """Has no states, and whole tensors, as Muon has them."""

    needs_whole_tensors = True

    def __init__(self, params, lr=0.01, **others):
        super().__init__(params, lr)


def with_muon(rank, size, rest):
    """Bytes of this rank's states, with Muon in one group and another class in the other; and of all states."""

    def make(model, first, second):
        inner, others = halves(model.module)
        groups = [{"params": inner, "optimizer_class": first, "lr": 0.01}, {"params": others}]
        return dpfuse.ShardedOptimizer(model, second, groups, **RATE)

    own, others = (
        held(lambda model, both=both: make(model, *both), rank, torch.float32)[0]
        for both in ((optim.Muon, rest), (Still, optim.SGD))
    )
    return own - others, 4 * sum(param.numel() for param in network().parameters())  # one number for each, in both


@pytest.mark.parametrize("rest", [optim.Adagrad, pytest.param(InList, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [*(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2)), 3])
def test_so_they_do_with_muon_for_the_matrices(ranks, rest, size):
    results = ranks(with_muon, rest, size=size)
    assert sum(own for own, _ in results) == pytest.approx(results[0][1], rel=0.01)


IN_BACKWARD = pytest.param({"extra": {"step_in_backward": True}}, marks=pytest.mark.slow)
ACCUMULATING = pytest.param({"micro": 2}, marks=pytest.mark.slow)


@pytest.mark.parametrize("how", [{}, IN_BACKWARD, ACCUMULATING], ids=str)
@pytest.mark.parametrize("kind", one_in(2, OWN), ids=lambda kind: kind.__name__)
def test_states_of_any_place_give_the_bits_of_ddp(ranks, kind, how):
    """On several buckets, which would be planned anew after the first step."""
    assert ranks(values_beside_ddp, kind, how) == [[], []]


def values_beside_ddp(rank, size, kind, how):
    steps, _, ours, _, _ = trained_beside(kind, 12, **how, **RATE)
    assert len(ours.bucket_plan.buckets) >= 3
    return steps


def differently(net):
    second = [net.second.weight, net.scale]
    ids = set(map(id, second))
    first = [param for param in net.parameters() if id(param) not in ids]
    return [{"params": first}, {"params": second, "lr": 0.2, "lr_decay": 0.1, "eps": 1e-5}]


def warm_up(optimizer):
    return optim.lr_scheduler.LinearLR(optimizer, total_iters=5)


ADAGRAD = {
    "first sums": {"initial_accumulator_value": 0.3},
    "foreach": {"foreach": True, "maximize": True},
    "a tensor": {"lr": torch.tensor(0.05)},
    "decay": {"lr_decay": 0.01, "weight_decay": 0.1},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ADAGRAD)
def test_settings_of_adagrad_are_those_of_ddp(ranks, name):
    how = {"groups": differently, "scheduler": warm_up if name != "a tensor" else None}
    assert ranks(differing, optim.Adagrad, RATE | ADAGRAD[name], 12, how) == [[], []]


def fused(rank, size):
    _, theirs, ours, _, _ = trained_beside(optim.Adagrad, 5, lr=0.01, fused=True)
    pairs = zip(theirs.module.parameters(), ours.module.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def test_a_fused_adagrad_differs_in_last_digits_at_most(ranks):
    for largest in ranks(fused):
        assert largest < 1e-5


class Shared(optim.Adagrad):
    """Lets other processes read its sums."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.share_memory()


def test_adagrad_in_shared_memory_has_the_bits_of_ddp(ranks):
    assert ranks(differing, Shared, RATE, 6) == [[], []]


def older(state):
    """A state dict as torch 1.9 wrote it: a number for the steps, and fewer settings."""
    state = {
        "state": {index: {**one, "step": int(one["step"])} for index, one in state["state"].items()},
        "param_groups": [{**group} for group in state["param_groups"]],
    }
    for group in state["param_groups"]:
        for key in ("foreach", "maximize", "differentiable", "fused"):
            del group[key]
    return state


def resumed(rank, size, is_older):
    """Weights after a state dict of the plain Adagrad was loaded by both, and one of the sharded by a plain one."""
    before = dpfuse.DataParallel(network())
    plain = optim.Adagrad(before.parameters(), lr=0.01)
    train(before, plain, range(3), rank, torch.float32)
    saved, state = before.module.state_dict(), plain.state_dict()
    if is_older:
        state = older(state)
    seen = []
    for make in (dpfuse.ShardedOptimizer, lambda model, kind, lr: kind(model.parameters(), lr=lr)):
        model = dpfuse.DataParallel(network(), comm_buffer_size=0.1, last_comm_buffer_size=0.02)
        model.module.load_state_dict(saved)
        optimizer = make(model, optim.Adagrad, lr=9.0)
        optimizer.load_state_dict(state)
        train(model, optimizer, range(3, 6), rank, torch.float32)
        seen.append(([*model.module.parameters()], optimizer.state_dict()))
    (ours, found), (theirs, expected) = seen
    assert found["param_groups"] == expected["param_groups"]
    optim.Adagrad(theirs, lr=1.0).load_state_dict(found)
    values = [[v for one in state["state"].values() for v in one.values()] for state in (found, expected)]
    return bits_differ(ours, theirs), bits_differ(*values)


@pytest.mark.parametrize("is_older", [False, True])
def test_state_dicts_of_adagrad_go_both_ways(ranks, is_older):
    assert ranks(resumed, is_older) == [(False, False)] * 2


def unfrozen(rank, size, kind):
    """Whether weights differ from those of a plain optimizer to which a group was added, too."""
    seen = []
    for make in (dpfuse.ShardedOptimizer, lambda model, kind, params, **own: kind(params, **own)):
        net = network()
        net.second.requires_grad_(False)
        model = dpfuse.DataParallel(net)
        optimizer = make(model, kind, [p for p in net.parameters() if p.requires_grad], lr=0.01)
        train(model, optimizer, range(2), rank, torch.float32)
        optimizer.load_state_dict(optimizer.state_dict())
        net.second.requires_grad_(True)
        optimizer.add_param_group({"params": list(net.second.parameters()), "lr": 0.02})
        train(model, optimizer, range(2, 5), rank, torch.float32)
        assert optimizer.param_groups[1]["lr"] == 0.02
        seen.append([*net.parameters()])
    return bits_differ(*seen)


def takes_groups(kind):
    """Whether a plain optimizer steps a group that was added. In torch 2.11 Adagrad makes no states for it."""
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = kind([first])
    optimizer.add_param_group({"params": [second]})
    first.grad = second.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("kind", [optim.Adagrad, WithGroups])
def test_a_group_is_added_later(ranks, kind):
    if not takes_groups(kind):
        pytest.skip(f"torch {torch.__version__}: {kind.__name__} steps no group that was added")
    assert ranks(unfrozen, kind) == [False, False]


@pytest.mark.parametrize("how", ["unused", "load", "plan"])
def test_what_would_be_lost_is_an_error_on_every_rank(rank, size, how):
    model = dpfuse.DataParallel(network(), find_unused_parameters=how == "unused")
    optimizer = dpfuse.ShardedOptimizer(model, InList, lr=0.01)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)  # before the first step nothing is lost
    train(model, optimizer, range(1), rank, torch.float32)
    with pytest.raises(
        DPFuseError, match=f"rank {rank}: .*InList keeps what its next step needs outside of its `state`"
    ):
        if how == "unused":
            model(batch(1, rank, torch.float32)).square().mean().backward()
            model.module.second.weight.grad = None
            optimizer.step()
        elif how == "load":
            optimizer.load_state_dict(state)
        else:
            model._sync.grads.use_plan(dpfuse.plan_buckets(model.module, comm_buffer_size=0, last_comm_buffer_size=0))
            train(model, optimizer, range(1, 3), rank, torch.float32)


@pytest.mark.parametrize("kind", one_in(3, [optim.Adagrad, *OWN]), ids=lambda kind: kind.__name__)
def test_without_a_process_group_the_states_of_the_constructor_are_used(kind):
    with pytest.warns(UserWarning, match="there is no process group"):
        model = dpfuse.DataParallel(network())
    net = network()
    sharded, plain = dpfuse.ShardedOptimizer(model, kind, lr=0.01), kind(net.parameters(), lr=0.01)
    assert [*sharded.state] == [*model.parameters()][: len(plain.state)]
    for one, optimizer in ((model, sharded), (net, plain)):
        train(one, optimizer, range(3), 0, torch.float32)
        optimizer.load_state_dict(optimizer.state_dict())
        train(one, optimizer, range(3, 5), 0, torch.float32)
    assert not bits_differ([*model.parameters()], [*net.parameters()])


def test_without_a_process_group_classes_share_their_states():
    with pytest.warns(UserWarning, match="there is no process group"):
        model = dpfuse.DataParallel(network())
    net = network()
    inner, others = halves(model.module)
    groups = [{"params": inner, "optimizer_class": optim.Adagrad, "lr": 0.1}, {"params": others}]
    sharded = dpfuse.ShardedOptimizer(model, Eager, groups, lr=0.01)
    inner, others = halves(net)
    plain = [optim.Adagrad(inner, lr=0.1), Eager(others, lr=0.01)]
    for step in range(3):
        train(model, sharded, [step], 0, torch.float32)
        net(batch(step, 0, torch.float32)).square().mean().backward()
        for each in plain:
            each.step()
            each.zero_grad()
    assert not bits_differ([*model.parameters()], [*net.parameters()])
    assert len(sharded.state) == len([*net.parameters()])


class Marked(Eager):
    """Sees marks that a program puts on its parameters, and has a tensor among its settings."""

    def __init__(self, params, lr=0.01):
        optim.Optimizer.__init__(self, params, {"lr": lr, "factor": torch.tensor(0.5)})
        for group in self.param_groups:
            group["slow"] = any(getattr(param, "slow", False) for param in group["params"])
        self.make()


def test_settings_are_those_of_the_class(rank, size):
    net = network()
    net.scale.slow = True
    model = dpfuse.DataParallel(net)
    others = [param for param in net.parameters() if param is not net.scale]
    optimizer = dpfuse.ShardedOptimizer(model, Marked, [{"params": [net.scale]}, {"params": others}])
    assert [group["slow"] for group in optimizer.param_groups] == [True, False]
    assert all(torch.equal(group["factor"], torch.tensor(0.5)) for group in optimizer.param_groups)
    assert all(one is other for one, other in zip(optimizer.param_groups[1]["params"], others, strict=True))
    assert "slow: True" in repr(optimizer)
    assert optimizer.defaults["lr"] == 0.01
    train(model, optimizer, range(2), rank, torch.float32)


def test_nothing_of_the_trial_is_left(ranks):
    """Of all optimizers that are made, those that update this rank's parts live: one for each region."""
    for alive, made in ranks(optimizers_left):
        assert made > 4
        assert alive == 1


def optimizers_left(rank, size):
    living = []

    class Watched(Hooked):
        def __init__(self, *args, **settings):
            living.append(weakref.ref(self))
            super().__init__(*args, **settings)

    model = dpfuse.DataParallel(network())
    optimizer = dpfuse.ShardedOptimizer(model, Watched, lr=0.01)
    train(model, optimizer, range(2), rank, torch.float32)
    gc.collect()
    alive = [one for each in living if (one := each()) is not None]
    numels = [sum(param.numel() for param in one.all()) for one in alive]
    assert sum(numels) <= 1.01 * sum(param.numel() for param in network().parameters()) / size
    return len(alive), len(living)


def rates_of_zero(rank, size):
    """A warm-up that begins at zero: Muon needs whole matrices also then."""
    model = dpfuse.DataParallel(network())
    inner, others = halves(model.module)
    groups = [{"params": inner, "optimizer_class": optim.Muon, "lr": 0.0}, {"params": others}]
    optimizer = dpfuse.ShardedOptimizer(model, InList, groups, lr=0.0)
    return [(trainer.needs_whole, trainer.keeps_elsewhere) for trainer in optimizer._groups.trainers]


def test_what_an_optimizer_needs_is_found_also_at_a_rate_of_zero(ranks):
    assert ranks(rates_of_zero) == [[(True, False), (False, True)]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*(kind for kind, _ in TORCH.values()), optim.Muon, optim.Adafactor])
def test_the_optimizers_of_torch_keep_all_in_their_states(kind, dtype):
    assert not keeps_elsewhere(lambda params: kind(params, lr=0.1), torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("kind", OWN)
def test_an_optimizer_that_keeps_more_is_found(kind):
    expected = kind in (ByParameter, ById, InList, Nested)
    assert keeps_elsewhere(lambda params: kind(params, lr=0.1), torch.empty(0)) == expected
