"""ignite starts two ranks, and makes model, optimizer and loader ready for them; gradients of two batches add up."""

import sys

import ignite.distributed as idist
import torch
from ending import end
from ignite.engine import Events, create_supervised_trainer
from torch import nn
from torch.utils.data import TensorDataset


def training(rank, steps):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 1, 28, 28), torch.randint(10, (256,)))
    net = nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(2304, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    wrapper = idist.auto_model(net)
    optimizer = idist.auto_optim(torch.optim.AdamW(wrapper.parameters(), 1e-3))
    loader = idist.auto_dataloader(data, batch_size=32, shuffle=True)
    trainer = create_supervised_trainer(
        wrapper, optimizer, nn.CrossEntropyLoss(), idist.device(), gradient_accumulation_steps=2
    )
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    torch.manual_seed(rank)
    trainer.run(loader, max_epochs=1, epoch_length=2 * steps)
    end(losses, net)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(training, int(sys.argv[1]))
