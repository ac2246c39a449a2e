"""What a settled step asks of the device, in each way of use: a call that is added here costs every user's host."""

from __future__ import annotations

import gc
import re
from functools import partial
from itertools import groupby
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from dpfuse.comm.collective import direct_all_reduce
from dpfuse.gradients.weight import GradientWeight
from dpfuse.weights.check import WeightsCheck
from tests.operations import Operations
from tests.pretended_gpu.device import counted, logged
from tests.pretended_gpu.test_ways import NEED_VALUES, pytestmark, steps  # noqa: F401  # the mark of these tests, too
from tests.pretended_gpu.ways import (
    SETTLED,
    WAYS,
    Way,
    accumulating,
    chain,
    clipping,
    plain,
    scaling,
    weighing,
    wrapped,
    zeroing,
)


@pytest.fixture(autouse=True)
def _collects_nothing():
    """What the garbage collector frees in the middle of a step, also of tests before, would count as its calls."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Calls(NamedTuple):
    """Of one step. Kernels of torch are not counted: the optimizer and the model launch them."""

    collectives: int = 1
    launches: int = 2  # of Triton: the pack, and the kernel that fills with NaN and writes the report to the host
    reads: int = 0  # copies to the host
    writes: int = 0  # copies from the host: addresses that have changed
    waits: int = 1  # of the host, for the report of the step before
    events: int = 5  # one of the pack's stream and two of NCCL's for each collective, and two for the report


# Whether torch starts several sums as one call of NCCL. Its class of release 2.15 starts one after the other.
IS_ONE_CALL = torch.__version__ < "2.15"
PRIVATE = Calls(launches=3)
WITH_REPORT_APART = Calls(collectives=2, launches=4, events=8)  # a report beside gradients of 16 bits is 32 bits wide
EXCHANGED = Calls(collectives=3, launches=5, events=11)  # all-to-all, a sum, all-gather; and the report
# Reduce-scatter, all-gather; and the report. Without an update in backward, the host waits for that of the same step.
SHARDED = Calls(collectives=3, reads=1, events=10)
CHECKED = Calls(reads=1, waits=2, events=7)
EXPECTED = {
    "private": PRIVATE,
    "face": PRIVATE,
    "face, static graph": PRIVATE,
    # One call starts all sums of a bucket, small ones too. Only the report is packed.
    "private, large gradients": PRIVATE._replace(collectives=9, launches=2),
    "two streams, private": PRIVATE,
    "bfloat16 wire": WITH_REPORT_APART,
    "error feedback": WITH_REPORT_APART,
    "bfloat16 model": WITH_REPORT_APART._replace(launches=3),
    "float8 wire": EXCHANGED,
    "error feedback, float8": EXCHANGED,
    "bfloat16 wire, float32 sum": EXCHANGED,
    "deterministic": Calls(collectives=2, launches=3, events=8),
    # Of three micro-batches this rank has two, which need a pack each.
    "fixed micro-batches": Calls(collectives=2, launches=3, events=8),
    "fixed micro-batches, bfloat16": Calls(collectives=3, launches=4, events=11),
    "sharded, fixed micro-batches": SHARDED._replace(launches=3),
    "check_finite": CHECKED,
    "check_finite raises": CHECKED,
    "clip": Calls(launches=4),
    "metrics": PRIVATE,
    "no_sync, in buckets": Calls(launches=4),
    "unused layer": Calls(collectives=2, reads=2, waits=2, events=7),  # the host reads which parameters are used
    "buffers": Calls(collectives=2, events=8),
    "comm hook": Calls(collectives=2, launches=4, events=9 if IS_ONE_CALL else 11),
    "sharded": SHARDED,
    "sharded, stepped in backward": SHARDED._replace(events=11),
    "sharded, masters": SHARDED,
}
# In some steps of these, gradients have other addresses, which are written to the device then.
MOVING = {"two streams", "two streams, private", "metrics", "private, large gradients"}
MOVING |= {name for name in WAYS if "fixed micro-batches" in name}

SEVERAL = Way(wrapped(comm_buffer_size=0.1, last_comm_buffer_size=0.02), partial(chain, 40))  # seven buckets


def calls_of(found: dict[str, int]) -> Calls:
    def total(pattern: str) -> int:
        return sum(count for name, count in found.items() if re.search(pattern, name))

    return Calls(
        collectives=total(r"^nccl (?!Group)"),
        launches=total("triton launch"),
        reads=total("DtoH"),
        writes=total("HtoD"),
        waits=total("Synchronize"),
        events=total("EventRecord"),
    )


def fewest_calls(step) -> Calls:
    """Return the calls of one of five steps, the one with the fewest: others may write addresses that have changed."""
    several = []
    for _ in range(5):
        with counted() as found:
            step()
        several.append(calls_of(found))
    return min(several, key=sum)


@pytest.fixture
def unhashed(monkeypatch):
    """No step hashes weights: some steps of a model do, and others do not."""
    monkeypatch.setattr(WeightsCheck, "after_step", lambda *arguments: None)


@pytest.mark.parametrize("name", [name for name in WAYS if name not in NEED_VALUES])
def test_a_settled_step_makes_these_calls(name, unhashed):
    step, expected = steps(WAYS[name], 2 * SETTLED), EXPECTED.get(name, Calls())
    seen, allocates = [], []
    while len(seen) < 3 or (expected not in seen and len(seen) < 12):
        with counted() as found:
            step()
        seen.append(calls_of(found))
        assert seen[-1][:3] == expected[:3]
        assert "cudaDeviceSynchronize" not in found
        allocates.append(not found.keys().isdisjoint({"cudaMalloc", "cudaHostAlloc"}))
    # Torch's caches of memory serve all tests of this process. One may grow in a step, and gradients may have other
    # addresses, which are written then, also in three steps in a row. But not in each step.
    assert name in MOVING or expected in seen
    assert name in MOVING or not all(allocates)


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_weight_of_the_gradients_lets_the_host_wait_for_nothing(kind, monkeypatch):
    monkeypatch.setattr(GradientWeight, "hear", lambda *arguments, **named: None)  # it reads values, which are not here
    way = Way(wrapped(), step=partial(weighing, weight=3.0 if kind == "number" else torch.ones((), device="cuda")))
    step = steps(way, 2 * SETTLED)
    with counted() as found:
        step()
    assert calls_of(found)[3:5] == (Calls().writes, Calls().waits)


def test_the_private_gradients_of_a_bucket_with_large_ones_are_one_call():
    step = steps(WAYS["private, large gradients"], SETTLED)
    with logged() as lines:
        step()
    seen = [line for line in lines if re.search("records|waits for event|nccl allReduce", line)]
    runs = [list(run) for sums, run in groupby(seen, lambda line: "nccl allReduce" in line) if sums]
    large = [sum("allReduce 4194304 bytes" in line for line in run) for run in runs]
    if IS_ONE_CALL:
        assert (large, list(map(len, runs))) == ([3, 1, 0], [7, 1, 1])  # with four biases; a weight; the report
    else:
        assert (sum(large), list(map(len, runs))) == (4, [1] * 9)


def test_the_default_checks_let_the_host_wait_for_nothing_and_launch_one_kernel_more(monkeypatch):
    monkeypatch.setattr("dpfuse.weights.schedule.CALL", 1 << 20)  # so that each step hashes something
    found, kept = {}, []  # what is kept leaves the memory of the next model alone
    for level in ("off", "raise"):
        kept.append(steps(Way(wrapped(check_training=level), partial(chain, 300)), 5 * SETTLED))
        found[level] = fewest_calls(kept[-1])
    more = found["off"]._replace(launches=found["off"].launches + 1)
    assert found["raise"][:3] == more[:3]
    # Gradients of either model may have other addresses in each step. To write these, the host waits for a copy before.
    assert found["raise"].waits == Calls().waits + found["raise"].writes


def test_the_check_of_loops_compares_ranks_with_one_more_read_and_no_launch(monkeypatch):
    monkeypatch.setattr("dpfuse.loop.loop_check.is_due", lambda averages: True)  # in each backward
    step = steps(WAYS["views"], 2 * SETTLED)
    with counted() as found:
        step()
    calls = calls_of(found)
    assert calls.collectives == Calls().collectives
    assert calls.launches - Calls().launches <= 1
    assert "cudaDeviceSynchronize" not in found


def test_a_sum_is_started_by_the_back_end_unless_a_mode_watches_operations():
    flat, calls = torch.ones(8, device="cuda"), []
    start = direct_all_reduce(flat.device, dist.group.WORLD)
    with counted() as found, Operations() as watched:
        start(flat).wait()
    calls.append((found["nccl allReduce"], [name for name, _ in watched.collectives]))
    with counted() as found:
        start(flat).wait()
    assert [*calls, found["nccl allReduce"]] == [(1, ["allreduce_"]), 1]


@pytest.mark.parametrize("do", [plain, zeroing, accumulating, clipping, scaling])
def test_the_check_of_the_loop_costs_a_settled_step_at_most_one_launch_and_lets_the_host_wait_for_nothing(do, unhashed):
    found, launches, kept = {}, {}, []
    for level in ("off", "raise"):
        kept.append(steps(Way(wrapped(check_training=level), step=do), 2 * SETTLED))
        with counted() as calls:
            kept[-1]()
        found[level] = calls_of(calls)._replace(launches=0)
        launches[level] = calls["kernel"] + calls["triton launch"]  # those of torch, too
    assert found["raise"] == found["off"]
    assert 0 < launches["off"] <= launches["raise"] <= launches["off"] + 1


def test_each_further_bucket_costs_a_launch_a_collective_and_three_events(unhashed):
    step = steps(SEVERAL, 2 * SETTLED)
    with counted() as found:
        step()
    calls = calls_of(found)
    buckets = calls.collectives
    assert buckets > 3
    assert calls == Calls(collectives=buckets, launches=buckets + 1, events=3 * buckets + 2)


@pytest.mark.parametrize("name", ["two streams", "two streams, private"])
def test_autograd_lets_the_bucket_at_the_end_of_a_backward_wait_for_every_stream(name):
    # dpfuse notes no stream for that bucket, and relies on what autograd does before it calls what is queued.
    step = steps(WAYS[name], SETTLED)
    with logged() as lines:
        step()
    pack = max(place for place, line in enumerate(lines) if "triton _flatten" in line)
    before: dict[str, set[int]] = {}  # by stream or event: the kernels that come before what follows there
    for place, line in enumerate(lines[:pack]):
        stream = before.setdefault(line.split(":")[0], set())
        if "at::native" in line:
            stream.add(place)
        elif found := re.search(r": (records|waits for) (event \d+)", line):
            event = before.setdefault(found[2], set())
            if found[1] == "records":
                event |= stream
            else:
                stream |= event
    kernels = {place for place, line in enumerate(lines[:pack]) if "at::native" in line}
    own = lines[pack].split(":")[0]
    assert any(not lines[place].startswith(f"{own}:") for place in kernels)
    assert kernels <= before[own]


def test_a_bucket_is_sent_after_its_pack_and_the_program_goes_on_after_all_buckets():
    step = steps(SEVERAL, 2 * SETTLED)
    with logged() as lines:
        step()
    seen = [line for line in lines if re.search("triton _flatten|records|waits for event|nccl allReduce", line)]
    landed = []  # events behind which a reduced bucket lies, in the order of the one stream of the collectives
    buckets = 0
    for before, line in enumerate(seen):
        if "nccl allReduce" in line:
            # Torch 2.15 records an event in the stream of the collectives before each of them, too.
            pack, record, wait = [one for one in seen[:before] if not one.startswith("stream 1: records")][-3:]
            event = re.search(r"records event (\d+)", record)
            assert "triton _flatten" in pack
            assert f"waits for event {event[1]} " in wait
            assert [each.split(":")[0] for each in (pack, record, wait)] == ["stream 0", "stream 0", "stream 1"]
            assert line.startswith("stream 1")
            landed.append(re.search(r"stream 1: records event (\d+)", seen[before + 1])[1])
            buckets += 1
        elif line.startswith("stream 0: waits for event"):
            event = re.search(r"event (\d+)", line)[1]
            landed = landed[landed.index(event) + 1 :] if event in landed else landed
    assert buckets > 3
    assert landed == [], "what waits for a bucket waits for all before it, and nothing waited for these"
