"""Runs one program on several devices of this process at once, and averages their gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from dpfuse import DPFuseError, reduce_replicas
from dpfuse.arguments import flag
from dpfuse.paddle.checks import instance
from dpfuse.paddle.static.device_thread import on_device
from dpfuse.paddle.static.executor import program_and_scope
from dpfuse.paddle.static.feed import Fed, given_feed, split_feed
from dpfuse.paddle.static.fetch import fetch_names, merged, unmerged
from dpfuse.paddle.static.names import GRAD
from dpfuse.paddle.static.places import cpu_places, cuda_places
from dpfuse.paddle.static.program import Program
from dpfuse.paddle.static.replica import Replica
from dpfuse.paddle.static.replica_set import ReplicaSet
from dpfuse.paddle.static.scope import Scope
from dpfuse.paddle.static.seeds import Seed, seeds_of
from dpfuse.paddle.static.strategies import BuildStrategy, ExecutionStrategy
from dpfuse.paddle.static.trainers import Trainers

__all__ = ["ParallelExecutor"]

BUCKET_SIZE = 128 << 20  # bytes, as for fused_allreduce_gradients


class ParallelExecutor:
    """Runs a program on every GPU of this process, or on CPU_NUM CPU devices, each on its share of the data.

    Each device has a replica of the program's variables. The replica of the first device lives in the scope. Replicas
    run at the same time. A training program has a `loss_name`: the gradients of all devices are averaged in fused
    buffers (`dpfuse.reduce_replicas`), and each device updates its own variables, so that parameters stay equal. The
    mean is over devices, also if their numbers of rows differ. Each device has its own buffers, such as the statistics
    of batch norm. If the user writes to a parameter between two runs, for example to load a checkpoint, all devices get
    it before the next run.

    Random operations use their device's generator. CPU devices share one generator in any order: for repeatable results
    set `ExecutionStrategy.num_threads = 1`.

    Args:
        use_cuda: True runs on the visible GPUs (those of FLAGS_selected_gpus, if it is set). False runs on as many CPU
            devices as the environment variable CPU_NUM says.
        loss_name: name of the loss, a tensor of one element; None runs forward only.
        main_program: the program to run, in its present form; None means `default_main_program()`.
        share_vars_from: an executor; this one uses its variables on all devices. Pass it to test a program that is
            being trained: without it, all devices except the first keep the present values.
        exec_strategy: how the executor runs.
        build_strategy: how gradients are averaged.
        num_trainers: number of processes that train together, each with the same number of devices. They must have
            joined a process group with the rank `trainer_id` and the size `num_trainers`. All trainers get trainer 0's
            variables, and gradients are averaged over all devices of all trainers.
        trainer_id: number of this process.
        scope: holds the variables; None means `global_scope()`, or the scope of `share_vars_from`.

    Raises:
        TypeError: An argument has another type.
        ValueError: No GPU is visible; CPU_NUM, `loss_name` or the trainers' numbers are wrong; or `share_vars_from` has
            other devices or variables.
        DPFuseError: The trainers have no process group or different programs, or a variable's name is taken in the
            scope.

    Example:
        >>> import os, numpy, torch
        >>> from dpfuse.paddle import static
        >>> os.environ["CPU_NUM"] = "2"
        >>> program = static.Program()
        >>> with static.program_guard(program):
        ...     x = static.data("x", [None, 1])
        ...     loss = torch.nn.Linear(1, 1)(x).mean()
        ...     program.minimize(loss, lambda params: torch.optim.SGD(params, lr=0.1))
        >>> exe = static.ParallelExecutor(use_cuda=False, loss_name=loss.name, main_program=program)
        >>> exe.device_count
        2
        >>> (losses,) = exe.run(feed={"x": numpy.ones((3, 1), "float32")}, fetch_list=[loss])
        >>> losses.shape  # one per device: the first had two rows, the second one
        (2,)

    Source: Paddle's `static.ParallelExecutor`, as measured on 2.6.
    """

    def __init__(
        self,
        use_cuda: bool,
        loss_name: str | None = None,
        main_program: Program | None = None,
        share_vars_from: ParallelExecutor | None = None,
        exec_strategy: ExecutionStrategy | None = None,
        build_strategy: BuildStrategy | None = None,
        num_trainers: int = 1,
        trainer_id: int = 0,
        scope: Scope | None = None,
    ) -> None:
        flag("use_cuda", use_cuda)
        exec_strategy = ExecutionStrategy() if exec_strategy is None else exec_strategy
        build_strategy = BuildStrategy() if build_strategy is None else build_strategy
        self._strategy = copy.copy(instance("exec_strategy", exec_strategy, ExecutionStrategy))
        self._build = copy.copy(instance("build_strategy", build_strategy, BuildStrategy))
        if share_vars_from is not None:
            instance("share_vars_from", share_vars_from, ParallelExecutor)
            scope = share_vars_from._set.scopes[0] if scope is None else scope
        given, scope = program_and_scope("main_program", main_program, scope)
        self._program = given.clone()
        self._loss = self._checked_loss(loss_name)
        self._trainers = Trainers(num_trainers, trainer_id)
        self._devices = cuda_places() if use_cuda else cpu_places()
        if share_vars_from is None:
            scopes = [scope, *(Scope() for _ in self._devices[1:])]
        else:
            self._check_shared(share_vars_from, scope)
            scopes = share_vars_from._set.scopes
        self._set: ReplicaSet = ReplicaSet(self._program, scopes, self._devices)
        if share_vars_from is None:
            self._trainers.share(self._set.replicas[0], self.device_count)
            self._set.distribute()
        # If the variables of its first device were changed, its other devices get them.
        self._origin: ReplicaSet = self._set if share_vars_from is None else share_vars_from._origin
        self._follows = share_vars_from is not None or loss_name is not None or self.device_count == 1
        self._warned = False
        threads = self._strategy.num_threads or self.device_count
        self._pool = ThreadPoolExecutor(min(threads, self.device_count), "dpfuse-device")
        self._known = {*self._set.replicas[0].nodes, *self._set.replicas[0].tensors}
        self._runs = 0

    @property
    def device_count(self) -> int:
        """Number of devices. Each has a replica."""
        return len(self._devices)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Each device's optimizer, for example to change all learning rates; empty without `minimize`."""
        return [replica.optimizer for replica in self._set.replicas if replica.optimizer is not None]

    def run(
        self,
        fetch_list: list[Any] | None,
        feed: Any = None,
        feed_dict: Any = None,
        return_numpy: bool = True,
        return_merged: bool = True,
    ) -> list[Any]:
        """Run the whole program once on each device, also the operations that are not fetched.

        Args:
            fetch_list: names, or variables: inputs, intermediate values, parameters, buffers, and the gradients
                `NAME@GRAD` of parameters (averaged) and of intermediate values (of each device). Parameters are fetched
                after the step.
            feed: a dictionary, which is cut along dim 0 into chunks of ceil(n / devices) rows; or a list with one
                dictionary per device, with any numbers of rows. A test program leaves devices idle if there are fewer
                chunks.
            feed_dict: the old name of `feed`.
            return_numpy: True returns arrays, False tensors.
            return_merged: True concatenates the devices' values along dim 0 (numbers become a vector with one element
                per device). False returns a list.

        Returns:
            One value, or list of values, for each of `fetch_list`.

        Raises:
            TypeError, ValueError: An argument, name, length or shape is wrong; the nearest names are suggested. Nothing
                ran.
            DPFuseError: The batch is too small for all devices of a training program, or an operation failed on a
                device or another trainer. Then no device steps.
        """
        replicas: Sequence[Replica] = ()
        training = self._loss is not None
        try:
            names = fetch_names(fetch_list, self._program, self._known, training)
            fed, seeds = self._split_feed(given_feed(feed, feed_dict))
            self._look_at_variables()
            replicas = self._set.replicas[: len(fed)]
            self._on_each(
                lambda replica: replica.run_once(fed[replica.index], names, loss=self._loss, seed=seeds[replica.index]),
                replicas,
            )
            if training:
                # The seeds include the factor, so gradients are only added up.
                bucket_size = BUCKET_SIZE if self._build.fuse_all_reduce_ops else 0
                reduce_replicas([replica.trainable for replica in replicas], scale=1.0, bucket_size=bucket_size)
        except Exception as error:
            self._give_up(replicas)
            if training:
                self._trainers.report(error)
            raise
        if training:
            try:
                self._trainers.sum_gradients(replicas)
            except DPFuseError:
                self._give_up(replicas)
                raise
        lasting = set(replicas[0].tensors)

        def fetched(name: str) -> Any:
            values = [replica.value(name) for replica in replicas]
            if return_merged:
                return merged(values, name, return_numpy)
            return [unmerged(value, name, return_numpy) for value in values]

        before, after = ([name for name in names if (name in lasting) == late] for late in (False, True))
        try:
            found = {name: fetched(name) for name in before}
        finally:
            # Step even if a fetch fails, because the other trainers step, too.
            self._on_each(Replica.update, replicas)
            self._origin.mark()
            self._runs += 1
        found |= {name: fetched(name) for name in after}
        if self._runs % self._strategy.num_iteration_per_drop_scope == 0:
            self.drop_local_exe_scopes()
        return [found[name] for name in names]

    def drop_local_exe_scopes(self) -> None:
        """Release the last run's intermediate values and gradients on all devices.

        The executor also does this after every `ExecutionStrategy.num_iteration_per_drop_scope` runs. It does not
        change fetched values.
        """
        for replica in self._set.replicas:
            replica.drop()

    def _give_up(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            replica.drop()
        if replicas:
            self._origin.mark()  # the devices' own buffers may have changed

    def _on_each(self, function: Callable[[Replica], None], replicas: Sequence[Replica]) -> None:
        """Call `function` for each replica at the same time. When all have ended, raise the first device's error."""
        call = on_device(function)
        if len(replicas) == 1:
            call(replicas[0])
            return
        futures = [self._pool.submit(call, replica) for replica in replicas]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def _split_feed(self, feed: Any) -> tuple[list[Fed], list[Seed]]:
        """Return the feed of each device in use, and the gradient of the loss there."""
        training = self._loss is not None
        seeds: list[Seed] = [1.0] * self.device_count
        if training:
            strategy = self._build.gradient_scale_strategy
            feed, seeds = seeds_of(feed, f"{self._loss}{GRAD}", strategy, self.device_count, self._trainers.count)
        kind = self._devices[0].type.upper()
        return split_feed(feed, self._program.feeds, self.device_count, kind, training), seeds

    def _look_at_variables(self) -> None:
        for scope, replica in zip(self._set.scopes, self._set.replicas, strict=True):
            scope.move(replica.tensors.values(), replica.device)  # a run on another device may have moved them
        if not self._origin.is_changed():
            return
        if self._follows:
            self._origin.distribute()
        elif not self._warned:
            self._warned = True
            warnings.warn(
                "the variables of this ParallelExecutor have changed on its first device since it was made, but not on "
                "its other devices: their results are out of date. Pass share_vars_from=the executor that trains.",
                UserWarning,
                stacklevel=3,
            )

    def _checked_loss(self, loss_name: Any) -> str | None:
        name = None if loss_name is None else self._program.computed(loss_name, "loss_name")
        objective, nodes = self._program.objective, self._program.nodes
        if objective is not None and (name is None or nodes[name] is not nodes[objective.loss]):
            raise ValueError(
                f"loss_name is {name!r}, but the program minimises {objective.loss!r}; expected "
                f"loss_name={objective.loss!r}. To test, run program.clone(for_test=True)."
            )
        return name

    def _check_shared(self, other: ParallelExecutor, scope: Scope) -> None:
        if other._devices != self._devices:
            raise ValueError(
                f"share_vars_from runs on {[str(device) for device in other._devices]}, this executor on "
                f"{[str(device) for device in self._devices]}; expected the same devices. Do not change CPU_NUM in "
                "between."
            )
        if other._program.root is not self._program.root:
            raise ValueError(
                "share_vars_from runs another program; expected a clone of this one, or the one of which it is a clone"
            )
        if scope is not other._set.scopes[0]:
            raise ValueError("scope is not the scope of share_vars_from; expected the same scope. Leave it out.")
