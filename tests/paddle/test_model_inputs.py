"""InputSpec, and the rule by which a batch is split into inputs and labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfuse.paddle.batch_split import BatchSplit
from dpfuse.paddle.static import InputSpec


def one(x): ...
def two(a, b): ...
def optional(x, mask=None): ...
def anything(*inputs): ...


SPEC = InputSpec([None, 3], "float32", "x")


@pytest.mark.parametrize(
    ("forward", "inputs", "labels", "batch", "labelled", "expected"),
    [
        (one, None, None, "xy", True, "x|y"),
        (one, None, None, "x", True, "x|"),
        (one, None, None, "xyz", True, "x|yz"),  # the network takes but one
        (two, None, None, "abl", True, "ab|l"),
        (two, None, None, "ab", False, "ab|"),
        (two, None, None, "abl", False, "ab|"),
        (one, None, None, "xy", False, "x|"),
        (one, None, None, "x", False, "x|"),
        (optional, None, None, "xy", True, "x|y"),
        (optional, None, None, "xmy", True, "xm|y"),
        (optional, None, None, "x", False, "x|"),
        (anything, None, None, "abcl", True, "abc|l"),
        (anything, None, None, "a", False, "a|"),
        (anything, ["a", "b"], None, "abl", True, "ab|l"),
        (anything, ["a", "b"], None, "abl", False, "ab|"),
        (optional, ["x", "mask"], ["y"], "xmy", True, "xm|y"),
        (one, None, ["s", "t"], "xst", True, "x|st"),
        (one, SPEC, SPEC, "xy", True, "x|y"),
        (one, {"x": SPEC}, None, "xy", True, "x|y"),
    ],
)
def test_what_is_input_and_what_is_label(forward, inputs, labels, batch, labelled, expected):
    found = BatchSplit(inputs, labels, forward)(list(map(ord, batch)), labelled)
    assert "|".join("".join(map(chr, part)) for part in found) == expected


def test_nested_batches_are_flattened():
    assert BatchSplit(None, None, one)([1, [2, (3,)]], True) == ([1], [2, 3])


@pytest.mark.parametrize(("forward", "batch"), [(optional, "xy"), (optional, "xmy"), (anything, "abl")])
def test_what_was_found_with_labels_counts_for_prediction(forward, batch):
    split = BatchSplit(None, None, forward)
    inputs, labels = split([*batch.encode()], True)
    assert split([*batch.encode()], False) == (inputs, [])
    assert split(inputs, False) == (inputs, [])
    assert len(labels) == 1


@pytest.mark.parametrize("batch", [[("a", "b"), torch.ones(2, 1), torch.ones(2)], [torch.ones(2, 1), b"a"]])
def test_text_in_a_batch_is_named(batch):
    with pytest.raises(TypeError, match=r"text, such as b?'a'.*Leave it out"):
        BatchSplit(None, None, one)(batch, True)


def test_a_single_tensor_is_an_input():
    batch = torch.ones(2, 2)
    assert BatchSplit(None, None, one)(batch, False)[0][0] is batch


def test_dicts_are_taken_apart_by_name():
    batch = {"y": 2, "more": 0, "x": 1}
    assert BatchSplit(["x"], ["y"], one)(batch, True) == ([1], [2])
    assert BatchSplit(["x"], ["y"], one)({"x": 1}, False) == ([1], [])
    assert BatchSplit({"x": SPEC, "more": SPEC}, None, two)(batch, True) == ([1, 0], [])
    for inputs, labels in ((None, None), (None, ["y"]), (["x"], ["label"]), (InputSpec([1]), None)):
        with pytest.raises(ValueError, match=r"keys \['y', 'more', 'x'\]"):
            BatchSplit(inputs, labels, one)(batch, True)


@pytest.mark.parametrize(
    ("forward", "inputs", "labels", "items", "labelled", "text"),
    [
        (optional, None, None, 2, False, "takes 1 to 2 inputs"),
        (anything, None, None, 2, False, "takes 0 to inf inputs"),
        (two, ["a", "b"], None, 1, True, "expected one item for each"),
        (two, ["a", "b"], ["l"], 4, True, "2 inputs and 1 labels"),
        (two, ["a", "b"], ["l"], 2, True, "2 inputs and 1 labels"),
        (one, None, None, 0, True, "0 item"),
        (optional, None, None, 4, True, "Name them"),
    ],
)
def test_batches_that_cannot_be_split(forward, inputs, labels, items, labelled, text):
    with pytest.raises(ValueError, match=text):
        BatchSplit(inputs, labels, forward)([0] * items, labelled)


@pytest.mark.parametrize("inputs", [3, [SPEC, 3], {"x": 3}])
def test_only_specs_and_names_are_accepted(inputs):
    with pytest.raises(TypeError, match="InputSpecs or names"):
        BatchSplit(inputs, None, one)


def test_a_spec_describes_shape_dtype_and_name():
    spec = InputSpec([None, 784], "float32", "x")
    assert repr(spec) == "InputSpec(shape=(-1, 784), dtype=torch.float32, name='x')"
    assert spec == InputSpec((-1, 784), torch.float32, "x") != InputSpec((-1, 784), "float64", "x")
    assert spec != (-1, 784)
    assert InputSpec([2]).dtype == InputSpec([2], np.float32).dtype == InputSpec([2], "torch.float32").dtype
    with pytest.raises(TypeError, match="unhashable"):
        hash(spec)


def test_a_spec_of_a_tensor_or_an_array():
    assert InputSpec.from_tensor(torch.ones(2, 3, dtype=torch.int64), "t") == InputSpec([2, 3], "int64", "t")
    assert InputSpec.from_numpy(np.ones((2, 3))) == InputSpec([2, 3], "float64")
    with pytest.raises(TypeError, match="from_numpy"):
        InputSpec.from_tensor(np.ones(2))


def test_a_batch_dimension_comes_and_goes():
    spec = InputSpec([3])
    assert spec.batch(4) is spec
    assert spec.shape == (4, 3)
    assert spec.unbatch().unbatch().shape == ()
    with pytest.raises(ValueError, match="no dimension"):
        spec.unbatch()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3,), TypeError, "shape must be"),
        (("ab",), TypeError, "shape must be"),
        (([2, -2],), ValueError, r"shape\[1\]: got -2"),
        (([2.0],), ValueError, r"shape\[0\]"),
        (([True],), ValueError, r"shape\[0\]"),
        (([2], "float33"), ValueError, "float33"),
        (([2], "nn"), ValueError, "'nn'"),
        (([2], object()), TypeError, "dtype"),
        (([2], "int64", 3), TypeError, "name"),
    ],
)
def test_a_spec_refuses_what_it_cannot_describe(arguments, error, text):
    with pytest.raises(error, match=text):
        InputSpec(*arguments)
