"""When buckets are sent in real backwards, on the CPU: the times are those of a clock."""

from __future__ import annotations

import torch

import dpfuse
from bench.send_recorder import SendRecorder
from tests.unit.test_tune_recorder import PAUSE, Pause


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))

    def forward(self, value):
        return Pause.apply(Pause.apply(value * self.first) * self.second)


def test_each_bucket_is_sent_when_its_gradients_are_ready(group):
    model = dpfuse.DataParallel(Layers(), comm_buffer_size=0, last_comm_buffer_size=0)
    recorder = SendRecorder(2, device=torch.device("cpu"))
    model(torch.ones(8)).sum().backward()  # the buckets are made again
    model._sync.grads.record(recorder)
    for _ in range(3):
        model(torch.ones(8)).sum().backward()
    early, last = recorder.sent()
    assert PAUSE <= early <= last - PAUSE
    recorder.restart(2)
    model(torch.ones(8)).sum().backward()
    assert (recorder.steps, len(recorder.sent())) == (1, 2)
