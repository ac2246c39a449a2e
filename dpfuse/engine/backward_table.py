"""What a backward is doing, what may happen, and what follows: one table. Knows no gradient and no rank."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["IMPOSSIBLE", "RESTING", "TRANSITIONS", "Action", "Event", "State"]


class _Member(Enum):
    __hash__ = object.__hash__  # that of `Enum` is a function of Python, and each backward looks into the table


class State(_Member):
    """What the backward that is open, if any, means for the reducer."""

    IDLE = auto()  # none is open
    LOCAL = auto()  # it is not synchronised
    RECORDING = auto()  # the first that is synchronised: all buckets are sent at its end
    CHANGED = auto()  # like RECORDING, but first the buckets of the old model are sent, empty
    REDUCING = auto()  # a bucket is sent once it and all before it are complete, the last one at the end
    ABANDONED = auto()  # an exception ended a synchronised backward; what the peers wait for comes before anything else


class Event(_Member):
    """What may happen."""

    BEGINS_LOCAL = auto()  # a backward begins that is not synchronised
    BEGINS_FIRST = auto()  # one begins that is synchronised: the first with these parameters
    BEGINS_CHANGED = auto()  # or the first since this rank's model has changed
    BEGINS = auto()  # or any later one
    READY = auto()  # a gradient was accumulated
    ENDED = auto()  # the backward has ended, and there is nothing to average
    AVERAGED = auto()  # it has ended, and everything is delivered
    REFUSED = auto()  # it has ended in an error that every rank raises
    DIED = auto()  # an exception has ended it
    DIED_UNOPENED = auto()  # an exception has ended one that was to be synchronised, before it was opened
    DIED_UNNOTED = auto()  # an exception has ended a local one, before it was opened
    COMPLETED = auto()  # what the peers waited for is complete
    WAS_OPEN = auto()  # it was a backward that still runs, and nothing has announced it


class Action(_Member):
    """What the reducer does about it."""

    ENTER = auto()  # tell the heartbeat that a backward runs
    OPEN = auto()  # open the backward that runs, which nothing has announced
    ACCUMULATE = auto()  # take the gradient into its bucket, where buckets accumulate
    RECORD = auto()  # note the order in which gradients become ready
    SEND = auto()  # send the buckets that are complete
    LEAVE = auto()  # forget what became ready, and tell the heartbeat that no backward runs
    DROP = auto()  # the same, and drop what it has accumulated: it is incomplete
    OWE = auto()  # the same as LEAVE, and keep the model until what the peers wait for is complete
    FORGET = auto()  # forget the backward, and begin a new window
    COUNT = auto()  # the same, and count the backward


# Before Python 3.12, looking up a member is slow.
IDLE, LOCAL, RECORDING, CHANGED, REDUCING, ABANDONED = State
BEGINS_LOCAL, BEGINS_FIRST, BEGINS_CHANGED, BEGINS, READY = list(Event)[:5]
ENDED, AVERAGED, REFUSED, DIED, DIED_UNOPENED, DIED_UNNOTED, COMPLETED, WAS_OPEN = list(Event)[5:]
ENTER, OPEN, ACCUMULATE, RECORD, SEND, LEAVE, DROP, OWE, FORGET, COUNT = Action

RESTING = (IDLE, ABANDONED)  # no backward is running

# What is done, and the state from then on. An error in what is done leaves the state as it was.
TRANSITIONS: dict[tuple[State, Event], tuple[Action, State]] = {
    (IDLE, BEGINS_LOCAL): (ENTER, LOCAL),
    (IDLE, BEGINS_FIRST): (ENTER, RECORDING),
    (IDLE, BEGINS_CHANGED): (ENTER, CHANGED),
    (IDLE, BEGINS): (ENTER, REDUCING),
    (IDLE, READY): (OPEN, IDLE),
    (LOCAL, READY): (ACCUMULATE, LOCAL),
    (RECORDING, READY): (RECORD, RECORDING),
    (CHANGED, READY): (RECORD, CHANGED),
    (REDUCING, READY): (SEND, REDUCING),
    (ABANDONED, READY): (OPEN, ABANDONED),
    (LOCAL, ENDED): (LEAVE, IDLE),
    (RECORDING, ENDED): (LEAVE, IDLE),
    (CHANGED, ENDED): (LEAVE, IDLE),
    (REDUCING, ENDED): (LEAVE, IDLE),
    (RECORDING, AVERAGED): (COUNT, IDLE),
    (CHANGED, AVERAGED): (COUNT, IDLE),
    (REDUCING, AVERAGED): (COUNT, IDLE),
    (RECORDING, REFUSED): (FORGET, IDLE),
    (CHANGED, REFUSED): (FORGET, IDLE),
    (REDUCING, REFUSED): (FORGET, IDLE),
    (LOCAL, DIED): (DROP, IDLE),
    (RECORDING, DIED): (OWE, ABANDONED),
    (CHANGED, DIED): (OWE, ABANDONED),
    (REDUCING, DIED): (OWE, ABANDONED),
    (ABANDONED, DIED): (OWE, ABANDONED),
    (IDLE, DIED_UNOPENED): (OWE, ABANDONED),
    (IDLE, DIED_UNNOTED): (DROP, IDLE),
    (ABANDONED, COMPLETED): (FORGET, IDLE),
    (IDLE, WAS_OPEN): (LEAVE, ABANDONED),
}
_ONE_AT_A_TIME = "a backward is open, or has failed and is completed before another one begins"
_NONE_OPEN = "no backward is open, so none ends"
_NOT_AVERAGED = "a backward that is not synchronised averages nothing, and no other rank takes part in it"
_IS_NOTED = "the reducer knows a backward that is open or has failed, so DIED is the event of its end"
_NOTHING_OWED = "only of a backward that has failed is there something to complete"
_LOOKED_AT_ALONE = "it is noticed once the backward before is complete, so that none is open"
IMPOSSIBLE: dict[tuple[State, Event], str] = {
    **{
        (state, event): _ONE_AT_A_TIME
        for state in State
        for event in (BEGINS_LOCAL, BEGINS_FIRST, BEGINS_CHANGED, BEGINS)
        if state is not IDLE
    },
    **{(state, event): _NONE_OPEN for state in RESTING for event in (ENDED, AVERAGED, REFUSED)},
    (IDLE, DIED): _NONE_OPEN,
    (LOCAL, AVERAGED): _NOT_AVERAGED,
    (LOCAL, REFUSED): _NOT_AVERAGED,
    **{(state, event): _IS_NOTED for state in State for event in (DIED_UNOPENED, DIED_UNNOTED) if state is not IDLE},
    **{(state, COMPLETED): _NOTHING_OWED for state in State if state is not ABANDONED},
    **{(state, WAS_OPEN): _LOOKED_AT_ALONE for state in State if state is not IDLE},
}
