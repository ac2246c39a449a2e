"""Callbacks: which hooks are called when, with what, and what the ready-made ones do."""

from __future__ import annotations

import builtins
import io
import os
import re
import sys

import pytest
import torch
from torch import nn

from dpfuse.paddle.callbacks import Callback, EarlyStopping, LRScheduler, ModelCheckpoint, ProgBarLogger
from dpfuse.paddle.epoch_display import EpochDisplay
from dpfuse.paddle.metric import Accuracy
from tests.paddle.models import Recorder, make_data, make_model


def test_every_hook_is_called_in_paddles_order():
    recorder = Recorder()
    data = make_data(8)
    model = make_model(metrics=Accuracy())
    model.fit(data, data, batch_size=4, epochs=2, verbose=0, callbacks=recorder)
    model.predict(data, batch_size=8, verbose=0, callbacks=[recorder])
    train = [f"on_train_batch_{edge} {step}" for step in range(2) for edge in ("begin", "end")]
    evaluation = ["on_eval_begin", *(line.replace("train", "eval") for line in train), "on_eval_end"]
    expected = ["on_train_begin"]
    for epoch in range(2):
        expected += [f"on_epoch_begin {epoch}", *train, f"on_epoch_end {epoch}", *evaluation]
    expected += ["on_train_end", "on_predict_begin"]
    expected += ["on_predict_batch_begin 0", "on_predict_batch_end 0", "on_predict_end"]
    numbered = [" ".join([name, *(str(arg) for arg in args if isinstance(arg, int))]) for name, *args in recorder.calls]
    assert numbered == expected
    assert recorder.model is model


def test_logs_and_params_hold_what_callbacks_need():
    recorder = Recorder()
    data = make_data(10)
    model = make_model(metrics=Accuracy())
    model.fit(data, data, batch_size=4, verbose=0, callbacks=recorder)
    assert recorder.params == {
        "batch_size": 4, "epochs": 1, "steps": 3, "verbose": 0, "metrics": ["loss", "acc"], "save_dir": None,
    }  # fmt: skip
    last = recorder.logs("on_train_batch_end")[-1]
    assert set(last) == {"loss", "acc", "step", "batch_size"}
    assert (last["step"], last["batch_size"]) == (2, 2)
    assert recorder.logs("on_epoch_end") == recorder.logs("on_train_end") == [last]
    assert recorder.logs("on_eval_begin") == [{"steps": 3, "metrics": ["loss", "acc"]}]
    (result,) = recorder.logs("on_eval_end")
    assert {"loss": result["loss"], "acc": result["acc"]} == model.evaluate(data, 4, verbose=0)


def test_the_bases_hooks_do_nothing():
    base = Callback()
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    assert len(hooks) == 14
    assert all(getattr(base, hook)(*([0] if "batch" in hook or "epoch" in hook else [])) is None for hook in hooks)


def test_checkpoints_are_named_by_epoch(tmp_path, capsys):
    data = make_data(8)
    model = make_model()
    model.fit(data, batch_size=4, epochs=4, save_dir=tmp_path / "new" / "folder", save_freq=3, verbose=0)
    names = {"0", "3", "final"}
    assert {name.rpartition(".")[0] for name in os.listdir(tmp_path / "new" / "folder")} == names
    assert capsys.readouterr().out == ""
    other = make_model()
    other.load(tmp_path / "new" / "folder" / "final")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_checkpoint_of_the_users_replaces_the_usual_one(tmp_path, capsys):
    own = ModelCheckpoint(save_freq=2, save_dir=tmp_path / "own")
    make_model().fit(make_data(8), batch_size=8, epochs=2, save_dir=tmp_path / "usual", callbacks=own)
    assert sorted(os.listdir(tmp_path / "own")) == ["0.pdopt", "0.pdparams", "final.pdopt", "final.pdparams"]
    assert not (tmp_path / "usual").exists()
    assert f"saving {tmp_path / 'own' / 'final'}" in capsys.readouterr().out


def test_a_checkpoint_of_the_users_without_a_folder_takes_fits(tmp_path):
    own = ModelCheckpoint(save_freq=2)
    for name in ("first", "second"):
        make_model().fit(make_data(8), batch_size=8, epochs=2, save_dir=tmp_path / name, verbose=0, callbacks=own)
        assert {path.stem for path in (tmp_path / name).iterdir()} == {"0", "final"}
    make_model().fit(make_data(8), batch_size=8, verbose=0, callbacks=own)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("options", [{}, {"by_step": False, "by_epoch": True}])
def test_the_learning_rate_follows_the_optimizers_steps_or_the_epochs(options):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.prepare(optimizer, nn.CrossEntropyLoss())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    # Five batches in windows of two are three steps.
    epochs = 1 if not options else 3
    model.fit(
        make_data(20), batch_size=4, epochs=epochs, verbose=0, accumulate_grad_batches=2,
        callbacks=LRScheduler(scheduler, **options),
    )  # fmt: skip
    assert scheduler.get_last_lr() == [0.5**3]


def test_the_learning_rate_follows_the_last_step_of_a_loader_without_length():
    data = make_data(10)
    batches = [data[i : i + 2] for i in range(0, 10, 2)]
    model = make_model()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(model._stepper.optimizer, 0.5)
    model.fit(iter(batches), verbose=0, accumulate_grad_batches=2, callbacks=LRScheduler(scheduler))
    assert scheduler.last_epoch == 3


def test_bad_schedulers_are_refused():
    optimizer = make_model()._stepper.optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for options in ({"by_epoch": True}, {"by_step": False}):
        with pytest.raises(ValueError, match="expected exactly one"):
            LRScheduler(scheduler, **options)
    for wrong in (None, True, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)):
        with pytest.raises(TypeError, match="scheduler must be"):
            LRScheduler(wrong)


class FakeModel:
    stop_training = False

    def __init__(self):
        self.saved = []

    def save(self, path):
        self.saved.append(path)


def stopped_after(values, monitor="loss", save_dir=None, **options):
    stopper = EarlyStopping(monitor, verbose=0, **options)
    model = FakeModel()
    stopper.set_model(model)
    stopper.set_params({"epochs": 9, "save_dir": save_dir})
    stopper.on_train_begin()
    for count, value in enumerate(values, start=1):
        stopper.on_eval_end({monitor: value})
        if model.stop_training:
            return count, model.saved
    return None, model.saved


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([3, 2, 1], {}, None),
        ([3, 2, 2, 1], {}, 3),  # patience 0: the first evaluation that is no better
        ([3, 2, 2, 1], {"patience": 1}, 3),
        ([3, 2, 2, 1, 1, 1], {"patience": 2}, 6),
        ([3, 2, 2, 1, 1, 1], {"patience": 3}, None),
        ([3, 2.9, 2.8], {"min_delta": 0.5}, 2),
        ([3, 2.4, 1.8], {"min_delta": 0.5}, None),
        ([3, 2.4, 1.8], {"min_delta": -0.5}, None),
        ([3, 2], {"baseline": 2.5}, 1),
        ([2, 1], {"baseline": 2.5}, None),
        ([1, 2, 2], {"mode": "max"}, 3),
        ([1, 2, 2], {"monitor": "acc_top1"}, 3),
        ([1, 2, 3], {"monitor": "acc", "mode": "min"}, 2),
        ([[3.0], [2.0], [2.0]], {}, 3),
        ([3, float("nan")], {}, 2),
    ],
)
def test_early_stopping_ends_when_nothing_gets_better(values, options, expected):
    assert stopped_after(values, **options)[0] == expected


@pytest.mark.parametrize(("options", "count"), [({}, 2), ({"save_best_model": False}, 0)])
def test_early_stopping_saves_the_best_model(options, count):
    path = os.path.join("folder", "best_model")
    assert stopped_after([3, 2, 4], save_dir="folder", **options)[1] == [path] * count
    assert stopped_after([3, 2, 4], **options)[1] == []


def test_early_stopping_says_so_and_begins_anew(capsys):
    data = make_data(8)
    model = make_model()
    model._stepper.optimizer.param_groups[0]["lr"] = 0.0
    stopper = EarlyStopping()
    for _ in range(2):
        model.fit(data, data, batch_size=4, epochs=5, verbose=0, callbacks=stopper)
        assert re.fullmatch(r"early stopping: loss is \S+, the best was \S+\n", capsys.readouterr().out)


def test_early_stopping_refuses_what_it_cannot_watch():
    data = make_data(8)
    with pytest.raises(ValueError, match="expected 'auto'"):
        EarlyStopping(mode="least")
    with pytest.raises(ValueError, match="Did you mean 'loss'"):
        make_model().fit(data, data, verbose=0, callbacks=EarlyStopping("los"))
    with pytest.raises(ValueError, match="no eval_data"):
        make_model().fit(data, verbose=0, callbacks=EarlyStopping())
    with pytest.raises(ValueError, match="pass it to fit"):
        make_model().evaluate(data, verbose=0, callbacks=EarlyStopping())


def test_lines_are_printed_every_log_freq_and_at_the_end(capsys):
    data = make_data(20)
    make_model(metrics=Accuracy()).fit(data, batch_size=4, log_freq=2, epochs=2)
    line = r"step {}/5 - loss: \d+\.\d{{4}} - acc: \d\.\d{{4}} - \d+ms/step\n"
    epoch = "".join(line.format(step) for step in (2, 4, 5))
    assert re.fullmatch(f"Epoch 1/2\n{epoch}Epoch 2/2\n{epoch}", capsys.readouterr().out)


@pytest.mark.parametrize(("log_freq", "expected"), [(2, ["step 2", "step 3"]), (3, ["step 3"]), (9, ["step 3"])])
def test_a_loader_without_length_has_lines_too(log_freq, expected, capsys):
    data = make_data(6)
    make_model().fit((data[i : i + 2] for i in (0, 2, 4)), log_freq=log_freq)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" - ")[0] for line in lines] == ["Epoch 1/1", *expected]


def test_silence(capsys):
    data = make_data(8)
    model = make_model()
    model.fit(data, data, verbose=0)
    model.evaluate(data, verbose=0)
    model.predict(data, verbose=0)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    make_model().fit(make_data(20), batch_size=4, verbose=1)
    assert "5/5" in sys.stdout.getvalue()
    assert "━" in sys.stdout.getvalue()
    assert "ms/step" not in sys.stdout.getvalue()


def test_a_bar_is_taken_away_when_training_breaks(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())

    class Break(Callback):
        def on_train_batch_end(self, step, logs=None):
            raise RuntimeError("broken")

    logger = ProgBarLogger(verbose=1)
    with pytest.raises(RuntimeError, match="broken"):
        make_model().fit(make_data(20), batch_size=4, callbacks=[logger, Break()])
    assert logger._display is None
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert sys.stdout.getvalue().count(hidden) == sys.stdout.getvalue().count(shown) == 1


def test_without_rich_a_terminal_gets_lines(monkeypatch):
    real = builtins.__import__

    def without_rich(name, *args, **kwargs):
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    monkeypatch.setattr(sys, "stdout", Terminal())
    make_model().fit(make_data(20), batch_size=4, verbose=1)
    assert "step 5/5" in sys.stdout.getvalue()


def test_lists_and_arrays_are_shown_by_their_numbers(capsys):
    display = EpochDisplay(1, 1, bar=False)
    display.show(1, {"loss": [0.5, 0.25], "rows": torch.arange(2).numpy(), "n": 3})
    display.finish()
    assert capsys.readouterr().out.startswith("step 1/1 - loss: 0.5000 0.2500 - rows: 0 1 - n: 3 - ")
