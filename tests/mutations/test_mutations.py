"""Does each mutation of the list still fit the code and the tests?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_changes_one_place_of_code_that_compiles_and_names_tests(mutation):
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.before) == 1, f"{mutation.file} has this text {text.count(mutation.before)} times"
    assert mutation.after != mutation.before
    compile(text.replace(mutation.before, mutation.after), mutation.file, "exec")
    assert mutation.tests
    missing = [path for path in mutation.tests if not (ROOT / path).exists()]
    assert not missing, f"there are no tests {missing}; name those that find this defect now"


def test_no_two_have_the_same_name_or_place():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    assert len({(mutation.file, mutation.before) for mutation in MUTATIONS}) == len(MUTATIONS)
