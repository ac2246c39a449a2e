"""Metrics in nested loops and under clashing names, static loss scales, and what Model cannot use."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dpfuse.paddle import Model
from dpfuse.paddle.callbacks import Callback
from dpfuse.paddle.metric import Accuracy
from dpfuse.paddle.precision import MixedPrecision
from tests.paddle.models import Recorder, make_data, make_model, make_net


class Nested(Callback):
    """Evaluates other data in the middle of another loop."""

    def __init__(self, hook):
        self.results = []
        setattr(self, hook, self.evaluate)

    def evaluate(self, step, logs=None):
        self.results.append(self.model.evaluate(make_data(40), batch_size=4, verbose=0)["acc"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_evaluation_inside_of_training_leaves_its_figures_alone(accumulate):
    logs = []
    for callbacks in ([], [Nested("on_train_batch_end")]):
        recorder = Recorder()
        model = make_model(metrics=Accuracy())
        options = {"batch_size": 4, "verbose": 0, "accumulate_grad_batches": accumulate}
        model.fit(make_data(), epochs=2, callbacks=[*callbacks, recorder], **options)
        logs.append(recorder.logs("on_epoch_end"))
    assert logs[0] == logs[1]
    assert callbacks[0].results[-1] == model.evaluate(make_data(40), batch_size=4, verbose=0)["acc"]


def test_an_evaluation_inside_of_an_evaluation_leaves_its_figures_alone():
    model = make_model(metrics=Accuracy())
    expected = model.evaluate(make_data(), 4, verbose=0)
    assert model.evaluate(make_data(), 4, verbose=0, callbacks=Nested("on_eval_batch_end")) == expected


class Values:
    """A metric of torchmetrics' kind that names its values itself."""

    def reset(self):
        pass

    def update(self, scores, labels):
        pass

    def compute(self):
        return {"loss": 99.0, "acc": 98.0, "step": 97.0, "own": 96.0}


def test_values_of_a_metric_never_take_the_place_of_others():
    found = make_model(metrics=[Values(), Accuracy(), Values()]).evaluate(make_data(), verbose=0)
    loss = make_model().evaluate(make_data(), verbose=0)["loss"]
    names = ["loss", "loss_2", "acc_2", "step_2", "own", "acc", "loss_3", "acc_3", "step_3", "own_2"]
    assert list(found) == names
    assert found["loss"] == loss
    assert [found[name] for name in names if name not in ("loss", "acc")] == [99.0, 98.0, 97.0, 96.0] * 2


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_loss_scale_changes_only_if_it_is_dynamic(dynamic):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    precision = MixedPrecision(True, scaler, dynamic)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in (1.0, 1.0, np.inf, 1.0):
        scaler.scale((factor * weight).sum()).backward()
        precision.step(optimizer)
        optimizer.zero_grad()
    # The step with infinite gradients is left out.
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.7))
    assert scaler.get_scale() == (8.0 * 2 * 2 / 2 * 2 if dynamic else 8.0)


class ScalarToo(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.weight.norm()


def test_outputs_that_cannot_be_stacked_are_named():
    model = Model(ScalarToo(5, 3))
    assert len(model.predict(make_data(), 4, verbose=0)[1]) == 6
    with pytest.raises(ValueError, match=r"output 1 .*shapes \(\);.*stack_outputs=False"):
        model.predict(make_data(), 4, stack_outputs=True, verbose=0)
    pieces = [(torch.ones(2, width),) for width in (3, 4)]
    with pytest.raises(ValueError, match=r"output 0 .*shapes \(2, 3\), \(2, 4\)"):
        Model(nn.Identity()).predict(pieces, stack_outputs=True, verbose=0)


class Labelled(Dataset):
    def __init__(self, as_dict):
        self.as_dict = as_dict

    def __len__(self):
        return 10

    def __getitem__(self, index):
        sample = {"name": f"file {index}", "x": torch.ones(5), "y": index % 3}
        return sample if self.as_dict else tuple(sample.values())


def test_text_in_samples_is_named_with_its_remedy():
    model = make_model()
    for call in (model.fit, model.evaluate, model.predict):
        with pytest.raises(TypeError, match=r"'file \d.*expected tensors.*make them dicts"):
            call(Labelled(False), batch_size=3, verbose=0)
    named = make_model(inputs=["x"], labels=["y"])
    named.fit(Labelled(True), batch_size=3, verbose=0)
    assert len(named.predict(Labelled(True), 5, verbose=0)[0]) == 2
    with pytest.raises(TypeError, match=r"a batch holds .*'file 0'"):
        make_model(inputs=["name"], labels=["y"]).evaluate(DataLoader(Labelled(True), 3), verbose=0)


def test_an_optimizer_that_needs_a_closure_is_refused():
    model = Model(make_net())
    with pytest.raises(TypeError, match="LBFGS needs a closure"):
        model.prepare(torch.optim.LBFGS(model.parameters()), nn.CrossEntropyLoss())


def test_prediction_knows_the_inputs_that_training_found():
    class Optional(nn.Linear):
        def forward(self, x, mask=None):
            return super().forward(x)

    model = make_model(Optional(5, 3))
    with pytest.raises(ValueError, match="takes 1 to 2 inputs"):
        model.predict(make_data(), 11, verbose=0)
    model.fit(make_data(), batch_size=4, verbose=0)
    assert len(model.predict(make_data(), 11, verbose=0)[0]) == 2
