"""Each text after a mistake names what is wrong, what was got, what was expected, and the remedy."""

from __future__ import annotations

import pytest

from dpfuse.errors import DPFuseError
from tests.mistakes import mistakes, of_sharded_optimizer
from tests.mistakes.two_ranks import MISTAKES as SHARED

MISTAKES = mistakes.MISTAKES | of_sharded_optimizer.MISTAKES


def missing(mistake, text):
    """Return the parts that the text does not have."""
    parts = {"what": mistake.what, "got": mistake.got, "expected": mistake.expected, "remedy": mistake.remedy}
    return {part: words for part, words in parts.items() if not words or words not in text}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", MISTAKES)
def test_the_text_says_what_got_expected_and_remedy(name, tmp_path):
    mistake = MISTAKES[name]
    with pytest.raises(mistake.error) as caught:
        mistake.action(tmp_path)
    assert type(caught.value) is mistake.error
    text = str(caught.value)
    assert missing(mistake, text) == {}, text


def made(rank, size, name):
    with pytest.raises(DPFuseError) as caught:
        SHARED[name].action(rank)
    return str(caught.value)


@pytest.mark.parametrize("name", SHARED)
def test_both_ranks_say_what_got_expected_and_remedy(ranks, name):
    for text in ranks(made, name):
        assert missing(SHARED[name], text) == {}, text
