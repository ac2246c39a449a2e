"""The table of the faults, and the page that has its summary: what is promised is proved somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.machine import ROOT
from tests.faults.__main__ import PAGE, main
from tests.faults.fault import Outcome, Verdict
from tests.faults.faults import BY_NAME
from tests.faults.job import DDP
from tests.faults.jobs import JOB_FAULTS
from tests.faults.promises import PROMISES
from tests.faults.report import ALL, BEGIN, GROUPS, OURS, entry, groups, into_page, newest_record, table

NAMES = {fault.name for fault in ALL}


def exists(test: str) -> bool:
    path, _, function = test.partition("::")
    return (ROOT / path).is_file() and bool(re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE))


def test_every_proof_that_is_named_exists() -> None:
    proofs = [proof for proofs in PROMISES.values() for proof in proofs]
    proofs += re.findall(r"`(tests/[^`]+\.py::[^`]+)`", PAGE.read_text())
    assert len(proofs) > 60
    assert [proof for proof in proofs if not (exists(proof) if "::" in proof else proof in NAMES)] == []


def test_every_promise_has_a_proof() -> None:
    assert len(PROMISES) > 30
    assert [promise for promise, proofs in PROMISES.items() if not proofs] == []


def test_every_fault_proves_a_promise() -> None:
    named = {proof for proofs in PROMISES.values() for proof in proofs}
    assert NAMES - named == set()


def test_what_jobs_are_held_to_in_every_run_of_the_tests_exists() -> None:
    assert [fault.test for fault in JOB_FAULTS if not exists(fault.test)] == []


def test_the_page_has_the_summary_of_the_newest_record() -> None:
    path = newest_record()
    if path is None:
        pytest.skip("nothing is recorded: python -m tests.faults, then with --docs")
    record = json.loads(path.read_text())
    page = PAGE.read_text()
    assert into_page(page, groups(record["measurements"])) == page
    assert f"`bench/results/{path.name}`" in page
    assert {row["case"] for row in record["measurements"]} == NAMES


def test_a_table_shows_both_and_counts() -> None:
    right, wrong = Verdict(Outcome.RIGHT, 1.0, 0, ""), Verdict(Outcome.CORRUPT, 2.04, 0, "")
    fault = BY_NAME["unused_one_rank"]
    rows = [entry(fault, OURS, right), entry(fault, DDP, wrong), entry(BY_NAME["plain"], DDP, right)]
    shown = table([vars(row) for row in rows])
    assert "| `unused_one_rank` | rank 1 does not use a layer | right | 1.0 | silent corruption | 2.0 |" in shown
    assert "| `plain` | nothing goes wrong |  |  | right | 1.0 |" in shown
    assert "dpfuse does what is expected in 1 of 1; torch does what is expected in 1 of 2, and is wrong in" in shown
    assert "in silence in 1." in shown


def test_a_summary_counts_each_group() -> None:
    assert {fault.hazard[:2] for fault in ALL} == GROUPS.keys()
    right, wrong = Verdict(Outcome.RIGHT, 1.0, 0, ""), Verdict(Outcome.CORRUPT, 2.04, 0, "")
    fault = BY_NAME["unused_one_rank"]
    shown = groups([vars(row) for row in (entry(fault, OURS, right), entry(fault, DDP, wrong))])
    assert f"| {GROUPS['1b']} | 1 | 1 | 0 | 1 |" in shown
    assert f"| {GROUPS['1a']} | 0 | 0 | 0 | 0 |" in shown


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
    assert re.search(r"\| `unused_one_rank` \|.*\| right \| [\d.]+ \| silent corruption \| [\d.]+ \|", shown)
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
    assert outcomes.count("silent corruption") >= 10
    assert outcomes.count("hang") >= 3
