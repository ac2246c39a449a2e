"""Real ranks on pretended GPUs, under the race detector: every way of use of both faces, and torch's class beside them.

Values are those of the same program on the CPU, and no two accesses to the same memory are without an order.
"""

from __future__ import annotations

import pytest

from tests.pretended_gpu.job import reports_of
from tests.pretended_gpu.two_ranks import programs_of

RANKS = {"tensor parallel": 4}
CASES = [(face, name) for face in ("ours", "drop-in", "torch's") for name in programs_of(face)]
# The two devices add in the same order, so no value may differ. But the order in which torch adds up the squares of a
# norm depends on where the memory lies.
APART = {"clip": 1e-6, "clip, failing": 1e-6}


@pytest.fixture(scope="session")
def reports(request, tmp_path_factory):
    """Run all programs of a face that are to be tested in one job, and keep what its ranks report."""
    wanted = [item.callspec.params for item in request.session.items if item.path.name == "test_two_ranks.py"]
    found = {}

    def of(face, name):
        ranks = RANKS.get(name, 2)
        if (face, ranks) not in found:
            names = [one["name"] for one in wanted if one["face"] == face and RANKS.get(one["name"], 2) == ranks]
            found[face, ranks] = reports_of(face, names, tmp_path_factory.mktemp("job"), ranks=ranks)
        return found[face, ranks][name]

    return of


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("face", "name"), CASES)
def test_no_access_races_and_values_are_those_of_the_cpu(face, name, reports):
    for report in reports(face, name):
        assert report["findings"] == []
        assert report["error"] == ""
        assert report["apart"] <= APART.get(name, 0.0)
        assert report["steps"] > 10
        assert report["compared"] > 1000
