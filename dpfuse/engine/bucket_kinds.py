"""Of which parts a bucket is made: a table for each part, of which the first row that fits holds. Makes nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

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

__all__ = ["DELIVERIES", "EXCHANGES", "FEEDS", "RENEWED", "Row", "Trait", "fits", "part_for"]


class Trait(Enum):
    """What is known of a bucket before it is made: its gradients, what a user asked for, and the machine."""

    SPARSE = auto()  # one parameter with sparse gradients
    COMPLEX = auto()  # complex gradients
    DTENSOR = auto()  # this rank's parts of DTensors
    LARGE = auto()  # so large gradients that to copy them takes longer than to look at them
    IN_PLACE = auto()  # some travel in their own memory if they are private, since they or their neighbours are large
    OWN_DTYPE = auto()  # what travels has the dtype of the gradients
    REPORT = auto()  # the report travels after the gradients
    HOOK = auto()  # a communication hook reduces the gradients
    VIEWS = auto()  # `.grad` is to be a view of the buffer
    MICRO_BATCHES = auto()  # their fixed number is added up in one tree
    ACCUMULATES = auto()  # local backwards add to the buffer
    ORDERED = auto()  # sums are formed in the order of the ranks, or in float32
    FLOAT8 = auto()  # blocks of 8-bit numbers travel
    DIVIDED = auto()  # each rank receives a part of the sum
    REGISTERED = auto()  # the buffer lies in memory that the group has registered
    COUNTED = auto()  # on a CPU, where references tell whether a program holds a gradient
    ON_STREAMS = auto()  # collectives run on streams of a device while backward goes on
    RENEWED = auto()  # private gradients lie in the buffer; not where all of them travel in their own memory
    SINGLY = auto()  # some are large enough to be packed alone, and no feature must see all of them at once


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Args:
        part: a class.
        needs: what a bucket must have.
        without: what it must not have.
    """

    part: type
    needs: Collection[Trait] = ()
    without: Collection[Trait] = ()


T = Trait
FEEDS = (
    Row(AtOnce, needs=[T.HOOK]),
    Row(AtOnce, needs=[T.SPARSE]),
    Row(TreeSums, needs=[T.MICRO_BATCHES]),
    Row(Accumulating, needs=[T.ACCUMULATES]),
    Row(Eager, needs=[T.VIEWS, T.SINGLY]),
    Row(Eager, needs=[T.DIVIDED, T.SINGLY]),
    Row(Eager, needs=[T.RENEWED, T.SINGLY]),
    Row(AtOnce),
)
EXCHANGES = (
    Row(HookedRows, needs=[T.HOOK, T.SPARSE]),
    Row(HookedBuffer, needs=[T.HOOK]),
    Row(SparseRows, needs=[T.SPARSE]),
    Row(TreeSum, needs=[T.MICRO_BATCHES]),
    Row(OrderedSum, needs=[T.FLOAT8]),
    Row(OrderedSum, needs=[T.ORDERED], without=[T.DIVIDED]),
    Row(AllReduce, needs=[T.DIVIDED]),  # in whose place the feature that divides puts its own
    Row(InPlace, needs=[T.IN_PLACE], without=[T.VIEWS, T.ACCUMULATES]),
    Row(AllReduce),
)
DELIVERIES = (
    Row(Delivery, needs=[T.SPARSE]),  # the exchange delivers
    Row(RenewedViews, needs=[T.RENEWED]),
    Row(Views, needs=[T.VIEWS, T.OWN_DTYPE]),
    Row(EarlyPrivate, needs=[T.ON_STREAMS, T.LARGE], without=[T.HOOK, T.REPORT, T.COMPLEX]),
    Row(Private),
)
# Whether private gradients lie in the buffer, which gets new memory while a program holds one.
RENEWED = Row(
    RenewedViews,
    needs=[T.COUNTED, T.OWN_DTYPE],
    without=[T.VIEWS, T.HOOK, T.ACCUMULATES, T.MICRO_BATCHES, T.DIVIDED, T.REGISTERED, T.DTENSOR],
)


def part_for(table: Sequence[Row], traits: Collection[Trait]) -> type:
    """Return the part of the first row that fits."""
    return next(row.part for row in table if fits(row, traits))


def fits(row: Row, traits: Collection[Trait]) -> bool:
    """Whether a bucket with these traits has what the row needs, and nothing that it must not have."""
    return all(trait in traits for trait in row.needs) and not any(trait in traits for trait in row.without)
