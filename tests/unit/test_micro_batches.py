"""The tree of a fixed number of micro-batches: each deal adds in the same order, in little memory."""

from __future__ import annotations

import math
import random

import pytest
import torch

from dpfuse.engine.micro_batches import MicroBatches, Node, Stack
from dpfuse.engine.subtrees import Subtrees
from dpfuse_kernels import Slot, flatten

COUNTS = range(1, 71)
RANKS = range(1, 21)
DEALS = [(count, ranks) for count in COUNTS for ranks in RANKS if ranks <= count]
SLOTS = [Slot("one", 0, (3,), (1,)), Slot("two", 3, (2, 2), (2, 1))]
NUMEL = 7


def whole(count):
    """Return the size of the root."""
    return 1 << (count - 1).bit_length()


def tree(count, leaf, add, first=0, size=None):
    """The oracle: a node is that of its left half, to which that of its right half is added if there is one."""
    size = size or whole(count)
    if size == 1:
        return leaf(first)
    left = tree(count, leaf, add, first, size // 2)
    middle = first + size // 2
    return left if middle >= count else add(left, tree(count, leaf, add, middle, size // 2))


def written(left, right):
    return f"({left}+{right})"


def expression(count, first=0, size=None):
    return tree(count, str, written, first, size)


def pushed(stack, nodes, values):
    """Push nodes with their values, make the additions that the stack asks for, and return what is on it."""
    waiting = []
    for node, value in zip(nodes, values, strict=True):
        waiting.append(value)
        for _ in range(stack.push(node)):
            right = waiting.pop()
            waiting[-1] = written(waiting[-1], right)
        assert len(waiting) == len(stack.nodes)
    return waiting


def test_the_oracle_is_the_tree_that_the_guide_draws():
    assert expression(1) == "0"
    assert expression(6) == "(((0+1)+(2+3))+(4+5))"
    assert expression(7) == "(((0+1)+(2+3))+((4+5)+6))"


def test_each_deal_adds_in_the_order_of_the_same_tree():
    for count, ranks in DEALS:
        deal = MicroBatches(count, ranks)
        nodes, values = [], []
        for rank in range(ranks):
            own = [Node(number, 1) for number in deal.of(rank)]
            values += pushed(Stack(count), own, map(str, deal.of(rank)))
            nodes += deal.subtrees(rank)
        assert pushed(Stack(count), nodes, values) == [expression(count)], (count, ranks)


def test_ranges_are_contiguous_and_as_equal_as_they_can_be():
    for count, ranks in DEALS:
        ranges = [MicroBatches(count, ranks).of(rank) for rank in range(ranks)]
        assert [number for own in ranges for number in own] == list(range(count))
        lengths = [len(own) for own in ranges]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)


def least_nodes(count, own):
    """The oracle: how many nodes cover a range, if the largest are taken whose micro-batches all lie in it."""

    def cover(first, size):
        inside = [number for number in range(first, min(first + size, count)) if number in own]
        if not inside:
            return 0
        if len(inside) == min(first + size, count) - first:
            return 1
        return cover(first, size // 2) + cover(first + size // 2, size // 2)

    return cover(0, whole(count))


def test_a_rank_sends_the_fewest_subtrees_that_cover_its_range():
    for count, ranks in DEALS:
        deal = MicroBatches(count, ranks)
        for rank in range(ranks):
            subtrees = deal.subtrees(rank)
            assert len(subtrees) == least_nodes(count, deal.of(rank)), (count, ranks, rank)
            covered = [n for first, size in subtrees for n in range(first, min(first + size, count))]
            assert covered == list(deal.of(rank))


def test_a_rank_sends_one_subtree_where_the_deal_is_even_and_its_share_a_power_of_two():
    for count, ranks in ((4, 4), (8, 4), (8, 2), (8, 1), (6, 3), (7, 1), (32, 8)):
        assert [len(MicroBatches(count, ranks).subtrees(rank)) for rank in range(ranks)] == [1] * ranks


def test_a_rank_never_holds_more_nodes_than_the_logarithm():
    for count, ranks in DEALS:
        deal = MicroBatches(count, ranks)
        for rank in range(ranks):
            most = deal.most_nodes(rank)
            assert most >= len(deal.subtrees(rank))
            if count <= 48:
                assert most <= max(1, math.ceil(math.log2(count))), (count, ranks, rank)


class Memory:
    """Allocates the nodes, filled with what no sum may contain, and counts them."""

    def __init__(self):
        self.allocated = []

    def __call__(self, numel, dtype):
        self.allocated.append(torch.full((numel,), math.nan, dtype=dtype))
        return self.allocated[-1]


def gradients(number, dtype, generator):
    """Gradients of such different sizes that each order of addition has other bits."""
    factor = 10.0 ** random.Random(number).randint(-3, 3)
    return [(torch.randn(slot.shape, generator=generator) * factor).to(dtype) for slot in SLOTS]


def fill(subtrees, own, leaves, sparse):
    """Give the gradients of these micro-batches to the tree, as the feed does it."""
    for number in own:
        if number in leaves or number == own[-1] or not sparse:
            adds = subtrees.open(number)
            if number in leaves:
                flatten(leaves[number], subtrees.leaf, accumulate=adds)
            elif not adds:
                subtrees.leaf.flat.fill_(-0.0)
    subtrees.close()


def sum_of(leaves, first, size, count, dtype):
    """The oracle: the sum of those micro-batches of a node that have gradients, None if there is none."""

    def leaf(number):
        if number not in leaves:
            return None
        return torch.cat([grad.flatten() for grad in leaves[number]]).to(dtype)

    def add(left, right):
        if left is None or right is None:
            return right if left is None else left
        return left + right

    return tree(count, leaf, add, first, size)


def same_bits(one, other):
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()


def assert_subtrees_hold_the_sums(count, ranks, leaves, dtype=torch.float32, sparse=False):
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    deal = MicroBatches(count, ranks)
    for rank in range(ranks):
        memory = Memory()
        subtrees = Subtrees(deal, rank, NUMEL, SLOTS, dtype, memory)
        for _ in range(2):  # the second step finds in the memory what the first one left there
            fill(subtrees, deal.of(rank), leaves, sparse)
            assert len(memory.allocated) == deal.most_nodes(rank)
            for node, own in zip(subtrees.nodes, deal.subtrees(rank), strict=True):
                expected = sum_of(leaves, *own, count, sums)
                expected = torch.full((NUMEL,), -0.0, dtype=sums) if expected is None else expected
                assert same_bits(node, expected), (count, ranks, rank, own)
            subtrees.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_subtrees_hold_the_sums_of_the_tree_in_the_memory_that_was_promised(dtype):
    for count in (1, 2, 3, 5, 6, 8, 13, 16, 31):
        generator = torch.Generator().manual_seed(count)
        leaves = {number: gradients(number, dtype, generator) for number in range(count)}
        for ranks in {1, 2, 3, 4, count} & set(range(1, count + 1)):
            assert_subtrees_hold_the_sums(count, ranks, leaves, dtype)


@pytest.mark.parametrize("sparse", [True, False], ids=["never opened", "opened without a gradient"])
def test_a_micro_batch_without_gradients_in_the_bucket_is_skipped(sparse):
    for seed in range(40):
        rng = random.Random(seed)
        count = rng.randint(2, 20)
        generator = torch.Generator().manual_seed(seed)
        kept = [number for number in range(count) if rng.random() < 0.5]
        leaves = {number: gradients(number, torch.float32, generator) for number in kept}
        assert_subtrees_hold_the_sums(count, rng.randint(1, min(4, count)), leaves, sparse=sparse)


@pytest.mark.parametrize("sparse", [True, False], ids=["never opened", "opened without a gradient"])
def test_a_sum_of_negative_zeros_is_a_negative_zero(sparse):
    negative = [torch.full(slot.shape, -0.0) for slot in SLOTS]
    for count in (5, 8):
        for ranks in (1, 2, 3):
            for kept in ((1,), (0, 4), (3, 4), (2,)):
                leaves = dict.fromkeys(kept, negative)
                assert_subtrees_hold_the_sums(count, ranks, leaves, sparse=sparse)


def test_copies_of_a_bucket_grow_with_the_logarithm_of_the_number_of_micro_batches():
    for count, ranks in ((8, 1), (8, 3), (32, 1), (32, 5), (48, 7)):
        deal = MicroBatches(count, ranks)
        for rank in range(ranks):
            memory = Memory()
            Subtrees(deal, rank, NUMEL, SLOTS, torch.float32, memory)
            with_buffer = len(memory.allocated) + 1
            assert with_buffer <= math.ceil(math.log2(count)) + 1
            assert {each.numel() for each in memory.allocated} == {NUMEL}


def test_after_an_error_in_the_tree_the_next_call_raises_no_other_one(monkeypatch):
    """A backward that fails there is completed later, and its own exception must reach the program."""

    def fail(stack, node):
        raise MemoryError

    deal = MicroBatches(4, 1)
    generator = torch.Generator().manual_seed(0)
    leaves = {number: gradients(number, torch.float32, generator) for number in range(4)}
    subtrees = Subtrees(deal, 0, NUMEL, SLOTS, torch.float32, Memory())
    fill(subtrees, [0, 1], leaves, sparse=False)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Stack, "would_join", fail)
        subtrees.open(2)
    fill(subtrees, [2, 3], leaves, sparse=False)
    assert same_bits(subtrees.nodes[0], sum_of(leaves, 0, 4, 4, torch.float32))
    subtrees.clear()
    subtrees.open(0)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Stack, "push", fail)
        subtrees.close()
    subtrees.close()
    subtrees.clear()
    fill(subtrees, range(4), leaves, sparse=False)
    assert same_bits(subtrees.nodes[0], sum_of(leaves, 0, 4, 4, torch.float32))
