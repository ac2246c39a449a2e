"""The rule of docs/design/failures.md in a small model: three ranks, up to two failures, in every order of events.

`RULES` is the table of the page, and what a failed rank does is read from it. Each rank goes through the stages of its
steps. A failure may strike at each place of a stage, on any rank. `Model.explore` follows every order in which ranks
can act, and notes what is wrong. Stages are divided where another rank can notice it: at collectives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, IntEnum, auto
from typing import Any, NamedTuple

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "docs/design/failures.md"
RANKS, BATCHES = 3, 3

# What can be wrong.
DEADLOCK = "no rank can go on"
KINDS = "collectives of different kinds meet"
PAIRS = "batches are averaged that do not belong together"
WEIGHTS = "ranks go on with different weights"
MORE = "a rank raises where the rule has no exception"
FEWER = "a rank does not raise where the rule has an exception"
ALONE = "a rank ends before the others, and has told no failure"


class Peers(Enum):
    """What the peers of a rank do after its failure in backward n. The cells of the page begin with these words."""

    GO_ON = "go on"
    RAISE = "raise in backward *n*"
    RAISE_NEXT = "raise in the next averaged backward"
    RAISE_ALWAYS = "raise in each attempt"


class Own(Enum):
    """What the rank itself does after the exception that its program has seen."""

    SILENT = "silent"
    TELLS = "raises in the next averaged backward"
    ENDS = "raises in each attempt"
    AGAIN = "raises in its next forward"  # no row of the page: the rule before this one


class Rule(NamedTuple):
    """A row of the page."""

    places: tuple[str, ...]
    peers: Peers
    own: Own


RULES = [
    Rule(("forward",), Peers.GO_ON, Own.SILENT),
    Rule(("opening", "between sends", "before the last send"), Peers.RAISE, Own.SILENT),
    Rule(("start of a collective",), Peers.RAISE_ALWAYS, Own.ENDS),
    Rule(("after the report", "delivery", "after the vote"), Peers.RAISE_NEXT, Own.TELLS),
    Rule(("vote",), Peers.RAISE, Own.SILENT),
    Rule(("optimizer step",), Peers.RAISE_NEXT, Own.TELLS),
]


class At(IntEnum):
    """What a rank does next. One that owes it does it in its next forward, without gradients."""

    FORWARD = auto()  # and open the backward, and send the first bucket
    BUCKET = auto()  # send the first bucket, which it owes
    REPORT = auto()  # send the last bucket, with the report
    MEAN = auto()  # wait for the buckets, read the report
    VOTE = auto()  # after the first averaged backward
    VERDICT = auto()  # wait for the votes
    STEP = auto()
    END = auto()  # no batch is left
    STOPPED = auto()  # an error has said that the group, or a rank, has ended


COLLECTIVES = (At.FORWARD, At.BUCKET, At.REPORT, At.VOTE)
RESTING = (At.END, At.STOPPED)
# Where a failure can strike before a rank has done what is next.
PLACES = {
    At.FORWARD: ("forward", "opening", "start of a collective"),
    At.REPORT: ("between sends", "before the last send", "start of a collective"),
    At.MEAN: ("after the report", "delivery"),
    At.VOTE: ("vote", "start of a collective"),
    At.VERDICT: ("after the vote",),
}


class Sent(NamedTuple):
    """What a rank gives to a collective. A vote has `failed` where the rank declines."""

    kind: At
    batch: int = -1  # the number of its batch; -1 without one
    number: int = -1  # of this batch among those that the rank has not dropped after a forward
    failed: bool = False
    missed: bool = False  # whether this rank has not used the mean of an earlier backward
    weights: tuple[tuple[int, ...], ...] = ()


class Read(NamedTuple):
    """What all ranks read in a report, or in the votes."""

    failed: bool
    missed: bool
    mean: tuple[int, ...]  # the batches of all ranks, in order


class Rank(NamedTuple):
    at: At = At.FORWARD
    batch: int = 0
    dropped: int = 0  # batches that its program has skipped after a forward
    weights: tuple[tuple[int, ...], ...] = ()  # the means that its optimizer has stepped on
    mean: tuple[int, ...] = ()
    voted: bool = False
    owes: Own | None = None  # what follows once it has completed the backward that an exception ended
    missed: bool = False
    backward: int = 0  # the last one whose report it has read
    expected: tuple[int, ...] = ()  # the backwards in which it is to raise
    out: tuple[Sent, ...] = ()  # what it has sent, and a peer has not
    read: tuple[Read, ...] = ()  # what has landed, and it has not read


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    failures: int  # that may still strike, on any rank
    ended: bool = False  # whether the group has ended


class Model:
    """The ranks of a job whose programs catch all exceptions.

    Args:
        skips: whether a program takes its next batch after an exception, or the same one again.
        rules: the table.
        tells_beside_failure: whether a missed mean is told in a backward that also failed on a rank.
    """

    def __init__(self, *, skips: bool, rules: list[Rule] = RULES, tells_beside_failure: bool = False) -> None:
        self.skips = skips
        self.tells_beside_failure = tells_beside_failure
        self.rule = {place: rule for rule in rules for place in rule.places}
        self.alone = False  # whether only one failure may strike
        self.struck: set[str] = set()
        self.wrong: set[str] = set()

    def explore(self, failures: int) -> int:
        """Follow all orders of events with so many failures, breadth first. Returns how many states there are."""
        self.alone = failures == 1
        start = State((Rank(),) * RANKS, failures)
        seen, row = {start}, [start]
        while row:
            following = {sort_ranks(after) for state in row for after in self.after(state)}
            row = list(following - seen)
            seen.update(row)
        return len(seen)

    def after(self, state: State) -> Iterator[State]:
        """Every state that can follow; notes what is wrong at an end."""
        moved = False
        for number, rank in enumerate(state.ranks):
            if rank.at in RESTING:
                continue
            for after in self.moves(state, number, rank):
                moved = True
                yield after
        if not moved:
            self.look_at_end(state)

    # --- What one rank can do ---

    def moves(self, state: State, number: int, rank: Rank) -> Iterator[State]:
        at, owes = rank.at, rank.owes
        if (at is At.FORWARD or owes) and rank.batch == BATCHES:
            yield with_rank(state, number, rank._replace(at=At.END))
            return
        if state.failures:
            for place in self.places(rank):
                yield self.fail(state, number, place)
        if state.ended:
            yield with_rank(state, number, rank._replace(at=At.STOPPED))
        if rank.read:
            yield from self.read(state, number, rank)
        elif state.ended:
            return
        elif at in COLLECTIVES:
            yield self.send(state, number, rank)
        elif any(other.at in RESTING and not other.out for other in state.ranks):
            # The heartbeat names the rank that has ended, and what its last forward has raised.
            yield with_rank(state, number, rank._replace(at=At.STOPPED, expected=rank.expected[1:]))

    def places(self, rank: Rank) -> Iterator[str]:
        """Where a failure can strike now."""
        if rank.owes:
            yield "forward"
            if rank.at in COLLECTIVES:
                yield "start of a collective"
            return
        for place in PLACES[rank.at]:
            well = rank.read and not rank.read[0].failed and not rank.read[0].missed
            if place != "delivery" or well:
                yield place

    def fail(self, state: State, number: int, place: str) -> State:
        """An exception strikes, and the program of the rank catches it."""
        self.struck.add(place)
        rule, rank = self.rule[place], state.ranks[number]
        if rule.own is Own.TELLS and not rank.voted and rank.at is At.MEAN:
            rule = self.rule["vote"]  # in which the peers wait for this rank
        backward = rank.backward + (rank.at not in (At.VOTE, At.VERDICT, At.STEP))
        due = {Peers.RAISE: (backward,), Peers.RAISE_NEXT: (backward + 1,)}.get(rule.peers, ())
        ranks = [other._replace(expected=(*other.expected, *due)) for other in state.ranks]
        ranks[number] = rank  # its own exception is seen here
        if rule.own in (Own.TELLS, Own.AGAIN):
            rank = rank._replace(expected=(*rank.expected, backward + (rule.own is Own.TELLS)))
        if place == "forward":
            rank = rank._replace(dropped=rank.dropped + self.skips)
        elif rank.at is At.STEP:
            rank = rank._replace(at=At.FORWARD, mean=(), missed=rule.own is Own.TELLS)
        else:
            rank = rank._replace(at=sending(rank.at), owes=rule.own)
        ranks[number] = rank._replace(batch=rank.batch + self.skips)
        return State(tuple(ranks), state.failures - 1, state.ended or rule.own is Own.ENDS)

    def send(self, state: State, number: int, rank: Rank) -> State:
        """Join a collective. It lands on all ranks once all have joined."""
        kind = sending(rank.at)
        sent = Sent(kind, failed=bool(rank.owes), missed=rank.missed, weights=rank.weights)
        if not rank.owes:
            sent = sent._replace(batch=rank.batch, number=rank.batch - rank.dropped)
        following = {At.BUCKET: At.REPORT, At.REPORT: At.MEAN, At.VOTE: At.VERDICT}[kind]
        state = with_rank(state, number, rank._replace(at=following, out=(*rank.out, sent)))
        if not all(rank.out for rank in state.ranks):
            return state
        landed = [rank.out[0] for rank in state.ranks]
        if len({each.kind for each in landed}) > 1:
            self.wrong.add(KINDS)
        read = self.landed(landed)
        waiting = (rank._replace(out=rank.out[1:], read=(*rank.read, *read)) for rank in state.ranks)
        return state._replace(ranks=tuple(waiting))

    def landed(self, sent: list[Sent]) -> list[Read]:
        """What the ranks read of a collective that has landed."""
        failed, missed = any(each.failed for each in sent), any(each.missed for each in sent)
        if sent[0].kind is At.BUCKET:
            return []
        if sent[0].kind is At.REPORT and not failed and not missed:
            if len({each.number for each in sent}) > 1:
                self.wrong.add(PAIRS)
            if len({each.weights for each in sent}) > 1:
                self.wrong.add(WEIGHTS)
        return [Read(failed, missed, tuple(sorted(each.batch for each in sent)))]

    def read(self, state: State, number: int, rank: Rank) -> Iterator[State]:
        """Read what has landed. A step of the optimizer follows at once, since no other rank notices when it runs."""
        first, *rest = rank.read
        is_read = self.vote_is_read if rank.at is At.VERDICT else self.report_is_read
        rank = is_read(rank._replace(read=tuple(rest)), first)
        state = with_rank(state, number, rank)
        if rank.at is not At.STEP:
            yield state
            return
        if state.failures:
            yield self.fail(state, number, "optimizer step")
        stepped = rank._replace(weights=(*rank.weights, rank.mean), mean=(), batch=rank.batch + 1)
        yield with_rank(state, number, stepped._replace(at=At.FORWARD))

    def report_is_read(self, rank: Rank, read: Read) -> Rank:
        rank = rank._replace(backward=rank.backward + 1)
        if rank.owes:
            if read.failed:
                return self.silent(rank)
            if read.missed:  # the peers have raised, and this rank has not: it tells them again
                return settled(rank)._replace(missed=True)
            if not rank.voted:
                return rank._replace(at=At.VOTE)
            return settled(rank)._replace(missed=rank.missed or rank.owes is Own.TELLS)
        if read.missed and (self.tells_beside_failure or not read.failed):
            # The programs load a checkpoint, here that from before the first step.
            return self.raises(rank)._replace(batch=0, weights=(), dropped=0, missed=False)
        if read.failed:
            return self.raises(rank)
        return rank._replace(at=At.STEP if rank.voted else At.VOTE, mean=read.mean)

    def vote_is_read(self, rank: Rank, read: Read) -> Rank:
        if rank.owes:
            if read.failed:
                return self.silent(rank)
            return settled(rank)._replace(voted=True, missed=rank.owes is Own.TELLS)
        return self.raises(rank) if read.failed else rank._replace(at=At.STEP, voted=True)

    def silent(self, rank: Rank) -> Rank:
        """Go on with the forward after a backward in which the peers have raised."""
        after = settled(rank)
        return self.raises(after) if rank.owes is Own.AGAIN else after

    def raises(self, rank: Rank) -> Rank:
        """The backward, or a forward, raises. Beside another failure a missed mean may be told later."""
        due = [each for each in rank.expected if each == rank.backward or (each < rank.backward and not self.alone)]
        if not due:
            self.wrong.add(MORE)
        left = list(rank.expected)
        if due:
            left.remove(due[0])
        after = rank._replace(at=At.FORWARD, mean=(), batch=rank.batch + self.skips)
        return after._replace(expected=tuple(left))

    # --- The end ---

    def look_at_end(self, state: State) -> None:
        """Note what is wrong where no rank can go on."""
        ranks = state.ranks
        if any(rank.at not in RESTING for rank in ranks):
            self.wrong.add(DEADLOCK)
        if state.ended:
            return
        # No backward was left in which such a rank could tell it.
        untold = any(rank.missed or rank.owes is Own.TELLS for rank in ranks)
        if not untold and len({rank.weights for rank in ranks}) > 1:
            self.wrong.add(WEIGHTS)
        explained = untold or any(rank.dropped or rank.owes for rank in ranks)
        if not explained and any(rank.at is At.STOPPED for rank in ranks):
            self.wrong.add(ALONE)
        if self.alone and not untold and any(rank.expected for rank in ranks):
            self.wrong.add(FEWER)


def sending(at: At) -> At:
    return At.BUCKET if at is At.FORWARD else at


def with_rank(state: State, number: int, rank: Rank) -> State:
    return state._replace(ranks=(*state.ranks[:number], rank, *state.ranks[number + 1 :]))


def sort_ranks(state: State) -> State:
    """The rules do not ask which rank is which. So states are the same that differ only in the order of the ranks."""
    return state._replace(ranks=tuple(sorted(state.ranks, key=hash)))


def settled(rank: Rank) -> Rank:
    return rank._replace(at=At.FORWARD, owes=None, mean=())


def explored(failures: int, *, skips: bool, **how: Any) -> Model:
    model = Model(skips=skips, **how)
    assert model.explore(failures) > 1000
    return model


def with_rule(place: str, **changed: Any) -> list[Rule]:
    """The table with another row of this place."""
    return [rule._replace(**changed) if place in rule.places else rule for rule in RULES]


SKIPS = pytest.mark.parametrize("skips", [True, False], ids=["skip", "repeat"])


@SKIPS
@pytest.mark.parametrize("failures", [1, 2])
def test_no_order_of_events_breaks_the_rule(skips, failures):
    model = explored(failures, skips=skips)
    assert model.wrong == set()
    assert model.struck == {place for rule in RULES for place in rule.places}


def test_a_rank_that_raises_again_skips_one_batch_more_than_its_peers():
    assert PAIRS in explored(1, skips=True, rules=with_rule("opening", own=Own.AGAIN)).wrong


@SKIPS
@pytest.mark.parametrize("place", ["delivery", "optimizer step"])
def test_a_rank_that_is_silent_although_its_peers_have_stepped_has_other_weights(skips, place):
    assert WEIGHTS in explored(1, skips=skips, rules=with_rule(place, own=Own.SILENT)).wrong


@SKIPS
def test_a_missed_mean_is_not_told_beside_another_failure_since_that_rank_would_not_hear_it(skips):
    assert {PAIRS, WEIGHTS} <= explored(2, skips=skips, tells_beside_failure=True).wrong


@SKIPS
@pytest.mark.parametrize(
    ("place", "changed", "wrong"),
    [
        ("opening", {"peers": Peers.GO_ON}, MORE),
        ("opening", {"peers": Peers.RAISE_NEXT}, MORE),
        ("vote", {"own": Own.TELLS}, FEWER),
        ("delivery", {"peers": Peers.RAISE}, FEWER),
        ("optimizer step", {"peers": Peers.RAISE}, FEWER),
    ],
)
def test_no_row_can_say_anything_else(skips, place, changed, wrong):
    assert wrong in explored(1, skips=skips, rules=with_rule(place, **changed)).wrong


def test_ranks_that_wait_for_each_other_are_seen():
    model = Model(skips=True)
    assert list(model.after(State((Rank(at=At.MEAN),) * RANKS, failures=0))) == []
    assert model.wrong == {DEADLOCK}


def test_collectives_of_different_kinds_are_seen():
    model = Model(skips=True)
    waiting = Rank(at=At.VERDICT, out=(Sent(At.VOTE),))
    list(model.after(State((Rank(), waiting, waiting), failures=0)))
    assert KINDS in model.wrong


def test_the_page_has_the_same_rows():
    rows = re.findall(r"^\| (\d) \| (.+) \| (.+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, *_ in rows] == [*range(1, len(RULES) + 1)]
    for rule, (_, places, peers, own) in zip(RULES, rows, strict=True):
        assert tuple(re.findall(r"\*\*(.+?)\*\*", places)) == rule.places
        assert peers.startswith(rule.peers.value)
        assert own.startswith(rule.own.value)
