"""The table of a backward: it is complete, nothing else says what the state is, and the page prints it."""

from __future__ import annotations

import ast
from pathlib import Path

import dpfuse.engine.reducer
from dpfuse.engine.backward_table import IMPOSSIBLE, RESTING, TRANSITIONS, Action, Event, State

# `python -m tests.unit.test_backward_table` prints what the page has.
PAGE = Path(__file__).parents[2] / "docs/design/architecture.md"
BEGINNINGS = {Event.BEGINS_LOCAL, Event.BEGINS_FIRST, Event.BEGINS_CHANGED, Event.BEGINS}


def test_each_pair_of_a_state_and_an_event_is_in_one_of_the_tables():
    pairs = {(state, event) for state in State for event in Event}
    assert TRANSITIONS.keys() | IMPOSSIBLE.keys() == pairs
    assert not TRANSITIONS.keys() & IMPOSSIBLE.keys()
    assert all(len(reason.split()) > 5 for reason in IMPOSSIBLE.values())


def test_each_action_follows_from_something():
    assert {action for action, _ in TRANSITIONS.values()} == set(Action)


def test_each_state_is_reached_from_idle_and_left_for_it():
    for start, wanted in ((State.IDLE, set(State)), *((state, {State.IDLE}) for state in State)):
        reached = {start}
        for _ in State:
            reached |= {after for (before, _), (_, after) in TRANSITIONS.items() if before in reached}
        assert wanted <= reached


def test_a_backward_begins_and_a_gradient_that_becomes_ready_changes_no_state():
    assert {pair[0] for pair in TRANSITIONS if pair[1] in BEGINNINGS} == {State.IDLE}
    assert all(after is before for (before, event), (_, after) in TRANSITIONS.items() if event is Event.READY)


def test_a_synchronised_backward_that_died_is_completed_before_anything_else():
    for state in set(State) - {State.IDLE, State.LOCAL}:
        assert TRANSITIONS[state, Event.DIED] == (Action.OWE, State.ABANDONED)
    left = {after for (before, event), (_, after) in TRANSITIONS.items() if before is State.ABANDONED}
    assert left == {State.ABANDONED, State.IDLE}
    assert [event for state, event in TRANSITIONS if state is State.ABANDONED] == [
        Event.READY,
        Event.DIED,
        Event.COMPLETED,
    ]


def test_only_what_averages_counts_and_only_what_rests_can_begin():
    for (before, event), (action, after) in TRANSITIONS.items():
        assert (action is Action.COUNT) == (event is Event.AVERAGED)
        assert (action is Action.ENTER) == (after not in RESTING and before in RESTING)


def test_nothing_but_the_table_says_what_the_state_is():
    sources = []
    for node in ast.walk(ast.parse(Path(dpfuse.engine.reducer.__file__).read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [ast.unparse(each) for target in targets if target for each in getattr(target, "elts", [target])]
        if "self.state" in names:
            sources.append(ast.unparse(node))
    assert sorted(sources) == [
        "self.state = after",
        "self.state, self._run, self.completed = (after, run, completed)",
        "self.state: State = IDLE",
    ]


def test_the_page_prints_the_table():
    assert as_text() in PAGE.read_text()


def as_text() -> str:
    """Return the table as text: a line for each event, and what each state does about it."""
    rows = [["", *(state.name for state in State)]]
    for event in Event:
        cells = [_cell(state, event) for state in State]
        rows.append([event.name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _cell(state: State, event: Event) -> str:
    action, after = TRANSITIONS.get((state, event), (None, state))
    if action is None:
        return "-"
    return action.name if after is state else f"{action.name} > {after.name}"


if __name__ == "__main__":
    print(as_text())
