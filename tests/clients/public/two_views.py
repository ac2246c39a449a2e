"""SimCLR as lightly's example for Lightning on several ranks: two views of an image, and negatives of both ranks."""

import sys

import torch
import torch.distributed as dist
from cpu_torchvision import torchvision
from ending import end
from lightly.data import LightlyDataset
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from pytorch_lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader


class SimCLR(LightningModule):
    def __init__(self):
        super().__init__()
        resnet = torchvision.models.resnet18()
        self.backbone = nn.Sequential(*list(resnet.children())[:-1])
        self.projection_head = SimCLRProjectionHead(512, 256, 64)
        self.criterion = NTXentLoss(gather_distributed=True)
        self.losses = []

    def forward(self, images):
        return self.projection_head(self.backbone(images).flatten(start_dim=1))

    def training_step(self, batch, batch_idx):
        first, second = batch[0]
        loss = self.criterion(self(first), self(second))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)


def main():
    seed_everything(0)
    model = SimCLR()
    images = torchvision.datasets.FakeData(128, (3, 32, 32), transform=None)
    data = LightlyDataset.from_torch_dataset(images, transform=SimCLRTransform(input_size=32, gaussian_blur=0.0))
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=int(sys.argv[1]), **dict.fromkeys(names, False)
    )
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True, drop_last=True))
    end(model.losses, model.backbone, model.projection_head)  # the criterion has a buffer that nothing has filled
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
