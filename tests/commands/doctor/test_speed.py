"""How fast, and where the time of a step goes, from traces whose times are known."""

from __future__ import annotations

import pytest

from dpfuse.commands.doctor.findings import findings_of
from dpfuse.commands.doctor.speed import measure, to_try
from tests.commands.doctor.made import plain_facts, timed

PARTS = {"loader": 0.01, "forward": 0.02, "backward": 0.05, "optimizer": 0.01, "outside": 0.01}


def test_steps_and_parts_leave_tracing_out():
    slower = {**PARTS, "backward": 0.15}
    found = measure([timed(1, "torch", **slower), timed(2, "dpfuse", **PARTS), timed(3, "torch", **slower)], deep=2)
    assert found.ratio == pytest.approx(0.5)
    assert found.noise == pytest.approx(0.0)
    assert [len(one.steps) for one in found.timings] == [10, 10, 10]
    assert found.timings[1].median == pytest.approx(0.1)
    assert found.timings[1].parts == pytest.approx({**PARTS, "device": 0.0})
    assert found.timings[1].waiting == 0.0
    assert found.link is None
    assert found.advice == ()


def test_noise_is_what_runs_of_one_kind_differ_by():
    runs = [timed(1, "torch", backward=0.1), timed(2, "dpfuse", backward=0.1), timed(3, "torch", backward=0.12)]
    assert measure(runs, deep=2).noise == pytest.approx(0.2)


def test_nothing_is_said_of_steps_that_take_a_moment_together():
    kinds = [("torch", 1), ("dpfuse", 3), ("torch", 1), ("dpfuse", 3)]

    def runs(seconds):
        return [timed(number, wrapper, backward=times * seconds) for number, (wrapper, times) in enumerate(kinds)]

    long, short = (measure(runs(seconds), deep=2) for seconds in (0.03, 0.019999))
    assert long.short == "200% more time for a step"
    assert (short.change, short.short) == (0.0, "too short to say")
    assert not short.is_known
    assert "take 0.199 s, which is too short to say whether dpfuse is faster: expected 0.25 s;" in short.verdict


def test_nothing_is_advised_for_steps_that_take_a_moment_together():
    runs = compared(0.06)
    assert measure(runs, deep=2).advice
    assert to_try(runs, deep=2) == "narrow"
    runs.append(timed(5, "torch", steps=9, backward=0.01))
    assert measure(runs, deep=2).advice == ()
    assert to_try(runs, deep=2) == ""


def test_on_a_busy_machine_nothing_is_said_of_speed_and_nothing_is_advised():
    runs = compared(0.06)
    assert to_try(runs, deep=2) == "narrow"
    runs[3].load = 1.2
    assert measure(runs, deep=2).advice
    runs[3].load = 4.04
    found = measure(runs, deep=2)
    assert (found.change, found.short, found.link, found.advice) == (0.0, "too busy to say", None, ())
    assert "4.0 tasks ran or waited for each core of this machine; expected at most 1.25" in found.verdict
    assert to_try(runs, deep=2) == ""
    short = [timed(number, wrapper, forward=0.001) for number, wrapper in enumerate(["torch", "dpfuse"] * 2, start=1)]
    assert "pass more --steps" in measure(short, deep=2).verdict
    short[3].load = 4.04
    assert "pass more --steps" not in measure(short, deep=2).verdict


def test_on_a_busy_machine_a_rank_is_slow_if_all_runs_say_so_and_a_loader_may_be():
    slow = [timed(number, "torch", busy=(0.0, 0.04), **PARTS) for number in (1, 3)]
    quick = timed(2, "dpfuse", **PARTS)
    quick.load = 4.0
    assert lost([*slow, quick]) == []
    for run in slow:
        run.load = 4.0
    assert [title for title, _, _ in lost(slow)] == ["a rank is slow"]
    waits = timed(1, "torch", **{**PARTS, "loader": 0.03})
    waits.load = 4.0
    assert lost([waits]) == []


def test_averaging_less_often_is_advised_for_one_model_where_it_saves_more_than_runs_differ():
    assert measure(compared(0.06), deep=2).advice  # a quarter of a step, where runs of one kind differ by 4 %
    runs = compared(0.06)
    runs[2].traces[0].steps = [
        {**line, "times": {**line["times"], "backward": 0.07}} for line in runs[2].traces[0].steps
    ]
    assert measure(runs, deep=2).advice == ()
    runs = compared(0.06)
    for trace in runs[0].traces.values():
        trace.models.append({"number": 1, "class": "Net", "names": []})
    assert measure(runs, deep=2).advice == ()


def test_a_slow_rank_is_named_and_what_the_others_wait():
    found = measure([timed(1, "torch", busy=(0.0, 0.04), **PARTS), timed(2, "dpfuse", **PARTS)], deep=2)
    slowest = found.timings[0].slowest
    assert (slowest.rank, slowest.part, slowest.seconds) == (1, "forward", pytest.approx(0.04))
    assert slowest.explain() == "rank 1 is the slowest in most steps, by 40 ms in its forward"
    assert found.timings[0].waiting == pytest.approx(0.02)  # the mean over both ranks
    assert found.timings[1].slowest is None


def lost(runs):
    return [(one.title, one.text, len(one.where)) for one in findings_of(runs, measure(runs, deep=2))]


def test_a_rank_for_which_a_tenth_of_each_step_is_lost_is_a_finding_where_half_of_the_runs_say_so():
    slow = [timed(number, "torch", busy=(0.0, 0.04), **PARTS) for number in (1, 3)]
    for run in slow:
        run.facts["1"] = plain_facts(lines={"forward": "train.py:31"})
    quick = [timed(number, "dpfuse", **PARTS) for number in (2, 4)]
    ((title, text, runs),) = lost([*slow, *quick])
    assert (title, runs) == ("a rank is slow", 2)
    assert "rank 1 is the slowest in most steps, by 40 ms in its forward (train.py:31), 33% of a step." in text
    assert lost([slow[0], *quick]) == []
    toy = {part: value / 20 for part, value in PARTS.items()}
    assert lost([timed(1, "torch", busy=(0.0, 0.002), **toy)]) == []  # of a step of 5 ms


def test_a_rank_that_is_late_from_its_optimizer_on_is_found():
    run = timed(1, "torch", **PARTS)
    for line in run.traces[1].steps:
        line["times"] = {**line["times"], "optimizer": 0.05}
    ((_, text, _),) = lost([run])
    assert "rank 1 is the slowest in most steps, by 40 ms in its optimizer" in text


def test_a_loader_that_takes_a_tenth_of_each_step_is_a_finding():
    run = timed(1, "torch", **{**PARTS, "loader": 0.03})
    run.facts["0"] = plain_facts(lines={"loader": "train.py:12"})
    ((title, text, _),) = lost([run])
    assert title == "the loader is slow"
    assert "each step waits 30 ms for its batch (train.py:12), 25% of the step." in text
    assert "num_workers" in text
    assert lost([timed(1, "torch", **{**PARTS, "loader": 0.009})]) == []
    assert lost([timed(1, "torch", loader=0.004, forward=0.002)]) == []  # less than anyone notices


def test_too_few_steps_say_nothing():
    found = measure([timed(1, "torch", steps=6, **PARTS), timed(2, "dpfuse", steps=6, **PARTS)], deep=2)
    assert (found.timings, found.ratio) == ((), None)


def test_two_optimizers_make_one_step_of_the_program():
    run = timed(1, "torch", steps=24, **PARTS)
    for trace in run.traces.values():
        for number, line in enumerate(trace.steps):
            line["optimizer"] = number % 2
    assert measure([run], deep=2).timings[0].median == pytest.approx(0.2)


def linked(number, exposed, nbytes=4e6, collectives=2, steps=12):
    """A run of dpfuse whose timed steps, all but two, communicate so much."""
    run = timed(number, "dpfuse", steps=steps, **PARTS)
    of_step = {"collectives": collectives, "nbytes": nbytes, "seconds": 0.05, "exposed": exposed}
    sums = {name: (steps - 2) * value for name, value in of_step.items()}
    run.facts["0"] = plain_facts(communication=[{"steps": steps - 2, **sums}])
    return run


def compared(exposed, steps=12, **of_link):
    """Two runs of each kind, which differ by 4 %."""
    torch = [
        timed(number, "torch", steps=steps, **{**PARTS, "backward": seconds})
        for number, seconds in ((1, 0.05), (3, 0.054))
    ]
    ours = [linked(number, exposed, steps=steps, **of_link) for number in (2, 4)]
    return [torch[0], ours[0], torch[1], ours[1]]


@pytest.mark.parametrize(
    ("exposed", "steps", "limit", "trial"),
    [(0.001, 40, False, ""), (0.01, 40, False, "tuned"), (0.01, 30, False, ""), (0.04, 12, True, "narrow")],
)
def test_the_link_and_what_is_worth_a_run(exposed, steps, limit, trial):
    runs = compared(exposed, steps=steps)
    link = measure(runs, deep=2).link
    assert link.is_the_limit == limit
    assert "4 MB in 2 messages per step, 80 MB/s while a bucket travels" in link.explain()
    assert to_try(runs, deep=2) == trial


def test_one_message_is_one():
    assert "in 1 message per step" in measure(compared(0.01, collectives=1), deep=2).link.explain()


def test_short_messages_are_not_made_shorter():
    runs = compared(0.04, nbytes=4e3)
    assert measure(runs, deep=2).link.explain().endswith("the link is the limit, by its latency")
    assert to_try(runs, deep=2) == ""
    assert to_try(compared(0.04, nbytes=4e3, steps=40), deep=2) == "tuned"
    assert to_try(compared(0.04, nbytes=4e3, steps=40, collectives=1), deep=2) == ""  # one bucket leaves no choice


@pytest.mark.parametrize(
    ("wrapper", "steps", "backward", "said"),
    [
        (
            "narrow",
            12,
            0.02,
            "send 16 bits: a step took 70 ms in a run with it, and 100 without; wire_dtype=torch.bfloat16; gradients "
            "are rounded; of dpfuse.DistributedDataParallel",
        ),
        ("narrow", 12, 0.045, "which may be chance"),  # seven percent, where runs of one kind differ by four
        ("narrow", 12, 0.08, "saves no time"),
        (
            "tuned",
            42,
            0.02,
            "let the tuner choose the buckets: a step took 70 ms in a run with it, and 100 without; "
            'plan="auto"; of dpfuse.DistributedDataParallel',
        ),
        ("tuned", 36, 0.02, ""),  # too few steps behind the tuner's
    ],
)
def test_an_argument_is_advised_where_a_run_with_it_was_faster_than_runs_differ(wrapper, steps, backward, said):
    run = timed(5, wrapper, steps=steps, **{**PARTS, "backward": backward})
    run.facts["0"]["tunings"] = [{"done": True, "error": ""}] if wrapper == "tuned" else []
    found = measure([*compared(0.01), run], deep=2)
    assert [one.explain() for one in found.advice] == [said] * said.startswith(("send", "let"))
    assert (said in found.tried) == (not found.advice)
    assert bool(found.tried) == bool(said and not found.advice)
    assert [one.wrapper for one in found.timings] == ["torch", "dpfuse", "torch", "dpfuse"]


@pytest.mark.parametrize(
    ("tuning", "tried"),
    [
        ({"done": False, "error": ""}, ""),
        ({"done": True, "error": "no link"}, "the tuner has changed nothing: no link"),
    ],
)
def test_what_a_tuner_that_has_not_ended_did_is_no_advice(tuning, tried):
    run = timed(5, "tuned", steps=42, **{**PARTS, "backward": 0.01})
    run.facts["0"]["tunings"] = [tuning]
    found = measure([*compared(0.01), run], deep=2)
    assert (found.advice, found.tried) == ((), tried)


def test_a_run_of_advice_that_fails_advises_nothing():
    run = timed(5, "narrow", **{**PARTS, "backward": 0.01})
    run.code = 1
    found = measure([*compared(0.01), run], deep=2)
    assert (found.advice, found.tried) == ((), "")


@pytest.mark.parametrize(
    ("backwards", "batches"), [([{}], 1), ([{}, {}, {}, {"all_averaged": {}}], 4), ([{"all_averaged": {}}] * 4, 1)]
)
def test_averaging_half_as_often_is_an_estimate_from_medians(backwards, batches):
    runs = compared(0.1)
    for run in runs:
        for trace in run.traces.values():
            for line in trace.steps:
                line["backwards"] = backwards
            trace.steps[-1] = {**trace.steps[-1], "times": {**trace.steps[-1]["times"], "backward": 2.0}}
    found = measure(runs, deep=2)
    (advice,) = found.advice
    assert advice.before == pytest.approx(0.1)  # whatever one slow step takes
    assert advice.after < advice.before
    assert advice.explain().startswith(f"average once in {2 * batches} batches, or double the batch: up to")
    assert "as an estimate" in advice.explain()
    assert "no_sync() of the wrapped model" in advice.how


def test_the_part_of_a_step_that_waits_is_one_of_means():
    """On a busy machine a few steps take long, and the median would be less than what is waited for."""
    run = timed(2, "dpfuse", **PARTS)
    for trace in run.traces.values():
        trace.steps[-1] = {**trace.steps[-1], "times": {**trace.steps[-1]["times"], "backward": 2.0}}
    sums = {"steps": 10, "collectives": 10, "nbytes": 1e6, "seconds": 2.2, "exposed": 2.2}
    run.facts["0"] = plain_facts(communication=[sums])
    found = measure([run], deep=2)
    assert found.link.exposed < found.link.step
