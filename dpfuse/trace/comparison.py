"""Where two runs part: the first step, rank, bucket and parameter, and the class of the cause. Reads traces only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpfuse.trace.by_micro_batch import by_number
from dpfuse.trace_file import BEFORE_STEP, HELD, HOOKED, RankTrace, behind_hooks

__all__ = ["CAUSES", "Difference", "compare", "first_setting"]

# The classes of causes, and what each of them means.
CAUSES = {
    "settings": "an option, a version or a number of the optimizer",
    "random state": "a generator of random numbers",
    "data": "a batch, its targets, or weights that were loaded",
    "kernel": "the same operation on the same numbers has given other bits",
    "program": "a hook of the program has changed a gradient",
    "communication": "the gradients of the ranks are the same, and their average is not",
    "gradient": "the gradient of a rank, or the average: which of them, was not hashed in this step",
    "forward": "the outputs of a forward, or the weights before it: which of them, was not hashed there",
    "optimizer": "what happens between the average and the new weights",
    "written": "something outside the step of an optimizer has written weights",
}

TOGETHER = "all_averaged"  # one hash for the averages of a model, in steps without one for each parameter

# Fields of a forward or backward in the order in which they come about, and the cause where one differs first.
FORWARD = (
    ("training", "settings", "the mode (train or eval) of the model"),
    ("context", "settings", "autocast"),
    ("weights", "written", "the weights when the forward begins"),
    ("inputs", "data", "the inputs of the forward"),
    ("outputs", "kernel", "the outputs of the forward"),
    ("buffers", "kernel", "the buffers after the forward"),
)
BACKWARD = (
    ("loss", "data", "the loss, computed from the same outputs: its targets, or the loss function"),
    ("local", "kernel", "the gradient of this rank, before it is averaged"),
    (HOOKED, "program", "the gradient of this rank, after hooks of the program and before it is averaged"),
    ("averaged", "communication", "the averaged gradient"),
    (TOGETHER, "gradient", "the averaged gradient of the model"),
)
EVENTS = {"forwards": FORWARD, "backwards": BACKWARD}
STEP = (
    ("stepped", "optimizer", "the gradient that the optimizer uses, after clipping and scaling"),
    (BEFORE_STEP, "written", "the parameter when the step of the optimizer begins"),
    ("parameters", "optimizer", "the parameter after the step"),
)
DRAWN = {what for name, _, what in (*FORWARD, *BACKWARD) if name in ("inputs", "outputs", "loss")}
NO_NUMBERS = {"format", "rank", "random"}  # of the settings
NOT_CAUSES = {"dpfuse"}  # versions that are compared elsewhere


@dataclass(frozen=True)
class Difference:
    """The first place where two runs part.

    Args:
        step: of the optimizer, counted from 0 over all optimizers; -1 is before the first step.
        rank: the first with this difference.
        ranks: all with it; empty where runs on other numbers of ranks are compared by micro-batch.
        cause: one of `CAUSES`.
        what: differs, in words.
        model: its number; None where it belongs to no model.
        parameter: the first that differs, in the order of the model; empty if it is none.
        parameters: how many differ.
        bucket: its place in the order of sending; None where it is not known.
        hint: what the two runs have set differently that may explain it, or another remark.
        batch: the micro-batch of the step, from 0, and how many there are; None where there is one, or it is not known.
    """

    step: int
    rank: int
    ranks: tuple[int, ...]
    cause: str
    what: str
    model: int | None = None
    parameter: str = ""
    parameters: int = 0
    bucket: int | None = None
    hint: str = ""
    batch: tuple[int, int] | None = None

    @property
    def place(self) -> str:
        """The step, the micro-batch where there are several, and the rank, in words."""
        step = "before the first step" if self.step < 0 else f"step {self.step}"
        batch = "" if self.batch is None else f", micro-batch {self.batch[0]} of {self.batch[1]}"
        return f"{step}{batch}, rank {self.rank}" if self.ranks else f"{step}{batch}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "ranks": list(self.ranks)}

    def explain(self) -> str:
        """Return the difference as a few lines."""
        lines = [f"first difference   {self.place}", f"what               {self.what}"]
        if self.parameter:
            more = f" and {self.parameters - 1} more" if self.parameters > 1 else ""
            model = f" of model {self.model}" if self.model else ""
            lines.append(f"parameter          {self.parameter}{model}{more}")
        if self.bucket is not None:
            lines.append(f"bucket             {self.bucket}")
        lines.append(f"class of cause     {self.cause}: {CAUSES[self.cause]}")
        if len(self.ranks) > 1:
            lines.append(f"ranks that differ  {', '.join(map(str, self.ranks))}")
        return "\n".join([*lines, *([f"note               {self.hint}"] if self.hint else [])])


@dataclass(frozen=True)
class _Part:
    """One thing that differs in one step of one rank."""

    place: tuple[int, int]  # in the order of the step: the event, and what of it
    cause: str
    what: str
    model: int | None = None
    names: tuple[str, ...] = ()  # of the parameters that differ
    batch: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Random:
    """Where random states differ first."""

    step: int
    forward: int  # in the step
    rank: int
    batch: tuple[int, int] | None


def compare(one: dict[int, RankTrace], other: dict[int, RankTrace]) -> Difference | None:
    """Return the first difference of two runs; None if all that both have written is equal.

    Runs with fixed micro-batches may have other numbers of ranks: they are compared by micro-batch.

    Args:
        one: the traces of a run by rank, as `read_folder` returns them.
        other: those of another one.
    """
    if len(one) != len(other) and (ours := by_number(one)) and (theirs := by_number(other)):
        difference = compare({0: ours}, {0: theirs})
        return None if difference is None else replace(difference, ranks=())
    if len(one) != len(other):
        return Difference(-1, 0, (0,), "settings", f"the number of ranks: {len(one)} and {len(other)}")
    at_start = _before_the_first_step(one, other)
    if at_start is not None:
        return at_start
    early: _Random | None = None  # where random states part
    plans: dict[int, list[list[str]]] = {}
    for step in range(min(len(trace.steps) for run in (one, other) for trace in run.values())):
        for run in (other, one):
            plans |= {int(model): plan for model, plan in run[0].steps[step].get("plan", {}).items()}
        parts = {rank: part for rank in one if (part := _first_part(one[rank], other[rank], step)) is not None}
        drawn = [found for rank in one if (found := _random_parts(one[rank], other[rank], step, rank)) is not None]
        early = early or min(drawn, key=lambda found: found.forward, default=None)
        if parts:
            first = min(part.place for part in parts.values())
            ranks = tuple(rank for rank, part in parts.items() if part.place == first)
            return _told(step, ranks, parts[ranks[0]], early, plans, (one[ranks[0]], other[ranks[0]]))
    return None


def first_setting(one: dict[int, RankTrace], other: dict[int, RankTrace]) -> Difference | None:
    """Return the first setting of an optimizer that differs, whatever numbers differ before; None if there is none.

    Args:
        one, other: as for `compare`, of as many ranks.
    """
    for step in range(min(len(trace.steps) for run in (one, other) for trace in run.values())):
        for rank in one:
            ours, theirs = one[rank].steps[step]["settings"], other[rank].steps[step]["settings"]
            if ours != theirs:
                return Difference(step, rank, (rank,), "settings", f"the optimizer's {_setting(ours, theirs)}")
    return None


def _told(
    step: int,
    ranks: tuple[int, ...],
    part: _Part,
    early: _Random | None,
    plans: dict[int, list[list[str]]],
    traces: tuple[RankTrace, RankTrace],
) -> Difference:
    cause, what, hint, rank = part.cause, part.what, "", ranks[0]
    settings = _settings_that_differ(*traces)
    # Data and masks are drawn from these states; a kernel that draws is no kernel that rounds.
    if early is not None and what in DRAWN and (early.step, early.forward) <= (step, part.place[0]):
        hint = f"{what} differ at step {step}" if early.step < step else f"{what} follow from it"
        cause, what = "random state", "the state of a random number generator when the forward begins"
        step, rank, ranks = early.step, early.rank, (early.rank,)
        part = _Part(part.place, cause, what, part.model, batch=early.batch)
    elif cause in ("kernel", "forward") and settings:
        cause, hint = "settings", f"these settings differ: {settings}"
    elif settings or _wrappers(traces[0]) != _wrappers(traces[1]):
        wrappers = "" if _wrappers(traces[0]) == _wrappers(traces[1]) else "the class of the wrapper"
        hint = f"these also differ: {', '.join(filter(None, [wrappers, settings]))}"
    name, model = part.names[0] if part.names else "", part.model
    if model is None and ":" in name:  # of an optimizer, and of a model that is not the first
        prefix, _, name = name.partition(":")
        model = int(prefix)
    buckets = plans.get(model or 0, [])
    bucket = next((number for number, names in enumerate(buckets) if name in names), None)
    return Difference(step, rank, ranks, cause, what, model, name, len(part.names), bucket, hint, part.batch)


def _before_the_first_step(one: dict[int, RankTrace], other: dict[int, RankTrace]) -> Difference | None:
    for rank in one:
        for ours, theirs in zip(one[rank].models, other[rank].models, strict=False):
            number = ours["number"]
            for name in ("class", "names", "shapes", "dtypes"):
                if ours[name] != theirs[name]:
                    what = f"the {name} of the parameters of model {number}" if name != "class" else "the model's class"
                    return Difference(-1, rank, (rank,), "settings", what, number)
            names = _names_where(ours["parameters"], theirs["parameters"], ours["names"])
            if names:
                ranks = tuple(
                    r
                    for r in one
                    for mine, yours in zip(one[r].models, other[r].models, strict=False)
                    if mine["number"] == number and mine["parameters"] != yours["parameters"]
                )
                drawn = ours["random"]["torch"] != theirs["random"]["torch"]
                cause = "random state" if drawn else "data"
                hint = "" if drawn else "the random states are the same: were other weights loaded?"
                what = "the weights when the model is wrapped"
                return Difference(-1, rank, ranks, cause, what, number, names[0], len(names), None, hint)
    return None


def _first_part(ours: RankTrace, theirs: RankTrace, step: int) -> _Part | None:
    return next(_parts(ours, theirs, step), None)


def _parts(ours: RankTrace, theirs: RankTrace, step: int) -> Iterator[_Part]:
    """Yield what differs in one step of one rank, in the order in which it has come about."""
    one, other = ours.steps[step], theirs.steps[step]
    events = 0
    for kind, fields in EVENTS.items():
        for index, (first, second) in enumerate(zip(one[kind], other[kind], strict=False)):
            for number, (name, cause, what) in enumerate(fields):
                mine, yours = _field(first, name), _field(second, name)
                if mine is None or yours is None or mine == yours:
                    continue
                place = events, number
                if not isinstance(mine, dict):
                    if name == "outputs" and not ("weights" in first and "weights" in second):
                        cause = "forward"
                    yield _Part(place, cause, what, first.get("model"), batch=_batch(one, kind, index))
                    continue
                for key in sorted(mine.keys() & yours.keys(), key=int):
                    batch = _batch(one, kind, index, key)
                    if name == TOGETHER:
                        if mine[key] != yours[key]:
                            yield _Part(place, cause, what, int(key), batch=batch)
                        continue
                    names = _names_where(mine[key], yours[key], ours.models[int(key)]["names"])
                    if names:
                        # Before the first forward and the first step of an optimizer, they were loaded.
                        loaded = name == "weights" and step == 0 and key not in _models(one["forwards"][:index])
                        about = ("data", "the weights when the first forward begins") if loaded else (cause, what)
                        yield _Part(place, *about, int(key), names, batch)
            events += 1
        events = 1000 * (1 + events // 1000)
    # Behind what both have: a run that has left out a step, since a gradient was not finite, has the next batch here.
    for kind in EVENTS:
        if len(one[kind]) != len(other[kind]):
            counts = f"{len(one[kind])} and {len(other[kind])}"
            yield _Part((events, 0), "settings", f"the number of {kind} in the step: {counts}")
    events += 1
    if one["optimizer"] != other["optimizer"]:
        yield _Part((events, 0), "settings", "which optimizer makes the step")
        return
    names = ours.optimizers[one["optimizer"]]["names"]
    if one["settings"] != other["settings"]:
        yield _Part((events, 1), "settings", f"the optimizer's {_setting(one['settings'], other['settings'])}")
    for number, (name, cause, what) in enumerate(STEP, start=2):
        if name in one and name in other and one[name] != other[name]:
            yield _Part((events, number), cause, what, None, _names_where(one[name], other[name], names))
    if one.get("all_parameters") != other.get("all_parameters"):
        averaged = any(TOGETHER in backward for backward in one["backwards"])
        yield _Part((events, 5), "optimizer" if averaged else "gradient", "the parameters after the step")


def _field(event: dict[str, Any], name: str) -> Any:
    """Return what a forward or backward has in a field; None if it has none."""
    if name == HOOKED and HOOKED in event:
        return behind_hooks(event)
    return event.get(name)


def _batch(line: dict[str, Any], kind: str, index: int, model: str | None = None) -> tuple[int, int] | None:
    """Return which micro-batch of a step a forward or a backward belongs to, and how many there are.

    Args:
        line: of the step.
        kind: "forwards" or "backwards".
        index: of the forward or backward.
        model: its number as a text. None: the only one of this forward or backward.

    Returns:
        None if there is one, or where a model has not as many forwards as backwards.
    """
    models = {model} if model is not None else _models(line[kind][index : index + 1])
    if len(models) != 1:
        return None
    places = {each: [n for n, one in enumerate(line[each]) if models & _models([one])] for each in EVENTS}
    if len({len(found) for found in places.values()}) > 1 or len(places[kind]) < 2:
        return None
    return places[kind].index(index), len(places[kind])


def _models(events: Sequence[dict[str, Any]]) -> set[str]:
    """Return the numbers, as texts, of the models that take part in these forwards or backwards."""
    found = {str(one["model"]) for one in events if "model" in one}
    return found.union(*(one.get(name, ()) for one in events for name in (HELD, "local", "averaged", TOGETHER)))


def _setting(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    """Return the name of the first setting that differs, with both values and its group."""
    if len(one) != len(other):
        return f"number of groups: {len(one)} and {len(other)}"
    for number, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                return f"{name} of group {number}: {ours.get(name)} and {theirs.get(name)}"
    return "settings"


def _random_parts(ours: RankTrace, theirs: RankTrace, step: int, rank: int) -> _Random | None:
    """Return where a generator that the program uses has another state in the two runs when a forward begins.

    Python's and NumPy's generators begin at random unless the program seeds them. So a state that differs counts only
    if it has changed since the forward before, or since the start.
    """
    forwards = zip(ours.steps[step]["forwards"], theirs.steps[step]["forwards"], strict=False)
    for index, (one, other) in enumerate(forwards):
        for kind, state in one["random"].items():
            if state != other["random"].get(kind) and (kind in ("torch", "cuda") or _moved(ours, step, index, kind)):
                return _Random(step, index, rank, _batch(ours.steps[step], "forwards", index))
    return None


def _moved(trace: RankTrace, step: int, index: int, kind: str) -> bool:
    if index:
        before = trace.steps[step]["forwards"][index - 1]["random"]
    elif step and trace.steps[step - 1]["forwards"]:
        before = trace.steps[step - 1]["forwards"][-1]["random"]
    else:
        before = trace.settings["random"]
    return bool(before.get(kind) != trace.steps[step]["forwards"][index]["random"][kind])


def _names_where(one: str, other: str, names: list[str]) -> tuple[str, ...]:
    """Return the names of the parameters whose eight characters differ."""
    return tuple(
        name for index, name in enumerate(names) if one[8 * index : 8 * index + 8] != other[8 * index : 8 * index + 8]
    )


def _wrappers(trace: RankTrace) -> list[str]:
    return [model["wrapper"] for model in trace.models]


def _settings_that_differ(one: RankTrace, other: RankTrace) -> str:
    """Return the settings of the processes that differ, with both values, as a text."""
    found = []
    for name in one.settings.keys() - NO_NUMBERS:
        ours, theirs = one.settings[name], other.settings.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found += [
                f"{key} ({ours[key]} and {theirs.get(key)})"
                for key in ours
                if ours[key] != theirs.get(key) and key not in NOT_CAUSES
            ]
        elif ours != theirs:
            found.append(f"{name} ({ours} and {theirs})")
    return ", ".join(sorted(found))
