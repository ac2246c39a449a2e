"""What only a GPU can measure runs here in Triton's interpreter, and its goals are judged."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
import triton
from torch import nn

from bench import kernel_time, update_time
from bench.__main__ import main
from bench.baselines import wire_wrappers
from bench.equality import prove_gradients
from bench.goals import Entry, judge
from bench.kernel_time import LAUNCHES, SHAPES, label, time_launches, time_shapes
from bench.pack_time import CEILING
from bench.update_time import FUSED, UPDATES, time_updates
from dpfuse_kernels import launcher


@pytest.fixture
def interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("DPFUSE_KERNELS", "triton")
    launcher.jit.cache_clear()
    # Code that has imported Triton's own functions earlier has them compiled, not interpreted.
    monkeypatch.setattr(triton.language, "sum", triton.jit(triton.language.sum.fn))
    yield
    launcher.jit.cache_clear()


@pytest.mark.slow
def test_every_shape_packs_the_same_and_is_timed(interpreter):
    found = time_shapes([(300, 31), (64,)], torch.float32, torch.float32, "cpu", rounds=2, hot=True)
    assert list(found) == [*map(label, SHAPES), CEILING]
    assert [name for name, result in found.items() if result["default"]] == ["4096 elements, 8 warps"]
    assert all(len(result["seconds"]) == 2 and result["bytes"] == 4 * 9364 for result in found.values())


def test_a_shape_that_packs_something_else_is_caught(interpreter, monkeypatch):
    def forgetful(sources, table, *, scale):
        if table.launcher.shape.chunk < 8192:
            real(sources, table, scale=scale)

    real = kernel_time.flatten
    monkeypatch.setattr(kernel_time, "flatten", forgetful)
    with pytest.raises(AssertionError, match=r"LaunchShape\(chunk=8192, warps=4\): a tensor differs"):
        time_shapes([(64,)], torch.float32, torch.float32, "cpu", rounds=1, hot=True)


def test_both_ways_of_launching_are_counted(interpreter):
    found = time_launches("cpu", rounds=2, calls=3)
    assert list(found) == list(LAUNCHES)
    # Three rounds to warm up; the interpreter has nothing to bind.
    assert {name: (result["launches"], result["bound"]) for name, result in found.items()} == {
        "bound": (15, 0),
        "kernel[grid]": (15, 0),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_of_adamw_is_timed_beside_torchs_own_and_a_copy_of_as_many_bytes(interpreter, dtype):
    found = time_updates(3000, dtype, torch.bfloat16, "cpu", rounds=2)
    assert list(found) == list(UPDATES)
    assert all(len(result["seconds"]) == 2 for result in found.values())
    moved = 3000 * (26 if dtype == torch.float32 else 28)
    for result in found.values():
        assert result["bytes_per_second"] == pytest.approx(2 * moved / sum(result["seconds"]))
    outcomes = judge(
        Entry("kernels", "adamw float32, gradient float32", name, time, time, 0.0, 9, {})
        for name, time in zip(UPDATES, (4.0, 8.0, 3.0), strict=True)
    )
    assert {outcome.what: outcome.value for outcome in outcomes} == {
        f"time, adamw_step / {FUSED}": 0.5,
        "copy_ of the same bytes / adamw_step, times": 0.75,
    }


def test_an_update_that_differs_is_caught(interpreter, monkeypatch):
    def forgetful(*arguments, **options):
        is_reference = os.environ.get("DPFUSE_KERNELS") == "reference"
        real(*arguments, **(options if is_reference else {**options, "step": 2}))

    real = update_time.adamw_step
    monkeypatch.setattr(update_time, "adamw_step", forgetful)
    with pytest.raises(AssertionError, match="adamw_step: the value differs from the reference"):
        time_updates(64, torch.float32, torch.float32, "cpu", rounds=1)


@pytest.mark.parametrize(("seconds", "bound", "met"), [(3e-6, 99, True), (5e-6, 99, False), (3e-6, 0, False)])
def test_a_launch_counts_as_bound_only_if_it_was(seconds, bound, met):
    times = {"bound": (seconds, bound), "kernel[grid]": (9e-6, 0)}
    compared, absolute = judge(
        Entry("kernels", "launch", name, time, time, 0.0, 9, {"bound": count}) for name, (time, count) in times.items()
    )
    assert compared.value == pytest.approx(seconds / 9e-6)
    assert absolute.met is met


def test_the_best_shape_is_named():
    times = {"2048 elements, 4 warps": 2.0, "4096 elements, 8 warps": 4.0, "copy_ of the same bytes": 1.0}
    best, copied = judge(
        Entry("kernels", "a", name, time, time, 0.0, 9, {"default": "4096" in name}) for name, time in times.items()
    )
    assert "best shape (2048 elements, 4 warps) / 4096 elements, 8 warps as in use" in best.what
    assert (best.value, copied.value) == (0.5, 0.5)


@pytest.mark.parametrize(("ours", "met"), [(1.7, True), (1.9, False)])
def test_a_bfloat16_wire_is_held_against_the_better_of_ddps_modes(ours, met):
    facts = {"packs": 2, "unpacks": 2, "buckets": 2, "host_to_device": 0}
    extras = {"bare": 0.0, "dpfuse bf16 views": ours, "dpfuse bf16 private": 3.0}
    extras |= {"DDP default, bf16 hook": 8.0, "DDP view, bf16 hook": 4.0}
    views, private, *counts = judge(
        Entry("step", "cuda wire BERT-large b8", name, 1.0, 1.0, 0.0, 9, {"extra": extra, **facts})
        for name, extra in extras.items()
    )
    assert (views.value, views.met, private.met) == (pytest.approx(ours / 4), met, None)
    assert [outcome.value for outcome in counts] == [2.0, 0, 2.0, 0]


def prove_wires(rank: int, size: int) -> list[str]:
    torch.manual_seed(rank)
    base, batch = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(2, 3)
    caught = []
    for wire in (torch.bfloat16, None):
        for name, wrap in wire_wrappers().items():
            if "hook" in name:  # torch refuses it without a GPU
                continue
            module = copy.deepcopy(base)
            wrapped = wrap(module)
            try:
                prove_gradients(name, module, lambda: wrapped(batch).sum().backward(), averaged=True, wire=wire)  # noqa: B023
            except AssertionError as error:
                caught.append(f"{wire} {error}")
            dist.barrier()
    return caught


def test_every_bfloat16_contender_sends_bfloat16(ranks):
    for caught in ranks(prove_wires):
        names = [text.partition(":")[0] for text in caught]
        wired = [name for name in wire_wrappers() if name.startswith("dpfuse")]
        bare = ["bare", "bare again"]
        assert names == [*(f"torch.bfloat16 {name}" for name in bare), *(f"None {name}" for name in (*bare, *wired))]


@pytest.mark.parametrize(("words", "says"), [(["kernels"], "with --gpu only"), (["forward", "--bogus"], "bogus")])
def test_a_suite_that_does_not_run_here_is_named(words, says, capsys):
    with pytest.raises(SystemExit):
        main(["--only", *words])
    assert says in capsys.readouterr().err
