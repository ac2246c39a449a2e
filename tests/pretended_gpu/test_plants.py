"""Defects that are planted into dpfuse: the race detector finds each of them, in one run."""

from __future__ import annotations

import re

import pytest

from tests.pretended_gpu.job import reports_of
from tests.pretended_gpu.plants import PLANT_PROGRAMS, PLANTS

QUIET = [name for name, plant in PLANTS.items() if not plant.breaks]


@pytest.fixture(scope="session")
def reports(request, tmp_path_factory):
    """Run in one job of each face all plants that are to be tested and break nothing, and their programs without."""
    wanted = [item.callspec.params for item in request.session.items if item.path.name == "test_plants.py"]
    names = {param["name"] for param in wanted if "name" in param} & set(QUIET)
    bare = {param["program"] for param in wanted if "program" in param}
    found = {}

    def of(face, name):
        if face not in found:
            planted = [f"plant: {each}" for each in QUIET if each in names and PLANTS[each].face == face]
            programs = [*sorted(bare), *planted] if face == "ours" else planted
            found[face] = reports_of(face, programs, tmp_path_factory.mktemp("plants"))
        return found[face][name]

    return of


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", QUIET)
def test_a_plant_is_found(name, reports):
    assert is_found(PLANTS[name], reports(PLANTS[name].face, f"plant: {name}"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name, plant in PLANTS.items() if plant.breaks])
def test_a_plant_after_which_the_ranks_cannot_go_on_is_found(name, tmp_path):
    found = reports_of(PLANTS[name].face, [f"plant: {name}"], tmp_path, breaks=True)
    assert is_found(PLANTS[name], found[f"plant: {name}"])


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("program", PLANT_PROGRAMS)
def test_without_the_plant_its_program_is_right(program, reports):
    for report in reports("ours", program):
        assert (report["findings"], report["error"]) == ([], "")


def is_found(plant, reports):
    """Whether a rank has found what a plant must be found by."""
    if plant.found == "values":
        return any(report["apart"] > 0 for report in reports)
    texts = [text for report in reports for text in (*report["findings"], f"error: {report['error']}")]
    return any(re.search(plant.found, text) for text in texts)
