"""The questions for a GPU: here only what needs none. On a pretended one, tests/pretended_gpu asks them all."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_questions import MODELS, QUESTIONS, ROUNDS, main, spans


def test_without_a_gpu_nothing_is_asked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path)]) == 2
    assert "nothing was asked" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_questions_fit_into_the_time_and_name_models():
    assert {question.model for question in QUESTIONS} <= set(MODELS)
    assert sum(question.share for question in QUESTIONS) * ROUNDS <= ROUNDS + 1e-9


@pytest.mark.parametrize(
    ("intervals", "busy", "gaps"),
    [([], 0, 0), ([(5, 9)], 4, 0), ([(3, 4), (0, 2)], 3, 1), ([(0, 9), (1, 2), (9, 10), (12, 13)], 11, 2)],
)
def test_overlapping_kernels_count_once(intervals, busy, gaps):
    assert spans(intervals) == (busy, gaps)
