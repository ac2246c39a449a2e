"""Fixtures that every part of the suite shares."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator
from inspect import signature
from multiprocessing.spawn import get_executable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool, pools_by_size
from tests.warm import warm_python

# Tensors of tests are small, and other tests run on the other cores. Threads that wait there for each other take longer
# than one thread for all of it.
torch.set_num_threads(1)

# What an earlier test has left may hold a process group. A forked worker of a DataLoader must not take that apart: the
# group's threads are not there, and the worker hangs or crashes.
os.register_at_fork(after_in_child=gc.freeze)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep Python's collector away from the thousands of tests: they stay, and it takes 0.4 s to look at them all."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _what_other_files_have_left() -> None:
    """Keep it away from the collections of this file: after thousands of tests each would take a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where a test is marked `one_in(count)`, leave one in so many of its cases to `make test`; the others are slow.

    Those stay whose places in the crossed tables add up to a multiple of `count`. So where two tables are crossed, each
    value of both is still in some case, if no table is shorter than `count`.
    """
    tables: dict[tuple[object, str, str], dict[int, int]] = {}  # the place of each value, by its identity
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is None:
            continue
        places = 0
        for name, value in item.callspec.params.items():
            table = tables.setdefault((item.parent, item.originalname, name), {})
            places += table.setdefault(id(value), len(table))
        if places % marker.args[0]:
            item.add_marker(pytest.mark.slow)


def pytest_unconfigure() -> None:
    """Give them back: libraries complain at the end of Python of what is left."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    yield from pools_by_size()


@pytest.fixture
def ranks(_pools: dict[int, RankPool]) -> Callable[..., list[Any]]:
    """`ranks(function, *args, size=2, timeout=60)`: run it on real gloo ranks, return their results.

    `function(rank, size, *args)` must be importable (module level) and is called in every process. A
    failure, a crash or a hang on any rank fails the test with that rank's traceback.
    """

    def run(function: Callable[..., Any], *args: Any, size: int = 2, timeout: float = 60) -> list[Any]:
        if size in _pools and _pools[size].crowded:
            _pools[size].ask_to_end()
            _pools[size].close()
        if size not in _pools or not _pools[size].healthy:
            _pools[size] = RankPool(size)
        return _pools[size].run(function, *args, timeout=timeout)

    return run


@pytest.fixture
def rank(ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """What runs a test whose first arguments are `rank` and `size`: each rank calls it, with its own number."""
    return ranks


@pytest.fixture
def size(request: pytest.FixtureRequest) -> int:
    """The number of the ranks that call such a test, which its marker or a table may say."""
    return _how(request.node)["size"]


def _how(test: pytest.Item) -> dict[str, Any]:
    marker = test.get_closest_marker("ranks")
    return {"size": 2, "timeout": 60} | (marker.kwargs if marker else {})


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Let ranks call a test that has these two arguments; its other ones are sent to them."""
    names = [*signature(pyfuncitem.obj).parameters]
    if names[:2] != ["rank", "size"]:
        return None
    run, size, *others = (pyfuncitem.funcargs[name] for name in names)
    run(pyfuncitem.obj, *others, **_how(pyfuncitem) | {"size": size})
    return True


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A default group of this process alone, for what needs no peer."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_group()
    if dist.is_initialized():  # a test may have ended it
        dist.destroy_process_group()


@pytest.fixture
def warm_spawn() -> Iterator[None]:
    """Let spawned processes begin with torch imported. They have other ids than their parent knows."""
    before = get_executable()
    multiprocessing.set_executable(warm_python())
    yield
    multiprocessing.set_executable(before)
