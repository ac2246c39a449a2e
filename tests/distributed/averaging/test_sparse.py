"""Embeddings with sparse gradients: rows are gathered, and the mean is that of dense ones."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dpfuse

ROWS, WIDTH = 11, 4


class Lookup(nn.Module):
    def __init__(self, sparse=True, dtype=torch.float32):
        super().__init__()
        self.first = nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=dtype)
        self.second = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, mode="sum", dtype=dtype)
        self.head = nn.Linear(WIDTH, 2, dtype=dtype)

    def forward(self, words, use_second=True):
        hidden = self.first(words).mean(1)
        return self.head(hidden + self.second(words) if use_second else hidden)


def words_of(rank, step):
    return torch.randint(ROWS, (3, 2 + rank), generator=torch.Generator().manual_seed(100 * step + rank))


def dense(grad):
    return grad.to_dense() if grad.layout is torch.sparse_coo else grad


def test_sparse_training_gives_the_bits_of_ddp(rank, size):
    torch.manual_seed(1)
    net = Lookup()
    twin = DistributedDataParallel(copy.deepcopy(net))
    model = dpfuse.DataParallel(net)
    assert [bucket.sparse for bucket in model.bucket_plan.buckets] == [False, True, True]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, foreach=False) for m in (model, twin)]
    for step in range(8):
        for wrapper, optimizer in zip((model, twin), optimizers, strict=True):
            wrapper(words_of(rank, step)).square().sum().backward()
            optimizer.step()
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert ours.grad.layout == theirs.grad.layout
            assert torch.equal(dense(ours.grad), dense(theirs.grad)), (step, name)
            assert torch.equal(ours, theirs), (step, name)
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float64},
        {"gradient_scale": 1.0, "gradient_as_bucket_view": False},
        {"comm_buffer_size": 0, "last_comm_buffer_size": 0},
    ],
    ids=["default", "float64", "sum", "every parameter alone"],
)
def test_sparse_gradients_are_those_of_the_dense_model(rank, size, options):
    dtype = options.pop("dtype", torch.float32)
    torch.manual_seed(1)
    sparse = dpfuse.DataParallel(Lookup(dtype=dtype), find_unused_parameters=True, **options)
    twin = Lookup(sparse=False, dtype=dtype)
    twin.load_state_dict(sparse.state_dict())
    plain = dpfuse.DataParallel(twin, find_unused_parameters=True, **options)
    for step in range(4):
        # Accumulated locally first; then one rank, or every rank, leaves the second table out.
        for model in (sparse, plain):
            with model.no_sync():
                model(words_of(rank, step), use_second=False).square().sum().backward()
            model(words_of(rank, step + 50), use_second=step % 2 == 0 and rank == 0).square().sum().backward()
        for ours, theirs in zip(sparse.parameters(), plain.parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None
            else:
                # Rows that occur twice are added in another order than in a dense gradient.
                torch.testing.assert_close(dense(ours.grad), theirs.grad)
                together = [torch.empty_like(theirs.grad) for _ in range(size)]
                dist.all_gather(together, dense(ours.grad).contiguous())
                assert all(torch.equal(part, together[0]) for part in together)
        sparse.zero_grad()
        plain.zero_grad()


def test_rows_travel_in_the_wires_type(rank, size):
    for wire, dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        table = nn.Embedding(3, 2, sparse=True, dtype=dtype)
        model = dpfuse.DataParallel(table, wire_dtype=wire)
        factor = torch.tensor([1.001, 3.0], dtype=dtype)
        (model(torch.tensor([0, 1 + rank])) * factor).sum().backward()
        half = (factor.float() / 2).to(wire)
        expected = torch.stack([half + half, half, half]).to(dtype)
        assert table.weight.grad.is_coalesced()
        assert torch.equal(table.weight.grad.to_dense(), expected)


class Tied(nn.Module):
    """The table is the output layer too: its gradient is sparse and dense, added up."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, words):
        return self.table(words).mean(1) @ self.table.weight.T


def test_a_gradient_that_is_dense_stays_dense(rank, size):
    torch.manual_seed(0)
    model = dpfuse.DataParallel(Tied())
    bare = [copy.deepcopy(model.module) for _ in range(size)]
    model(words_of(rank, 0)).square().sum().backward()
    for r, twin in enumerate(bare):
        twin(words_of(r, 0)).square().sum().backward()
    assert model.table.weight.grad.layout is torch.strided
    torch.testing.assert_close(model.table.weight.grad, (bare[0].table.weight.grad + bare[1].table.weight.grad) / 2)


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("planted")


class OnlyATable(nn.Module):
    """Its one bucket is sparse, so that carries the tail."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)

    def forward(self, words, blow=False):
        hidden = self.table(words)
        return Fuse.apply(hidden) if blow else hidden


def test_ranks_must_agree_on_what_is_sparse(rank, size):
    with pytest.raises(dpfuse.DPFuseError, match=r"weight.* has sparse gradients"):
        dpfuse.DataParallel(nn.Embedding(4, 2, sparse=rank == 0))


def test_a_failure_is_told_where_only_sparse_buckets_are(rank, size):
    model = dpfuse.DataParallel(OnlyATable())
    words = torch.tensor([rank, 3])
    if rank == 1:
        with pytest.raises(KeyError, match="planted"):
            model(words, blow=True).sum().backward()
    else:
        with pytest.raises(dpfuse.DPFuseError, match="failed on rank 1 of 2"):
            model(words).sum().backward()
    model.zero_grad()
    for _ in range(2):
        model(words).sum().backward()
        assert model.table.weight.grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0, 1]
        model.zero_grad()


def test_a_gradient_that_is_no_set_of_rows_is_refused_and_its_peer_hears_of_it(rank, size):
    model = dpfuse.DataParallel(OnlyATable())
    words = torch.tensor([rank, 3])
    for _ in range(2):
        model(words).sum().backward()
        model.zero_grad()
    if rank == 1:
        elements = torch.sparse_coo_tensor([[0], [1]], [1.0], (4, 2), check_invariants=True)
        model.table.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", elements))
        expected = r"rank 1 could not pack its gradients: parameter 'table.weight' has a gradient of layout"
    else:
        expected = r"failed on rank 1 of 2"
    with pytest.raises(dpfuse.DPFuseError, match=expected):
        model(words).sum().backward()


def test_what_travels_is_the_rows_not_the_table(rank, size):
    model = dpfuse.DataParallel(nn.Embedding(10_000, 16, sparse=True))
    with dpfuse.time_communication(model) as times:
        model(torch.tensor([5, 7, 7, rank])).sum().backward()
    assert times.steps == 1
    # At most four rows of an index and 16 floats, and the counts with the tail.
    assert 0 < times.nbytes <= 4 * (8 + 64) + 8 * 2 + 4 * model.reducer.buckets[-1].parts.report.numel


def test_the_rows_of_all_ranks_are_freed_once_they_are_delivered(rank, size):
    def bytes_of_rows():
        return [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype is torch.uint8]

    model = dpfuse.DataParallel(nn.Embedding(50, 8, sparse=True))
    others = bytes_of_rows()  # of tests before
    known = set(map(id, others))
    for step in range(3):
        model(torch.arange(step, 50, device="cpu")).sum().backward()
        model.zero_grad()
        assert sum(each.nbytes for each in bytes_of_rows() if id(each) not in known) < 50 * 8 * 4


def test_tables_of_every_width_and_ranks_without_rows(rank, size):
    for width in (0, 1, 2, 3):
        for wire in (None, torch.bfloat16):
            for rows in ([], [5]), ([5], []), ([], []), ([4, 4, 6], [6]):  # of rank 0 and of rank 1
                model = dpfuse.DataParallel(nn.EmbeddingBag(9, width, mode="sum", sparse=True), wire_dtype=wire)
                words = torch.tensor(rows[rank], dtype=torch.long)
                for _ in range(2):
                    model.zero_grad()
                    model(words, torch.tensor([0])).sum().backward()
                    expected = torch.zeros(9, width)
                    for row in rows[0] + rows[1]:
                        expected[row] += 0.5
                    assert torch.equal(model.weight.grad.to_dense(), expected), (width, wire, rows)


def test_a_rank_that_does_not_use_a_table_gets_the_mean(rank, size):
    """The gradient is None there, and the row's size is the least possible."""
    model = dpfuse.DataParallel(Lookup(), find_unused_parameters=True)
    narrow = dpfuse.DataParallel(
        nn.ModuleList([nn.Embedding(9, 1, sparse=True), nn.Linear(1, 1)]), find_unused_parameters=True
    )
    for _ in range(3):
        model.zero_grad()
        model(words_of(rank, 0), use_second=rank == 0).sum().backward()
        assert model.second.weight.grad.is_coalesced()
        narrow.zero_grad()
        table, head = narrow.module
        hidden = table(torch.tensor([4])) if rank == 0 else torch.ones(1, 1)
        head(hidden).sum().backward()
        assert table.weight.grad.to_dense()[4].item() == head.weight.item() / 2


def test_a_gradient_that_is_dense_on_one_rank_is_dense_on_all(rank, size):
    model = dpfuse.DataParallel(nn.Embedding(4, 2, sparse=True))
    for dense_rank in (0, 1):
        model.zero_grad()
        if rank == dense_rank:
            (model.module.weight.sum() * 2).backward()  # synchronised too: every backward outside no_sync() is
        else:
            model(torch.tensor([3])).sum().backward()
        assert model.weight.grad.layout is torch.strided
        assert model.weight.grad[:, 0].tolist() == [1, 1, 1, 1.5]


@pytest.mark.ranks(size=3)
def test_rows_are_added_up_in_the_wider_type(rank, size):
    model = dpfuse.DataParallel(
        nn.Embedding(2, 1, sparse=True, dtype=torch.float16), gradient_scale=1.0, wire_dtype=torch.float32
    )
    (model(torch.tensor([0])) * [40000.0, 40000.0, -40000.0][rank]).sum().backward()
    assert model.weight.grad.to_dense().tolist() == [[40000.0], [0.0]]


class SparseAttention(nn.Module):
    """Its flag says nothing about gradients."""

    def __init__(self):
        super().__init__()
        self.sparse = True
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.mix = nn.Parameter(torch.eye(WIDTH))
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, words):
        return self.table(words).mean(1) @ self.mix * self.scale


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_a_flag_of_a_users_module_is_none_of_an_embedding(rank, size, options):
    torch.manual_seed(1)
    net = SparseAttention()
    models = [DistributedDataParallel(copy.deepcopy(net), **options)]
    models += [dpfuse.DistributedDataParallel(copy.deepcopy(net), **options), dpfuse.DataParallel(net)]
    assert not any(spec.sparse for spec in models[-1].bucket_plan.specs)
    for step in range(3):
        for model in models:
            model.zero_grad()
            model(words_of(rank, step)).square().sum().backward()
        for grads in zip(*([param.grad for param in model.module.parameters()] for model in models), strict=True):
            assert torch.equal(grads[0], grads[1])
            assert torch.equal(grads[0], grads[2])


class ScaledEmbedding(nn.Embedding):
    """A table with sparse gradients beside parameters with dense ones. torch's class takes none of it."""

    def __init__(self):
        super().__init__(ROWS, WIDTH, sparse=True)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, words):
        return super().forward(words).mean(1) * self.scale + self.bias


class Table(nn.Module):
    """No class of torch, but it has the attributes of one."""

    def __init__(self):
        super().__init__()
        self.sparse, self.num_embeddings = True, ROWS
        self.values = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, words):
        return nn.functional.embedding(words, self.values, sparse=True).mean(1)


@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
@pytest.mark.parametrize("kind", [ScaledEmbedding, Table])
def test_tables_of_other_embeddings_have_sparse_gradients(rank, size, kind, face):
    torch.manual_seed(1)
    net = kind()
    bare, model = copy.deepcopy(net), face(net)
    tables = [spec for spec in model.bucket_plan.specs if spec.sparse]
    assert len(tables) == 1
    for step in range(3):
        for module in (bare, model):
            module.zero_grad()
            module(words_of(rank, step)).square().sum().backward()
        for (name, got), local in zip(net.named_parameters(), bare.parameters(), strict=True):
            assert (got.grad.layout is torch.sparse_coo) == (name == tables[0].name)
            mean = dense(local.grad) / size
            dist.all_reduce(mean)
            torch.testing.assert_close(dense(got.grad), mean)
