"""The lines of a launcher that waits for the other machines of its job."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from dpfuse.job.meeting import tells_while_waiting


def met_after(lines, wanted, **told):
    """Wait in a rendezvous until there are `wanted` lines, then end it, and return what is said afterwards."""
    enough = Event()

    def say(line):
        lines.append(line)
        if len(lines) >= wanted:
            enough.set()

    with patch.object(SimpleElasticAgent, "_rendezvous", lambda self, group: enough.wait(20)):
        original = SimpleElasticAgent._rendezvous
        with tells_while_waiting(say, "10.0.0.1:29500", "3", every=0.01, **told):
            SimpleElasticAgent._rendezvous(SimpleNamespace(), None)
            count = len(lines)
        assert SimpleElasticAgent._rendezvous is original
    return lines[count:]


@pytest.mark.parametrize(
    ("backend", "settings", "limit"),
    [
        ("static", {}, "900 s (--rdzv_conf=timeout=…)"),
        ("static", {"timeout": "30"}, "30 s (--rdzv_conf=timeout=…)"),
        ("c10d", {"timeout": 5}, "600 s (--rdzv_conf=join_timeout=…)"),
        ("c10d", {"join_timeout": 70}, "70 s (--rdzv_conf=join_timeout=…)"),
    ],
)
def test_a_machine_that_waits_says_where_for_how_many_and_how_long(backend, settings, limit):
    lines = []
    assert met_after(lines, 2, backend=backend, settings=settings) == []
    assert lines[0].startswith("this machine has waited 0.01 s for the others: the job needs 3 machines")
    assert lines[1].startswith("this machine has waited 0.02 s")
    assert all("meet at 10.0.0.1:29500." in line for line in lines)
    assert all(limit in line for line in lines)


def test_a_rendezvous_that_fails_ends_the_lines():
    def fails(self, group):
        raise TimeoutError("nobody came")

    lines = []
    with (
        patch.object(SimpleElasticAgent, "_rendezvous", fails),
        tells_while_waiting(lines.append, "10.0.0.1:29500", "2", "static", {}, every=0.01),
        pytest.raises(TimeoutError, match="nobody came"),
    ):
        SimpleElasticAgent._rendezvous(SimpleNamespace(), None)
    count = len(lines)
    assert not Event().wait(0.05)
    assert len(lines) == count
