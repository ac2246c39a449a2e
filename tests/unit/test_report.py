"""What the report tells: each bit through any dtype, factor and number of ranks, and when the host may read it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfuse.comm import collective
from dpfuse.engine import messages
from dpfuse.engine.number_hash import number_hash
from dpfuse.engine.reading import ALL_WELL, Outcome, Reading, Row
from dpfuse.engine.report_format import FROZEN, FROZEN_BITS, UNTOLD, ReportFormat
from dpfuse.engine.report_layout import Field, Question, ReportLayout
from dpfuse.engine.sync_decision import Window
from dpfuse.weights.hashing import write_number
from tests.operations import Operations
from tests.unit import engine_inputs

CPU = torch.device("cpu")
PARAMS = 3
BITS = {"color": 3, "size": 6}  # of each field
NAMES = (*BITS, FROZEN)


def around(limit):
    """Numbers near a limit, near twice as much, and near the largest of all."""
    return [limit - 1, limit, limit + 1, 2 * limit - 1, 2 * limit, 2 * limit + 1, 2**62, 2**63 - 1 - 2**33]


def make_report(
    rank=0, size=2, told=None, *, elsewhere=False, asks=False, dtype=torch.float32, params=PARAMS, has_number=False
):
    """A report whose fields say what is in `told`, which may change; it has a question, which `asks` tells to ask."""
    told = {} if told is None else told
    window, layout, question = Window(), ReportLayout(), Question("whether", lambda: None)
    window.without_inputs, question.asks = elsewhere, asks
    layout.ask(question)
    fields = [Field(name, lambda name=name: told.get(name, 0), str, "", bits) for name, bits in BITS.items()]
    number = layout.register("number", 32, compared=True) if has_number else None
    report = engine_inputs.make_report(params, dtype, rank=rank, size=size, fields=fields, window=window, layout=layout)
    report.question = question
    report.bits = None if number is None else report.compared(number)
    return report


def sum_over_ranks(reports, outcomes, dtype=torch.float32, scale=0.5):
    """What all ranks send, added up in the dtype that travels; every rank has received the sum."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(reports[0].numel, dtype=dtype)
    for report, outcome in zip(reports, outcomes, strict=True):
        source = report.source(outcome)
        assert source.shape == total.shape
        total += (source.to(compute) * scale).to(dtype)
    for report in reports:
        report.landed(total)
    return total


def readings(outcomes, told=None, **how):
    """What each of so many ranks reads."""
    told = told or [{}] * len(outcomes)
    reports = [make_report(rank, len(outcomes), values) for rank, values in enumerate(told)]
    sum_over_ranks(reports, outcomes, **how)
    return [report.read(outcome, wait=True, gather=False) for report, outcome in zip(reports, outcomes, strict=True)]


def differing_in(told):
    """The fields in whose bits ranks differ that say this."""
    bits = {name: {one[name] % (1 << width) for one in told} for name, width in BITS.items()}
    bits[FROZEN] = {number_hash(sorted(one[FROZEN])) % (1 << FROZEN_BITS) if one[FROZEN] else 0 for one in told}
    return tuple(name for name in NAMES if len(bits[name]) > 1)


def outcome(**what):
    well = not any(what.get(name) for name in ("failed", "late", "error"))
    return Outcome(**{name: frozenset(value) if name == "frozen" else value for name, value in what.items()}, well=well)


# --- A number of a feature ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("numbers", "differ"),
    [((5, 5), False), ((5, 4), True), ((0, 2**32 - 1), True), ((None, 7), False), ((9, None, 9), False),
     ((9, None, 8), True), ((2**31,) * 5, False), ((1,) * 999 + (3,), True)],
    ids=["equal", "a bit", "all bits", "one is silent", "the others agree", "the others differ", "five", "1000 ranks"],
)  # fmt: skip
def test_a_number_that_differs_is_no_failure(numbers, differ, dtype):
    reports = [make_report(rank, len(numbers), dtype=dtype, has_number=True) for rank in range(len(numbers))]
    for report, number in zip(reports, numbers, strict=True):
        if number is not None:
            write_number(number, report.bits.pairs)
    well = [outcome()] * len(numbers)
    for _ in range(2):
        sum_over_ranks(reports, well, dtype, scale=1 / len(numbers))
        for report in reports:
            assert report.read(outcome(), wait=True, gather=False).all_well
            assert report.bits.differs is differ
            assert not report.wrong()
    for report in reports:
        report.bits.pairs.zero_()  # says nothing any more
    sum_over_ranks(reports, well, dtype)
    assert reports[0].read(outcome(), wait=True, gather=False) == ALL_WELL
    assert not reports[0].bits.differs


def test_beside_a_number_a_failure_is_still_told():
    reports = [make_report(rank, has_number=True) for rank in range(2)]
    write_number(1, reports[0].bits.pairs)
    write_number(2, reports[1].bits.pairs)
    sum_over_ranks(reports, [outcome(failed=True), outcome()])
    reading = reports[1].read(outcome(), wait=True, gather=False)
    assert (reading.any_failed, reading.rank, reading.told) == (True, 0, ("number",))


def test_without_a_number_no_element_is_sent_for_it():
    assert make_report(has_number=True).numel - make_report().numel == 64


@pytest.mark.parametrize("late", [False, True])
def test_a_difference_asks_its_question_of_every_rank(late, device):
    """On a GPU in the next backward, in which every rank has heard of it."""
    reports = []
    for rank in range(2):
        layout, question = ReportLayout(), Question("why", lambda: None)
        place = layout.register("number", 32, compared=True, question=question)
        assert (layout.questions, layout.answered) == ([], [question])
        report = engine_inputs.make_report(PARAMS, rank=rank, layout=layout)
        report.is_on_cpu = not late
        reports.append((report, place, question))
    heard = []
    for numbers in ((5, 5), (5, 7), (5, 5)):
        total = torch.zeros(reports[0][0].numel)
        for (report, place, _), number in zip(reports, numbers, strict=True):
            write_number(number, report.compared(place).pairs)
            total += report.source(outcome())
        for report, place, question in reports:
            report.landed(total.as_subclass(OnDevice) if late else total)
            assert late or report.differ_now(place) == (numbers[0] != numbers[1])
            assert report.read(outcome(), wait=False, gather=False).all_well
            report.hand_over()
            assert report.asked in [(), (question,)]
            heard.append(bool(report.asked))
    assert heard == ([False] * 4 + [True] * 2 if late else [False] * 2 + [True] * 2 + [False] * 2)


# --- Every bit, through any sum ---

rank_states = st.fixed_dictionaries(
    {
        "color": st.integers(0, 7),
        "size": st.integers(0, 63),
        "elsewhere": st.sampled_from([False, False, True]),
        "asks": st.sampled_from([False, False, True]),
        "goes_wrong": st.sampled_from([{}, {}, {}, {"failed": True}, {"late": [1]}, {"error": ValueError("planted")}]),
        "changed": st.sampled_from([False, False, False, True]),
        "frozen": st.sampled_from([(), (), (0,), (1, 2)]),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    every=st.lists(rank_states, min_size=2, max_size=6),
    same=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1.0, 1 / 2, 1 / 3, 1 / 7, 1 / 1000, 1 / 60000, -1.0, 0.9, 1e4]),
)
def test_all_ranks_read_what_each_has_told(every, same, dtype, scale):
    if same:  # else hardly ever all is well
        every = [{**one, **{name: every[0][name] for name in (*BITS, "frozen")}} for one in every]
    here = [one for one in every if not one["elsewhere"]]
    reports = [
        make_report(rank, len(every), one, elsewhere=one["elsewhere"], asks=one["asks"])
        for rank, one in enumerate(every)
    ]
    outcomes = [outcome(changed=one["changed"], frozen=one["frozen"], **one["goes_wrong"]) for one in every]
    sum_over_ranks(reports, outcomes, dtype, scale)
    failed = {rank for rank, one in enumerate(every) if one["goes_wrong"]}
    changed = {rank for rank, one in enumerate(every) if one["changed"]}
    numbered = failed | changed
    expected = Reading(
        any_failed=bool(failed),
        any_changed=bool(changed),
        any_unchanged=len(changed) < len(every),
        differing=differing_in(here) or (UNTOLD,) * (len({tuple(one[name] for name in NAMES) for one in here}) > 1),
        rank=next(iter(numbered)) if len(numbered) == 1 else None,
    )
    for rank, (report, own) in enumerate(zip(reports, outcomes, strict=True)):
        reading = report.read(own, wait=True, gather=False)
        assert replace(reading, asked=()) == expected
        assert reading.asked == report.asked == (report.question,) * any(one["asks"] for one in every)
        assert reading.failed() == (sorted(failed) if len(numbered) == 1 else [])
        assert reading.changed() == (sorted(changed) if len(numbered) == 1 else [])
        if rank not in numbered:
            assert bool(report.wrong()) is not expected.all_well


@pytest.mark.parametrize("scale", [1e-6, 1e6, -1e6, 0.25])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_that_overflows_or_nearly_vanishes_tells_the_same(dtype, scale):
    well = readings([outcome() for _ in range(4)], dtype=dtype, scale=scale)
    assert well == [ALL_WELL] * 4
    every = readings([outcome(), outcome(), outcome(failed=True), outcome()], dtype=dtype, scale=scale)
    assert every == [Reading(any_failed=True, rank=2)] * 4


@pytest.mark.parametrize("name", ["color", "size"])
def test_the_last_of_many_ranks_differs_in_one_bit_in_sixteen_bits(name):
    """Sums of so many equal numbers absorb one more in 16 bits, but no sum of them becomes zero."""
    size = 60000
    for bit in range(BITS[name]):
        report, other = make_report(0, size), make_report(size - 1, size, {name: 1 << bit})
        one = (report.source(outcome()).float() / size).bfloat16()
        total = one * (size - 1) + (other.source(outcome()).float() / size).bfloat16()
        report.landed(total)
        assert report.read(outcome(), wait=True, gather=False).differing == (name,)


# Numbers of each field: at the limit of its bits, one beyond, twice as much, and the largest of all.
AROUND = [(name, number) for name, width in BITS.items() for number in around(1 << width)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "number"), AROUND)
def test_the_whole_number_of_a_field_is_compared(name, number, dtype):
    limit = 1 << BITS[name]
    for other in {0, 1, limit, number - limit, number + limit, number + (1 << 32), -number} - {number}:
        for reading in readings([outcome()] * 3, [{name: number}, {name: number}, {name: other}], dtype=dtype):
            assert reading.differing == ((name,) if (number - other) % limit else (UNTOLD,))
            assert not reading.all_well
    assert readings([outcome()] * 3, [{name: number}] * 3, dtype=dtype) == [ALL_WELL] * 3


def test_two_fields_that_differ_by_as_much_in_opposite_ways_differ():
    for reading in readings([outcome()] * 2, [{"color": 8, "size": 64}, {"color": 16, "size": 0}]):
        assert reading.differing == (UNTOLD,)


def test_one_number_in_another_field_differs():
    for reading in readings([outcome()] * 2, [{"color": 64}, {"size": 64}]):
        assert reading.differing == (UNTOLD,)


def test_one_rank_is_named_and_several_are_not():
    size = 60000
    for failed, named in (([20001], [20001]), ([0], [0]), ([3, 20001], []), ([1, 2, 3], [])):
        total = make_report(0, size).source(outcome()) * (size - len(failed))
        for rank in failed:
            total = total + make_report(rank, size).source(outcome(failed=True))
        report = make_report(7, size)
        report.source(outcome())
        report.landed(total)
        reading = report.read(outcome(), wait=True, gather=False)
        assert (reading.any_failed, reading.failed(), reading.changed()) == (True, named, [])


def test_no_set_of_frozen_parameters_looks_like_none():
    sets = [(), (0,), (1,), *(tuple(range(count)) for count in range(2, 300))]
    sent = [tuple(make_report(params=300).source(outcome(frozen=each)).tolist()) for each in sets]
    assert len(set(sent)) == len(sets)


def test_ranks_that_have_frozen_as_many_parameters_but_not_the_same_ones_differ():
    for reading in readings([outcome(frozen=(1,)), outcome(frozen=(2,))]):
        assert reading.differing in [(FROZEN,), (UNTOLD,)]
    for reading in readings([outcome(frozen=(1, 2)), outcome(frozen=(2, 1))]):
        assert reading == Reading()


def test_the_same_report_is_sent_again_until_something_changes():
    told = {"size": 1}
    report = make_report(told=told)
    usual = report.source(outcome())
    assert report.source(outcome()) is usual
    told["size"] = 2
    assert report.source(outcome()).equal(make_report(told={"size": 2}).source(outcome()))
    before = report.source(outcome()).clone()
    for what in ({"failed": True}, {"changed": True}, {"missing": [0]}):
        report.source(outcome(**what))
    assert report.source(outcome()).equal(before), "what happens in one backward is not told in the next"


# --- Its size ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("params", [0, 1, 1000])
def test_its_size_depends_on_the_parameters_alone_and_is_at_most_a_kilobyte_besides(dtype, params):
    fields = [Field("wrapper", int, str, ""), Field("handling", int, str, "", 4)]
    fields += Window().fields()
    counts = (1, 2, 1000, 10000, 60000)
    sizes = {engine_inputs.make_report(params, dtype, size=count, fields=fields).numel for count in counts}
    assert len(sizes) == 1
    assert (sizes.pop() - params) * dtype.itemsize <= 1024


# --- Flags of parameters, and numbers of features ---


def test_a_parameter_is_used_where_some_rank_has_a_gradient():
    reports = [make_report(rank) for rank in range(2)]
    outcomes = [outcome(missing=[0, 1]), outcome(missing=[1, 2])]
    sum_over_ranks(reports, outcomes)
    for report, own in zip(reports, outcomes, strict=True):
        assert report.used_somewhere([0, 1, 2]) == {0, 2}
        assert report.used_somewhere([1]) == set()
        assert report.read(own, wait=True, gather=False) == ALL_WELL


WEIGHTS = [1 / 3, 16777215.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_features_are_summed_beside_the_rest(dtype):
    layout = ReportLayout()
    flag = layout.register("nonfinite", 1)
    layout.register("hash", 4, compared=True)  # lies before all numbers that are added up
    weights = layout.register("weights", {"bad": 1, "weight": 1})
    for finders in ([], [1], [0, 1, 2]):
        reports = [engine_inputs.make_report(PARAMS, dtype, rank=rank, size=3, layout=layout) for rank in range(3)]
        total = torch.zeros(reports[0].numel, dtype=dtype)
        for rank, report in enumerate(reports):
            packed = report.source(outcome()) / 3  # as the pack has scaled it
            report.write(packed, flag, torch.tensor(float(rank in finders)))
            report.write(packed, weights, torch.tensor(WEIGHTS[rank]), "weight")
            total += packed
        for report in reports:
            report.landed(total)
            assert report.sums(flag).tolist() == [len(finders)]
            assert report.sums(weights).tolist() == [0, torch.tensor(WEIGHTS).to(dtype).sum().item()]
            assert report.read(outcome(), wait=True, gather=False) == ALL_WELL
            assert report.used_somewhere([0, 1]) == {0, 1}


def test_a_failure_can_be_written_into_what_is_packed():
    reports = [make_report(rank) for rank in range(2)]
    packed = [report.source(outcome()).clone() for report in reports]
    reports[1].write_failure(packed[1])
    for report in reports:
        report.landed(packed[0] + packed[1])
        assert report.read(outcome(), wait=True, gather=False) == Reading(any_failed=True, rank=1)


# --- Details, where every rank reads at the same time ---


def test_rows_of_all_ranks_are_gathered_where_something_is_wrong(monkeypatch):
    told = [{"size": 3}, {"size": 70}, {}]
    reports = [make_report(rank, 3, told[rank], elsewhere=rank == 2) for rank in range(3)]
    outcomes = [outcome(frozen=[1, 2]), outcome(error=ValueError("planted")), outcome(changed=True)]
    rows = []
    monkeypatch.setattr(collective, "group_device", lambda group: CPU)
    monkeypatch.setattr(collective, "all_gather", lambda row, group: rows.append(row) or rows)
    sum_over_ranks(reports, outcomes)
    read = [report.read(own, wait=True, gather=True) for report, own in zip(reports, outcomes, strict=True)]
    numbers = [row.numbers for row in read[-1].rows]
    assert numbers == [(0, 3, number_hash([1, 2])), (0, 70, 0), (0, 0, 0)], "whole numbers"
    assert read[-1].rows == (
        Row(False, False, True, 2, numbers[0]),
        Row(True, False, True, 0, numbers[1]),
        Row(False, True, False, 0, numbers[2]),
    )
    assert (read[-1].failed(), read[-1].changed()) == ([1], [2])
    assert read[-1].differing == ("size", "frozen")
    again = [report.read(own, wait=True, gather=True) for report, own in zip(reports, outcomes, strict=True)]
    assert again == read, "they are gathered once, for every rank reads equally often only once"
    assert len(rows) == 3


def test_where_only_the_hash_differs_rows_say_in_what(monkeypatch):
    told = [{"size": 64}, {"size": 128}, {"size": 0}]
    reports = [make_report(rank, 3, told[rank], elsewhere=rank == 2) for rank in range(3)]
    rows = []
    monkeypatch.setattr(collective, "group_device", lambda group: CPU)
    monkeypatch.setattr(collective, "all_gather", lambda row, group: rows.append(row) or rows)
    sum_over_ranks(reports, [outcome()] * 3)
    read = [report.read(outcome(), wait=True, gather=True) for report in reports]
    assert (read[0].differing, read[-1].differing) == ((), ("size",)), "the first has seen no other row"
    text = messages.differing(2, reports[2]._format.fields, read[-1])
    assert text.startswith("rank 2: rank 1 128, rank 0 64; expected the same on every rank.")


def test_where_only_the_hash_differs_and_no_rows_are_known_each_rank_says_what_it_has_done():
    told = {"size": 64}
    layout = ReportLayout()
    layout.compare(*(Field(name, partial(told.get, name, 0), "has {}".format, "") for name in BITS))
    for number, own in ((64, "has 64"), (0, "has 0 in each of them")):
        told["size"] = number
        text = messages.differing(1, layout.fields, Reading(differing=(UNTOLD,)))
        assert text.startswith("rank 1: the ranks differ in one of these numbers, or in which parameters they have ")
        assert f"color, size. This rank {own}; expected the same on every rank." in text
        assert "No rank's gradients of this backward are averaged" in text


def test_a_rank_alone_reads_only_what_it_knows():
    report = make_report(0, 1)
    report.landed(torch.full((report.numel,), math.nan))
    assert report.read(outcome(), wait=True, gather=True) == ALL_WELL
    report.landed(report.source(outcome(failed=True)))
    assert report.read(outcome(failed=True), wait=True, gather=False) == Reading(any_failed=True, rank=0)


# --- On CUDA ---


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = property(lambda self: True)


@pytest.fixture
def device(monkeypatch):
    """Copies to pinned memory and events behind them, which note when the host waits; as many as there were copies."""
    events = []

    class Event:
        def __init__(self, before=None):
            self.waited = False
            events.append(self)

        def synchronize(self):
            self.waited = True

        def query(self):
            return True

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **how: empty(*shape, **how))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: SimpleNamespace(record_event=Event))
    return events


def land(report, other_outcome):
    """A backward in which this rank is well, and the other one as told; what lands is on a GPU."""
    total = report.source(outcome()) + make_report(1).source(other_outcome)
    report.landed(total.as_subclass(OnDevice))


def test_a_report_on_cuda_is_read_one_backward_later(device):
    report = make_report()
    report.is_on_cpu = False
    for other, read in [
        (outcome(), ALL_WELL),
        (outcome(failed=True), ALL_WELL),
        (outcome(frozen=[1]), Reading(any_failed=True, rank=1)),
        (outcome(), Reading(differing=("frozen",))),
        (outcome(), ALL_WELL),
    ]:
        land(report, other)
        assert report.read(outcome(), wait=False, gather=False) == read
        report.hand_over()
        assert bool(report.wrong()) is not (other == outcome()), "the device knows at once"
        assert [event.waited for event in device] == [True] * (len(device) - 1) + [False], "the host did not wait"


@pytest.mark.parametrize("waits", [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0, 1, 1)], ids=str)
def test_on_cuda_every_rank_hears_one_backward_later_that_one_asks_whether_it_waits_or_not(device, waits):
    report, other = make_report(), make_report(1)
    report.is_on_cpu = False
    heard = []
    for asks, wait in zip((False, True, False), waits, strict=True):
        other.question.asks = asks
        report.landed((report.source(outcome()) + other.source(outcome())).as_subclass(OnDevice))
        assert report.read(outcome(), wait=bool(wait), gather=False).all_well
        assert not report.wrong()
        report.hand_over()
        heard.append(report.asked)
    assert heard == [(), (), (report.question,)]


@pytest.mark.parametrize("waits", [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0, 1, 1)], ids=str)
def test_on_cuda_every_rank_hears_one_backward_later_that_numbers_differ_whether_it_waits_or_not(device, waits):
    report, other = make_report(has_number=True), make_report(1, has_number=True)
    report.is_on_cpu = False
    heard = []
    for number, wait in zip((5, 7, 5), waits, strict=True):
        write_number(5, report.bits.pairs)
        write_number(number, other.bits.pairs)
        report.landed((report.source(outcome()) + other.source(outcome())).as_subclass(OnDevice))
        assert report.read(outcome(), wait=bool(wait), gather=False).all_well
        assert not report.wrong(), "the gradients are right"
        report.hand_over()
        heard.append(report.bits.differs)
    assert heard == [False, False, True]


def test_a_guard_copies_the_report_in_its_own_launch(device):
    report = make_report()
    report.is_on_cpu = False
    handed = []

    def guard(pairs, copy):
        handed.append((pairs, copy))
        if copy is not None:
            copy[1].copy_(copy[0].as_subclass(torch.Tensor))

    for other, read in [(outcome(), ALL_WELL), (outcome(failed=True), ALL_WELL), (outcome(), Reading(True, rank=1))]:
        land(report, other)
        assert report.read(outcome(), wait=False, gather=False) == read
        report.hand_over(guard)
        assert handed[-1][0] is report.pairs()
    # Torch has copied the first one, and the last one, because an error is raised in place of the launch.
    assert [copy is None for _, copy in handed] == [True, False, True]
    assert handed[1][1][0].data_ptr() == handed[1][0].data_ptr()
    assert [event.waited for event in device] == [True, True, False], "an event follows each copy"


def test_a_report_that_nobody_has_handed_over_is_copied_when_it_is_read(device):
    """An interrupt may strike between the two."""
    report = make_report()
    report.is_on_cpu = False
    for other in (outcome(), outcome(failed=True)):
        land(report, other)
        assert report.read(outcome(), wait=False, gather=False) == ALL_WELL
    assert report.read(outcome(), wait=True, gather=False) == Reading(any_failed=True, rank=1)


def test_what_is_still_to_be_read_comes_before_what_is_waited_for(device):
    report = make_report()
    report.is_on_cpu = False
    land(report, outcome(failed=True))
    assert report.read(outcome(), wait=False, gather=False) == ALL_WELL
    land(report, outcome(frozen=[1]))
    assert report.read(outcome(), wait=True, gather=False) == Reading(any_failed=True, rank=1)
    assert report.read(outcome(), wait=True, gather=False) == Reading(differing=("frozen",)), "it was read once"


@pytest.mark.parametrize("wait", [False, True])
def test_a_rank_that_hears_of_the_backward_before_while_it_waits_hears_of_its_own_in_the_next(device, wait):
    """The others read each report one backward later, so they raise for both backwards, and answer then."""
    report, other = make_report(), make_report(1)
    report.is_on_cpu = False
    land(report, outcome(failed=True))
    report.read(outcome(), wait=False, gather=False)
    other.question.asks = True
    report.landed((report.source(outcome()) + other.source(outcome(frozen=[1]))).as_subclass(OnDevice))
    assert report.read(outcome(), wait=wait, gather=False) == Reading(any_failed=True, rank=1)
    assert report.asked == ()
    land(report, outcome())
    assert report.read(outcome(), wait=False, gather=False).differing == ("frozen",)
    assert report.asked == (report.question,)


def test_ranks_that_have_all_changed_read_each_backward_themselves(device):
    """All of them wait, so nobody hears of it in the next backward, and another report begins with nothing."""
    report, changed = make_report(), make_report(1)
    report.is_on_cpu = False
    land(report, outcome(frozen=[1]))
    assert report.read(outcome(), wait=False, gather=False) == ALL_WELL
    for differing in (("frozen",), ()):
        sources = (one.source(outcome(changed=True)) for one in (report, changed))
        report.landed(sum(sources).as_subclass(OnDevice))
        reading = report.read(outcome(changed=True), wait=True, gather=False)
        assert reading.differing == differing
    assert (reading.any_changed, reading.any_unchanged) == (True, False)
    after = make_report()
    after.is_on_cpu = False
    after.follow(report)
    land(after, outcome())
    assert after.read(outcome(), wait=False, gather=False) == ALL_WELL


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("reports", [1, 2], ids=["replaced once", "replaced twice"])
def test_on_cuda_a_report_that_replaces_another_tells_what_that_has_not_told(device, waits, reports):
    """One rank may make its buckets again: its peers hear of the backward before, and answer together."""
    report, other = make_report(has_number=True), make_report(1, has_number=True)
    report.is_on_cpu = False
    other.question.asks = True
    write_number(5, report.bits.pairs)
    write_number(7, other.bits.pairs)
    report.landed((report.source(outcome()) + other.source(outcome(failed=not waits))).as_subclass(OnDevice))
    assert report.read(outcome(), wait=waits, gather=False) == ALL_WELL or waits
    for _ in range(reports):
        before, report = report, make_report(has_number=True)
        report.is_on_cpu = False
        report.follow(before)
    other = make_report(1, has_number=True)
    for told in (True, False):  # once
        report.landed((report.source(outcome()) + other.source(outcome())).as_subclass(OnDevice))
        assert report.read(outcome(), wait=False, gather=False).any_failed == (told and not waits)
        assert [one.name for one in report.asked] == ["whether"] * told
        assert report.bits.differs == told


def test_a_rank_that_has_failed_reads_its_own_backward(device):
    report = make_report()
    report.is_on_cpu = False
    land(report, outcome(changed=True))
    report.read(outcome(), wait=False, gather=False)
    report.landed((report.source(outcome(failed=True)) + make_report(1).source(outcome())).as_subclass(OnDevice))
    assert report.read(outcome(failed=True), wait=True, gather=False) == Reading(any_failed=True, rank=0)
    land(report, outcome())
    assert report.read(outcome(), wait=False, gather=False) == ALL_WELL, "what was told before is told no more"


@pytest.mark.parametrize("wait", [True, False])
def test_while_a_graph_is_captured_only_this_ranks_own_failure_is_known(wait, monkeypatch):
    report = make_report(1, 3)
    report.is_on_cpu = False
    report.source(outcome())
    report.landed(torch.full((report.numel,), 0.1))
    assert not report.unreadable
    assert not report.read(outcome(), wait=True, gather=False).all_well
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(ReportFormat, "read", None)  # calling it would wait for the device
    report.source(outcome())
    report.landed(torch.full((report.numel,), 0.1))
    assert report.unreadable
    assert report.read(outcome(), wait=wait, gather=True) == ALL_WELL
    assert report.wrong(), "the device knows"
    assert report.read(outcome(failed=True), wait=wait, gather=True) == Reading(any_failed=True, rank=1)


UPLOADS = {"index_put_", "copy_", "_to_copy", "lift_fresh"}  # on a GPU they would bring numbers from the host, and wait


def test_a_captured_graph_packs_the_same_memory_and_what_was_told_last(monkeypatch):
    """Memory elsewhere would have to be uploaded as an address, which a graph cannot do."""
    told = {"color": 1, "size": 2}
    report = make_report(told=told)
    report.is_on_cpu = False  # as on a GPU
    kept = report.source(outcome()).clone()
    told.update(color=4, size=33)
    with monkeypatch.context() as patch, Operations() as done:
        patch.setattr("torch.cuda.is_initialized", lambda: True)
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        usual = report.source(outcome())
        missing = report.source(outcome(missing=[0, 2]))
    assert not UPLOADS.intersection(done.names)
    assert usual is report._source
    assert report._source.equal(kept), "what is captured is written at each replay"
    expected = kept.clone()
    expected[[-3, -1]] = 0
    assert missing.equal(expected)
    with Operations() as done:
        eager = report.source(outcome())
    assert done.names.count("copy_") == 1, "one operation, however many bits change"
    assert not eager.equal(kept)
    expected = eager.clone()
    expected[[-3, -1]] = 0
    assert report.source(outcome(missing=[0, 2])).equal(expected)


def test_a_number_that_is_none_is_alarming():
    reports = [make_report(rank) for rank in range(2)]
    total = sum_over_ranks(reports, [outcome()] * 2)
    assert not reports[0].wrong()
    total[(total == 0).nonzero()[0]] = math.nan
    assert reports[0].wrong()
