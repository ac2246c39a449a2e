"""What the comparison of weights is doing, what may happen, and what follows: one table. Knows no tensor and no rank.

A step counts if it is the first of this model after an average. Further ones are made on other gradients, such as those
of the inner loop of meta-learning, whose steps are taken back.
"""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["IMPOSSIBLE", "TRANSITIONS", "Action", "Event", "State"]


class _Member(Enum):
    __hash__ = object.__hash__  # that of `Enum` is a function of Python, and each backward looks into the table


class State(_Member):
    """What the comparison is doing."""

    FIRST = auto()  # nothing was averaged yet, so no step counts
    AWAITED = auto()  # gradients were averaged: the next step counts, and a slice is hashed after it
    STEPPED = auto()  # a step has counted: none does until gradients are averaged again
    EXPECTED = auto()  # a rank expects an examination: the next step counts, and each parameter is hashed after it
    HASHED_AFTER = auto()  # that is done: each parameter is hashed again when the next backward begins
    HASHED_BEFORE = auto()  # that is done, too, or no step counts: nothing is hashed for the expected examination
    OFF = auto()  # this rank hashes nothing any more, and takes part in examinations without its weights


class Event(_Member):
    """What may happen."""

    AVERAGED = auto()  # an average is complete, of which this rank hears no difference
    DIFFERENT = auto()  # an average is complete, and every rank hears that hashes have differed
    LOOK_DUE = auto()  # an average is complete, after which known differences are to be looked at again
    STEP = auto()  # an optimizer of this model has stepped, between backwards or inside the one that is averaged now
    EMPTY_STEP = auto()  # it has, and there is nothing in the slice that is due
    OUTER_STEP = auto()  # it has, and a step inside of this one has counted already
    BACKWARD = auto()  # a backward begins
    SUSPECTED = auto()  # every rank hears that a rank suspects that weights differ
    EXAMINATION = auto()  # every rank examines now
    SYNCHRONIZED = auto()  # all ranks have the same weights again
    NO_INPUTS = auto()  # this rank only takes part in the next backward: it makes no steps, and has nothing to compare
    TURNED_OFF = auto()  # this rank is to compare no more


class Action(_Member):
    """What the comparison does about it."""

    NOTHING = auto()
    PASS_SLICE = auto()  # count a slice that is empty
    HASH_SLICE = auto()  # hash the next slice
    HASH_SLICE_AGAIN = auto()  # hash the same slice again
    HASH_EACH = auto()  # hash the next slice, and each parameter by itself
    HASH_EACH_AGAIN = auto()  # hash the same slice again, and each parameter
    HASH_BEFORE = auto()  # hash each parameter before the backward
    HEAR_BEGINS = auto()  # hear from now on when steps begin, as one may run inside another one
    ASK = auto()  # ask for an examination
    NOTICE = auto()  # ask for one, and note when a difference was heard of
    MAKE_DUE = auto()  # examine in the next averaged backward, as every rank does
    EXAMINE = auto()  # exchange the hashes of each parameter
    START_AGAIN = auto()  # forget what was known, expected and hashed
    SAY_NOTHING = auto()  # send no hash


# Before Python 3.12, looking up a member is slow.
FIRST, AWAITED, STEPPED, EXPECTED, HASHED_AFTER, HASHED_BEFORE, OFF = State
AVERAGED, DIFFERENT, LOOK_DUE, STEP, EMPTY_STEP, OUTER_STEP = list(Event)[:6]
BACKWARD, SUSPECTED, EXAMINATION, SYNCHRONIZED, NO_INPUTS, TURNED_OFF = list(Event)[6:]
NOTHING, PASS_SLICE, HASH_SLICE, HASH_SLICE_AGAIN, HASH_EACH, HASH_EACH_AGAIN, HASH_BEFORE = list(Action)[:7]
HEAR_BEGINS, ASK, NOTICE, MAKE_DUE, EXAMINE, START_AGAIN, SAY_NOTHING = list(Action)[7:]

# What is done, and the state from then on: it is the next one already while that is done.
TRANSITIONS: dict[tuple[State, Event], tuple[Action, State]] = {
    (FIRST, AVERAGED): (NOTHING, AWAITED),
    (AWAITED, AVERAGED): (NOTHING, AWAITED),
    (STEPPED, AVERAGED): (NOTHING, AWAITED),
    (EXPECTED, AVERAGED): (NOTHING, EXPECTED),
    (HASHED_AFTER, AVERAGED): (NOTHING, EXPECTED),
    (HASHED_BEFORE, AVERAGED): (NOTHING, EXPECTED),
    (OFF, AVERAGED): (NOTHING, OFF),
    # A rank that hashes nothing asks, too: on a GPU one whose backward has failed has not heard of it.
    (FIRST, DIFFERENT): (NOTICE, EXPECTED),
    (AWAITED, DIFFERENT): (NOTICE, EXPECTED),
    (STEPPED, DIFFERENT): (NOTICE, EXPECTED),
    (EXPECTED, DIFFERENT): (NOTICE, EXPECTED),
    (HASHED_AFTER, DIFFERENT): (NOTICE, EXPECTED),
    (HASHED_BEFORE, DIFFERENT): (NOTICE, EXPECTED),
    (OFF, DIFFERENT): (NOTICE, OFF),
    (AWAITED, LOOK_DUE): (ASK, EXPECTED),
    (STEPPED, LOOK_DUE): (ASK, EXPECTED),
    (EXPECTED, LOOK_DUE): (ASK, EXPECTED),
    (HASHED_AFTER, LOOK_DUE): (ASK, EXPECTED),
    (HASHED_BEFORE, LOOK_DUE): (ASK, EXPECTED),
    (OFF, LOOK_DUE): (ASK, OFF),
    (AWAITED, STEP): (HASH_SLICE, STEPPED),
    (STEPPED, STEP): (HEAR_BEGINS, STEPPED),
    (EXPECTED, STEP): (HASH_EACH, HASHED_AFTER),
    (HASHED_AFTER, STEP): (NOTHING, HASHED_AFTER),
    (HASHED_BEFORE, STEP): (NOTHING, HASHED_BEFORE),
    (OFF, STEP): (NOTHING, OFF),
    (AWAITED, EMPTY_STEP): (PASS_SLICE, STEPPED),
    # What counts is the end of the outer step, which may change weights once more.
    (AWAITED, OUTER_STEP): (HASH_SLICE, STEPPED),
    (STEPPED, OUTER_STEP): (HASH_SLICE_AGAIN, STEPPED),
    (EXPECTED, OUTER_STEP): (HASH_EACH, HASHED_AFTER),
    (HASHED_AFTER, OUTER_STEP): (HASH_EACH_AGAIN, HASHED_AFTER),
    (HASHED_BEFORE, OUTER_STEP): (HASH_EACH_AGAIN, HASHED_AFTER),
    (FIRST, BACKWARD): (NOTHING, FIRST),
    (AWAITED, BACKWARD): (NOTHING, AWAITED),
    (STEPPED, BACKWARD): (NOTHING, STEPPED),
    (EXPECTED, BACKWARD): (NOTHING, EXPECTED),
    (HASHED_AFTER, BACKWARD): (HASH_BEFORE, HASHED_BEFORE),
    (HASHED_BEFORE, BACKWARD): (NOTHING, HASHED_BEFORE),
    (OFF, BACKWARD): (NOTHING, OFF),
    # Ranks hear of it inside a backward. If that fails, a step after it does not count.
    (FIRST, SUSPECTED): (MAKE_DUE, HASHED_BEFORE),
    (AWAITED, SUSPECTED): (MAKE_DUE, EXPECTED),
    (STEPPED, SUSPECTED): (MAKE_DUE, HASHED_BEFORE),
    (EXPECTED, SUSPECTED): (MAKE_DUE, EXPECTED),
    (HASHED_AFTER, SUSPECTED): (MAKE_DUE, HASHED_AFTER),
    (HASHED_BEFORE, SUSPECTED): (MAKE_DUE, HASHED_BEFORE),
    (OFF, SUSPECTED): (MAKE_DUE, OFF),
    # All ranks examine and synchronize in the same place, so the step that comes next counts on all of them.
    (FIRST, EXAMINATION): (EXAMINE, FIRST),
    (AWAITED, EXAMINATION): (EXAMINE, AWAITED),
    (STEPPED, EXAMINATION): (EXAMINE, AWAITED),
    (EXPECTED, EXAMINATION): (EXAMINE, AWAITED),
    (HASHED_AFTER, EXAMINATION): (EXAMINE, AWAITED),
    (HASHED_BEFORE, EXAMINATION): (EXAMINE, AWAITED),
    (OFF, EXAMINATION): (EXAMINE, OFF),
    (FIRST, SYNCHRONIZED): (START_AGAIN, FIRST),
    (AWAITED, SYNCHRONIZED): (START_AGAIN, AWAITED),
    (STEPPED, SYNCHRONIZED): (START_AGAIN, AWAITED),
    (EXPECTED, SYNCHRONIZED): (START_AGAIN, AWAITED),
    (HASHED_AFTER, SYNCHRONIZED): (START_AGAIN, AWAITED),
    (HASHED_BEFORE, SYNCHRONIZED): (START_AGAIN, AWAITED),
    (OFF, SYNCHRONIZED): (START_AGAIN, OFF),
    **{(state, NO_INPUTS): (SAY_NOTHING, state) for state in State},
    **{(state, TURNED_OFF): (SAY_NOTHING, OFF) for state in State},
}
_TOO_EARLY = "no step is told before the first average, and those inside its backward are told after it"
_UNASKED = "whether the next slice is empty is asked only where a step counts, and no other hash is due after it"
IMPOSSIBLE: dict[tuple[State, Event], str] = {
    (FIRST, LOOK_DUE): "known differences are looked at again after some number of averages, and this is the first one",
    (FIRST, STEP): _TOO_EARLY,
    (FIRST, OUTER_STEP): _TOO_EARLY,
    (OFF, OUTER_STEP): "no step between backwards is told once the comparison is off",
    **{(state, EMPTY_STEP): _UNASKED for state in State if state is not AWAITED},
}
