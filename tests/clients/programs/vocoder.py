"""A vocoder in the shape of HiFi-GAN: three wrappers, two of them in one backward, weight and spectral norms."""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from weights import say, show

PARSER = argparse.ArgumentParser()
PARSER.add_argument("--port", default="0")
PARSER.add_argument("--ranks", type=int, default=2)
PARSER.add_argument("--checkpoint_path")
PARSER.add_argument("--training_epochs", type=int, default=2)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_pre = weight_norm(nn.Conv1d(4, 8, 7, 1, 3))
        self.up = weight_norm(nn.ConvTranspose1d(8, 6, 8, 4, 2))
        self.blocks = nn.ModuleList(weight_norm(nn.Conv1d(6, 6, kernel, 1, kernel // 2)) for kernel in (3, 5))
        self.conv_post = weight_norm(nn.Conv1d(6, 1, 7, 1, 3))

    def forward(self, x):
        x = self.up(F.leaky_relu(self.conv_pre(x), 0.1))
        x = sum(x + block(F.leaky_relu(x, 0.1)) for block in self.blocks) / len(self.blocks)
        return torch.tanh(self.conv_post(F.leaky_relu(x)))


class PeriodDiscriminator(nn.Module):
    def __init__(self, period):
        super().__init__()
        self.period = period
        self.convs = nn.ModuleList([weight_norm(nn.Conv2d(1, 4, (5, 1), (3, 1), (2, 0)))])
        self.conv_post = weight_norm(nn.Conv2d(4, 1, (3, 1), 1, (1, 0)))

    def forward(self, x):
        x = F.pad(x, (0, -x.shape[2] % self.period), "reflect")
        x, features = x.view(len(x), 1, -1, self.period), []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        x = self.conv_post(x)
        return x.flatten(1), [*features, x]


class ScaleDiscriminator(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.convs = nn.ModuleList([norm(nn.Conv1d(1, 4, 15, 1, 7)), norm(nn.Conv1d(4, 4, 9, 2, 4, groups=2))])
        self.conv_post = norm(nn.Conv1d(4, 1, 3, 1, 1))

    def forward(self, x):
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        x = self.conv_post(x)
        return x.flatten(1), [*features, x]


class Several(nn.Module):
    def __init__(self, *discriminators, pooled):
        super().__init__()
        self.discriminators, self.pooled = nn.ModuleList(discriminators), pooled

    def forward(self, real, fake):
        found = []
        for index, discriminator in enumerate(self.discriminators):
            if index and self.pooled:
                real, fake = (F.avg_pool1d(each, 4, 2, 2) for each in (real, fake))
            found.append((*discriminator(real), *discriminator(fake)))
        return tuple(zip(*found, strict=True))


def discriminator_loss(reals, fakes):
    return sum((1 - real).square().mean() + fake.square().mean() for real, fake in zip(reals, fakes, strict=True))


def feature_loss(reals, fakes):
    pairs = zip(itertools.chain(*reals), itertools.chain(*fakes), strict=True)
    return 2 * sum((real - fake).abs().mean() for real, fake in pairs)


def spectrum(wave):
    return torch.stft(wave.squeeze(1), 16, 4, window=torch.hann_window(16), return_complex=True).abs()


def train(rank, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=args.port)
    dist.init_process_group("gloo", world_size=args.ranks, rank=rank)
    torch.manual_seed(1234)
    generator = Generator()
    mpd = Several(PeriodDiscriminator(2), PeriodDiscriminator(3), pooled=False)
    msd = Several(ScaleDiscriminator(nn.utils.spectral_norm), ScaleDiscriminator(weight_norm), pooled=True)
    generator, mpd, msd = (DistributedDataParallel(net) for net in (generator, mpd, msd))
    optimizer_g = torch.optim.AdamW(generator.parameters(), 2e-3, betas=(0.8, 0.99))
    optimizer_d = torch.optim.AdamW(itertools.chain(msd.parameters(), mpd.parameters()), 2e-3, betas=(0.8, 0.99))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, gamma=0.9) for each in (optimizer_g, optimizer_d)]
    data = TensorDataset(torch.randn(16, 4, 12), torch.randn(16, 1, 48).tanh())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler, shuffle=False, drop_last=True)
    steps = 0
    for epoch in range(args.training_epochs):
        sampler.set_epoch(epoch)
        for mel, real in loader:
            fake = generator(mel)
            optimizer_d.zero_grad()
            period_real, _, period_fake, _ = mpd(real, fake.detach())
            scale_real, _, scale_fake, _ = msd(real, fake.detach())
            loss_d = discriminator_loss(period_real, period_fake) + discriminator_loss(scale_real, scale_fake)
            loss_d.backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            loss_mel = F.l1_loss(spectrum(real), spectrum(fake)) * 45
            _, period_features, period_fake, period_fakes = mpd(real, fake)
            _, scale_features, scale_fake, scale_fakes = msd(real, fake)
            loss_g = sum((1 - each).square().mean() for each in (*period_fake, *scale_fake)) + loss_mel
            loss_g = loss_g + feature_loss(period_features, period_fakes) + feature_loss(scale_features, scale_fakes)
            loss_g.backward()
            optimizer_g.step()
            steps += 1
            say(f"step {steps}: {loss_d.item()!r} {loss_g.item()!r}")
        for schedule in schedules:
            schedule.step()
        if rank == 0 and args.checkpoint_path:
            states = {"mpd": mpd.module.state_dict(), "msd": msd.module.state_dict()}
            torch.save(states, os.path.join(args.checkpoint_path, f"do_{steps:08d}"))
    show(generator.module, mpd.module, msd.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    args = PARSER.parse_args()
    mp.spawn(train, nprocs=args.ranks, args=(args,))
