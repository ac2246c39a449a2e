"""`paddle.Model`: train, evaluate and predict with one object, on one process or on the ranks of a job."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dpfuse import get_rank
from dpfuse.arguments import flag, integer
from dpfuse.paddle import model_files
from dpfuse.paddle.batch_model import BatchModel
from dpfuse.paddle.batches import Batches, Distribution
from dpfuse.paddle.callback_base import Callback, CallbackList
from dpfuse.paddle.callbacks import EarlyStopping, LRScheduler, ModelCheckpoint, ProgBarLogger
from dpfuse.paddle.collectives import agree, any_rank
from dpfuse.paddle.loops import Loops
from dpfuse.paddle.meters import as_list
from dpfuse.paddle.mode import network_mode
from dpfuse.paddle.static.input_spec import InputSpec
from dpfuse.paddle.summary import summary

__all__ = ["Model"]


class Model(BatchModel):
    """A network with everything to train, evaluate and use it. A script for one device runs under launch unchanged.

    If the environment announces several ranks, the constructor joins the job and wraps the network in a DataParallel
    with default settings. So every rank has rank 0's parameters, and gradients are averaged. A network on the CPU is
    moved to the rank's current GPU if there is one; an optimizer of its parameters stays valid. Every rank must build
    the Model.

    Args:
        network: the bare module.
        inputs: InputSpecs or names of the network's inputs, one or a list, or a dict of specs by name. They decide
            which items of a batch are inputs, and are needed for `save(training=False)` and `summary()`.
        labels: the same for the loss's labels. Without `inputs` and `labels` the last item of a batch is the label.

    Raises:
        TypeError, ValueError: An argument cannot be used, or the job's environment is incomplete.
        DPFuseError: The ranks' networks differ.

    Example:
        >>> import torch, dpfuse.paddle as paddle
        >>> data = torch.utils.data.TensorDataset(torch.eye(8), torch.arange(8) % 2)
        >>> model = paddle.Model(torch.nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> model.prepare(optimizer, torch.nn.CrossEntropyLoss(), paddle.metric.Accuracy())
        >>> model.fit(data, batch_size=4, epochs=10, verbose=0)
        >>> model.evaluate(data, batch_size=4, verbose=0)["acc"]
        1.0
        >>> len(model.predict(data, batch_size=4, verbose=0)[0])
        2

    Source: `paddle.Model`.
    """

    def fit(
        self,
        train_data: Any = None,
        eval_data: Any = None,
        batch_size: int | Sequence[int] = 1,
        epochs: int = 1,
        eval_freq: int = 1,
        log_freq: int = 10,
        save_dir: str | os.PathLike[str] | None = None,
        save_freq: int = 1,
        verbose: int = 2,
        drop_last: bool = False,
        shuffle: bool = True,
        num_workers: int = 0,
        callbacks: Any = None,
        accumulate_grad_batches: int = 1,
        num_iters: int | None = None,
    ) -> None:
        """Train. Every rank must call it, with the same arguments.

        Another `fit` continues where the last one ended, or the one that `load` has restored. So a dataset is shuffled
        as in one `fit` of all epochs.

        In training, the logs have losses and metrics of this rank's batches. In evaluation they are over all samples.

        Args:
            train_data: a dataset, which DistributedBatchSampler distributes to the ranks; or a DataLoader or another
                iterable of batches, used as it is. It must give all ranks the same number of batches. If it has torch's
                DistributedSampler, its first order is that of the sampler's epoch, and then its epoch is increased.
            eval_data: the same for evaluation after epochs.
            batch_size: samples per batch and rank; a pair for training and evaluation. This, `drop_last`, `shuffle`
                (of the training data) and `num_workers` apply only to datasets.
            epochs: number of passes over the data.
            eval_freq: epochs from one evaluation to the next; the first follows the first epoch.
            log_freq: steps from one line to the next.
            save_dir: folder for rank 0's checkpoints after epochs (named by number) and at the end ("final").
            save_freq: epochs from one checkpoint to the next.
            verbose: output of rank 0: 0 none, 1 a progress bar (of rich, on a terminal), 2 lines.
            callbacks: one or a list of `callbacks.Callback`.
            accumulate_grad_batches: the gradients of this many batches are added up for one optimizer step. Only the
                last of these batches communicates. The end of an epoch makes a step, too.
            num_iters: number of batches to train on. It overrides `epochs` if the number of batches is known.

        Raises:
            TypeError, ValueError: An argument cannot be used, or there are no batches.
            DPFuseError: There is no optimizer or loss, or the ranks' arguments or numbers of batches differ. Every rank
                raises.
        """
        stepper = self._stepper
        if train_data is None:
            raise ValueError("train_data must be given: a dataset, a DataLoader or an iterable of batches")
        sizes: list[Any] = list(batch_size) if isinstance(batch_size, (list, tuple)) else [batch_size, batch_size]
        if len(sizes) != 2:
            raise ValueError(f"batch_size: got {batch_size!r}, expected a number, or two: (training, evaluation)")
        counts = {"epochs": epochs, "eval_freq": eval_freq, "accumulate_grad_batches": accumulate_grad_batches}
        counts |= {} if num_iters is None else {"num_iters": num_iters}
        for name, value in counts.items():
            integer(name, value, 1)
        dealt = {"shuffle": shuffle, "drop_last": drop_last, "epoch": stepper.epochs}
        train = self._batches(train_data, "train_data", sizes[0], num_workers, **dealt)
        evaluation = None if eval_data is None else self._batches(eval_data, "eval_data", sizes[1], num_workers)
        steps = train.steps
        if num_iters is not None and steps:
            epochs, steps = -(-num_iters // steps), min(num_iters, steps)
        own = as_list(callbacks)
        usual = [ProgBarLogger(log_freq, verbose), ModelCheckpoint(save_freq, save_dir)]
        params = {"batch_size": sizes[0], "epochs": epochs, "steps": steps, "verbose": verbose, "save_dir": save_dir}
        run = self._callbacks(own, usual, **params)
        if evaluation is None and any(isinstance(callback, EarlyStopping) for callback in own):
            raise ValueError("EarlyStopping needs an evaluation, but there is no eval_data; pass it to fit")
        facts = [f"{name} = {value}" for name, value in counts.items()]
        facts += [train.facts, f"len(train_data) = {train.steps}"] + ([] if evaluation is None else [evaluation.facts])
        agree(
            "\n".join(facts),
            "the call of fit",
            "Give every rank the same arguments and the same number of batches.",
        )
        train.warn_of_distribution(training=True)
        if evaluation is not None:
            evaluation.warn_of_distribution()
        stepper.check_ready()
        self.stop_training = False
        left = num_iters
        stepper.drop_gradients()
        stepper.schedules.use([callback.scheduler for callback in own if isinstance(callback, LRScheduler)])
        try:
            with network_mode(self.network, training=True), self._loops(run) as loops:
                run.call("on_train_begin")
                for epoch in range(epochs):
                    run.call("on_epoch_begin", epoch)
                    # Layers may have been replaced, frozen or unfrozen since the last epoch.
                    stepper.wrap()
                    self.mode = "train"
                    logs = loops.train(train, accumulate_grad_batches, left)
                    stepper.epochs += 1
                    run.call("on_epoch_end", epoch, logs)
                    if evaluation is not None and epoch % eval_freq == 0:
                        self.mode = "eval"
                        loops.evaluate(evaluation, None)
                    left = None if left is None else left - logs["step"] - 1
                    # A callback may have decided by values of its own rank only.
                    self.stop_training = any_rank(self.stop_training, "the end of an epoch of fit")
                    if self.stop_training or left == 0:
                        break
                run.call("on_train_end", logs)
            # When a rank returns, rank 0 has written the files that other ranks may read.
            any_rank(False, "the end of fit")
        finally:
            stepper.drop_gradients()

    def evaluate(
        self,
        eval_data: Any,
        batch_size: int = 1,
        log_freq: int = 10,
        verbose: int = 2,
        num_workers: int = 0,
        callbacks: Any = None,
        num_iters: int | None = None,
    ) -> dict[str, Any]:
        """Compute loss and metrics. Every rank must call it.

        Every rank gets the result of a single process, with each sample counted once and rank 0's buffers (running
        statistics). A dataset is distributed to the ranks, and outputs and labels are gathered. The same applies to a
        DataLoader with a DistributedBatchSampler or torch's DistributedSampler. With a plain DataLoader every rank
        evaluates all data. If the order of a loader is unknown, each rank's results are those of its own batches and
        buffers.

        A callback of a running loop may call it: it then uses copies of the metrics.

        Args:
            eval_data: a dataset, a DataLoader or an iterable of batches.
            batch_size: samples per batch and rank, for a dataset.
            log_freq, verbose, num_workers, callbacks: as for `fit`.
            num_iters: number of batches of each rank to evaluate.

        Returns:
            {"loss": [mean over all samples of the loss of their batch], metric: value, …}.

        Raises:
            TypeError, ValueError: An argument cannot be used, or there are no batches.
            DPFuseError: The ranks' data or outputs differ in shape or number. Every rank raises.
        """
        if num_iters is not None:
            integer("num_iters", num_iters, 1)
        batches = self._batches(eval_data, "eval_data", batch_size, num_workers)
        run = self._start("evaluate", batches, callbacks, ProgBarLogger(log_freq, verbose), f"num_iters = {num_iters}")
        self.mode = "eval"
        with self._loops(run) as loops:
            logs = loops.evaluate(batches, num_iters)
        return {name: value for name, value in logs.items() if name not in ("step", "batch_size")}

    def predict(
        self,
        test_data: Any,
        batch_size: int = 1,
        num_workers: int = 0,
        stack_outputs: bool = False,
        verbose: int = 1,
        callbacks: Any = None,
    ) -> list[Any]:
        """Return the network's outputs for all samples, on every rank, in the order of the dataset.

        Args:
            test_data: as for `evaluate`; labels in it are dropped.
            batch_size: samples per batch and rank, for a dataset.
            stack_outputs: True joins the batches, which may differ only in their numbers of samples.
            num_workers, verbose, callbacks: as for `fit`.

        Returns:
            For every output of the network a list of arrays, one per batch; or one array if `stack_outputs`.

        Raises:
            As for `evaluate`.
        """
        flag("stack_outputs", stack_outputs)
        batches = self._batches(test_data, "test_data", batch_size, num_workers)
        run = self._start("predict", batches, callbacks, ProgBarLogger(10, verbose))
        self.mode = "test"
        with self._loops(run) as loops:
            found = loops.predict(batches)
        return [_joined(arrays, index) for index, arrays in enumerate(found)] if stack_outputs else found

    def save(self, path: str | os.PathLike[str], training: bool = True) -> None:
        """Write the model to files on rank 0. Other ranks return at once, and need not call it.

        Before another rank reads the files, rank 0 must be done: use a barrier, except after `fit`.

        Args:
            path: folder/name, the begin of the files' names.
            training: True writes name.pdparams (the parameters), name.pdopt (the optimizer's state, and the number of
                epochs) and, with a loss scale, name.pdscaler. False writes name.pt2, the forward in evaluation mode,
                for `torch.export.load`.

        Raises:
            DPFuseError: `training` is False, and the Model has no InputSpecs of its inputs.
        """
        prefix = model_files.prefix_of(path)
        flag("training", training)
        if get_rank() != 0:
            return
        if training:
            model_files.store(self._stepper, prefix)
            return
        with network_mode(self.network, training=False):
            model_files.export(self.network, self._split.inputs, self._stepper.device, prefix)

    def load(self, path: str | os.PathLike[str], skip_mismatch: bool = False, reset_optimizer: bool = False) -> None:
        """Read the files of `save`. Every rank must call it.

        Args:
            path: as for `save`.
            skip_mismatch: True warns instead of raising if parameters are missing or have another shape, and resets the
                optimizer.
            reset_optimizer: True resets the optimizer's state and the number of epochs instead of loading them.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: The parameters or the optimizer's state do not fit, or a file is broken. Nothing is loaded.
        """
        model_files.restore(self._stepper, model_files.prefix_of(path), skip_mismatch, reset_optimizer)

    def summary(self, input_size: Any = None, dtype: Any = None) -> dict[str, int]:
        """Print the network's layers on rank 0; see `dpfuse.paddle.summary`.

        Args:
            input_size: shapes of the inputs; None uses Model's `inputs`.
            dtype: of the inputs.

        Returns:
            {"total_params": …, "trainable_params": …}.
        """
        specs = self._split.inputs
        if input_size is None and (not specs or not all(isinstance(spec, InputSpec) for spec in specs)):
            raise ValueError("summary needs input_size, such as (1, 784), or a Model with InputSpecs of its inputs")
        return summary(self.network, list(specs) if input_size is None else input_size, dtype)

    def _batches(self, data: Any, name: str, batch_size: int, num_workers: int, **options: Any) -> Batches:
        on_gpu = self._stepper.device.type == "cuda"
        return Batches(data, name, batch_size, num_workers=num_workers, pin_memory=on_gpu, **options)

    def _start(
        self, call: str, batches: Batches, callbacks: Any, logger: ProgBarLogger, facts: str = ""
    ) -> CallbackList:
        """Prepare an evaluation or prediction. Ranks compare their arguments unless the data's order is unknown."""
        params = {"batch_size": batches.batch_size, "steps": batches.steps, "verbose": logger.verbose}
        run = self._callbacks(as_list(callbacks), [logger], **params)
        if batches.distribution is not Distribution.UNKNOWN:
            remedy = "Call it on every rank with the same arguments."
            agree(f"{batches.facts}\n{facts}", f"the call of {call}", remedy)
            self._stepper.wrap()
        batches.warn_of_distribution(stacklevel=4)
        return run

    def _callbacks(self, own: list[Any], usual: Sequence[Callback], **params: Any) -> CallbackList:
        """Return the logger, the user's callbacks, and the usual callbacks of types that the user has not passed."""
        missing = [callback for callback in usual if not any(isinstance(other, type(callback)) for other in own)]
        loggers = [callback for callback in missing if isinstance(callback, ProgBarLogger)]
        rest = [callback for callback in missing if callback not in loggers]
        metrics = ["loss"] * (self._stepper.loss is not None) + self._meters.names
        return CallbackList([*loggers, *own, *rest], self, {"metrics": metrics, **params})

    @contextmanager
    def _loops(self, callbacks: CallbackList) -> Iterator[Loops]:
        """Yield loops with the metrics, or with copies of them inside another loop. Then close the callbacks."""
        meters, outer = self._meters, self._measuring
        self._measuring = True
        try:
            yield Loops(self._stepper, self._split, copy.deepcopy(meters) if outer else meters, callbacks)
        finally:
            self._measuring = outer
            callbacks.call("close")


def _joined(arrays: Sequence[Any], index: int) -> Any:
    try:
        return np.concatenate(arrays)
    except ValueError as error:
        shapes = ", ".join(dict.fromkeys(str(array.shape) for array in arrays))
        raise ValueError(
            f"stack_outputs=True cannot join output {index} of the network, whose batches have the shapes {shapes}; "
            "expected one shape with the samples in dimension 0. Pass stack_outputs=False for a list of batches."
        ) from error
