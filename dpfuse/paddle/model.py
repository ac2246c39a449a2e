"""`paddle.Model`: train, evaluate and predict with one object, on one process or on the ranks of a job."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dpfuse import get_rank
from dpfuse.paddle import checkpoint
from dpfuse.paddle.batch_model import BatchModel
from dpfuse.paddle.batches import Batches, Dealing
from dpfuse.paddle.callback import Callback, CallbackList
from dpfuse.paddle.callbacks import EarlyStopping, ModelCheckpoint, ProgBarLogger
from dpfuse.paddle.gathered import agree, any_rank
from dpfuse.paddle.loops import Loops
from dpfuse.paddle.meters import as_list
from dpfuse.paddle.mode import network_mode
from dpfuse.paddle.static.input_spec import InputSpec
from dpfuse.paddle.summary import summary

__all__ = ["Model"]


class Model(BatchModel):
    """A network with what it needs to be trained, evaluated and used. A script for one card runs under launch as it is.

    Where the environment announces several ranks, the constructor joins the job and wraps the network in a
    DataParallel with default settings, so that every rank has rank 0's parameters and gradients are averaged. A network
    on the CPU is moved to the (rank's) current GPU if there is one; an optimizer of its parameters stays valid. Every
    rank must build it.

    Args:
        network: the bare module.
        inputs: InputSpecs or names of the network's inputs, one or a list, or a dict of specs by name. They decide
            which items of a batch are inputs, and are needed for `save(training=False)` and `summary()`.
        labels: the same for the loss's labels. Without `inputs` and `labels` the last item of a batch is the label.

    Raises:
        TypeError, ValueError: an argument that cannot be used, or half a job in the environment.
        DPFuseError: the ranks' networks differ.

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

        Another `fit` goes on where the last one, or the one that `load` has restored, ended: a dataset is shuffled as
        in one `fit` of all the epochs.

        Losses and metrics in the logs of training are those of this rank's batches; those of evaluation are of all.

        Args:
            train_data: a dataset, dealt out to the ranks by DistributedBatchSampler; or a DataLoader or another
                iterable of batches, used as it is. It must give all ranks equally many batches. torch's
                DistributedSampler in it has the order of its own epoch first, and then those that follow.
            eval_data: the same for evaluation after epochs.
            batch_size: samples per batch and rank; a pair for training and evaluation. This, `drop_last`, `shuffle`
                (of the training data) and `num_workers` count for datasets only.
            epochs: how often to go through the data.
            eval_freq: epochs from one evaluation to the next, the first after the first epoch.
            log_freq: steps from one line to the next.
            save_dir: folder for what rank 0 saves after epochs (named by their number) and at the end ("final").
            save_freq: epochs from one saving to the next.
            verbose: of rank 0: 0 silent, 1 a progress bar (of rich, on a terminal), 2 lines.
            callbacks: one or a list of `callbacks.Callback`.
            accumulate_grad_batches: batches whose gradients are added up for one step of the optimizer; all but the
                last communicate nothing. An epoch's incomplete rest makes a step too.
            num_iters: batches after which to end; it overrides `epochs` where the number of batches is known.

        Raises:
            TypeError, ValueError: an argument that cannot be used; data without batches.
            DPFuseError: no optimizer or loss; the ranks' arguments or numbers of batches differ (on every rank).
        """
        engine = self._engine
        if train_data is None:
            raise ValueError("train_data must be given: a dataset, a DataLoader or an iterable of batches")
        sizes: list[Any] = list(batch_size) if isinstance(batch_size, (list, tuple)) else [batch_size, batch_size]
        if len(sizes) != 2:
            raise ValueError(f"batch_size: got {batch_size!r}, expected a number, or two: (training, evaluation)")
        counts = {"epochs": epochs, "eval_freq": eval_freq, "accumulate_grad_batches": accumulate_grad_batches}
        counts |= {} if num_iters is None else {"num_iters": num_iters}
        for name, value in counts.items():
            _check_count(name, value)
        dealt = {"shuffle": shuffle, "drop_last": drop_last, "epoch": engine.epochs}
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
            raise ValueError("EarlyStopping watches the evaluation, but there is no eval_data; pass it to fit")
        facts = [f"{name} = {value}" for name, value in counts.items()]
        facts += [train.facts, f"len(train_data) = {train.steps}"] + ([] if evaluation is None else [evaluation.facts])
        agree("\n".join(facts), "the arguments of fit", "Give every rank the same, and equally many batches.")
        train.warn_of_dealing(training=True)
        engine.check_ready()
        self.stop_training = False
        left = num_iters
        try:
            engine.drop_gradients()
            with network_mode(self.network, training=True), self._loops(run) as loops:
                run.call("on_train_begin")
                for epoch in range(epochs):
                    run.call("on_epoch_begin", epoch)
                    # Since the last epoch, layers may have been replaced, frozen or unfrozen.
                    engine.wrap()
                    self.mode = "train"
                    logs = loops.train(train, accumulate_grad_batches, left)
                    engine.epochs += 1
                    run.call("on_epoch_end", epoch, logs)
                    if evaluation is not None and epoch % eval_freq == 0:
                        self.mode = "eval"
                        loops.evaluate(evaluation, None)
                    left = None if left is None else left - logs["step"] - 1
                    # A callback may have judged by figures of its rank alone.
                    self.stop_training = any_rank(self.stop_training, "the end of an epoch of fit")
                    if self.stop_training or left == 0:
                        break
                run.call("on_train_end", logs)
            # When a rank returns, rank 0 has written what the others may want to read.
            any_rank(False, "the end of fit")
        finally:
            engine.drop_gradients()
            run.call("close")

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
        """Measure loss and metrics; the same numbers on every rank and on one process, each sample counted once.

        A dataset is dealt out to the ranks, and outputs and labels are gathered, as for a DataLoader with a
        DistributedBatchSampler or torch's DistributedSampler. With a plain DataLoader every rank goes through its data
        alone. Every rank must call it; buffers (running statistics) are rank 0's. Only of a loader whose order cannot
        be known each rank's results are those of its own batches and buffers.

        In a callback of a running loop the metrics are copies, and those of the loop are left alone.

        Args:
            eval_data: a dataset, a DataLoader or an iterable of batches.
            batch_size: samples per batch and rank, for a dataset.
            log_freq, verbose, num_workers, callbacks: as for `fit`.
            num_iters: batches of each rank after which to end.

        Returns:
            {"loss": [mean over all samples of what the loss gave for their batch], metric: value, …}.

        Raises:
            TypeError, ValueError: an argument that cannot be used; data without batches.
            DPFuseError: the ranks' data or outputs differ in shape or number (on every rank).
        """
        if num_iters is not None:
            _check_count("num_iters", num_iters)
        batches = self._batches(eval_data, "eval_data", batch_size, num_workers)
        run = self._start("evaluate", batches, callbacks, ProgBarLogger(log_freq, verbose), f"num_iters = {num_iters}")
        self.mode = "eval"
        try:
            with self._loops(run) as loops:
                logs = loops.evaluate(batches, num_iters)
        finally:
            run.call("close")
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
        """The network's outputs for all samples, on every rank, in the order of the dataset.

        Args:
            test_data: as for `evaluate`; labels in it are dropped.
            batch_size: samples per batch and rank, for a dataset.
            stack_outputs: True joins the batches, which must have one shape but for their numbers of samples.
            num_workers, verbose, callbacks: as for `fit`.

        Returns:
            For every output of the network a list of arrays, one per batch; or one array.

        Raises:
            as `evaluate`.
        """
        batches = self._batches(test_data, "test_data", batch_size, num_workers)
        run = self._start("predict", batches, callbacks, ProgBarLogger(10, verbose))
        self.mode = "test"
        try:
            with self._loops(run) as loops:
                found = loops.predict(batches)
        finally:
            run.call("close")
        return [_joined(arrays, index) for index, arrays in enumerate(found)] if stack_outputs else found

    def save(self, path: str | os.PathLike[str], training: bool = True) -> None:
        """Write the model to files, by rank 0; the other ranks return at once and need not call it.

        A rank that reads them must know that rank 0 is done: after `fit` it is, else wait with a barrier.

        Args:
            path: folder/name, where name begins the files' names.
            training: True writes name.pdparams (the parameters), name.pdopt (the optimizer's state, and the number of
                epochs) and, with a loss scale, name.pdscaler. False writes name.pt2, the forward in evaluation mode,
                for `torch.export.load`.

        Raises:
            DPFuseError: an export without InputSpecs of the inputs.
        """
        prefix = checkpoint.prefix_of(path)
        if get_rank() != 0:
            return
        if training:
            checkpoint.store(self._engine, prefix)
            return
        with network_mode(self.network, training=False):
            checkpoint.export(self.network, self._split.inputs, self._engine.device, prefix)

    def load(self, path: str | os.PathLike[str], skip_mismatch: bool = False, reset_optimizer: bool = False) -> None:
        """Read what `save` has written; every rank must call it.

        Args:
            path: as for `save`.
            skip_mismatch: True warns of parameters that are missing or of another shape, instead of raising, and
                resets the optimizer.
            reset_optimizer: True makes the optimizer forget its state instead of loading it, and training begin anew.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the parameters or the optimizer's state do not fit, or a file is broken; nothing is loaded.
        """
        checkpoint.restore(self._engine, checkpoint.prefix_of(path), skip_mismatch, reset_optimizer)

    def summary(self, input_size: Any = None, dtype: Any = None) -> dict[str, int]:
        """Print the network's layers, on rank 0; see `dpfuse.paddle.summary`.

        Args:
            input_size: shapes of the inputs; None takes Model's `inputs`.
            dtype: of the inputs.

        Returns:
            {"total_params": …, "trainable_params": …}.
        """
        specs = self._split.inputs
        if input_size is None and (not specs or not all(isinstance(spec, InputSpec) for spec in specs)):
            raise ValueError("summary needs input_size, such as (1, 784), or a Model with InputSpecs of its inputs")
        return summary(self.network, list(specs) if input_size is None else input_size, dtype)

    def _batches(self, data: Any, name: str, batch_size: int, num_workers: int, **options: Any) -> Batches:
        on_gpu = self._engine.device.type == "cuda"
        return Batches(data, name, batch_size, num_workers=num_workers, pin_memory=on_gpu, **options)

    def _start(
        self, call: str, batches: Batches, callbacks: Any, logger: ProgBarLogger, facts: str = ""
    ) -> CallbackList:
        """What evaluation and prediction begin with; the ranks only meet where all must have the same results."""
        params = {"batch_size": batches.batch_size, "steps": batches.steps, "verbose": logger.verbose}
        run = self._callbacks(as_list(callbacks), [logger], **params)
        if batches.dealing is not Dealing.UNKNOWN:
            remedy = "Call it on every rank with the same arguments."
            agree(f"{batches.facts}\n{facts}", f"the arguments of {call}", remedy)
            self._engine.wrap()
        batches.warn_of_dealing()
        return run

    def _callbacks(self, own: list[Any], usual: Sequence[Callback], **params: Any) -> CallbackList:
        """The user's callbacks and, of the usual ones, those of which there is none among them; the logger first."""
        missing = [callback for callback in usual if not any(isinstance(other, type(callback)) for other in own)]
        loggers = [callback for callback in missing if isinstance(callback, ProgBarLogger)]
        rest = [callback for callback in missing if callback not in loggers]
        metrics = ["loss"] * (self._engine.loss is not None) + self._meters.names
        return CallbackList([*loggers, *own, *rest], self, {"metrics": metrics, **params})

    @contextmanager
    def _loops(self, callbacks: CallbackList) -> Iterator[Loops]:
        """Loops with the metrics, or with copies of them inside of other loops."""
        meters, outer = self._meters, self._measuring
        self._measuring = True
        try:
            yield Loops(self._engine, self._split, copy.deepcopy(meters) if outer else meters, callbacks)
        finally:
            self._measuring = outer


def _joined(arrays: Sequence[Any], index: int) -> Any:
    try:
        return np.concatenate(arrays)
    except ValueError as error:
        shapes = ", ".join(dict.fromkeys(str(array.shape) for array in arrays))
        raise ValueError(
            f"stack_outputs=True cannot join output {index} of the network, whose batches have the shapes {shapes}; "
            "expected one shape with the samples in dimension 0. Pass stack_outputs=False for a list of batches."
        ) from error


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
