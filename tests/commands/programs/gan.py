"""A GAN in the shape of public ones: two wrappers, two optimizers, a file of settings, another working folder."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    with open(sys.argv[1]) as file:
        settings = json.load(file)
    os.chdir("/")
    sys.path.insert(0, HERE)
    import weights  # from the folder of this file

    dist.init_process_group("gloo")
    torch.manual_seed(settings["seed"])
    generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    generator, critic = DistributedDataParallel(generator), DistributedDataParallel(critic, broadcast_buffers=False)
    both = [torch.optim.Adam(net.parameters(), lr=settings["lr"], betas=(0.5, 0.99)) for net in (generator, critic)]
    loss_of = nn.BCEWithLogitsLoss()
    torch.manual_seed(settings["seed"] + dist.get_rank() + 1)
    for _ in range(settings["steps"]):
        real, noise = torch.randn(6, 16), torch.randn(6, 8)
        critic.requires_grad_(True)
        both[1].zero_grad()
        fake = generator(noise)
        loss = loss_of(critic(real), torch.ones(6, 1)) + loss_of(critic(fake.detach()), torch.zeros(6, 1))
        loss.backward()
        both[1].step()
        critic.requires_grad_(False)
        both[0].zero_grad()
        loss_of(critic(fake), torch.ones(6, 1)).backward()
        both[0].step()
    weights.show(generator.module, critic.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
