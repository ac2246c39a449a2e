"""What programs do with a sharded optimizer: scalers, copies, norms, full gradients; and mistakes."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn, optim

import dpfuse
from dpfuse.errors import DPFuseError
from tests.sharded.against_ddp import batch, bits_differ, network

STEPS = 8


def loss_of(model, step, rank, *, bad=False):
    loss = model(batch(step, rank, torch.float32)).square().mean()
    return loss * (math.inf if bad else 1)


def scaled(rank, size, ours, everywhere):
    """Training with a GradScaler and a batch of rank 1 that overflows, maybe in one element; DDP beside."""
    seen = []
    for sharded in (True, False):
        net = network()
        model = dpfuse.DataParallel(net) if sharded else nn.parallel.DistributedDataParallel(net)
        make = dpfuse.ShardedOptimizer if sharded else lambda model, kind, lr: kind(model.parameters(), lr=lr)
        optimizer = make(model, optim.Adam, lr=0.01)
        own = ours and sharded
        scaler = dpfuse.GradScaler("cpu", model=model) if own else torch.amp.GradScaler("cpu", init_scale=2.0**16)
        skipped = []
        for step in range(STEPS):
            before = [param.detach().clone() for param in net.parameters()]
            bad = step == 3 and rank == 1
            loss = loss_of(model, step, rank, bad=bad and everywhere)
            if bad and not everywhere:  # only the rank that has the part with this element sees it
                loss = loss + math.inf * next(net.parameters()).view(-1)[0]
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped.append(not bits_differ(before, [*net.parameters()]))
        seen.append((skipped, scaler.get_scale(), [*net.parameters()]))
    (skipped, scale, weights), (their_skipped, their_scale, their_weights) = seen
    assert skipped == their_skipped == [step == 3 for step in range(STEPS)]
    assert scale == their_scale
    return max((one - other).abs().max().item() for one, other in zip(weights, their_weights, strict=True))


@pytest.mark.parametrize("everywhere", [True, False], ids=["all elements", "one element"])
@pytest.mark.parametrize("ours", [False, True], ids=["torch", "dpfuse"])
def test_a_scaler_skips_on_all_ranks(ranks, ours, everywhere):
    # The scale is a power of two: it changes no bit of float32.
    assert ranks(scaled, ours, everywhere) == [0.0, 0.0]


def norms(rank, size, order):
    net = network()
    peer, model = dpfuse.DataParallel(copy.deepcopy(net)), dpfuse.DataParallel(net)
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    differences = []
    for step in range(3):
        for one in (peer, model):
            one.zero_grad()
            loss_of(one, step, rank).backward()
        if step == 2:
            peer.second.weight.grad = model.second.weight.grad = None
        whole = [optimizer.full_gradient(param) for param in model.parameters()]
        theirs = [param.grad for param in peer.parameters()]
        assert [one is None for one in whole] == [one is None for one in theirs]
        assert not bits_differ([g for g in whole if g is not None], [g for g in theirs if g is not None])
        differences.append(model.grad_norm(order) / peer.grad_norm(order) - 1)
        before = model.clip_grad_norm_(0.01, order)
        peer.clip_grad_norm_(0.01, order)
        assert before > 0.01
        differences.append(model.grad_norm(order) / peer.grad_norm(order) - 1)
    return torch.stack(differences).abs().max().item()


def norms_of_16_bits(rank, size, dtype):
    net = nn.Linear(300, 300).to(dtype)
    peer, model = dpfuse.DataParallel(copy.deepcopy(net)), dpfuse.DataParallel(net)
    dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    for one in (peer, model):
        one(torch.full((4, 300), 2.0, dtype=dtype)).sum().backward()
    return (model.grad_norm(1.0) / peer.grad_norm(1.0) - 1).abs().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_of_16_bits_are_computed_in_32(ranks, dtype):
    assert max(ranks(norms_of_16_bits, dtype)) < 1e-5


@pytest.mark.parametrize("order", [2.0, 1.0, 3.5, math.inf])
def test_norm_and_clipping_are_those_of_whole_gradients(ranks, order):
    for difference in ranks(norms, order):
        assert difference < (1e-6 if order in (2.0, math.inf) else 1e-5)


def test_a_norm_that_is_not_finite_is_an_error_everywhere(rank, size):
    model = dpfuse.DataParallel(network())
    dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    loss_of(model, 0, rank, bad=rank == 0).backward()
    with pytest.raises(DPFuseError, match=r"the norm of order 2.0 of the gradients is nan"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match=r"norm_type must be above 0 with a ShardedOptimizer, got 0.0"):
        model.grad_norm(0)


USES = {
    "add": lambda model, grad: grad + 1,
    "mul": lambda model, grad: grad * 2,
    "mul_": lambda model, grad: grad.mul_(2),
    "clone": lambda model, grad: grad.clone(),
    "linalg_vector_norm": lambda model, grad: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "_local_scalar_dense": lambda model, grad: grad[0, 0].item(),
    "zero_": lambda model, grad: grad.zero_(),
    "_to_copy": lambda model, grad: grad.double(),
    "step": lambda model, grad: optim.SGD(model.parameters(), lr=0.1).step(),
}


def used(rank, size, what):
    model = dpfuse.DataParallel(network())
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    loss_of(model, 0, rank).backward()
    assert "ShardedGradient('second.weight')" in repr(model.second.weight.grad)
    with pytest.raises(DPFuseError, match=r"expected no use of .grad") as caught:
        USES[what](model, model.second.weight.grad)
    optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("what", USES)
def test_no_use_of_a_gradient_goes_unnoticed(ranks, what):
    for text in ranks(used, what):
        assert text.startswith("parameter '")
        assert "optimizer.full_gradient(parameter)" in text


def without_zero_grad(rank, size):
    model = dpfuse.DataParallel(network())
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    loss_of(model, 0, rank).backward()
    optimizer.step()
    with pytest.raises(DPFuseError, match=r"call optimizer.zero_grad\(\) before the next backward"):
        loss_of(model, 1, rank).backward()
    optimizer.zero_grad()
    loss_of(model, 1, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    with model.no_sync():
        loss_of(model, 2, rank).backward()
    with pytest.raises(DPFuseError, match=f"rank {rank}: parameter .* no synchronised backward of the wrapped model"):
        optimizer.step()
    loss_of(model, 3, rank).backward()
    optimizer.step()
    return [*model.parameters()]


def test_a_gradient_that_was_not_averaged_or_not_zeroed_is_an_error(ranks):
    one, other = ranks(without_zero_grad)
    assert not bits_differ(one, other)


def wrapped(**options):
    return dpfuse.DataParallel(network(), **options)


def wrapped_as_ddp():
    return dpfuse.DistributedDataParallel(network())


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4, sparse=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.words(x))


class Normed(optim.SGD):
    """Divides all gradients by their common norm."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        torch._foreach_div_(grads, nn.utils.get_total_norm(grads))
        super().step()


MISTAKES = {
    "bare": (lambda: dpfuse.ShardedOptimizer(network(), optim.SGD, lr=1), TypeError, "ShardedOptimizer: model must be"),
    "vectors for muon": (lambda: dpfuse.ShardedOptimizer(wrapped(), optim.Muon), ValueError, "Muon only supports 2D"),
    "all tensors": (
        lambda: dpfuse.ShardedOptimizer(wrapped(), Normed, lr=0.1),
        ValueError,
        "got Normed, expected .*differently in a matrix and in a part of one; it updates a matrix differently if there",
    ),
    "no class": (
        lambda: dpfuse.ShardedOptimizer(
            model := wrapped(), optim.SGD, [{"params": [*model.parameters()], "optimizer_class": "Muon"}], lr=1
        ),
        TypeError,
        "optimizer_class of a parameter group must be a class of torch.optim.Optimizer, got 'Muon'",
    ),
    "narrow masters": (
        lambda: dpfuse.ShardedOptimizer(wrapped(), optim.SGD, lr=1, master_dtype=torch.float16),
        ValueError,
        "master_dtype must be torch.float32 or None, got torch.float16",
    ),
    "lbfgs": (lambda: dpfuse.ShardedOptimizer(wrapped(), optim.LBFGS), ValueError, "got LBFGS, expected"),
    "keyword": (lambda: dpfuse.ShardedOptimizer(wrapped(), optim.SGD, rate=1), TypeError, "rate"),
    "missing": (
        lambda: dpfuse.ShardedOptimizer(model := wrapped(), optim.SGD, model.last.parameters(), lr=1),
        ValueError,
        "parameter 'scale' and 8 more that the model trains are in no parameter group",
    ),
    "narrow": (
        lambda: dpfuse.ShardedOptimizer(wrapped(wire_dtype=torch.bfloat16), optim.SGD, lr=1),
        ValueError,
        "with wire_dtype=torch.bfloat16, expected one of the two",
    ),
    "metrics": (
        lambda: dpfuse.ShardedOptimizer(wrapped(metrics=True), optim.SGD, lr=1),
        ValueError,
        "with metrics=True, expected one of the two",
    ),
    "sparse": (
        lambda: dpfuse.ShardedOptimizer(dpfuse.DataParallel(Counted()), optim.SGD, lr=1),
        ValueError,
        "the parameter 'words.weight', whose gradient is sparse or complex",
    ),
    "twice": (
        lambda: [dpfuse.ShardedOptimizer(model, optim.SGD, lr=1) for model in [wrapped()] * 2],
        ValueError,
        "with a ShardedOptimizer of the same model, expected one of the two",
    ),
    "weighted": (
        lambda: (dpfuse.ShardedOptimizer(model := wrapped(), optim.SGD, lr=1), model.set_gradient_weight(2)),
        DPFuseError,
        "a weight with a ShardedOptimizer",
    ),
    "joined": (
        lambda: (dpfuse.ShardedOptimizer(model := wrapped_as_ddp(), optim.SGD, lr=1), model.join().__enter__()),
        DPFuseError,
        r"join\(\) was called with a ShardedOptimizer",
    ),
    "hooked": (
        lambda: (
            dpfuse.ShardedOptimizer(model := wrapped_as_ddp(), optim.SGD, lr=1),
            model.register_comm_hook(None, lambda state, bucket: None),
        ),
        DPFuseError,
        "a communication hook was registered with a ShardedOptimizer",
    ),
    "pickled": (
        lambda: pickle.dumps(dpfuse.ShardedOptimizer(wrapped(), optim.SGD, lr=1)),
        DPFuseError,
        "expected its state_dict",
    ),
    "torn state": (
        lambda: dpfuse.ShardedOptimizer(wrapped(), optim.SGD, lr=1).load_state_dict({"state": {}, "param_groups": []}),
        ValueError,
        "number of parameter groups",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_errors_on_every_rank(rank, size, name):
    make, kind, text = MISTAKES[name]
    with pytest.raises(kind, match=text):
        make()
    # Nothing is left behind that would stop the group.
    model = wrapped()
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    loss_of(model, 0, rank).backward()
    optimizer.step()


def different(rank, size, what):
    model = wrapped()
    with pytest.raises(DPFuseError) as caught:
        if what == "rate":
            dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1 + rank)
        elif what == "class":
            dpfuse.ShardedOptimizer(model, optim.SGD if rank else optim.Adagrad, lr=0.1)
        elif rank:
            dpfuse.ShardedOptimizer(model, optim.SGD, lr=-1)
        else:
            dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("rate", "the ShardedOptimizer differs between ranks: rank 1 has 'group 0: lr=1.1', rank 0 has"),
        (
            "class",
            "rank 1 has 'group 0: optimizer_class=torch.optim.sgd.SGD', rank 0 has",
        ),
    ],
)
def test_ranks_with_different_optimizers_are_told(ranks, what, text):
    assert [text in each for each in ranks(different, what)] == [True, True]


def failing_on_one(rank, size):
    model = wrapped()
    with pytest.raises(DPFuseError if rank == 0 else ValueError) as caught:
        dpfuse.ShardedOptimizer(model, optim.SGD, lr=-1.0 if rank else 0.1)
    return str(caught.value)


def test_an_optimizer_that_one_rank_cannot_make_fails_on_all(ranks):
    first, second = ranks(failing_on_one)
    assert first == "the ShardedOptimizer failed on rank 1: Invalid learning rate: -1.0"
    assert second == "Invalid learning rate: -1.0"


class Fails(optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise MemoryError("planted")
        return super().step(closure)


def broken_step(rank, size):
    model = wrapped()
    optimizer = dpfuse.ShardedOptimizer(model, Fails, lr=0.1)
    loss_of(model, 0, rank).backward()
    Fails.fails = rank == 1
    if rank == 1:
        with pytest.raises(DPFuseError, match=r"rank 1: the optimizer has failed .*MemoryError: planted"):
            optimizer.step()
    else:
        optimizer.step()
    Fails.fails = False
    return [param.detach() for param in model.parameters()]


def test_a_step_that_fails_on_one_rank_keeps_no_other_waiting(ranks):
    one, other = ranks(broken_step)
    assert not bits_differ(one, other)


def replaced_memory(rank, size):
    """Programs that assign other memory to a parameter go on as with a plain optimizer."""
    model = wrapped()
    optimizer = dpfuse.ShardedOptimizer(model, optim.AdamW, lr=0.01)
    peer = dpfuse.DataParallel(network())
    plain = optim.AdamW(peer.parameters(), lr=0.01)
    for step in range(4):
        for one, other in ((model, optimizer), (peer, plain)):
            loss_of(one, step, rank).backward()
            if step == 1:
                one.second.weight.data = one.second.weight.data * 0.5
            if step == 2:
                one.module.load_state_dict({k: v * 2 for k, v in one.module.state_dict().items()}, assign=False)
            other.step()
            other.zero_grad()
    ema = copy.deepcopy(model.module)
    assert ema.second.weight.untyped_storage().nbytes() == ema.second.weight.nbytes
    return bits_differ([*model.parameters()], [*peer.parameters()])


@pytest.mark.parametrize("steps", [(True, True), (False, True)], ids=["after a step", "before a step"])
def test_a_gradient_of_an_input_leaves_the_gradients_for_the_step(rank, size, steps):
    """Buckets change at the end of the first backward, so the gradients lie in others than the next ones."""
    net = network()
    net.unused = nn.Linear(2, 2)
    plain = copy.deepcopy(net)
    model = dpfuse.DataParallel(net, find_unused_parameters=True)
    optimizer, plain_optimizer = (
        dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1),
        optim.SGD(plain.parameters(), lr=0.1),
    )
    loss_of(model, 0, rank).backward()
    (sum(loss_of(plain, 0, other) for other in range(size)) / size).backward()
    for step in steps:
        if step:
            optimizer.step()
            plain_optimizer.step()
        x = batch(0, rank, torch.float32).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
    optimizer.step()
    plain_optimizer.step()
    for ours, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, other)


def test_assigned_memory_is_followed(ranks):
    assert ranks(replaced_memory) == [False, False]


def test_without_a_process_group_it_is_the_plain_optimizer():
    with pytest.warns(UserWarning, match="there is no process group"):
        model = dpfuse.DataParallel(network())
    net = copy.deepcopy(model.module)
    sharded = dpfuse.ShardedOptimizer(model, optim.AdamW, lr=0.01)
    plain = optim.AdamW(net.parameters(), lr=0.01)
    for step in range(3):
        for one, optimizer in ((model, sharded), (net, plain)):
            loss_of(one, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = copy.deepcopy(sharded.state_dict())
        sharded.load_state_dict(state)
    assert not bits_differ([*model.parameters()], [*net.parameters()])
    assert state["state"].keys() == plain.state_dict()["state"].keys()


def alarmed(rank, size):
    """What a GPU does where the host does not know yet that a rank has failed: the parts become NaN."""
    model = wrapped()
    dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    norms = []
    for alarm in (False, True):
        model.zero_grad()
        loss_of(model, 0, rank).backward()
        sharding = model._sync._dividing
        sharding.spoil(lambda alarm=alarm: torch.tensor(alarm), sharding.used)
        norms.append(model.grad_norm().item())
    return norms


def test_an_alarm_on_the_device_spoils_all_parts(ranks):
    for first, second in ranks(alarmed):
        assert 0 < first < math.inf
        assert math.isnan(second)


def with_closure(rank, size):
    """The loss that a closure returns, and weights after it, of a sharded and of the plain optimizer."""
    seen = []
    for sharded in (True, False):
        model = wrapped()
        make = dpfuse.ShardedOptimizer if sharded else lambda model, kind, lr: kind(model.parameters(), lr=lr)
        optimizer = make(model, optim.SGD, lr=0.1)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, 0, rank)
            loss.backward()
            return loss.detach()

        losses = [optimizer.step(closure) for _ in range(3)]
        seen.append([*losses, *model.parameters()])
    return bits_differ(*seen)


def test_a_closure_is_called_with_gradients_enabled(ranks):
    assert ranks(with_closure) == [False, False]


def saved_by_others(rank, size, folder):
    """The names in the file of a library that leaves out tensors which share a storage."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = dpfuse.DataParallel(network())
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    model(batch(0, rank, torch.float32)).square().mean().backward()
    optimizer.step()
    path = f"{folder}/{rank}.safetensors"
    safetensors.save_model(model.module, path)
    loaded = safetensors.load_file(path)
    return bits_differ([*model.module.state_dict().values()], [loaded[key] for key in model.module.state_dict()])


def test_each_parameter_has_a_storage_of_its_own(ranks, tmp_path):
    pytest.importorskip("safetensors")
    assert ranks(saved_by_others, str(tmp_path)) == [False, False]


def test_a_lookup_of_a_state_is_an_error(rank, size):
    model = dpfuse.DataParallel(network())
    optimizer = dpfuse.ShardedOptimizer(model, optim.SGD, lr=0.1)
    with pytest.raises(DPFuseError, match=r"state of a parameter was read in .*Call state_dict\(\) on every rank"):
        optimizer.state[model.module.scale]
