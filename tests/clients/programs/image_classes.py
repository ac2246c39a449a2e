"""Image classification in the shape of PyTorch's imagenet example: own ranks, meters, validation, best and resume."""

import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from weights import say, show

PARSER = argparse.ArgumentParser()
PARSER.add_argument("out")
PARSER.add_argument("--world-size", type=int, default=2)
PARSER.add_argument("--port", default="0")
PARSER.add_argument("--workers", type=int, default=1)


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y.add_(self.downsample(x)))


def resnet():
    body = nn.Sequential(Residual(3, 6, 1), Residual(6, 8, 2))
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 5))


class Meter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n):
        self.sum, self.count = self.sum + value * n, self.count + n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = total.tolist()


def data(seed, rows):
    source = torch.Generator().manual_seed(seed)
    targets = torch.randint(5, (rows,), generator=source)
    images = torch.randn(rows, 3, 8, 8, generator=source) + targets[:, None, None, None] / 2
    return TensorDataset(images, targets)


def train(loader, model, criterion, optimizer):
    losses = Meter()
    model.train()
    for images, target in loader:
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def validate(loader, model, args):
    right = Meter()

    def run(loader):
        with torch.no_grad():
            for images, target in loader:
                right.update((model(images).argmax(1) == target).float().mean().item(), len(images))

    model.eval()
    run(loader)
    right.all_reduce()
    if len(loader.sampler) * args.world_size < len(loader.dataset):  # what the sampler has dropped
        rest = range(len(loader.sampler) * args.world_size, len(loader.dataset))
        run(DataLoader(Subset(loader.dataset, rest), batch_size=args.batch_size))
    return right.sum / right.count


def work(rank, args, epochs, resume):
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(resnet())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.3)
    start, best = 0, 0.0
    if resume:
        checkpoint = torch.load(os.path.join(args.out, "checkpoint.pth.tar"), map_location="cpu", weights_only=True)
        start, best = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    train_set, val_set = data(1, 44), data(2, 21)
    sampler = DistributedSampler(train_set)
    val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=args.workers)
    val_loader = DataLoader(val_set, args.batch_size, sampler=val_sampler)
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        losses = train(loader, model, criterion, optimizer)
        accuracy = validate(val_loader, model, args)
        scheduler.step()
        say(f"epoch {epoch}: {losses.sum / losses.count!r} {accuracy!r}")
        is_best, best = accuracy > best, max(accuracy, best)
        if rank == 0:
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            torch.save(state, os.path.join(args.out, "checkpoint.pth.tar"))
            if is_best:
                names = ("checkpoint.pth.tar", "model_best.pth.tar")
                shutil.copyfile(*(os.path.join(args.out, name) for name in names))
        dist.barrier()
    return model


def main_worker(rank, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=args.port)
    dist.init_process_group("gloo", world_size=args.world_size, rank=rank)
    args.batch_size = 12 // args.world_size
    work(rank, args, 1, resume=False)
    model = work(rank, args, 3, resume=True)
    show(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    args = PARSER.parse_args()
    mp.spawn(main_worker, nprocs=args.world_size, args=(args,))
