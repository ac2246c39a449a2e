"""Each question for a GPU can be asked, and its answer has a row for each contender."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from bench.gpu_questions import QUESTIONS


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="the profiler of torch 2.15 needs the driver itself")
def test_each_question_gets_an_answer_from_a_pretended_gpu(tmp_path):
    command = [sys.executable, "-m", "bench.gpu_questions", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = tmp_path.iterdir()
    answers = json.loads(file.read_text())["answers"]
    assert [each["model"] for each in answers] == [question.model for question in QUESTIONS]
    for question, each in zip(QUESTIONS, answers, strict=True):
        said = "\n".join(each["answer"])
        assert [name for name in question.wraps() if name not in said] == [], said
