"""Launches past Triton's dispatcher: what reaches Triton's own launcher is what the dispatcher would have sent.

The kernels are compiled, the driver only takes down its calls; the scenarios are in record_launches.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpfuse_kernels.bound_kernel import _without_scratch, bind
from tests.patience import patience
from tests.warm import warm_python

ROOT = Path(__file__).parents[2]
TOLD = ("told", "hooks")  # in what the two ways differ: hooks that nobody listens to are not called


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    """Every scenario, played once in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "DPFUSE_"))}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    done = subprocess.run(
        [warm_python(), "-m", "tests.kernels.record_launches"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    scenarios: dict[str, Any] = json.loads(done.stdout)
    return scenarios


def without(call: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in call.items() if key not in keys}


def halves(calls: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return calls[: len(calls) // 2], calls[len(calls) // 2 :]


def test_only_the_first_launch_goes_through_the_dispatcher(recorded: dict[str, Any]) -> None:
    seen = recorded["both_ways"]
    assert (seen["launches"], seen["bound"], len(seen["calls"])) == (4, 3, 4)
    assert [call["hooks"] for call in seen["calls"]] == [[True, True]] + 3 * [[False, False]]


def test_both_ways_say_the_same(recorded: dict[str, Any]) -> None:
    first, second, third, zero = recorded["both_ways"]["calls"]
    assert without(first, *TOLD) == without(second, *TOLD) == without(third, *TOLD)
    assert first["grid"] == [3, 1, 1]
    assert first["stream"] == 1234
    # Another factor is another number, not another compilation.
    assert zero["values"][3] == 0
    assert without(zero, *TOLD, "values") == without(first, *TOLD, "values")
    assert first["signature"][:6] == ["i64", "*i64", "*i64", "i64", "i64", "i64"]


def test_each_compilation_is_bound_for_itself(recorded: dict[str, Any]) -> None:
    seen = recorded["every_kernel"]
    assert (seen["launches"], seen["bound"]) == (14, 7)
    calls = [without(call, *TOLD, "values") for call in seen["calls"]]
    assert calls[:7] == calls[7:]
    assert len({(call["kernel"], *call["constants"]) for call in calls}) == 7
    # Counts, sums and the factor lie somewhere else at each call.
    assert all(one["values"][:5] == other["values"][:5] for one, other in zip(*halves(seen["calls"]), strict=True))
    given = [[value != 0 for value in call["values"][5:]] for call in seen["calls"][:7]]
    plain, counts, errors = [False] * 3, [True, False, False], [False, True, True]
    assert given == [plain, plain, [], counts, errors, [True], [True]]


def test_kernels_of_eight_bit_blocks_are_bound_too(recorded: dict[str, Any]) -> None:
    seen = recorded["eight_bits"]
    assert (seen["launches"], seen["bound"]) == (4, 2)
    first, second = halves([without(call, *TOLD) for call in seen["calls"]])
    assert first == second
    assert [call["kernel"] for call in first] == ["_quantize_kernel", "_dequantize_kernel"]


def test_kernels_without_a_table_are_bound_too(recorded: dict[str, Any]) -> None:
    seen = recorded["without_a_table"]
    assert (seen["launches"], seen["bound"]) == (6, 3)
    first, second = halves(seen["calls"])
    assert [call["kernel"] for call in first] == ["_adamw_kernel", "_sum_parts_kernel", "_sum_quantized_kernel"]
    assert [without(call, *TOLD, "values") for call in first] == [without(call, *TOLD, "values") for call in second]
    # The numbers of another step are other arguments, not another compilation.
    assert first[0]["signature"][8:15] == 7 * ["fp32"]
    assert (first[0]["values"][14], second[0]["values"][14]) == (0.5 / (1 - 0.9), 0.25 / (1 - 0.9**2))


def test_a_misaligned_pointer_goes_through_the_dispatcher(recorded: dict[str, Any]) -> None:
    seen = recorded["moved_table"]
    first, shifted, back = seen["calls"]
    assert (seen["launches"], seen["bound"]) == (3, 1)
    assert shifted["values"][2] % 16 == 8
    assert shifted["hooks"] == [True, True]
    assert back["hooks"] == [False, False]
    assert without(back, *TOLD) == without(first, *TOLD)


def test_a_launch_that_is_repeated_reads_the_addresses_of_its_own_tensors(recorded: dict[str, Any]) -> None:
    seen = recorded["repeated"]
    assert seen["reads"] == [True] * 23
    assert seen["uploads"] == 7, "the first list was forgotten, and came again"
    assert (seen["launches"], seen["bound"]) == (23, 21)


class Launcher:
    """As Triton 3.6 launches a kernel: constants of the kernel, and perhaps scratch memory, before the arguments."""

    def __init__(self, **scratch: int) -> None:
        self.global_scratch_size = scratch.get("shared", 0)
        self.profile_scratch_size = scratch.get("profile", 0)
        self.cooperative, self.calls = True, list[tuple[Any, ...]]()
        self.launch = lambda *arguments: self.calls.append(arguments)

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *arguments: Any) -> None:
        memory = [bytearray(size) if size else None for size in (self.global_scratch_size, self.profile_scratch_size)]
        self.launch(x, y, z, stream, function, self.cooperative, *memory, *arguments)


class OtherLauncher(Launcher):
    """As Triton 3.9: the arguments are one tuple."""

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *arguments: Any) -> None:
        self.launch(x, y, z, stream, function, self.cooperative, arguments)


def test_a_kernel_without_scratch_memory_is_launched_with_the_same_arguments() -> None:
    run = Launcher()
    direct, between = _without_scratch(run)
    assert direct is run.launch
    assert run.calls == [], "only a probe was launched"
    run(5, 1, 1, 1234, 77, "metadata", None, None, None, 8, 9)
    direct(5, 1, 1, 1234, 77, *between, "metadata", None, None, None, 8, 9)
    assert run.calls[0] == run.calls[1]


@pytest.mark.parametrize("run", [Launcher(shared=64), Launcher(profile=64), OtherLauncher(), print])
def test_other_kernels_and_launchers_go_through_the_launcher(run: Any) -> None:
    assert _without_scratch(run) == (run, ())


def test_listeners_hear_every_launch(recorded: dict[str, Any]) -> None:
    seen = recorded["listened"]
    assert (seen["launches"], seen["bound"], seen["heard"]) == (4, 1, 2)
    assert [call["told"] for call in seen["calls"]] == [True, False, True, True]


def test_a_refused_launch_is_made_once_through_the_dispatcher_and_never_tried_again(recorded: dict[str, Any]) -> None:
    seen = recorded["refused"]
    assert seen["refusals"] == 1
    assert (seen["launches"], seen["bound"], len(seen["calls"])) == (4, 0, 4)


def test_a_launch_that_fails_is_neither_hidden_nor_repeated(recorded: dict[str, Any]) -> None:
    seen = recorded["broken"]
    assert "illegal memory access" in seen["error"]
    assert seen["attempts"] == 1
    assert (seen["launches"], len(seen["calls"])) == (1, 1)


def test_an_unknown_triton_is_left_to_its_dispatcher(recorded: dict[str, Any]) -> None:
    seen = recorded["unknown"]
    assert (seen["launches"], seen["bound"], len(seen["calls"])) == (3, 0, 3)


def compiled(signature: tuple[str, ...] = ("i64", "*i64", "constexpr"), **attributes: Any) -> Any:
    attrs = {(1,): [["tt.divisibility", 16]], (2,): []} | {(int(key[1:]),): value for key, value in attributes.items()}
    return SimpleNamespace(src=SimpleNamespace(signature=dict(enumerate(signature)), attrs=attrs))


@pytest.mark.parametrize(
    "odd",
    [
        None,
        compiled(("i32", "*i64", "constexpr")),
        compiled(("constexpr", "*i64", "constexpr")),
        compiled(("i64", "*i64")),
        compiled(_0=[["tt.divisibility", 16]]),
        compiled(_1=[["tt.divisibility", 64]]),
        compiled(_1=[["tt.divisibility", 16], ["tt.pointer_range", 32]]),
    ],
)
def test_what_was_compiled_for_some_values_only_is_not_bound(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfuse_kernels.bound_kernel._launches_as_known", lambda kind: True)
    monkeypatch.setattr("dpfuse_kernels.bound_kernel.BoundKernel", lambda *arguments: "bound")
    assert bind(compiled(), ("i64", "*i64"), (1,)) == "bound"
    assert bind(odd, ("i64", "*i64"), (1,)) is None
