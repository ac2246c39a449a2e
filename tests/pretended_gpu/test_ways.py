"""Every way of use runs on the pretended device, eager and captured, with each option and pair of options."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from tests.pretended_gpu.device import counted
from tests.pretended_gpu.ways import OPTIONS, SETTLED, WAYS, wrapped, zeroing

# torch says this once in a process, of streams that a program has chosen.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
# Each of these excludes the others; the table of exclusions and its tests have the errors.
EXCLUDED = {"bfloat16 wire", "float8 wire", "accumulate in buckets"}
PAIRS = [pair for pair in combinations(OPTIONS, 2) if not EXCLUDED.issuperset(pair)]
# Sparse and complex gradients are no ways here, either: their kernels decide sizes that the host reads.
NEED_VALUES = {"weight": "the host reads the sum of the weights, which a kernel makes"}


def steps(way, number, **options):
    step = way.run(**options)
    for _ in range(number):
        step()
    torch.cuda.synchronize()
    return step


@pytest.mark.parametrize("name", [name for name in WAYS if name not in NEED_VALUES])
def test_a_way_of_use_runs(name):
    steps(WAYS[name], 6)


@pytest.fixture
def default_device():
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize("name", [name for name in WAYS if name not in NEED_VALUES and "sharded" not in name])
def test_a_way_of_use_runs_where_new_tensors_are_on_the_gpu(name):  # sharded: torch's AdamW counts steps there
    steps(WAYS[name], 3)


@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_works_where_new_tensors_are_on_the_gpu(name):
    steps(replace(WAYS["views"], wrap=wrapped(**OPTIONS[name])), 3)


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_two_options_run_together(pair):
    steps(replace(WAYS["views"], wrap=wrapped(**OPTIONS[pair[0]], **OPTIONS[pair[1]])), 4)


def captured(way):
    """Settle on a side stream, as torch's page on graphs says, capture one step, and return the graph and the step."""
    step = replace(way, step=zeroing).run(capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(11):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, step


def test_a_step_is_captured_after_another_model_has_trained():
    way = replace(WAYS["views"], step=zeroing)
    first, second = (way.run(capturable=True) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in [first] * 11 + [second] * 11:
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first()
    graph.replay()
    second()


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.captured])
def test_a_step_is_captured_and_replayed_and_training_goes_on(name):
    graph, step = captured(WAYS[name])
    with counted() as calls:
        for _ in range(3):
            graph.replay()
    assert calls.pop("cudaGraphLaunch") == 3
    assert calls.keys() <= {"cudaStreamIsCapturing", "cudaEventQuery"}  # torch asks, and NCCL's watchdog
    step()
    torch.cuda.synchronize()


def test_a_settled_step_waits_for_no_stream_and_no_device():
    step = steps(WAYS["views"], SETTLED)
    with counted() as calls:
        step()
    assert {"cudaDeviceSynchronize", "cudaStreamSynchronize", "memcpy sync", "cudaMalloc"}.isdisjoint(calls)
