"""A pretraining in the shape of build-nanogpt: a batch in tokens, autocast, a compiled model, a mean of losses."""

import inspect
import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from weights import say, show

WIDTH, HEADS, VOCABULARY = 16, 2, 48


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, time, _ = x.shape
        parts = self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        q, k, v = (part.view(batch, time, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(context, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate):
        params = [param for param in self.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]
        fused = "fused" in inspect.signature(torch.optim.AdamW).parameters
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)


class Loader:
    def __init__(self, batch, time, rank, size):
        self.tokens = torch.randint(VOCABULARY, (900,), generator=torch.Generator().manual_seed(5))
        self.batch, self.time, self.size, self.start = batch, time, size, batch * time * rank
        self.place = self.start

    def next_batch(self):
        length = self.batch * self.time
        part = self.tokens[self.place : self.place + length + 1]
        self.place += length * self.size
        if self.place + length * self.size + 1 > len(self.tokens):
            self.place = self.start
        return part[:-1].view(self.batch, self.time), part[1:].view(self.batch, self.time)


def rate(step, steps, warm=2, high=6e-3, low=6e-4):
    if step < warm:
        return high * (step + 1) / warm
    return low + 0.5 * (1.0 + math.cos(math.pi * (step - warm) / (steps - warm))) * (high - low)


def main():
    steps, total, batch, time = int(sys.argv[1]), 96, 2, 8
    dist.init_process_group(backend="gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1337)
    accumulation = total // (batch * time * size)
    loader = Loader(batch, time, rank, size)
    model = torch.compile(GPT(time), backend="aot_eager")
    model = DistributedDataParallel(model)
    raw_model = model.module
    optimizer = raw_model.configure_optimizers(0.1, 6e-4)
    for step in range(steps):
        if step % 3 == 0:
            model.eval()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                value = model(*loader.next_batch())[1].detach()
            dist.all_reduce(value)
        model.train()
        optimizer.zero_grad()
        total_loss = torch.zeros(())
        for micro in range(accumulation):
            x, y = loader.next_batch()
            model.require_backward_grad_sync = micro == accumulation - 1
            with torch.autocast("cpu", torch.bfloat16):
                _, loss = model(x, y)
            loss = loss / accumulation
            total_loss += loss.detach()
            loss.backward()
        dist.all_reduce(total_loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        optimizer.step()
        say(f"step {step}: {total_loss.item() / size!r} {value.item()!r} {norm.item()!r}")
    show(raw_model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
