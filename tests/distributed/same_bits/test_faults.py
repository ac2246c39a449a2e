"""A rank that makes a mistake in its loop over micro-batches, on real processes: each rank names it, and soon."""

from __future__ import annotations

import re

import pytest

from tests.distributed.processes import SCRIPTS, free_port, start
from tests.patience import patience

pytestmark = pytest.mark.timeout(300)

SIZE = 3
SOON = 5.0  # seconds from the mistake to the error of each peer; a silence would be noticed after 60

# What rank 1 does, and what it and its peers are told of that.
ENDED = r"rank 1 ended with "
STEPPED = r"SGD\.step\(\) was called at micro-batch 3, before the gradients of all of 3, 4"
TWICE = r"after that of micro-batch {} had ended, expected one backward for each micro-batch"
SKIPPED = r"micro-batch {} had no backward that has reached a parameter, expected one for each"
STEPS_DIFFER = r"rank 1 averages the micro-batches of step 7, rank 0 averages the micro-batches of step 2"
FAULTS = {
    "skips the first": SKIPPED.format(3),
    "skips the last": SKIPPED.format(4),
    "first twice": TWICE.format(3),
    "last twice": TWICE.format(4),
    "raises": r"ValueError: planted",
    "raises at the last": r"ValueError: planted",
    "leaves and steps": STEPPED,
    "leaves and begins again": r"the loop over micro_batches\(\) before this one was left at micro-batch 3",
    "threads later": r"torch computes with 2 threads, expected 1 .* Set DPFUSE_THREADS before",
    "outside": r"a backward has reached parameters outside of the loop over micro_batches\(\)",
    "forgets zero_grad": r"the parameter '0\.weight' has a gradient at the beginning of micro_batches\(\)",
}
QUICK = ("skips the first", "last twice", "leaves and steps")
CASES = [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in FAULTS]


def told_by_ranks(what: str, **variables: str) -> list[str]:
    """Run the job to its end, and return what each rank printed."""
    common = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(SIZE):
        own = variables if rank == 1 else {}
        ranks.append(start(SCRIPTS / "micro_batch_faults.py", what, warm=True, RANK=str(rank), **common, **own))
    try:
        return [process.communicate(timeout=patience(60))[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def errors(what: str, told: list[str], but: int | None = None) -> list[str]:
    """Return what each rank raised soon after the mistake, except rank `but`."""
    planted = re.search(r"^planted ([\d.]+)$", told[1], re.MULTILINE)
    assert planted, told
    texts = []
    for rank, text in enumerate(told):
        if rank == but:
            continue
        raised = re.search(r"^raised ([\d.]+) (.*)", text, re.MULTILINE | re.DOTALL)
        assert raised, f"{what}: rank {rank} told {text!r}"
        assert float(raised[1]) - float(planted[1]) < patience(SOON), f"{what}: rank {rank} heard of it too late"
        texts.append(raised[2])
    return texts


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", CASES)
def test_a_mistake_of_one_rank_is_named_on_all(what):
    first, own, last = errors(what, told_by_ranks(what))
    assert re.search(FAULTS[what], own)
    for peer in (first, last):
        assert re.search(ENDED + ".*" + FAULTS[what], peer)


def test_a_rank_that_dies_in_its_loop_is_named_on_all_others():
    for peer in errors("dies", told_by_ranks("dies"), but=1):
        assert re.search(r"rank 1 ended suddenly", peer)


def test_another_number_of_threads_on_one_rank_is_named_on_all_when_the_module_is_wrapped():
    for text in errors("threads", told_by_ranks("threads", DPFUSE_THREADS="2")):
        assert re.search(r"rank 1 has 'option DPFUSE_THREADS = 2(\.0)?', rank 0 has 'option DPFUSE_THREADS = 1", text)


def test_a_rank_in_another_step_is_named_on_all():
    for text in errors("another step", told_by_ranks("another step")):
        assert re.search(STEPS_DIFFER, text)


def test_the_same_job_without_a_mistake_ends_well():
    told = told_by_ranks("none")
    assert [text.splitlines()[-1] for text in told] == ["well"] * SIZE
