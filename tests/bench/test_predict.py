"""The predictions for a GPU: what fits on a multiprocessor, and what limits a kernel."""

from __future__ import annotations

import json

import pytest

from bench.predict import RESULT, Card, predict, resident

ROW = {"kernel": "flatten", "dtype": "float32", "wire": "float32", "shape": [4096, 8], "registers": 32, "spilled": 0}


@pytest.mark.parametrize(
    ("registers", "warps", "programs"),
    [(32, 8, 8), (33, 8, 6), (64, 8, 4), (255, 8, 1), (16, 1, 32), (16, 16, 4)],
)
def test_registers_threads_and_places_limit_the_programs(registers, warps, programs):
    assert resident(registers, warps, Card()) == programs


def test_a_large_bucket_uses_nearly_all_of_the_bandwidth_and_a_small_one_waits():
    small, usual, large = (predict(ROW, "resnet50", size, Card())["share"] for size in (1, 25, 100))
    assert small < 0.3 < usual < large < 1.0


def test_too_few_bytes_in_flight_are_the_limit():
    slow = Card(latency=8e-6)
    assert predict(ROW | {"registers": 255}, "resnet50", 100, slow)["share"] < 0.2
    assert predict(ROW, "resnet50", 100, Card())["share"] > 0.2
    short, fitting = (predict(ROW | {"shape": shape}, "tiny_2000", 8, slow) for shape in ([4096, 8], [1024, 2]))
    assert short["share"] < fitting["share"], "most threads have nothing to move"


def test_unpacking_reads_what_packing_writes():
    mixed = ROW | {"wire": "bfloat16"}
    pack, unpack = (predict(row, "resnet50", 25, Card()) for row in (mixed, mixed | {"kernel": "unflatten"}))
    assert pack["KiB_in_flight_per_multiprocessor"] == 2 * unpack["KiB_in_flight_per_multiprocessor"]


def test_the_record_is_what_the_model_says_of_its_registers():
    record = json.loads(RESULT.read_text())
    card = Card(**record["card"])
    assert len(record["predictions"]) == 10 * 3 * 2 * 4, "shapes, dtypes, kernels, buckets"
    for row in record["predictions"]:
        assert predict(row, row["sizes"], row["MiB"], card) == row
