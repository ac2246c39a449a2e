"""A loop written with accelerate."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from weights import show


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(TensorDataset(torch.randn(40, 5), torch.randint(2, (40,))), batch_size=2, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for _ in range(int(sys.argv[1])):
        for inputs, targets in data:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    show(accelerator.unwrap_model(model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
