"""torch's own tests of DistributedDataParallel, with torch's class as the oracle and with ours."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import tests.torch_suite
from tests.torch_suite.lists import NOT_COUNTED, PRIVATE, PUBLIC, QUICK, REFUSED
from tests.torch_suite.source import ddp_tests
from tests.torch_suite.suite_ranks import failure

VERSION = "2.13"
FOLDER = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(
        not torch.__version__.startswith(f"{VERSION}."),
        reason=f"the lists are of the tests of torch {VERSION}, this is {torch.__version__}",
    ),
    pytest.mark.timeout(300),
]


def names(list_: Iterable[str]) -> list[object]:
    """Parameters of a test; slow ones but for the quick selection."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(list_)]


def test_every_ddp_test_of_torch_is_in_exactly_one_list() -> None:
    listed = [*PUBLIC, *PRIVATE, *REFUSED, *NOT_COUNTED]
    assert len(listed) == len(set(listed))
    assert set(listed) == ddp_tests()
    assert set(listed) >= QUICK


def test_the_numbers_in_the_package_docstring_are_those_of_the_lists() -> None:
    passing = sum(private.passes for private in PRIVATE.values())
    said = " ".join(str(tests.torch_suite.__doc__).split())
    for text in (
        f"{len(ddp_tests())} of them",
        f"{len(PUBLIC)} tests of public behaviour",
        f"{len(PRIVATE)} tests that look at private parts: {passing} pass",
        f"{len(REFUSED)} tests that assert a refusal",
        f"{len(NOT_COUNTED)} tests do not count",
    ):
        assert text in said


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", names(PUBLIC))
def test_public_behaviour(name: str) -> None:
    assert not failure(name, "torch")
    assert not failure(name, "dpfuse")


@pytest.mark.parametrize("name", names(PRIVATE))
def test_private_parts(name: str) -> None:
    assert not failure(name, "torch")
    text = failure(name, "dpfuse")
    assert bool(text) is not PRIVATE[name].passes, text or f"{name} passes by now: say so in its list"


@pytest.mark.parametrize("name", names(REFUSED))
def test_refusals_have_a_replacement(name: str) -> None:
    refused = REFUSED[name]
    path, _, function = refused.replacement.partition("::")
    assert f"\ndef {function}(" in (FOLDER / path).read_text()
    assert not failure(name, "torch")
    text = failure(name, "dpfuse")
    assert refused.fails_with in text, text or f"{name} passes by now: move it to PUBLIC"


@pytest.mark.parametrize("name", names(NOT_COUNTED))
def test_what_torch_does_not_pass_does_not_count(name: str) -> None:
    assert failure(name, "torch", limit=10), f"torch's class passes {name} by now: move it to another list"
