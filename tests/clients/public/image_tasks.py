"""torchvision's models in the loops of its references: `detection` with RetinaNet, `segmentation` with DeepLabV3."""

import sys

import torch
import torch.distributed as dist
from cpu_torchvision import torchvision
from ending import end
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

CLASSES, SIZE = 5, 96


def detection():
    backbone = torchvision.models.detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, trainable_layers=3
    )
    net = torchvision.models.detection.RetinaNet(backbone, CLASSES, min_size=SIZE, max_size=SIZE)
    corners = torch.rand(3, 2) * SIZE / 2
    boxes = torch.cat([corners, corners + 24], dim=1)
    data = [(torch.rand(3, SIZE, SIZE), {"boxes": boxes, "labels": torch.tensor([1, 2, 3])}) for _ in range(64)]

    def loss_of(model, images, targets):
        return sum(model(images, targets).values())

    return net, data, lambda rows: tuple(map(list, zip(*rows, strict=True))), loss_of


def segmentation():
    net = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True
    )
    data = [(torch.rand(3, SIZE, SIZE), torch.randint(CLASSES, (SIZE, SIZE))) for _ in range(64)]

    def loss_of(model, images, targets):
        outputs = model(images)
        out, aux = (nn.functional.cross_entropy(outputs[name], targets, ignore_index=255) for name in ("out", "aux"))
        return out + 0.5 * aux

    return net, data, None, loss_of


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net, data, collate, loss_of = {"detection": detection, "segmentation": segmentation}[sys.argv[2]]()
    model = nn.parallel.DistributedDataParallel(net)
    chosen = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(chosen, lr=0.01, momentum=0.9, weight_decay=1e-4)
    steps, losses = int(sys.argv[1]), []
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=steps, power=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate, drop_last=True)
    torch.manual_seed(dist.get_rank())
    model.train()
    for epoch in range(-(-steps // len(loader))):
        sampler.set_epoch(epoch)
        for images, targets in list(loader)[: steps - len(losses)]:
            loss = loss_of(model, images, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    end(losses, net)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
