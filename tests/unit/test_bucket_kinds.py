"""The tables of what a bucket is made of: against the same choice in words, and the page prints them."""

from __future__ import annotations

import random
from pathlib import Path

from dpfuse.engine.bucket_kinds import DELIVERIES, EXCHANGES, FEEDS, RENEWED, Trait, fits, part_for
from dpfuse.engine.delivery import EarlyPrivate, Private, RenewedViews, Views
from dpfuse.engine.exchanges.all_reduce import AllReduce
from dpfuse.engine.exchanges.hooked import HookedBuffer, HookedRows
from dpfuse.engine.exchanges.in_place import InPlace
from dpfuse.engine.exchanges.ordered import OrderedSum
from dpfuse.engine.exchanges.sparse import SparseRows
from dpfuse.engine.exchanges.tree import TreeSum
from dpfuse.engine.feeds.accumulating import Accumulating
from dpfuse.engine.feeds.at_once import AtOnce
from dpfuse.engine.feeds.eager import Eager
from dpfuse.engine.feeds.tree_sums import TreeSums
from dpfuse.engine.protocols import Delivery

# `python -m tests.unit.test_bucket_kinds` prints what the page has.
PAGE = Path(__file__).parents[2] / "docs/design/architecture.md"
TABLES = {"feed": FEEDS, "exchange": EXCHANGES, "delivery": DELIVERIES}


def chosen(traits: set[str]) -> tuple[type, type, type]:
    """The feed, the exchange and the delivery, in nested questions."""

    def has(*names: str) -> bool:
        return any(name in traits for name in names)

    renewed = has("RENEWED")
    if has("HOOK"):
        feed, exchange = AtOnce, HookedRows if has("SPARSE") else HookedBuffer
    elif has("SPARSE"):
        feed, exchange = AtOnce, SparseRows
    else:
        if has("MICRO_BATCHES"):
            exchange = TreeSum
        elif has("FLOAT8") or (has("ORDERED") and not has("DIVIDED")):
            exchange = OrderedSum
        else:
            private = not has("DIVIDED", "VIEWS", "ACCUMULATES")
            exchange = InPlace if has("IN_PLACE") and private else AllReduce
        if has("MICRO_BATCHES"):
            feed = TreeSums
        elif has("ACCUMULATES"):
            feed = Accumulating
        else:
            feed = Eager if has("SINGLY") and (has("VIEWS", "DIVIDED") or renewed) else AtOnce
    if has("SPARSE"):
        return feed, exchange, Delivery
    if renewed:
        return feed, exchange, RenewedViews
    if has("VIEWS") and has("OWN_DTYPE"):
        return feed, exchange, Views
    early = has("ON_STREAMS") and has("LARGE") and not has("HOOK", "REPORT", "COMPLEX")
    return feed, exchange, EarlyPrivate if early else Private


def test_the_first_row_that_fits_is_the_choice_that_words_make_and_each_row_is_it_for_some_bucket():
    chance, used = random.Random(0), set()
    for _ in range(20_000):
        part = chance.random() ** 2
        traits = {trait for trait in Trait if chance.random() < part} - {Trait.RENEWED}
        if fits(RENEWED, traits):
            traits.add(Trait.RENEWED)
        found = tuple(part_for(table, traits) for table in TABLES.values())
        assert found == chosen({trait.name for trait in traits}), traits
        used |= {id(next(row for row in table if fits(row, traits))) for table in TABLES.values()}
    assert used == {id(row) for table in TABLES.values() for row in table}


def test_gradients_lie_in_their_buffer_only_where_nothing_else_uses_it():
    least = {Trait.COUNTED, Trait.OWN_DTYPE}
    assert fits(RENEWED, least)
    assert not any(fits(RENEWED, least - {trait}) for trait in least)
    refused = {trait for trait in Trait if not fits(RENEWED, least | {trait})}
    assert {trait.name for trait in refused} == {
        *("VIEWS", "HOOK", "ACCUMULATES", "MICRO_BATCHES", "DIVIDED", "REGISTERED", "DTENSOR")
    }


def as_text() -> str:
    """Return the tables as text: a line for each row."""
    lines = []
    for name, table in TABLES.items():
        for row in table:
            wanted = [*(trait.name for trait in row.needs), *(f"no {trait.name}" for trait in row.without)]
            lines.append(f"{name:10}{row.part.__name__:14}{', '.join(wanted)}".rstrip())
    return "\n".join(lines)


def test_the_page_prints_the_tables():
    assert as_text() in PAGE.read_text()


if __name__ == "__main__":
    print(as_text())
