"""Plans in files: what is written is read, and every other file is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dpfuse
from dpfuse.model.plan_from_groups import plan_from_groups


@given(data=st.data(), numels=st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_what_was_saved_is_loaded(tmp_path_factory, data, numels):
    specs = [dpfuse.ParamSpec(f"p{index}", (numel,), "float32") for index, numel in enumerate(numels)]
    order = data.draw(st.permutations(range(len(specs))))
    cut = data.draw(st.integers(1, len(specs)))
    plan = plan_from_groups(specs, [group for group in (order[:cut], order[cut:]) if group])
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    loaded = dpfuse.load_plan(path)
    assert (loaded.specs, loaded.buckets) == (plan.specs, plan.buckets)


def net(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))


def saved(path, **changes):
    dpfuse.plan_buckets(net()).save(path)
    facts = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(facts))
    return path


@pytest.mark.parametrize("text", ["", "not json", "[1, 2]", "{}", '{"format": "dpfuse plan 9"}', "\x00\xff"])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"plan\.json'.*got .*expected format 'dpfuse plan 1'.*plan\.save\(\)"):
        dpfuse.load_plan(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"buckets": [[0, 1, 2]]},
        {"buckets": [[0, 1, 2, 3], [3]]},
        {"buckets": [[0, 1, 2, 3, 4]]},
        {"buckets": [[0, "x"]]},
        {"buckets": 3},
        {"parameters": [["a", [2]]]},
        {"parameters": [["a", [-2], "float32", False]]},
        {"parameters": [["a", [2], "float12", False]]},
    ],
)
def test_a_damaged_file_is_refused(tmp_path, changes):
    with pytest.raises(ValueError, match=r"plan\.json' is damaged: got .*expected each parameter.*plan\.save\(\)"):
        dpfuse.load_plan(saved(tmp_path / "plan.json", **changes))


@pytest.mark.filterwarnings("ignore:there is no process group")
def test_a_plan_of_another_model_is_named(tmp_path):
    path = saved(tmp_path / "plan.json")
    assert len(dpfuse.DataParallel(net(), plan=path).bucket_plan.buckets) == 1
    with pytest.raises(ValueError, match=r"parameter 0 is '0\.weight' of shape \(8, 4\).*\(9, 4\)"):
        dpfuse.DataParallel(net(9), plan=str(path))
    with pytest.raises(ValueError, match=r"parameter 4 is missing in the plan, and '2\.weight'"):
        dpfuse.DataParallel(nn.Sequential(*net(), nn.Linear(2, 2)), plan=path)
    with pytest.raises(ValueError, match="and dtype float64 in the module"):
        dpfuse.DataParallel(net().double(), plan=path)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (
            "ramps",
            ValueError,
            'plan is \'ramps\', which cannot be read: No such file.*expected "ramp", "greedy", "auto"',
        ),
        (3, TypeError, 'got 3 of type int; expected "ramp"'),
        (None, TypeError, 'got None of type NoneType; expected "ramp"'),
    ],
)
def test_what_is_no_plan_is_refused(value, error, text):
    with pytest.raises(error, match=text):
        dpfuse.DataParallel(net(), plan=value)


def test_the_device_of_the_model_counts(tmp_path):
    plan = dpfuse.load_plan(saved(tmp_path / "plan.json"))
    assert {spec.device for spec in plan.specs} == {"cpu"}
    assert torch.device(plan.buckets[0].device).type == "cpu"
