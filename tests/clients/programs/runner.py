"""A runner in the shape of mmengine: a registry, hooks, and a class derived from a wrapper that the user names."""

import contextlib
import pkgutil
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from weights import say, show

BASE = pkgutil.resolve_name(sys.argv[1])


class Wrapper(BASE):
    """The wrapper runs a whole training step, and the optimizer decides when gradients are averaged."""

    def train_step(self, data, optim_wrapper):
        with optim_wrapper.optim_context(self):
            data = self.module.data_preprocessor(data, True)
            losses = self._run_forward(data, mode="loss")
        parsed, log_vars = self.module.parse_losses(losses)
        optim_wrapper.update_params(parsed)
        return log_vars

    def val_step(self, data):
        return self.module.val_step(data)

    def _run_forward(self, data, mode):
        return self(**data, mode=mode)


class Preprocessor(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((6,), 0.5), persistent=False)

    def forward(self, data, training):
        inputs, samples = data
        return {"inputs": inputs - self.mean, "data_samples": samples}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.data_preprocessor = Preprocessor()
        self.backbone = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.head, self.auxiliary = nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, inputs, data_samples=None, mode="tensor"):
        features = self.backbone(inputs)
        if mode == "predict":
            return self.head(features).argmax(1)
        heads = {"decode.loss": self.head, "aux.loss": self.auxiliary}
        return {name: [nn.functional.cross_entropy(head(features), data_samples)] for name, head in heads.items()}

    def parse_losses(self, losses):
        means = {name: sum(value.mean() for value in values) for name, values in losses.items()}
        total = sum(value for name, value in means.items() if "loss" in name)
        log_vars = {}
        for name, value in [("loss", total), *means.items()]:
            value = value.detach().clone()
            dist.all_reduce(value.div_(dist.get_world_size()))
            log_vars[name] = value.item()
        return total, log_vars

    def val_step(self, data):
        data = self.data_preprocessor(data, False)
        return self(**data, mode="predict").eq(data["data_samples"]).sum()


class OptimWrapper:
    def __init__(self, optimizer, accumulative_counts, max_norm):
        self.optimizer, self.counts, self.max_norm = optimizer, accumulative_counts, max_norm
        self.inner_count, self.max_counts = 0, 0

    def initialize_count_status(self, max_counts):
        self.inner_count, self.max_counts = 0, max_counts

    def should_update(self):
        return self.inner_count % self.counts == 0 or self.inner_count == self.max_counts

    @contextlib.contextmanager
    def optim_context(self, model):
        self.inner_count += 1
        local = not self.should_update()
        with model.no_sync() if local else contextlib.nullcontext():
            yield

    def update_params(self, loss):
        (loss / self.counts).backward()
        if self.should_update():
            nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], self.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()


class EMAHook:
    def before_run(self, runner):
        self.average = torch.optim.swa_utils.AveragedModel(
            runner.model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )

    def after_train_iter(self, runner, log_vars):
        self.average.update_parameters(runner.model.module)


class LoggerHook:
    def before_run(self, runner):
        pass

    def after_train_iter(self, runner, log_vars):
        say(f"iteration {runner.iteration}: {log_vars!r}")


class Runner:
    def __init__(self, max_epochs, hooks):
        torch.manual_seed(0)
        source = torch.randn(42, 6), torch.randint(3, (42,))
        self.sampler = DistributedSampler(TensorDataset(*source))
        self.loader = DataLoader(TensorDataset(*source), batch_size=3, sampler=self.sampler)
        self.model = Wrapper(module=Model(), broadcast_buffers=False, find_unused_parameters=False)
        self.optim_wrapper = OptimWrapper(torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9), 2, 1.0)
        self.max_epochs, self.hooks, self.iteration = max_epochs, hooks, 0

    def train(self):
        self.optim_wrapper.initialize_count_status(self.max_epochs * len(self.loader))
        for hook in self.hooks:
            hook.before_run(self)
        for epoch in range(self.max_epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for batch in self.loader:
                log_vars = self.model.train_step(batch, self.optim_wrapper)
                self.iteration += 1
                for hook in self.hooks:
                    hook.after_train_iter(self, log_vars)
            self.val()

    def val(self):
        self.model.eval()
        with torch.no_grad():
            right = sum(self.model.val_step(batch) for batch in self.loader)
        say(f"validation: {right.item()}")


def main():
    dist.init_process_group("gloo")
    ema = EMAHook()
    runner = Runner(int(sys.argv[2]), [ema, LoggerHook()])
    runner.train()
    del sys.argv[1]  # the only word that differs
    show(runner.model.module, ema.average)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
