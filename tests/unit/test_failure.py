"""Which rank failed first, and with which exit code, from what the ranks left behind."""

import signal

import pytest

from dpfuse.job.failure import RankFailure, explained, first_failure
from dpfuse.job.rank_program import record_exception


@pytest.mark.parametrize(
    ("error", "ended", "code"),
    [
        (ValueError("planted"), 1, 1),
        (ValueError("planted"), -signal.SIGTERM, 1),  # ended by the launcher while it was leaving
        (SystemExit(3), -signal.SIGTERM, 3),
        (SystemExit("text"), -signal.SIGTERM, 1),
        (ValueError("planted"), -signal.SIGKILL, 128 + signal.SIGKILL),
    ],
)
def test_a_recorded_failure_keeps_its_own_exit_code(tmp_path, error, ended, code):
    path = str(tmp_path / "error.json")
    record_exception(error, path)
    failure = explained(RankFailure(1, 10, ended, 0.0), path)
    assert failure.shell_code == code
    assert failure.error.startswith(type(error).__name__)


def test_a_rank_ended_by_the_launcher_is_never_the_cause():
    ended = RankFailure(0, 10, -signal.SIGTERM, 1.0)
    raised = RankFailure(1, 11, 1, 2.0, "ValueError: planted")
    assert first_failure([ended, raised]) is raised


def test_a_sudden_death_explains_its_peers_lost_connections():
    lost = RankFailure(0, 10, 1, 5.0, "RuntimeError: Connection closed by peer")
    killed = RankFailure(1, 11, -signal.SIGKILL, 5.1)
    assert first_failure([lost, killed]) is killed
