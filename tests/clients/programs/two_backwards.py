"""A GAN in the shape of DCGAN: the critic has two backwards before its step, and gets gradients in the generator's."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from weights import say, show

NOISE, FEATURES = 6, 4


def weights_init(module):
    name = type(module).__name__
    if name.startswith("Conv"):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif name.startswith("BatchNorm"):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 2 * FEATURES, 4, 1, 0, bias=False),
        nn.BatchNorm2d(2 * FEATURES),
        nn.ReLU(True),
        nn.ConvTranspose2d(2 * FEATURES, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def critic():
    return nn.Sequential(
        nn.Conv2d(1, FEATURES, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(FEATURES, 2 * FEATURES, 3, 1, 1, bias=False),
        nn.BatchNorm2d(2 * FEATURES),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(2 * FEATURES, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(999)
    nets = [net.apply(weights_init) for net in (generator(), critic())]
    net_g, net_d = (DistributedDataParallel(net) for net in nets)
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(4, NOISE, 1, 1)
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    torch.manual_seed(999 + rank)
    for step in range(int(sys.argv[1])):
        real = torch.randn(6, 1, 8, 8).tanh()
        net_d.zero_grad()
        label = torch.full((6,), 1.0)
        error_real = criterion(net_d(real), label)
        error_real.backward()
        fake = net_g(torch.randn(6, NOISE, 1, 1))
        label.fill_(0.0)
        error_fake = criterion(net_d(fake.detach()), label)
        error_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        label.fill_(1.0)
        error_g = criterion(net_d(fake), label)
        error_g.backward()
        optimizer_g.step()
        say(f"step {step}: {(error_real + error_fake).item()!r} {error_g.item()!r}")
        if rank == 0 and step % 2:
            with torch.no_grad():  # a picture for people; it moves the running means of this rank
                net_g.module(fixed_noise)
    show(net_g.module, net_d.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
