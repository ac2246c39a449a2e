"""The table of the faults, and the page that has its summary: what is promised is proved somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.machine import ROOT
from tests.faults.__main__ import PAGE, main
from tests.faults.fault import Outcome, Verdict
from tests.faults.faults import BY_NAME, FAULTS, ORDINARY
from tests.faults.job import DDP, TORCH
from tests.faults.jobs import JOB_FAULTS
from tests.faults.promises import PROMISES
from tests.faults.report import ALL, BEGIN, OURS, entry, into_page, newest_record, table

NAMES = {fault.name for fault in ALL}
EVERY = NAMES | {fault.name for fault in FAULTS}


def exists(test: str) -> bool:
    path, _, function = test.partition("::")
    return (ROOT / path).is_file() and bool(re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE))


def test_every_proof_that_is_named_exists() -> None:
    proofs = [proof for proofs in PROMISES.values() for proof in proofs]
    proofs += re.findall(r"`(tests/[^`]+\.py::[^`]+)`", PAGE.read_text())
    assert len(proofs) > 60
    assert [proof for proof in proofs if not (exists(proof) if "::" in proof else proof in EVERY)] == []


def test_every_promise_has_a_proof() -> None:
    assert len(PROMISES) > 30
    assert [promise for promise, proofs in PROMISES.items() if not proofs] == []


def test_every_fault_proves_a_promise() -> None:
    named = {proof for proofs in PROMISES.values() for proof in proofs}
    assert named >= EVERY


def test_what_jobs_are_held_to_in_every_run_of_the_tests_exists() -> None:
    assert [fault.test for fault in JOB_FAULTS if not exists(fault.test)] == []


def test_the_page_has_the_table_of_the_newest_record() -> None:
    path = newest_record()
    if path is None:
        pytest.skip("nothing is recorded: python -m tests.faults, then with --docs")
    record = json.loads(path.read_text())
    page = PAGE.read_text()
    assert into_page(page, table(record["measurements"])) == page
    assert f"`bench/results/{path.name}`" in page
    assert {row["case"] for row in record["measurements"]} == NAMES


def rows(name: str, **ends: Outcome) -> list[dict[str, Any]]:
    faces = dict(zip(("ours", "plain", "unused", "static"), (OURS, *TORCH), strict=True))
    return [vars(entry(BY_NAME[name], faces[face], Verdict(end, 1.0, 0, ""))) for face, end in ends.items()]


def test_a_table_has_both_sides_and_counts_the_best_end_of_torchs_wrapper() -> None:
    played = [
        *rows("unused_one_rank", ours=Outcome.RIGHT, plain=Outcome.LATE, unused=Outcome.RIGHT, static=Outcome.CORRUPT),
        *rows("model_order", ours=Outcome.NAMED, plain=Outcome.CORRUPT, unused=Outcome.CORRUPT, static=Outcome.HANG),
        *rows("param_added", ours=Outcome.CRASH, plain=Outcome.CORRUPT),
        *rows("plain", ours=Outcome.CORRUPT, plain=Outcome.CORRUPT),  # which is no fault
    ]
    shown = table(played)
    assert "| rank 1 does not use a layer | right | right |" in shown
    assert "| rank 1 registers two equal layers the other way round | hang | named error |" in shown
    assert shown.endswith(
        "DDP: 1 handled, 1 wrong without a word, 1 hangs.\n"
        "dpfuse: 2 handled, 1 an error that comes late or without the cause."
    )


def test_what_is_no_fault_is_played_too() -> None:
    assert ORDINARY < NAMES


def test_the_right_mean_is_as_good_as_an_error() -> None:
    assert entry(BY_NAME["bucket_size"], DDP, Verdict(Outcome.RIGHT, 1.0, 0, "")).info["as_expected"]
    assert not entry(BY_NAME["bucket_size"], DDP, Verdict(Outcome.UNNAMED, 1.0, 0, "")).info["as_expected"]


def test_the_rest_of_the_page_stays() -> None:
    page = f"before {BEGIN} old <!-- end of faults --> after"
    assert into_page(page, "new") == f"before {BEGIN}\n\nnew\n\n<!-- end of faults --> after"


def test_a_fault_is_played_with_both_wrappers_and_leaves_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["unused_one_rank", "--results", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| rank 1 does not use a layer | right | right |" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchs_wrapper_fails_silently_or_hangs_in_many_faults(tmp_path: Path) -> None:
    """What dpfuse does in each fault, `test_faults` and the tests that `JOB_FAULTS` names check."""
    assert main(["--faces", DDP, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["measurements"]
    assert {(row["case"], row["variant"]) for row in rows} == {(name, DDP) for name in NAMES}
    outcomes = [row["info"]["outcome"] for row in rows]
    # Else nothing was done to it.
    assert outcomes.count("silent corruption") >= 8
    assert outcomes.count("hang") >= 3
