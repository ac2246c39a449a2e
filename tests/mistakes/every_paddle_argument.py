"""How each public function and class of `dpfuse.paddle` is called rightly, by the names of its arguments."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpfuse import paddle
from dpfuse.paddle import static
from dpfuse.paddle.distributed import fleet
from dpfuse.paddle.distributed.fleet import session
from dpfuse.paddle.distributed.fleet.utils import hybrid_parallel_util
from tests.mistakes.right_call import Call, of, undone, values

__all__ = ["PADDLE"]


def layer() -> nn.Module:
    return nn.Linear(4, 2)


def wrapped() -> Any:
    return paddle.DataParallel(layer())


def model() -> Any:
    made = paddle.Model(layer(), static.InputSpec([None, 4], "float32", "x"))
    made.prepare(sgd(made), nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    return made


def sgd(of_what: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(of_what.parameters()), lr=0.1)


def samples() -> TensorDataset:
    return TensorDataset(torch.eye(4), torch.arange(4) % 2)


def batch() -> dict[str, Any]:
    return {"inputs": torch.eye(4), "labels": torch.arange(4) % 2}


def program() -> Any:
    made = static.Program()
    with static.program_guard(made):
        loss = nn.Linear(2, 1)(static.data("x", [None, 2])).mean()
        loss.name = "loss"
    return made


def feed() -> dict[str, Any]:
    return {"x": np.ones((2, 2), "float32")}


def add_data(**arguments: Any) -> None:
    with static.program_guard(static.Program()):
        static.data(**arguments)


def load_saved(path: str, **arguments: Any) -> None:
    paddle.save({"a": torch.ones(2)}, "saved.pdparams")
    paddle.load(path, **arguments)


def load_model(path: str, **arguments: Any) -> None:
    saved = model()
    saved.save("model")
    saved.load(path, **arguments)


def in_fleet(function: Callable[..., Any], begun: bool = True) -> Callable[..., None]:
    """Call it in a session of fleet of its own, and leave the log's level as it was."""

    def call(**arguments: Any) -> None:
        log = logging.getLogger("dpfuse")
        level = log.level
        try:
            with mock.patch.object(session, "_session", None):
                if begun:
                    fleet.init(is_collective=True)
                function(**arguments)
        finally:
            log.setLevel(level)

    return call


def scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(sgd(layer()), 1)


def printed_nowhere(function: Callable[..., Any]) -> Callable[..., None]:
    def call(**arguments: Any) -> None:
        with open(os.devnull, "w") as nowhere, mock.patch("sys.stdout", nowhere):
            function(**arguments)

    return call


LOOP = {"batch_size": 2, "verbose": 0, "num_workers": 0, "callbacks": None}
COUNTS = {"epochs": 1, "eval_freq": 1, "log_freq": 10, "save_freq": 1, "accumulate_grad_batches": 1, "num_iters": None}

PADDLE: dict[str, Call] = {
    "dpfuse.paddle.DataParallel": Call(
        paddle.DataParallel,
        lambda _: {
            "layers": layer(),
            "comm_buffer_size": 25.0,
            "last_comm_buffer_size": 1.0,
            "find_unused_parameters": False,
            "group": None,
        },
    ),
    "dpfuse.paddle.DataParallel.clear_gradients": Call(of(wrapped, "clear_gradients"), values(set_to_zero=True)),
    "dpfuse.paddle.DataParallel.state_dict": Call(
        of(wrapped, "state_dict"),
        values(destination=None, include_sublayers=True, structured_name_prefix="net.", prefix="", keep_vars=False),
    ),
    "dpfuse.paddle.DataParallel.scale_loss": Call(of(wrapped, "scale_loss"), values(loss=torch.ones(())), ("loss",)),
    "dpfuse.paddle.Model": Call(paddle.Model, lambda _: {"network": layer(), "inputs": None, "labels": None}),
    "dpfuse.paddle.Model.fit": Call(
        of(model, "fit"),
        lambda folder: {
            "train_data": samples(),
            "eval_data": samples(),
            "save_dir": folder,
            "drop_last": False,
            "shuffle": True,
            **LOOP,
            **COUNTS,
        },
    ),
    "dpfuse.paddle.Model.evaluate": Call(
        of(model, "evaluate"), lambda _: {"eval_data": samples(), "log_freq": 10, "num_iters": None, **LOOP}
    ),
    "dpfuse.paddle.Model.predict": Call(
        of(model, "predict"), lambda _: {"test_data": samples(), "stack_outputs": False, **LOOP}
    ),
    "dpfuse.paddle.Model.prepare": Call(
        of(model, "prepare"),
        lambda _: {"optimizer": sgd(layer()), "loss": nn.MSELoss(), "metrics": None, "amp_configs": None},
    ),
    "dpfuse.paddle.Model.train_batch": Call(of(model, "train_batch"), lambda _: {**batch(), "update": True}),
    "dpfuse.paddle.Model.eval_batch": Call(of(model, "eval_batch"), lambda _: batch()),
    "dpfuse.paddle.Model.predict_batch": Call(of(model, "predict_batch"), lambda _: {"inputs": torch.eye(4)}),
    "dpfuse.paddle.Model.save": Call(of(model, "save"), lambda folder: {"path": folder / "model", "training": True}),
    "dpfuse.paddle.Model.load": Call(load_model, values(path="model", skip_mismatch=False, reset_optimizer=False)),
    "dpfuse.paddle.Model.summary": Call(
        printed_nowhere(of(model, "summary")), values(input_size=(1, 4), dtype="float32")
    ),
    "dpfuse.paddle.load": Call(load_saved, values(path="saved.pdparams", return_numpy=False)),
    "dpfuse.paddle.save": Call(
        paddle.save, lambda folder: {"obj": {"a": torch.ones(2)}, "path": folder / "a.pdparams", "protocol": 4}
    ),
    "dpfuse.paddle.summary": Call(
        printed_nowhere(paddle.summary),
        lambda _: {"net": layer(), "input_size": (1, 4), "dtypes": None, "input": None},
        free=("input",),  # beside input_size, whatever it is
    ),
    "dpfuse.paddle.to_torch_state_dict": Call(
        paddle.to_torch_state_dict,
        lambda _: {"state": {"weight": torch.ones(4, 2), "bias": torch.ones(2)}, "model": layer()},
    ),
    "dpfuse.paddle.callbacks.EarlyStopping": Call(
        paddle.callbacks.EarlyStopping,
        values(monitor="loss", mode="auto", patience=0, verbose=1, min_delta=0.0, baseline=None, save_best_model=True),
    ),
    "dpfuse.paddle.callbacks.LRScheduler": Call(
        paddle.callbacks.LRScheduler, lambda _: {"scheduler": scheduler(), "by_step": True, "by_epoch": False}
    ),
    "dpfuse.paddle.callbacks.ModelCheckpoint": Call(
        paddle.callbacks.ModelCheckpoint, lambda folder: {"save_freq": 1, "save_dir": folder}
    ),
    "dpfuse.paddle.callbacks.ProgBarLogger": Call(paddle.callbacks.ProgBarLogger, values(log_freq=1, verbose=2)),
    "dpfuse.paddle.distributed.fleet.PaddleCloudRoleMaker": Call(
        fleet.PaddleCloudRoleMaker, values(is_collective=True)
    ),
    "dpfuse.paddle.distributed.fleet.init": Call(
        in_fleet(fleet.init, begun=False), values(role_maker=None, is_collective=True, strategy=None, log_level="INFO")
    ),
    "dpfuse.paddle.distributed.fleet.distributed_model": Call(
        in_fleet(fleet.distributed_model), lambda _: {"model": layer()}
    ),
    "dpfuse.paddle.distributed.fleet.distributed_optimizer": Call(
        in_fleet(fleet.distributed_optimizer), lambda _: {"optimizer": sgd(layer()), "strategy": None}
    ),
    "dpfuse.paddle.distributed.fleet.worker_endpoints": Call(fleet.worker_endpoints, values(to_string=False)),
    "dpfuse.paddle.distributed.fleet.utils.hybrid_parallel_util.fused_allreduce_gradients": Call(
        hybrid_parallel_util.fused_allreduce_gradients,
        lambda _: {"parameter_list": list(layer().parameters()), "hcg": None},
    ),
    "dpfuse.paddle.distributed.fleet.utils.hybrid_parallel_util.fused_allreduce_gradients_with_group": Call(
        hybrid_parallel_util.fused_allreduce_gradients_with_group,
        lambda _: {"parameter_list": list(layer().parameters()), "group": None, "bucket_size": 1 << 20, "scale": None},
    ),
    "dpfuse.paddle.io.DistributedBatchSampler": Call(
        paddle.io.DistributedBatchSampler,
        lambda _: {
            "dataset": samples(),
            "batch_size": 2,
            "num_replicas": None,
            "rank": None,
            "shuffle": False,
            "drop_last": False,
        },
    ),
    "dpfuse.paddle.io.DistributedBatchSampler.set_epoch": Call(
        of(lambda: paddle.io.DistributedBatchSampler(samples(), 2), "set_epoch"), values(epoch=1)
    ),
    "dpfuse.paddle.metric.Accuracy": Call(paddle.metric.Accuracy, values(topk=(1,), name=None)),
    "dpfuse.paddle.metric.Accuracy.compute": Call(
        of(paddle.metric.Accuracy, "compute"), values(pred=torch.eye(4), label=torch.arange(4))
    ),
    "dpfuse.paddle.metric.Accuracy.update": Call(
        of(paddle.metric.Accuracy, "update"), values(correct=torch.ones(4, 1))
    ),
    "dpfuse.paddle.metric.accuracy": Call(
        paddle.metric.accuracy,
        lambda _: {"input": torch.eye(4), "label": torch.arange(4), "k": 1, "correct": None, "total": None},
    ),
    "dpfuse.paddle.static.CUDAPlace": Call(static.CUDAPlace, values(id=0)),
    "dpfuse.paddle.static.Executor": Call(static.Executor, values(place="cpu")),
    "dpfuse.paddle.static.Executor.run": Call(
        of(lambda: static.Executor("cpu"), "run"),
        lambda _: {
            "program": program(),
            "feed": feed(),
            "fetch_list": ["loss"],
            "scope": static.Scope(),
            "return_numpy": True,
        },
    ),
    "dpfuse.paddle.static.InputSpec": Call(static.InputSpec, values(shape=(None, 2), dtype="float32", name="x")),
    "dpfuse.paddle.static.InputSpec.batch": Call(of(lambda: static.InputSpec((2,)), "batch"), values(batch_size=3)),
    "dpfuse.paddle.static.InputSpec.from_numpy": Call(
        static.InputSpec.from_numpy, values(ndarray=np.ones(2, "float32"), name="x")
    ),
    "dpfuse.paddle.static.InputSpec.from_tensor": Call(
        static.InputSpec.from_tensor, values(tensor=torch.ones(2), name="x")
    ),
    "dpfuse.paddle.static.ParallelExecutor": Call(
        static.ParallelExecutor,
        lambda _: {
            "use_cuda": False,
            "loss_name": "loss",
            "main_program": program(),
            "share_vars_from": None,
            "exec_strategy": None,
            "build_strategy": None,
            "num_trainers": 1,
            "trainer_id": 0,
            "scope": static.Scope(),
        },
    ),
    "dpfuse.paddle.static.ParallelExecutor.run": Call(
        of(lambda: static.ParallelExecutor(False, "loss", program(), scope=static.Scope()), "run"),
        lambda _: {
            "fetch_list": ["loss"],
            "feed": feed(),
            "feed_dict": None,
            "return_numpy": True,
            "return_merged": True,
        },
        free=("feed_dict",),  # beside feed, whatever it is
    ),
    "dpfuse.paddle.static.Program.clone": Call(of(program, "clone"), values(for_test=True)),
    "dpfuse.paddle.static.Program.minimize": Call(
        of(program, "minimize"), values(loss="loss", optimizer=torch.optim.Adam)
    ),
    "dpfuse.paddle.static.Scope.find_var": Call(of(static.Scope, "find_var"), values(name="a")),
    "dpfuse.paddle.static.Scope.var": Call(of(static.Scope, "var"), values(name="a")),
    "dpfuse.paddle.static.cpu_places": Call(static.cpu_places, values(device_count=1)),
    "dpfuse.paddle.static.data": Call(add_data, values(name="x", shape=(None, 2), dtype="float32")),
    "dpfuse.paddle.static.program_guard": Call(
        undone(static.program_guard),
        lambda _: {"main_program": static.Program(), "startup_program": static.Program()},
    ),
    "dpfuse.paddle.static.scope_guard": Call(undone(static.scope_guard), lambda _: {"scope": static.Scope()}),
}
