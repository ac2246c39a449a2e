"""The size lists are those of the published networks, and buckets cut from them hold the bytes they should."""

from __future__ import annotations

import math

import pytest
import torch

from bench.architectures import ARCHITECTURES
from bench.large_models import BertLarge, Gpt2, ResNet50, VitLarge
from bench.size_list import SIZE_LISTS, bucket_shapes, load

TOTALS = {
    "resnet50": (161, 25_557_032),
    "bert_large": (391, 335_141_888),
    "gpt2": (148, 124_439_808),
    "vit_large": (296, 304_326_632),
    "tiny_2000": (2000, 2_048_000),
}


@pytest.mark.parametrize("name", SIZE_LISTS)
def test_the_totals_are_the_published_ones(name):
    shapes = [shape for _, shape in load(name)]
    assert (len(shapes), sum(map(math.prod, shapes))) == TOTALS[name]


@pytest.mark.parametrize("name", SIZE_LISTS)
def test_the_data_files_are_what_the_architectures_give(name):
    assert load(name) == list(ARCHITECTURES[name]())


@pytest.mark.parametrize("name", SIZE_LISTS)
@pytest.mark.parametrize("numel", [1, 1000, 1 << 20])
def test_a_bucket_has_the_elements_asked_for(name, numel):
    assert sum(map(math.prod, bucket_shapes(name, numel))) == numel


def test_a_bucket_fills_as_backward_fills_it():
    assert bucket_shapes("tiny_2000", 2500) == [(1024,), (1024,), (452,)]
    assert bucket_shapes("resnet50", 1000 + 5)[:2] == [(1000,), (5,)]


# Only the GPU machine has these libraries.
@pytest.mark.parametrize(
    ("name", "network"), [("resnet50", ResNet50), ("bert_large", BertLarge), ("vit_large", VitLarge)]
)
def test_what_is_timed_has_these_shapes_in_this_order(name, network):
    with torch.device("meta"):
        built = network()
    assert [tuple(param.shape) for param in built.parameters()] == [shape for _, shape in load(name)]
    if name == "resnet50":
        assert [name for name, _ in built.named_parameters()] == [name for name, _ in load(name)]


@pytest.mark.slow
def test_what_is_timed_runs_and_trains_every_parameter():
    for built, batch, shape in [
        (ResNet50(), torch.randn(2, 3, 64, 64), (2, 1000)),
        (BertLarge(hidden=32, layers=2, heads=4), torch.randint(30522, (2, 5)), (2, 32)),
    ]:
        out = built(batch)
        assert out.shape == shape
        out.square().sum().backward()
        assert all(param.grad is not None and param.grad.isfinite().all() for param in built.parameters())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "library", "model", "config", "options"),
    [
        ("resnet50", "torchvision.models", "resnet50", None, {}),
        ("vit_large", "torchvision.models", "vit_l_16", None, {}),
        ("gpt2", "transformers", "GPT2Model", "GPT2Config", {}),
        (
            "bert_large",
            "transformers",
            "BertModel",
            "BertConfig",
            {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        ),
    ],
)
def test_the_shapes_are_those_of_the_libraries(name, library, model, config, options):
    module = pytest.importorskip(library)
    with torch.device("meta"):
        arguments = [getattr(module, config)(**options)] if config else []
        built = getattr(module, model)(*arguments)
    assert [tuple(param.shape) for param in built.parameters()] == [shape for _, shape in load(name)]


def test_gpt2_has_these_sizes_in_this_order():
    with torch.device("meta"):
        built = Gpt2()
    # Its published weights of linear layers are stored as (inputs, outputs).
    assert [param.numel() for param in built.parameters()] == [math.prod(shape) for _, shape in load("gpt2")]
