"""Detection in the shape of DETR: objects as inputs, dicts as outputs, matching, counts over ranks, a frozen part."""

import argparse
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler
from weights import say, show

WIDTH, CLASSES = 16, 3


class NestedTensor:
    def __init__(self, tensors, mask):
        self.tensors, self.mask = tensors, mask

    def decompose(self):
        return self.tensors, self.mask


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, n):
        super().__init__()
        for name, value in (("weight", 1.1), ("bias", 0.1), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((n,), value))

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class DETR(nn.Module):
    def __init__(self, queries):
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, 2, 1), FrozenBatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, WIDTH, 3, 2, 1)]
        self.backbone = nn.Sequential(*layers)
        for name, param in self.backbone.named_parameters():
            if name.startswith("0."):
                param.requires_grad_(False)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 2, 32, dropout=0.1, batch_first=True)
        self.class_embed = nn.Linear(WIDTH, CLASSES + 1)
        self.bbox_embed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
        self.query_embed = nn.Embedding(queries, WIDTH)

    def forward(self, samples):
        images, mask = samples.decompose()
        features = self.backbone(images)
        mask = F.interpolate(mask[:, None].float(), size=features.shape[-2:])[:, 0].bool().flatten(1)
        memory = self.transformer.encoder(features.flatten(2).transpose(1, 2), src_key_padding_mask=mask)
        x, found = self.query_embed.weight.expand(len(images), -1, -1), []
        for layer in self.transformer.decoder.layers:
            x = layer(x, memory, memory_key_padding_mask=mask)
            normed = self.transformer.decoder.norm(x)
            found.append({"pred_logits": self.class_embed(normed), "pred_boxes": self.bbox_embed(normed).sigmoid()})
        return {**found[-1], "aux_outputs": found[:-1]}


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight_dict = {"loss_ce": 1.0, "loss_bbox": 5.0}
        self.register_buffer("empty_weight", torch.tensor([1.0] * CLASSES + [0.1]))

    @torch.no_grad()
    def match(self, logits, boxes, target):
        """The best assignment of queries to objects, by trying all."""
        cost = 5 * torch.cdist(boxes, target["boxes"], p=1) - logits.softmax(-1)[:, target["labels"]]
        count = len(target["labels"])
        return min(
            itertools.permutations(range(len(boxes)), count),
            key=lambda queries: cost[list(queries), range(count)].sum().item(),
        )

    def losses(self, outputs, targets, num_boxes):
        classes, distance = [], []
        for logits, boxes, target in zip(outputs["pred_logits"], outputs["pred_boxes"], targets, strict=True):
            queries = list(self.match(logits, boxes, target))
            wanted = torch.full((len(logits),), CLASSES)
            wanted[queries] = target["labels"]
            classes.append(wanted)
            distance.append((boxes[queries] - target["boxes"]).abs().sum())
        cross = F.cross_entropy(outputs["pred_logits"].transpose(1, 2), torch.stack(classes), self.empty_weight)
        return {"loss_ce": cross, "loss_bbox": sum(distance) / num_boxes}

    def forward(self, outputs, targets):
        num_boxes = torch.tensor([sum(len(target["labels"]) for target in targets)], dtype=torch.float)
        dist.all_reduce(num_boxes)
        num_boxes = torch.clamp(num_boxes / dist.get_world_size(), min=1).item()
        losses = self.losses(outputs, targets, num_boxes)
        for index, others in enumerate(outputs["aux_outputs"]):
            losses |= {f"{name}_{index}": loss for name, loss in self.losses(others, targets, num_boxes).items()}
        return losses


class Scenes(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        source = torch.Generator().manual_seed(index)
        size, count = 8 + 4 * (index % 3), 1 + index % 3
        image = torch.randn(3, size, 12, generator=source)
        boxes = torch.rand(count, 4, generator=source)
        return image, {"boxes": boxes, "labels": torch.randint(CLASSES, (count,), generator=source)}


def collate(batch):
    images, targets = zip(*batch, strict=True)
    height = max(image.shape[1] for image in images)
    tensors, mask = torch.zeros(len(images), 3, height, 12), torch.ones(len(images), height, 12, dtype=torch.bool)
    for image, padded, hidden in zip(images, tensors, mask, strict=True):
        padded[:, : image.shape[1]] = image
        hidden[: image.shape[1]] = False
    return NestedTensor(tensors, mask), targets


@torch.no_grad()
def reduce_dict(values):
    names = sorted(values)
    stacked = torch.stack([values[name] for name in names])
    dist.all_reduce(stacked)
    return dict(zip(names, stacked / dist.get_world_size(), strict=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num_queries", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42 + rank)  # each rank begins with its own weights, and the wrapper sends rank 0's
    model, criterion = DETR(args.num_queries), Criterion()
    model = nn.parallel.DistributedDataParallel(model)
    model_without_ddp = model.module
    named = [(name, param) for name, param in model_without_ddp.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for name, param in named if "backbone" not in name]},
        {"params": [param for name, param in named if "backbone" in name], "lr": 1e-4},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    sampler = DistributedSampler(Scenes())
    batches = BatchSampler(sampler, 3, drop_last=True)
    loader = DataLoader(Scenes(), batch_sampler=batches, collate_fn=collate)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        criterion.train()
        for samples, targets in loader:
            found = criterion(model(samples), targets)
            losses = sum(loss * criterion.weight_dict[name.removesuffix("_0")] for name, loss in found.items())
            told = reduce_dict({name: loss.detach() for name, loss in found.items()})
            optimizer.zero_grad()
            losses.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            say(f"epoch {epoch}: { {name: loss.item() for name, loss in told.items()} }")
        schedule.step()
    show(model_without_ddp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
