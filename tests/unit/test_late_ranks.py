"""Which rank is found late, and in which phase, from seconds of simulated ranks: delays, healthy runs, bad input."""

from __future__ import annotations

import numpy as np
import pytest

from dpfuse.comm.step_clock import NAMES, WAITING
from dpfuse.liveness.late_ranks import LateRanks
from tests.one_in import one_in

PHASES = NAMES[:WAITING]
USUAL = {"loader": 8.0, "forward": 14.0, "backward": 22.0, "optimizer": 6.0, "garbage collection": 0.2}  # ms
COMMUNICATION = 2.0  # ms, exposed
STEP = sum(USUAL.values()) + COMMUNICATION


class Job:
    """Ranks in simulated time: each ends a step when the last one is ready and its gradients have travelled.

    Every duration has a jitter of 4 %. Each rank now and then loses some milliseconds to something else, one step in a
    hundred loses many, and each machine is faster or slower by up to 2 % for a while.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.random = np.random.default_rng(seed)
        self.judge = LateRanks(size)
        self.sums = np.zeros((size, len(NAMES)))
        self.steps = 0
        self.said: list[tuple[int, str]] = []

    def neighbours(self, rank: int) -> set[int]:
        """The ranks with which this one has a connection: all-reduces go round a ring."""
        return {(rank + 1) % self.size, (rank - 1) % self.size} - {rank}

    def run(self, steps: int, delays=None, communication=COMMUNICATION, slow=(), every=8) -> None:
        """Steps; `delays` gives milliseconds by (rank, phase). The heartbeat tells of `every` so many steps at once.

        Connections of `slow`, by the ranks at both ends, deliver at an eighth of the rate of the others.
        """
        random = self.random
        sums = {rank: [] for rank in range(self.size)}
        for step in range(steps):
            self.steps += 1
            if self.steps % 100 == 1:
                self.machines = random.uniform(0.99, 1.01, (self.size, 1))
            busy = np.array([list(USUAL.values())] * self.size) * random.normal(1, 0.04, (self.size, WAITING))
            busy *= self.machines
            struck = random.random((self.size, WAITING))
            busy += np.where(struck < 0.02, random.exponential(6, struck.shape), 0)
            busy += np.where(struck > 0.998, random.exponential(200, struck.shape), 0)
            for (rank, phase), more in (delays or {}).items():
                busy[rank, PHASES.index(phase)] += more(self.steps) if callable(more) else more
            total = busy.sum(1)
            waits = total.max() - total + communication * random.lognormal(0, 0.3)
            self.sums += np.column_stack([busy, waits]) / 1e3
            for rank in range(self.size):
                sums[rank].append((self.steps, self.sums[rank].tolist()))
            if (step + 1) % every == 0:
                for rank in range(self.size):
                    rates = [
                        (
                            f"10.0.0.{rank}",
                            f"10.0.0.{peer}",
                            3e9 * random.lognormal(0, 0.2) / (8 if (rank, peer) in slow else 1),
                        )
                        for peer in self.neighbours(rank)
                    ]
                    self.judge.add(rank, sums[rank], rates)
                    sums[rank] = []
                self.said += [(self.steps, text) for text in self.judge.judge()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize("phase", PHASES)
def test_a_delay_of_a_fifth_of_a_step_is_found_within_fifty_steps(size, phase):
    job = Job(size, seed=PHASES.index(phase))
    job.run(104)
    job.run(48, {(size - 1, phase): 0.2 * STEP})
    ((_, text),) = job.said
    assert text.startswith(f"rank {size - 1} is ")
    since = int(text.partition("since step ")[2].partition(";")[0])
    assert f"late in {phase} since" in text
    assert 95 <= since <= 130  # it is known as exactly as the window of some thirty steps
    assert job.judge.late.seconds == pytest.approx(0.2 * STEP / 1e3, rel=0.35)
    before = len(job.said)
    job.run(80)
    ((_, ended),) = job.said[before:]
    assert ended.startswith(f"rank {size - 1} is no longer late in {phase}, after step ")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("phase", PHASES)
def test_a_delay_of_a_twentieth_of_a_step_is_found(size, phase):
    job = Job(size, seed=PHASES.index(phase))
    job.run(800, {(0, phase): 0.05 * STEP})
    assert job.said, "nothing was said"
    assert all(text.startswith("rank 0 is ") and f"late in {phase}" in text for _, text in job.said), job.said


@pytest.mark.parametrize("seed", one_in(6, range(30)))
def test_nothing_is_said_of_a_healthy_run(seed):
    job = Job(2 + seed % 4, seed)
    job.run(1000)
    assert job.said == []


@pytest.mark.parametrize("computes", [True, False])
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in (1, 11) else pytest.mark.slow) for seed in range(12)]
)
def test_nothing_is_said_of_a_healthy_run_on_a_machine_with_other_work(seed, computes):
    """It comes and goes. A rank that computes is slower in all phases, by its own share. Exchanges take longer, too, by
    at most 8 % of a step."""
    job, random = Job(2 + seed % 3, seed), np.random.default_rng(100 + seed)
    for piece in range(80):
        if piece == 0 or random.random() < 0.25:  # after some two seconds
            load = random.choice([0.0, 0.0, 1.0, 2.0, 4.0])
            share = random.uniform(0.7, 1.3, job.size)
        slower = {
            (rank, phase): lambda _, most=2 * load * share[rank] * USUAL[phase]: most * random.uniform(0.1, 0.3)
            for rank in range(job.size)
            for phase in PHASES
            if computes
        }
        job.run(8, slower, communication=0.3 + load * random.uniform(0.3, 1.1))
    assert job.said == []


def test_communication_that_grows_from_nothing_ends_when_it_is_short_again():
    job = Job(2, seed=13)
    job.run(200, communication=0.01)
    job.run(60, communication=12.0)
    job.run(80, communication=1.0)
    assert [text.partition(" for communication ")[2].split()[0] for _, text in job.said] == ["since", "again,"]


def test_two_ranks_of_one_machine_are_late_together():
    job = Job(8, seed=1)
    job.run(200, {(3, "forward"): 12.0, (6, "forward"): 15.0})
    ((_, text),) = job.said
    assert text.startswith("ranks 3, 6 are ")
    assert "without them a step takes 0.8" in text


def test_a_collection_of_garbage_in_each_tenth_step_is_found():
    """No step is usual for it, so only blocks of several steps show it."""
    job = Job(3, seed=2)
    job.run(400, {(1, "garbage collection"): lambda step: 150.0 if step % 10 == 0 else 0.0})
    assert [text.partition(" since")[0].split(") ")[1] for _, text in job.said] == ["late in garbage collection"]
    assert job.judge.late.ranks == (1,)


def test_a_rank_that_is_slow_in_all_that_it_does_is_found_later():
    """For some seconds this is what a busy machine looks like."""
    slow = {(2, phase): 0.25 * USUAL[phase] for phase in ("loader", "forward", "backward", "optimizer")}
    job = Job(4, seed=3)
    job.run(80, slow)
    assert job.said == []
    job.run(160, slow)
    ((_, text),) = job.said
    assert text.startswith("rank 2 is ")
    assert "late in backward and forward since" in text


def test_another_phase_of_the_same_rank_is_another_finding():
    job = Job(2, seed=4)
    job.run(120, {(0, "loader"): 12.0})
    job.run(120, {(0, "optimizer"): 12.0})
    assert [" no longer " in text for _, text in job.said] == [False, True, False]
    assert "late in loader" in job.said[0][1]
    assert "no longer late in loader" in job.said[1][1]
    assert "late in optimizer" in job.said[2][1]


def test_a_delay_of_a_second_in_one_step_is_not_told():
    job = Job(2, seed=5)
    job.run(400, {(0, "loader"): lambda step: 1000.0 if step % 200 == 100 else 0.0})
    assert job.said == []


def test_communication_that_doubles_is_told_when_it_begins_and_ends():
    job = Job(4, seed=6)
    job.run(200, communication=8.0)
    job.run(60, communication=20.0)
    ((_, text),) = job.said
    assert text.startswith("every rank waits ")
    assert "no rank is late, so it is the link" in text
    assert job.judge.numbers()["slow_link_usual"] == pytest.approx(8e-3, rel=0.2)
    job.run(80, communication=8.0)
    assert [" again, after " in text for _, text in job.said] == [False, True]
    assert job.judge.numbers() == {}


def test_communication_is_not_slow_where_all_else_takes_longer_too():
    """As on machines that have other work."""
    job = Job(4, seed=12)
    job.run(200, communication=4.0)
    job.run(60, {(rank, "backward"): 12.0 for rank in range(4)}, communication=16.0)
    assert job.said == []


def through(rank: int, size: int) -> dict[str, list[tuple[int, int]]]:
    """The connections that are slow where the link of a rank is, in one direction or in both."""
    neighbours = [(rank - 1) % size, (rank + 1) % size]
    sends, receives = [(rank, peer) for peer in neighbours], [(peer, rank) for peer in neighbours]
    return {"one it sends through": sends[:1], "all it sends through": sends, "both ways": sends + receives}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["one it sends through", "all it sends through", "both ways"])
@pytest.mark.parametrize(("size", "rank"), [(3, 1), (4, 0), (4, 3), (8, 5)])
def test_the_rank_at_the_end_of_a_slow_link_is_named(size, rank, way):
    job = Job(size, seed=10)
    job.run(200, communication=4.0)
    job.run(60, communication=16.0, slow=through(rank, size)[way])
    ((_, text),) = job.said
    assert text.endswith(f"so it is the link of rank {rank}, which delivers at a lower rate than before")
    assert job.judge.numbers()["slow_link_rank"] == rank


def test_that_which_others_send_to_slowly_is_named_too():
    job = Job(4, seed=10)
    job.run(200, communication=4.0)
    job.run(60, communication=16.0, slow=[(1, 2), (3, 2)])
    assert job.judge.numbers()["slow_link_rank"] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_that_which_sends_slowly_is_named(rank):
    job = Job(2, seed=10)
    job.run(200, communication=4.0)
    job.run(60, communication=16.0, slow=[(rank, 1 - rank)])
    ((_, text),) = job.said
    assert f"so it is the link of rank {rank}," in text


@pytest.mark.parametrize(
    ("size", "slow"),
    [(4, []), (4, [(0, 1), (2, 3)]), (3, [(0, 1), (1, 2), (2, 0)]), (8, [(one, (one + 1) % 8) for one in range(8)])],
    ids=["none", "two that have nothing in common", "the whole ring of three", "the whole ring of eight"],
)
def test_no_rank_is_named_where_the_slow_connections_have_no_end_in_common(size, slow):
    job = Job(size, seed=11)
    job.run(200, communication=4.0)
    job.run(60, communication=16.0, slow=slow)
    ((_, text),) = job.said
    assert text.endswith("so it is the link")
    assert "slow_link_rank" not in job.judge.numbers()


@pytest.mark.parametrize(
    "rates", [[1], [["a", "b"]], [["a", "b", "fast"]], [["a", "b", -1.0]], [["a" * 300, "b", 1.0]]]
)
def test_rates_of_another_form_are_refused(rates):
    with pytest.raises(ValueError, match="these are not the rates of connections"):
        LateRanks(2).add(0, [(1, [0.0] * len(NAMES))], rates)


def test_ranks_that_tell_of_other_steps_are_compared_at_those_in_common():
    job = Job(2, seed=7)
    add = job.judge.add
    job.judge.add = lambda rank, sums, _: add(rank, [one for one in sums if rank == 0 or one[0] % 4 == 0])
    job.run(400, {(1, "forward"): 12.0})
    assert [text.partition(" is ")[0] for _, text in job.said] == ["rank 1"]


def test_nothing_is_judged_or_kept_while_a_rank_tells_nothing():
    job = Job(3, seed=8)
    add = job.judge.add
    job.judge.add = lambda rank, sums, _: None if rank == 2 else add(rank, sums)
    job.run(600, {(1, "forward"): 12.0})
    assert job.said == []
    assert len(job.judge._told) <= 256


def test_the_numbers_for_a_log():
    job = Job(2, seed=9)
    assert job.judge.numbers() == {}
    job.run(60, {(1, "backward"): 15.0})
    numbers = job.judge.numbers()
    assert (numbers["late_rank"], numbers["late_ranks"], NAMES[numbers["late_phase"]]) == (1, 1, "backward")
    assert numbers["late_seconds"] == pytest.approx(15e-3, rel=0.3)
    assert numbers["step_without_late"] == pytest.approx(1 - 15 / (STEP + 15), abs=0.06)


@pytest.mark.parametrize(
    "sums",
    [
        [[1, [0.0] * 5]],
        [[1.5, [0.0] * 6]],
        [["1", [0.0] * 6]],
        [[1, [0.0] * 5 + [float("nan")]]],
        [[1, [0.0] * 5 + [1e10]]],
        [[1, "123456"]],
        [1],
        [None],
    ],
)
def test_sums_that_no_clock_can_show_are_refused(sums):
    with pytest.raises(ValueError, match="not the seconds of the phases"):
        LateRanks(2).add(0, sums)
