"""The server of warm processes outlives clients that are killed while they ask, and its processes stay warm."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.distributed.processes import clean_environment
from tests.patience import patience
from tests.warm import _usual_environment, warm_python


@pytest.mark.parametrize("part", [0, 0.5, 1])
def test_a_client_that_dies_while_it_asks_ends_no_server(part: float):
    request = json.dumps([["-c", "import time; time.sleep(60)"], dict(os.environ), os.getcwd(), os.getpid(), []])
    message = len(request).to_bytes(4, "big") + request.encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(Path(warm_python()).with_name("socket")))
        client.sendall(message[: int(part * len(message))])
    done = subprocess.run([warm_python(), "-c", "print(2)"], capture_output=True, text=True, timeout=patience(60))
    assert (done.stdout, done.stderr, done.returncode) == ("2\n", "", 0)


@pytest.mark.parametrize("preload", ["torch.distributed.run", "tests.preload"])
def test_a_process_is_warm_also_behind_tests_that_have_imported_sklearn_and_lightning(preload, monkeypatch):
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    program = f"import sys; print({preload!r} in sys.modules, 'torch' in sys.modules)"
    command = [warm_python(preload), "-c", program]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=patience(60))
    assert (done.stdout, done.stderr, done.returncode) == ("True True\n", "", 0)


def test_a_server_has_no_variable_that_the_test_which_starts_it_has_set(monkeypatch):
    before = _usual_environment()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert _usual_environment() == before
