"""pytorch-metric-learning's trainer, with its loss and its miner over the embeddings of both ranks."""

import sys

import torch
import torch.distributed as dist
from ending import end
from pytorch_metric_learning.losses import MultiSimilarityLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.trainers import MetricLossOnly
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.BatchNorm2d(64), nn.ReLU()]
    trunk = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(2), nn.Flatten())
    embedder = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64))
    data = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(8, (256,)))
    models = {"trunk": DistributedDataParallel(trunk), "embedder": DistributedDataParallel(embedder)}
    losses = []
    MetricLossOnly(
        models,
        {f"{name}_optimizer": torch.optim.Adam(model.parameters(), 1e-3) for name, model in models.items()},
        batch_size=32,
        loss_funcs={"metric_loss": DistributedLossWrapper(MultiSimilarityLoss())},
        dataset=data,
        mining_funcs={"tuple_miner": DistributedMinerWrapper(MultiSimilarityMiner())},
        iterations_per_epoch=int(sys.argv[1]),
        data_device=torch.device("cpu"),
        sampler=DistributedSampler(data),
        dataloader_num_workers=0,
        end_of_iteration_hook=lambda trainer: losses.append(trainer.losses["total_loss"].item()),
    ).train()
    end(losses, trunk, embedder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
