"""Each generator is read, restored, hashed and seeded. Numbers are those of earlier versions and of files."""

import random
from zlib import crc32

import numpy as np
import torch

from dpfuse.engine.random_states import get_random_state, hashes_of_random_state, seed_by, seed_from, set_random_state

DRAWS = {"torch": lambda: torch.rand(()).item(), "python": random.random, "numpy": np.random.rand}


def drawn():
    return [draw() for draw in DRAWS.values()]


def test_a_state_is_restored_and_each_draw_changes_one_hash():
    before, hashes = get_random_state(on_gpus=False), hashes_of_random_state()
    kind, keys, *rest = np.random.get_state()
    told = [bytes(torch.get_rng_state().tolist()), repr(random.getstate()).encode()]
    told += [keys.tobytes() + repr((kind, rest)).encode()]
    assert [hashes[name] for name in before] == [f"{crc32(each):08x}" for each in told]
    first = drawn()
    set_random_state(before)
    assert hashes_of_random_state() == hashes
    for number, (name, draw) in enumerate(DRAWS.items()):
        now = hashes_of_random_state()
        assert draw() == first[number]
        assert [other for other, each in hashes_of_random_state().items() if each != now[other]] == [name]


def test_numbers_and_states_lead_to_the_seeds_of_earlier_versions():
    seed_by(0, 10, 3)
    assert drawn() == [0.5898962616920471, 0.9772594222719815, 0.37339803085025347]
    seed_by(0, 10, 3)
    seed_from(get_random_state(on_gpus=False), 2)
    assert drawn() == [0.9805540442466736, 0.09179422044650198, 0.37883028702781585]
