"""A small language model in the shape of nanoGPT: accumulation by its private switch, clipping, settings by exec."""

import math
import os
import runpy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from weights import show

steps, micro_steps, width, lr = 5, 3, 16, 1e-3
if len(sys.argv) > 1:
    settings = runpy.run_path(sys.argv[1])
    globals().update({name: value for name, value in settings.items() if not name.startswith("_")})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, width)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens, targets):
        logits = self.head(self.blocks(self.table(tokens)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1337)
    model = DistributedDataParallel(Model())
    raw = model.module
    decay = [param for param in raw.parameters() if param.dim() > 1]
    others = [param for param in raw.parameters() if param.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr)
    torch.manual_seed(1337 + int(os.environ["RANK"]))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (0.5 + 0.5 * math.cos(step))
        for micro in range(micro_steps):
            model.require_backward_grad_sync = micro == micro_steps - 1
            tokens = torch.randint(40, (4, 9))
            _, loss = model(tokens[:, :-1], tokens[:, 1:])
            (loss / micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    show(raw)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
