"""timm's task for classification in a loop as timm has it: two batches per step, clipping, and two averages."""

import contextlib
import sys

import cpu_torchvision  # noqa: F401
import torch
import torch.distributed as dist
from ending import end
from timm import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask
from timm.utils import dispatch_clip_grad, distribute_bn, reduce_tensor


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = create_model("resnet10t", num_classes=10, drop_path_rate=0.1)
    task = ClassificationTask(net, criterion_kwargs={"smoothing": 0.1})
    average = task.setup_ema(decay=0.9)
    task.prepare_distributed()
    model = task.get_trainable_module()
    optimizer = create_optimizer_v2(model, opt="lamb", lr=0.005, weight_decay=0.02)
    steps, losses = int(sys.argv[1]), []
    schedule, _ = create_scheduler_v2(optimizer, num_epochs=steps, warmup_epochs=2, updates_per_epoch=1)
    torch.manual_seed(1 + dist.get_rank())
    task.train()
    for step in range(steps):
        for last in (False, True):
            with contextlib.nullcontext() if last else task.no_sync():
                loss = task(torch.randn(4, 3, 64, 64), torch.randint(10, (4,)))["loss"] / 2
                loss.backward()
        dispatch_clip_grad(task.get_clip_parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        task.update_ema(step=step)
        losses.append((loss.item(), reduce_tensor(loss.detach(), 2).item()))
        schedule.step(step + 1)
    distribute_bn(model, 2)  # rank 0's; their mean differs, as dpfuse has sent rank 0's already
    end(losses, net, average)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
