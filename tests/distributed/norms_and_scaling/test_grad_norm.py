"""grad_norm and clip_grad_norm_ against torch's on copies of the gradients, whatever was done to `.grad` before."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.distributed.in_place import ALL, NONE, large_from

SOME = 1000  # bytes from which a gradient is large: one of the four is


class Net(nn.Module):
    """Odd sizes, so that buckets have padding; one parameter is used on request only."""

    def __init__(self, dtype=torch.float32, sparse=False):
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, 5, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(7, dtype=dtype))
        self.rows = nn.Parameter(torch.randn(41, 30, dtype=dtype).t())
        self.spare = nn.Parameter(torch.randn(9, dtype=dtype))
        self.table = nn.Embedding(6, 3, sparse=True, dtype=dtype) if sparse else None

    def forward(self, seed, spare=True):
        generator = torch.Generator().manual_seed(seed)
        params = [self.first, self.bias, self.rows, *([self.spare] if spare else [])]
        total = sum((torch.randn(p.shape, generator=generator).to(p.dtype) * p).sum() for p in params)
        if self.table is not None:
            total = total + (self.table(torch.tensor([seed % 5, 5, 5])) * 3).sum()
        return total.abs() if total.is_complex() else total


FACES = {
    "views": lambda net, **options: dpfuse.DataParallel(net, **options),
    "private": lambda net, **options: dpfuse.DataParallel(net, gradient_as_bucket_view=False, **options),
    "bucket each": lambda net, **options: dpfuse.DataParallel(net, None, 0, 0, **options),
    "half wire": lambda net, **options: dpfuse.DataParallel(net, wire_dtype=torch.float16, **options),
    "ddp": lambda net, **options: dpfuse.DistributedDataParallel(net, **options),
    "ddp views": lambda net, **options: dpfuse.DistributedDataParallel(net, gradient_as_bucket_view=True, **options),
}


def trained(face, rank, net=None, steps=3, **options):
    model = FACES[face](Net() if net is None else net, **options)
    for step in range(steps):
        model.zero_grad()
        model(10 * step + rank).backward()
    return model


def copies(model):
    """Parameters with the same gradients that nobody else has."""
    twins = []
    for param in model.module.parameters():
        twin = nn.Parameter(param.detach().clone())
        twin.grad = None if param.grad is None else param.grad.detach().clone()
        twins.append(twin)
    return twins


def dense(grad):
    return grad.to_dense() if grad.layout is not torch.strided else grad


def exact_norm(twins, order=2.0):
    """In float64, of all gradients as one vector."""
    parts = [dense(twin.grad).flatten() for twin in twins if twin.grad is not None]
    return float(torch.linalg.vector_norm(torch.cat([part.abs().double() for part in parts]), order)) if parts else 0.0


def check(model, max_norm=None, norm_type=2.0):
    """Measure and clip, here and with torch on copies; halves the norm unless told otherwise."""
    twins = copies(model)
    expected = exact_norm(twins, norm_type)
    if max_norm is None:
        max_norm = expected / 2
    norm = model.grad_norm(norm_type)
    assert norm.shape == ()
    assert float(norm) == pytest.approx(expected, rel=1e-6, nan_ok=True)
    before = [None if twin.grad is None else twin.grad.clone() for twin in twins]
    clipped = model.clip_grad_norm_(max_norm, norm_type)
    assert torch.equal(clipped, norm) or bool(clipped.isnan())
    theirs = torch.nn.utils.clip_grad_norm_(twins, max_norm, norm_type)
    assert float(clipped) == pytest.approx(float(theirs), rel=1e-6, nan_ok=True)
    changed = False
    for param, twin, old in zip(model.module.parameters(), twins, before, strict=True):
        assert (param.grad is None) == (twin.grad is None)
        if twin.grad is not None:
            torch.testing.assert_close(param.grad, twin.grad, rtol=1e-6, atol=0, equal_nan=True)
            changed |= not torch.equal(param.grad, old)
    return changed


def replaced(model):
    model.module.rows.grad = torch.ones(30, 41)


def another_place(model):
    model.module.rows.grad.data = torch.full((30, 41), 2.0)


def swapped(model):
    """Two gradients that both are views, each of the other's place."""
    module = model.module
    one = nn.Parameter(torch.zeros(15))
    module.first.grad, one.grad = module.first.grad * 3, None


def smaller(model):
    model.module.first.grad = model.module.first.grad.expand(3, 5).clone().t().contiguous().t()


def unscaled(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


def accumulated(model):
    with model.no_sync():
        model(5).backward()
        model(6).backward()


def by_hand(model):
    accumulated(model)
    dpfuse.fused_allreduce_gradients(list(model.module.parameters()))


CHANGES = {
    "untouched": lambda model: None,
    "zeroed": lambda model: model.zero_grad(set_to_none=False),
    "one zeroed": lambda model: model.module.bias.grad.zero_(),
    "one taken away": lambda model: setattr(model.module.bias, "grad", None),
    "scaled": lambda model: torch._foreach_mul_([param.grad for param in model.module.parameters()], 3.0),
    "replaced": replaced,
    "moved": another_place,
    "swapped": swapped,
    "other strides": smaller,
    "unscaled": unscaled,
    "accumulated": accumulated,
    "by hand": by_hand,
    "with a graph": lambda model: [param.grad.requires_grad_() for param in model.module.parameters()],
    "copied": lambda model: [setattr(p, "grad", p.grad.clone()) for p in model.module.parameters()],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("face", "large"), [*((face, NONE) for face in FACES), ("private", SOME), ("ddp", ALL)])
def test_norm_and_clipping_are_torchs_whatever_was_done_to_the_gradients(rank, size, face, large):
    with large_from(large):
        model = trained(face, rank)
        assert check(model)
        assert check(model, exact_norm(copies(model)) * 0.9999), "a little is not nothing"
        assert not check(model, 1e9), "below the limit nothing changes"
        for name, change in CHANGES.items():
            model.zero_grad()
            model(rank).backward()
            change(model)
            assert check(model) or name == "zeroed", name
        # And the next steps are as if nothing had been done.
        model.zero_grad()
        model(rank).backward()
        twin = copy.deepcopy(model.module)
        twin.zero_grad()
        local = torch.autograd.grad(twin(rank), list(twin.parameters()))
        for param, grad in zip(model.module.parameters(), local, strict=True):
            mean = grad.contiguous() / size
            dist.all_reduce(mean)
            torch.testing.assert_close(param.grad, mean, rtol=1e-6, atol=2e-3 if face == "half wire" else 1e-6)
        assert check(model)


@pytest.mark.parametrize("face", ["views", "private"])
def test_gradients_of_the_first_step_count_once(rank, size, face):
    """The first step's gradients lie in buffers that were rebuilt behind it."""
    for steps in (1, 2):
        assert check(trained(face, rank, steps=steps))


@pytest.mark.parametrize("face", ["views", "private"])
def test_norms_after_unusual_backwards(rank, size, face):
    model = trained(face, rank, find_unused_parameters=True)
    for step in range(4):  # used nowhere, by one rank, by all
        for param in model.parameters():
            param.grad = None
        model(10 * step + rank, spare=step % 2 == 0 and rank <= step // 2).backward()
        check(model)
    # Kept from before, and in no backward since.
    for step in range(2):
        model(step + rank, spare=False).backward()
        check(model)
    # A backward that died, and the one after.
    handle = model.module.first.register_hook(lambda grad: (_ for _ in ()).throw(KeyError("planted")))
    with pytest.raises(KeyError, match="planted"):
        model(7).backward()
    handle.remove()
    model.zero_grad()
    model(8 + rank).backward()
    assert check(model)
    # Weights are one more factor after the sums.
    model.set_gradient_weight(1 + rank)
    model.zero_grad()
    model(9 + rank).backward()
    assert check(model)
    # Added up once more by hand, where they lie or in other buckets.
    for large in (1, 1 << 60):
        with large_from(large):
            model.zero_grad()
            model(10 + rank).backward()
            before = float(model.grad_norm())
            dpfuse.fused_allreduce_gradients(list(model.parameters()), scale=1.0)
            assert float(model.grad_norm()) == pytest.approx(size * before, rel=1e-6)
    # A parameter that comes.
    model.module.extra = nn.Parameter(torch.ones(3))
    model.module.extra.grad = torch.full((3,), 5.0)
    assert check(model)


def test_asking_is_no_write_to_what_a_graph_has_saved(group):
    model = trained("views", 0)
    factor = torch.ones((), requires_grad=True)
    saved = (model.module.first.grad * factor).sum()
    model.grad_norm()
    saved.backward()
    assert factor.grad is not None


@pytest.mark.parametrize(
    ("dtype", "sparse"),
    [
        (torch.float64, False),
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.complex64, False),
        (torch.complex128, False),
        (torch.float32, True),
    ],
)
def test_other_kinds_of_gradients(rank, size, dtype, sparse):
    for face in ("views", "private"):
        model = trained(face, rank, Net(dtype, sparse))
        twins = copies(model)
        norm = model.grad_norm()
        assert norm.dtype == (torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32)
        exact = exact_norm(twins)
        # Of 16-bit gradients torch rounds the norm to 16 bits, so it is compared with what is exact.
        assert float(norm) == pytest.approx(exact, rel=1e-6)
        assert torch.equal(model.clip_grad_norm_(exact / 2), norm)
        factor = (exact / 2) / (exact + 1e-6)
        for param, twin in zip(model.module.parameters(), twins, strict=True):
            close = 1e-6 if dtype.itemsize > 2 else 1e-2
            torch.testing.assert_close(dense(param.grad), dense(twin.grad) * factor, rtol=close, atol=0)
        assert float(model.grad_norm()) == pytest.approx(exact / 2, rel=1e-5 if dtype.itemsize > 2 else 1e-2)


def test_dtypes_may_be_mixed(rank, size):
    net = nn.ModuleDict({"narrow": Net(torch.bfloat16), "wide": Net(torch.float64), "pairs": Net(torch.complex64)})
    net.forward = lambda seed: sum(part(seed).double() for part in net.values())
    model = dpfuse.DataParallel(net)
    for step in range(3):
        model.zero_grad()
        model(10 * step + rank).backward()
    twins = copies(model)
    norm = model.grad_norm()
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(exact_norm(twins), rel=1e-6)
    for order in (1.0, 3.0, math.inf):
        assert float(model.grad_norm(order)) == pytest.approx(exact_norm(twins, order), rel=1e-5)
    model.clip_grad_norm_(1.0)
    assert float(model.grad_norm()) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("order", [1.0, 0.5, 3.0, math.inf])
def test_norms_of_other_orders(rank, size, order):
    for face in ("views", "private"):
        check(trained(face, rank), norm_type=order)
    model = trained("views", rank, Net(sparse=True))
    assert float(model.grad_norm(order)) == pytest.approx(exact_norm(copies(model), order), rel=1e-5)


@pytest.mark.parametrize("face", FACES)
def test_every_parameter_with_a_gradient_counts_and_no_other(rank, size, face):
    """Without gradient, frozen with one, ignored with one, unused on one rank."""
    net = Net()
    net.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    net.frozen.grad = torch.full((4,), 5.0)
    net.ignored = nn.Parameter(torch.ones(4))
    if face.startswith("ddp"):
        dpfuse.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["ignored"])
        net.ignored.grad = torch.full((4,), 6.0)
    model = FACES[face](net, find_unused_parameters=True)
    for step in range(4):
        for param in (net.first, net.bias, net.rows, net.spare):
            param.grad = None
        model(10 * step + rank, spare=step % 2 == 0 and rank == 0).backward()
        assert (net.spare.grad is None) == (step % 2 == 1)
        check(model)
    for param in model.parameters():
        param.grad = None
    assert model.grad_norm().item() == 0.0
    assert model.clip_grad_norm_(1.0).item() == 0.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite(rank, size, value):
    for face in ("views", "bucket each", "private"):
        model = trained(face, rank)
        model.module.bias.grad[3] = value
        with pytest.raises(dpfuse.DPFuseError, match="error_if_nonfinite=False"):
            model.clip_grad_norm_(1.0, error_if_nonfinite=True)
        with pytest.raises(RuntimeError, match=r"is (inf|nan), expected a finite one"):
            model.grad_norm(error_if_nonfinite=True)
        finite = model.module.first.grad.clone()
        assert finite.isfinite().all(), "nothing was scaled"
        check(model, 1.0)
        # What clipping did to the gradients it did not do to the padding between them.
        for _ in range(2):
            model.zero_grad()
            model(rank).backward()
            assert check(model)


class Named(nn.Module):
    """A module with a method and a parameter of the same names as the wrapper's."""

    def __init__(self):
        super().__init__()
        self.grad_norm = nn.Parameter(torch.ones(3))

    def clip_grad_norm_(self):
        return "mine"

    def forward(self, x):
        return (x * self.grad_norm).sum()


@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
def test_the_wrappers_names_win_and_the_modules_stay(group, face):
    model = face(Named())
    for _ in range(2):
        model.zero_grad()
        model(torch.full((3,), 2.0)).backward()
    assert model.grad_norm().item() == pytest.approx(math.sqrt(12), rel=1e-6)
    model.clip_grad_norm_(1.0)
    assert model.grad_norm().item() == pytest.approx(1.0, rel=1e-5)
    assert model.module.clip_grad_norm_() == "mine"
    assert model.module.grad_norm.shape == (3,)


def test_without_a_process_group_it_measures_the_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = dpfuse.DataParallel(Net())
    model(1).backward()
    assert check(model)


def changed(rank, size):
    """Parameters that came, went or moved since the last forward."""
    model = trained("views", rank)
    module = model.module
    old = module.bias
    module.bias = nn.Parameter(torch.ones(7))
    assert old.grad is not None
    check(model)
    module.bias.grad = torch.full((7,), 9.0)
    check(model)
    for step in range(2):
        model.zero_grad()
        model(step + rank).backward()
        check(model)
    module.bias.requires_grad_(False)
    check(model)
    model.double()
    check(model)


def test_a_module_that_was_changed(ranks):
    ranks(changed)
