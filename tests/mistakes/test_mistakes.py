"""Each text after a mistake names what is wrong, what was got, what was expected, and the remedy."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.mistakes.mistakes import MISTAKES


@pytest.fixture(autouse=True, scope="module")
def job_of_one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", MISTAKES)
def test_the_text_says_what_got_expected_and_remedy(name, tmp_path):
    mistake = MISTAKES[name]
    with pytest.raises(mistake.error) as caught:
        mistake.action(tmp_path)
    assert type(caught.value) is mistake.error
    text = str(caught.value)
    parts = {"what": mistake.what, "got": mistake.got, "expected": mistake.expected, "remedy": mistake.remedy}
    assert {part: words for part, words in parts.items() if not words or words not in text} == {}, text


def test_there_are_at_least_sixty():
    assert len(MISTAKES) >= 60
