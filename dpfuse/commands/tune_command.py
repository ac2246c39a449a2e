"""`dpfuse tune`: run `autotune` on a user's own model, and report the result."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import dpfuse
from dpfuse.commands.ranks import build_on_all_ranks, reports_here, run_on_ranks, say
from dpfuse.commands.report_file import SavedRun, buckets_of, here, save_picture, write_report
from dpfuse.commands.report_folder import REPORT, make_folder
from dpfuse.commands.user_model import Target, find_factory
from dpfuse.engine.plan import BucketPlan
from dpfuse.errors import DPFuseError
from dpfuse.tune import Schedule, Tuning, autotune, save_plot, save_trace

__all__ = ["Tuned", "tune", "tune_wrapped"]

SILENCE = 5.0  # seconds after which a command says how far it is


@dataclass(frozen=True)
class Tuned:
    """The results on rank 0."""

    run: SavedRun
    tuning: Tuning
    in_use: BucketPlan

    @property
    def schedule(self) -> Schedule:
        """The schedule of the buckets in use, as recorded; with sparse gradients, as expected."""
        recorded = self.tuning.new if self.tuning.kept else self.tuning.old
        schedule = recorded or self.tuning.expected
        assert schedule is not None
        return schedule


def tune(
    place: str,
    count: int | None,
    steps: int,
    caps: tuple[float, float],
    folder: Path,
    arguments: list[str],
    *,
    save: Path | None = None,
) -> int:
    """Tune, print and write.

    Args:
        place: `module:factory`.
        count: ranks to start; None takes the default.
        steps: to record, before and after.
        caps: limits of a bucket, and of the one sent last, in MB.
        folder: for the report.
        arguments: of the command line.
        save: the file for the plan in use at the end; None writes none.

    Raises:
        DPFuseError: nothing could be tuned.
    """
    find_factory(place)  # before ranks start: an error is shorter here
    if reports_here():
        make_folder(folder)
    found: Tuned | None = run_on_ranks(_tune, (place, steps, caps), count)
    if found is not None:
        _report(found, place, folder, arguments, save)
    return 0


def tune_wrapped(target: Target, model: dpfuse.DataParallel, steps: int, caps: tuple[float, float]) -> Tuning:
    """Run backwards until `autotune` is done.

    Raises:
        DPFuseError: `autotune` failed and changed nothing, or it did not finish.
    """
    tuning = autotune(model, steps, comm_buffer_size=caps[0], last_comm_buffer_size=caps[1])
    most = 10 * steps + 20  # it takes 2 * steps + 3, unless backwards fail on a GPU
    started = said = perf_counter()
    for done in range(1, most + 1):
        target.step(model)
        if tuning.done:
            break
        if (now := perf_counter()) - said > SILENCE:
            left = (now - started) / done * max(2 * steps + 3 - done, 1)
            say(f"backward {done} of about {2 * steps + 3}, about {left:.0f} s to go")
            said = now
    else:
        raise DPFuseError(f"{target.place}: nothing was tuned within {most} backwards; do its gradients stay finite?")
    if tuning.error:
        raise DPFuseError(f"{target.place}: {tuning.explain()}")
    return tuning


def _tune(place: str, steps: int, caps: tuple[float, float]) -> Tuned:
    target = build_on_all_ranks(place)
    model = dpfuse.DataParallel(target.module)
    say(f"tuning {place}: about {2 * steps + 3} backwards")
    tuning = tune_wrapped(target, model, steps, caps)
    return Tuned(here(), tuning, model.bucket_plan)


def _report(found: Tuned, place: str, folder: Path, arguments: list[str], save: Path | None) -> None:
    tuning = found.tuning
    assert tuning.timeline is not None
    assert tuning.cost is not None
    assert tuning.old_plan is not None
    assert tuning.plan is not None
    print(f"{tuning.explain()}\n\nbuckets in use from now on\n{found.in_use.explain()}\n")
    if tuning.kept and save is None:
        print(
            'to train with these buckets, run `dpfuse tune --save plan.json` and pass plan="plan.json", or pass '
            'plan="auto"; `dpfuse bench` measures the gain'
        )
    elif save is None:
        print("keep the default sizes")
    facts: dict[str, Any] = {
        "kept": tuning.kept,
        "before": _times(tuning.before),
        "after": _times(tuning.after),
        "plans": {"before": buckets_of(tuning.old_plan), "tuned": buckets_of(tuning.plan)},
        "schedules": {
            name: schedule.to_json()
            for name, schedule in (("before", tuning.old), ("expected", tuning.expected), ("after", tuning.new))
            if schedule is not None
        },
        "timeline": tuning.timeline.to_json(),
        "cost": tuning.cost.to_json(),
    }
    write_report(folder / REPORT, "tune", arguments, place, found.run, facts)
    save_trace(found.schedule, folder / "trace.json")
    plot = save_picture(partial(save_plot, found.schedule, title=place), folder / "plan.png")
    print(f"report: {folder / REPORT}\ntrace: {folder / 'trace.json'}\nplot: {plot}")
    if save is not None:
        found.in_use.save(save)
        print(f'plan: {save}; to train with these buckets: DataParallel(model, plan="{save}")')


def _times(times: Any) -> dict[str, Any] | None:
    return None if times is None else asdict(times)
