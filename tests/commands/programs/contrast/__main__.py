"""Contrastive training in the shape of open_clip: two towers, features gathered from all ranks, a learned scale."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from weights import show


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, words):
        return F.normalize(self.image(images)), F.normalize(self.text(words).mean(1)), self.scale.exp()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(10 + dist.get_rank())
    for _ in range(args.steps):
        images, words, scale = model(torch.randn(5, 12), torch.randint(50, (5, 7)))
        images, words = torch.cat(all_gather(images)), torch.cat(all_gather(words))
        logits = scale * images @ words.t()
        target = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    show(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
