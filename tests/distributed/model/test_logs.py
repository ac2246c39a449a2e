"""What dpfuse logs, with the rank in each record, and DPFUSE_LOGS, which shows it."""

from __future__ import annotations

import logging
import os
import re

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.model.logs import LOGS, VARIABLE
from tests.docs.pages import ROOT


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append((record.name, record.rank, record.getMessage()))


def wrap_and_train(rank, size):
    kept, logger = Kept(), logging.getLogger("dpfuse")
    logger.addHandler(kept)
    before, level = logger.level, logging.INFO
    logger.setLevel(level)
    try:
        model = dpfuse.DataParallel(nn.Linear(4, 2))
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
    finally:
        logger.removeHandler(kept)
        logger.setLevel(before)
    return kept.records


def test_plan_and_rebuild_are_logged_once_with_the_rank(ranks):
    for rank, records in enumerate(ranks(wrap_and_train, size=2, timeout=60)):
        assert [(name, of) for name, of, _ in records] == [("dpfuse.plan", rank), ("dpfuse.rebuild", rank)]
        plan, rebuild = (text for _, _, text in records)
        assert plan.startswith(f"rank {rank}: 1 buckets to start with\norder  MB")
        assert rebuild == f"rank {rank}: 1 buckets after the first synchronised backward, 1 before it"


def wrap_with_variable(rank, size, value):
    os.environ[VARIABLE] = value
    loggers = [logging.getLogger(f"dpfuse.{name}") for name in LOGS]
    try:
        dpfuse.DataParallel(nn.Linear(4, 2))
        dpfuse.DataParallel(nn.Linear(4, 2))
        return [len(logger.handlers) for logger in loggers]
    except (ValueError, dpfuse.DPFuseError) as error:
        return str(error)
    finally:
        del os.environ[VARIABLE]
        for logger in loggers:
            logger.handlers.clear()
            logger.setLevel(logging.NOTSET)
            logger.propagate = True


def test_the_variable_shows_the_logs_that_it_names(ranks):
    shown = [int(name in ("plan", "stall")) for name in LOGS]
    assert ranks(wrap_with_variable, "plan, stall", size=2, timeout=60) == [shown] * 2


def test_an_unknown_log_is_named_on_every_rank(ranks):
    for text in ranks(wrap_with_variable, "plans", size=2, timeout=60):
        names = "plan, rebuild, group, loop, weights, failed, slow, stall"
        assert f"DPFUSE_LOGS names 'plans', expected some of {names}" in text


@pytest.mark.parametrize("page", ["wrong/diagnosis", "reference/environment"])
def test_the_pages_name_every_log(page):
    text = (ROOT / f"docs/{page}.md").read_text()
    assert [name for name in LOGS if not re.search(rf"`(dpfuse\.)?{name}`", text)] == []
