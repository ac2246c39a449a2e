"""Is each wrong loop named on every rank, with its code, and is nothing said of a right one?"""

from __future__ import annotations

import gc
import logging
import re
import warnings
from unittest import mock

import pytest

from dpfuse.errors import DPFuseError, DPFuseWarning
from dpfuse.findings import findings
from dpfuse.loop import input_comparison, unowned_parameters
from tests.docs.pages import ROOT, blocks_of
from tests.loops import right, wrong

CODES = sorted({code for code, _ in wrong.PROGRAMS.values()})
LOGGED = ("DPF-L02", "DPF-L09")
AT_THE_END = "since the model was wrapped"  # of the process, so another test reads it
OF_THE_DOCTOR = ("DPF-L03", "DPF-L06", *(f"DPF-L{number}" for number in range(10, 16)))
PAGE = ROOT / "docs/wrong/loops.md"


class Records(logging.Handler):
    """Keeps what was logged."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def heard(program, rank, size):
    """What a program was told, and what was logged, each as code and text; an error ends it."""
    findings.forget()
    gc.collect()  # the wrappers of the programs before
    logger, records = logging.getLogger("dpfuse.loop"), Records()
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program(rank, size)
    except DPFuseError as error:
        if not error.code:
            raise
        return [(error.code, str(error))], []
    finally:
        logger.removeHandler(records)
    told = [each.message for each in caught if isinstance(each.message, DPFuseWarning)]
    return [(each.code, str(each)) for each in told], [(text[: len("DPF-L00")], text) for text in records.texts]


def run_wrong(rank, size, names):
    results = {}
    for name in names:
        input_comparison._all.clear()  # models of other tests may not be freed yet
        code, program = wrong.PROGRAMS[name]
        with mock.patch.object(unowned_parameters, "LATER", 21):  # averages; else 1,000
            told, logged = heard(program, rank, size)
        results[name] = logged if code in LOGGED else [each for each in told if each[0].startswith("DPF-L")]
    return results


def run_right(rank, size, names):
    results = {}
    for name in names:
        told, logged = heard(right.PROGRAMS[name], rank, size)
        results[name] = told + [each for each in logged if "the check of the training loop has failed" in each[1]]
    return results


def shown(code):
    """The messages that the page shows for a finding."""
    blocks = (block.text for block in blocks_of(PAGE) if block.language == "text")
    return [plain(text) for text in blocks if text.startswith(f"{code}:")]


def plain(text):
    """A message in one line, without the name of its program, its times and the bytes of a report."""
    text = re.sub(r"\w+\.py:\d+", "train.py:1", " ".join(text.split()))
    return re.sub(r"[\d,]+ backwards averaged", "1,000 backwards averaged", text)


@pytest.mark.parametrize("code", CODES)
def test_each_wrong_loop_is_named_on_every_rank_as_the_page_shows(ranks, code):
    names = [name for name, (own, _) in wrong.PROGRAMS.items() if own == code]
    told = ranks(run_wrong, names, timeout=60)
    codes = {name: [[code for code, _ in one[name]] for one in told] for name in names}
    assert codes == {name: [[code]] * len(told) for name in names}
    texts = {plain(text) for said in told[0].values() for _, text in said}
    assert shown(code)
    assert [text for text in shown(code) if text not in texts and AT_THE_END not in text] == []


def test_the_page_has_a_section_for_each_finding():
    titles = re.findall(r"^## (DPF-L\d\d): ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert titles == sorted([*CODES, *OF_THE_DOCTOR])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", range(3))
def test_nothing_is_said_of_right_loops(ranks, part):
    names = [*right.PROGRAMS][part::3]
    assert ranks(run_right, names, timeout=120) == [{name: [] for name in names}] * 2
