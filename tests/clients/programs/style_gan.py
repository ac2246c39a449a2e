"""A GAN in the shape of StyleGAN2: lazy penalties with gradients of gradients, a moving average, gathered losses."""

import copy
import math
import sys

import torch
import torch.distributed as dist
from torch import autograd, nn
from torch.nn import functional as F
from weights import say, show

STYLE = 8


class Modulated(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, outside, inside, 3, 3))
        self.modulation = nn.Linear(STYLE, inside)
        self.noise = nn.Parameter(torch.zeros(1))
        self.bias = nn.Parameter(torch.zeros(1, outside, 1, 1))

    def forward(self, x, style, noise):
        batch, inside, height, width = x.shape
        weight = self.weight * self.modulation(style).view(batch, 1, inside, 1, 1)
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        y = F.conv2d(x.reshape(1, -1, height, width), weight.flatten(0, 1), padding=1, groups=batch)
        return F.leaky_relu(y.view(batch, -1, height, width) + self.noise * noise + self.bias, 0.2)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.style = nn.Sequential(nn.Linear(STYLE, STYLE), nn.LeakyReLU(0.2), nn.Linear(STYLE, STYLE))
        self.input = nn.Parameter(torch.randn(1, 6, 4, 4))
        self.convs = nn.ModuleList([Modulated(6, 6), Modulated(6, 3)])
        self.register_buffer("fixed", torch.randn(1, 1, 8, 8))

    def forward(self, noises, return_latents=False):
        styles = [self.style(noise) for noise in noises]
        latents = torch.stack([styles[0], styles[-1]], 1)
        x = self.input.repeat(len(latents), 1, 1, 1)
        x = self.convs[0](x, latents[:, 0], torch.randn(len(x), 1, 4, 4))
        x = self.convs[1](F.interpolate(x, scale_factor=2), latents[:, 1], self.fixed)
        return x, latents if return_latents else None


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, 6, 3, 2, 1))
        self.final = nn.Linear(7 * 4, 1)

    def forward(self, x):
        x = self.convs(x)
        spread = x.var(0, unbiased=False).add(1e-8).sqrt().mean().expand(len(x), 1, 2, 2)
        return self.final(torch.cat([x, spread], 1).flatten(1))


def requires_grad(model, flag):
    for param in model.parameters():
        param.requires_grad = flag


def accumulate(average, model, decay):
    theirs = dict(model.named_parameters())
    for name, param in average.named_parameters():
        param.data.mul_(decay).add_(theirs[name].data, alpha=1 - decay)


def reduce_sum(value):
    value = value.clone()
    dist.all_reduce(value)
    return value


def path_lengths(fake, latents, mean):
    noise = torch.randn_like(fake) / math.sqrt(fake.shape[2] * fake.shape[3])
    (grad,) = autograd.grad(outputs=(fake * noise).sum(), inputs=latents, create_graph=True)
    lengths = grad.square().sum(2).mean(1).sqrt()
    mean = mean + 0.01 * (lengths.mean() - mean)
    return (lengths - mean).square().mean(), mean.detach()


def mixing_noise(batch):
    return [torch.randn(batch, STYLE) for _ in range(1 + int(torch.rand(()) < 0.9))]


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    generator, discriminator = Generator(), Discriminator()
    average = copy.deepcopy(generator).eval()
    accumulate(average, generator, 0)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.002 * 4 / 5, betas=(0.0, 0.99 ** (4 / 5)))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.002 * 2 / 3, betas=(0.0, 0.99 ** (2 / 3)))
    wrapped_g, wrapped_d = (
        nn.parallel.DistributedDataParallel(net, broadcast_buffers=False) for net in (generator, discriminator)
    )
    mean_path = torch.zeros(())
    torch.manual_seed(100 + rank)
    for step in range(int(sys.argv[1])):
        real = torch.randn(4, 3, 8, 8)
        requires_grad(wrapped_g, False)
        requires_grad(wrapped_d, True)
        fake, _ = wrapped_g(mixing_noise(4))
        loss_d = F.softplus(-wrapped_d(real)).mean() + F.softplus(wrapped_d(fake)).mean()
        wrapped_d.zero_grad()
        loss_d.backward()
        optimizer_d.step()
        if step % 2 == 0:
            real.requires_grad = True
            predicted = wrapped_d(real)
            (grad,) = autograd.grad(outputs=predicted.sum(), inputs=real, create_graph=True)
            penalty = grad.square().flatten(1).sum(1).mean()
            wrapped_d.zero_grad()
            (10 / 2 * penalty * 2 + 0 * predicted[0]).backward()
            optimizer_d.step()
        requires_grad(wrapped_g, True)
        requires_grad(wrapped_d, False)
        fake, _ = wrapped_g(mixing_noise(4))
        loss_g = F.softplus(-wrapped_d(fake)).mean()
        wrapped_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        if step % 3 == 0:
            fake, latents = wrapped_g(mixing_noise(2), return_latents=True)
            path_loss, mean_path = path_lengths(fake, latents, mean_path)
            wrapped_g.zero_grad()
            (2 * 3 * path_loss + 0 * fake[0, 0, 0, 0]).backward()
            optimizer_g.step()
        accumulate(average, generator, 0.9)
        told = reduce_sum(torch.stack([loss_d.detach(), loss_g.detach(), mean_path])) / size
        say(f"step {step}: {told.tolist()!r}")
    show(generator, discriminator, average)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
