"""torch's arguments about buckets: one cap for each, and parameters that are sent later than the others."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dpfuse import DistributedDataParallel, DPFuseError
from tests.distributed.ddp_face.test_compile import Chain
from tests.torch_ddp import since_torch

pytestmark = pytest.mark.usefixtures("group")

MB = 2**20
BOTH = (TorchDDP, DistributedDataParallel)


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=(torch.float32, torch.float64)[i % 2]) for i in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def chain() -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(7)))


def buckets_of(model) -> dict[int, list[str]]:
    """Per bucket, in the order of communication, its parameters by name, as a hook of a later step sees them."""
    names = {param: name for name, param in model.module.named_parameters()}
    seen: dict[int, list[str]] = {}

    def hook(state, bucket):
        seen[bucket.index()] = sorted(names[param] for param in bucket.parameters())
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for _ in range(3):
        seen.clear()
        model(torch.ones(2, 6)).sum().backward()
    return seen


CAPS = {
    "one cap": [100 / MB],
    "two, the last repeats": [30 / MB, 300 / MB],
    "growing and shrinking": [1e-5, 600 / MB, 100 / MB],
    "each parameter alone": [0],
    "more caps than buckets": [200 / MB] * 50,
    "a tuple": (150 / MB, 1),
    "none": [],
}
broken = since_torch(2, 12, "torch's class fails an assertion of its own")
every_cap = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=broken) if case == "each parameter alone" else case for case in CAPS]
)


@every_cap
def test_a_cap_for_each_bucket_gives_torchs_buckets_in_torchs_order(case):
    theirs, ours = (buckets_of(cls(chain(), bucket_cap_mb_list=CAPS[case])) for cls in BOTH)
    assert ours == theirs
    assert len(ours) > 1 or case == "none"


@every_cap
def test_each_dtype_has_a_sequence_of_caps_of_its_own(case):
    theirs, ours = (buckets_of(cls(TwoDtypes(), bucket_cap_mb_list=CAPS[case])) for cls in BOTH)
    assert sorted(ours.values()) == sorted(theirs.values())  # between dtypes torch's order is that of a hash


@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": 3}, {"bucket_cap_mb": 60}])
@pytest.mark.parametrize("caps", [None, [], [1], [2, 40, 1.5]], ids=str)
def test_attributes_about_caps_are_those_of_torch(arguments, caps):
    theirs, ours = (cls(nn.Linear(2, 2), bucket_cap_mb_list=caps, **arguments) for cls in BOTH)
    for name in ("bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.slow
@pytest.mark.parametrize("caps", [[1, 2], [2], [1, 1, 3]], ids=str)
def test_the_compiler_splits_by_the_largest_of_the_caps_as_for_torch(caps):
    counts = []
    for cls in BOTH:
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        torch.compile(cls(Chain(24, 256), bucket_cap_mb_list=caps), backend=backend)(torch.ones(1, 256))
        counts.append(len(graphs))
    assert counts[0] == counts[1] > 1


@pytest.mark.parametrize(
    ("caps", "error", "text"),
    [
        (5, TypeError, "must be a list of sizes in MB, got 5"),
        ("12", TypeError, "must be a list of sizes in MB, got '12'"),
        ([None], TypeError, "bucket_cap_mb_list must be a number of MB, got None"),
        (["1"], TypeError, "bucket_cap_mb_list must be a number of MB, got '1'"),
        ([1, -1], ValueError, "bucket_cap_mb_list must be >= 0 MB, got -1"),
        ([float("nan")], ValueError, "bucket_cap_mb_list must be >= 0 MB, got nan"),
    ],
)
def test_caps_that_are_none_are_named(caps, error, text):
    with pytest.raises(error, match=re.escape(text)):
        DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb_list=caps)
    with pytest.raises((TypeError, ValueError)):
        TorchDDP(nn.Linear(2, 2), bucket_cap_mb_list=caps)


def delayed(net, names, behind):
    named = dict(net.named_parameters())
    return {
        "delay_all_reduce_named_params": [(name, named[name]) for name in names],
        "param_to_hook_all_reduce": named[behind],
    }


def plan_of(model) -> list[list[str]]:
    return [[model.bucket_plan.specs[i].name for i in bucket.params] for bucket in model.bucket_plan.buckets]


def test_delayed_parameters_are_one_bucket_behind_that_of_the_hooked_one():
    net = chain()
    model = DistributedDataParallel(net, bucket_cap_mb=150 / MB, **delayed(net, ["6.weight", "5.bias"], "3.weight"))
    assert plan_of(model) == [["5.weight", "6.bias"], ["4.weight", "4.bias"], ["3.weight", "3.bias"],
                              ["5.bias", "6.weight"], ["2.weight", "2.bias"], ["1.weight", "1.bias"],
                              ["0.weight", "0.bias"]]  # fmt: skip
    before = plan_of(model)
    model(torch.ones(2, 6)).sum().backward()
    assert plan_of(model) == before
    assert model.parameters_to_ignore == {"6.weight", "5.bias"}


def test_a_delayed_parameter_that_is_late_itself_holds_up_no_other_bucket():
    net = chain()
    model = DistributedDataParallel(net, bucket_cap_mb=0, **delayed(net, ["6.weight", "1.weight"], "4.weight"))
    model(torch.ones(2, 6)).sum().backward()
    order = plan_of(model)
    assert order.index(["1.weight", "6.weight"]) > order.index(["2.weight"])
    assert order.index(["1.weight", "6.weight"]) < order.index(["0.weight"])


def test_delayed_parameters_of_several_dtypes_and_sparse_ones_have_a_bucket_each():
    net = TwoDtypes()
    model = DistributedDataParallel(
        net, bucket_cap_mb=0, **delayed(net, ["layers.7.weight", "layers.7.bias", "layers.6.weight"], "layers.5.weight")
    )
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        order = plan_of(model)
        assert order.index(["layers.7.weight", "layers.7.bias"]) > order.index(["layers.5.weight"])
        assert order.index(["layers.6.weight"]) > order.index(["layers.5.weight"])


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.odd, self.never = (nn.Linear(6, 6) for _ in range(4))
        self.table = nn.Embedding(5, 6, sparse=True)

    def forward(self, x, step):
        y = self.second(torch.tanh(self.first(x))) + self.table(torch.tensor(step))
        return y + self.odd(x) if (step + dist.get_rank()) % 2 else y


def average_like_without_delay(rank, size, views, names, behind):
    """The mean is that of the same model with nothing delayed: with accumulation, unused and sparse parameters."""
    net = Branching()
    nets = [copy.deepcopy(net) for _ in range(2)]
    options = {"gradient_as_bucket_view": views, "find_unused_parameters": True}
    plain = DistributedDataParallel(nets[0], **options)
    model = DistributedDataParallel(nets[1], bucket_cap_mb=100 / MB, **options, **delayed(nets[1], names, behind))
    for step in range(4):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        for each in (plain, model):
            for param in each.parameters():
                param.grad = None
            with each.no_sync():
                each(x, step).sum().backward()
                local = each.module.first.weight.grad.clone()
            each(2 * x, step).square().sum().backward()
        assert not torch.equal(local, model.module.first.weight.grad)
        for name, param in model.module.named_parameters():
            grad, expected = param.grad, plain.module.get_parameter(name).grad
            if expected is None:
                assert grad is None, name
            else:
                assert torch.equal(grad.to_dense(), expected.to_dense()), name


DELAYED = {
    "two": (["second.weight", "first.bias"], "first.weight"),
    "unused ones": (["odd.weight", "never.weight", "never.bias"], "second.bias"),
    "a sparse one": (["table.weight", "second.bias"], "first.weight"),
    "behind itself": (["second.weight"], "second.weight"),
    "behind an unused one": (["second.weight"], "never.weight"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("case", DELAYED)
def test_delayed_gradients_are_the_mean(ranks, case, views):
    ranks(average_like_without_delay, views, *DELAYED[case])


def test_all_parameters_may_be_delayed(rank, size):
    """Beside the mean by hand: torch's class raises, since it finds nothing to tell the device by."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    mine = copy.deepcopy(net)
    ours = DistributedDataParallel(mine, **delayed(mine, list(dict(net.named_parameters())), "0.bias"))
    x = torch.randn(3, 4) + rank
    for _ in range(2):
        ours.zero_grad()
        ours(x).sum().backward()
    alone = copy.deepcopy(net)
    alone(x).sum().backward()
    for param, got in zip(alone.parameters(), ours.parameters(), strict=True):
        mean = param.grad / size
        dist.all_reduce(mean)
        assert torch.equal(got.grad, mean)
    assert len(ours.bucket_plan.buckets) == 1


def test_delayed_gradients_are_those_of_torch_where_it_waits(rank, size):
    """Torch's buffer is complete when the hooked parameter comes last, and the barrier is what it does not wait for."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    theirs, ours = (
        cls(mine, **delayed(mine, ["2.weight", "2.bias"], "0.weight"))
        for cls, mine in ((cls, copy.deepcopy(net)) for cls in BOTH)
    )
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        for model in (theirs, ours):
            model.zero_grad()
            model(x).sum().backward()
        dist.barrier()
        for got, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(got.grad, expected.grad)


WRONG = {
    "a name that is none": (lambda net: ([("5.weight", net[0].weight)], net[0].bias), ValueError, "has '5.weight'"),
    "a parameter of another name": (
        lambda net: ([("0.weight", net[0].bias)], net[0].bias),
        ValueError,
        "has '0.weight', which is not that parameter",
    ),
    "no pairs": (
        lambda net: ([net[0].weight], net[0].bias),
        TypeError,
        "must be pairs of a name and a parameter, got list",
    ),
    "no list": (lambda net: (5, net[0].bias), TypeError, "a parameter, got int"),
    "behind a stranger": (
        lambda net: ([("0.weight", net[0].weight)], nn.Parameter(torch.ones(2))),
        ValueError,
        "param_to_hook_all_reduce must be a parameter of the module",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_delays_that_make_no_sense_are_named(case):
    make, error, text = WRONG[case]
    net = chain()
    apart, behind = make(net)
    with pytest.raises(error, match=re.escape(text)):
        DistributedDataParallel(net, delay_all_reduce_named_params=apart, param_to_hook_all_reduce=behind)


def test_a_frozen_parameter_cannot_be_waited_for_as_in_torch():
    for cls in BOTH:
        net = chain()
        net[0].bias.requires_grad_(False)
        with pytest.raises(RuntimeError, match="register a hook on a tensor that doesn't require grad"):
            cls(net, **delayed(net, ["1.weight"], "0.bias"))


def test_ranks_that_differ_in_caps_or_delays_all_raise(rank, size):
    net = chain()
    with pytest.raises(DPFuseError, match="option rule"):
        DistributedDataParallel(net, **delayed(net, [f"{rank}.weight"], "2.bias"))
    with pytest.raises(DPFuseError, match="option rule"):
        DistributedDataParallel(chain(), bucket_cap_mb_list=[1, 5 + rank, 9])
