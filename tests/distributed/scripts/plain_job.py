"""An ordinary job: every rank trains for a few steps and ends."""

import torch
from torch import nn

import dpfuse

dpfuse.init_parallel_env()
model = dpfuse.DataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
