"""Which elements a sample of a tensor has, and of which tensors there is one."""

import pytest
import torch
from torch import nn

from dpfuse.engine.sample import are_comparable, is_dense, sample_of, values_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_a_sample_has_the_first_elements_or_those_of_all_parts(dtype):
    tensor = torch.randn(20, 10).round().to(dtype)
    flat, turned = tensor.flatten(), tensor.T.flatten()
    assert torch.equal(values_of(sample_of(tensor)), flat[:64])
    assert torch.equal(values_of(sample_of(tensor, spread=True)), flat[::3][:64])
    assert torch.equal(values_of(sample_of(tensor.T)), turned[::3][:64])
    assert torch.equal(values_of(sample_of(tensor.T, 50, spread=True)), turned[::4])
    assert torch.equal(values_of(sample_of(tensor, 1000)), flat)
    assert torch.equal(values_of(sample_of(tensor, 1000, spread=True)), flat)


@pytest.mark.parametrize("spread", [False, True])
def test_a_sample_is_a_copy(spread):
    values = torch.arange(1000.0)
    sample = sample_of(values, spread=spread)
    values.zero_()
    assert values_of(sample)[-1] == (63 * 15 if spread else 63)
    one = values_of(sample_of(torch.ones(()).expand(5)[:1], spread=spread))
    assert one.view(torch.uint8).numel() == 4, "bytes of one element with any stride"


def test_samples_of_another_dtype_or_length_cannot_be_compared():
    tensor = torch.randn(20, 10)
    usual = sample_of(tensor)
    assert are_comparable(usual, sample_of(tensor + 1))
    assert are_comparable(sample_of(tensor.T), sample_of(tensor.T + 1))
    for other in (tensor.double(), tensor[0], tensor.to(torch.int32)):
        assert not are_comparable(usual, sample_of(other))


def test_only_tensors_with_elements_here_are_dense():
    tensor = torch.ones(4, 5)
    assert is_dense(tensor)
    assert is_dense(nn.Parameter(tensor))
    nested = torch.nested.nested_tensor([tensor], layout=torch.jagged)
    assert not any(map(is_dense, (tensor.to_sparse(), tensor.to("meta"), nested)))
