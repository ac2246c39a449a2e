"""Averaging factors, and what cannot be averaged."""

import math

import pytest

from dpfuse.engine.averaging import averaging_for


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 1000])
def test_the_mean_multiplies_by_the_reciprocal(world_size):
    assert averaging_for("float32", world_size).pre_scale == 1.0 / world_size


def test_a_scale_of_ones_own_replaces_the_mean():
    assert averaging_for("bfloat16", 8, 1.0).pre_scale == 1.0


@pytest.mark.parametrize("dtype", ["int64", "complex32", "float8_e5m2", "bool"])
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(TypeError, match=f"dtype {dtype} cannot be averaged; expected one of float16"):
        averaging_for(dtype, 2)


@pytest.mark.parametrize(
    ("scale", "error"), [("1", TypeError), (True, TypeError), (math.nan, ValueError), (math.inf, ValueError)]
)
def test_a_bad_scale_is_refused(scale, error):
    with pytest.raises(error, match=r"scale must be .*got"):
        averaging_for("float32", 2, scale)
