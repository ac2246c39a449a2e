"""Model on one process: what it does must be what a plain torch loop does."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpfuse.paddle import Model
from dpfuse.paddle.callbacks import Callback
from dpfuse.paddle.io import DistributedBatchSampler
from dpfuse.paddle.metric import Accuracy, Metric
from tests.paddle.models import (
    Recorder,
    Stream,
    TorchMean,
    assert_same_parameters,
    make_data,
    make_model,
    make_net,
)


@pytest.mark.parametrize("accumulate", [1, 2, 3, 100])
def test_fit_equals_a_plain_loop(accumulate):
    data = make_data()
    model = make_model(make_net(dropout=0.25))
    recorder = Recorder()
    torch.manual_seed(3)
    model.fit(data, batch_size=4, epochs=3, verbose=0, accumulate_grad_batches=accumulate, callbacks=recorder)

    plain = make_net(dropout=0.25)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_sampler=DistributedBatchSampler(data, 4, shuffle=True))
    losses = []
    torch.manual_seed(3)
    for _ in range(3):
        for step, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(plain(x), y)
            loss.backward()
            losses.append(loss.item())
            if (step + 1) % accumulate == 0 or step + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    assert_same_parameters(model.network, plain)
    assert [logs["loss"] for logs in recorder.logs("on_train_batch_end")] == [[loss] for loss in losses]
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("length", [None, 99])
def test_gradients_that_a_loader_without_true_length_leaves_over_make_a_step(length):
    data = make_data(20)
    batches = [data[i : i + 4] for i in range(0, 20, 4)]

    class Liar(Stream):
        def __len__(self):
            return length

    net = make_net()
    nets = [net, copy.deepcopy(net)]
    for model_net, source in zip(nets, (batches, Stream(batches) if length is None else Liar(batches)), strict=True):
        make_model(model_net).fit(source, epochs=2, verbose=0, accumulate_grad_batches=3)
    assert_same_parameters(*nets)


def test_a_loader_may_give_the_same_memory_again():
    def batches():
        x, y = np.empty((4, 5), "float32"), np.zeros(4, "int64")
        for number in range(3):
            x.fill(number)
            yield x, y

    own, copied = make_model(), make_model()
    own.fit(batches(), verbose=0)
    copied.fit([(x.copy(), y) for x, y in batches()], verbose=0)
    assert_same_parameters(own.network, copied.network)


def test_fit_begins_without_gradients_and_leaves_none_behind():
    data = make_data()
    model, clean = make_model(), make_model()
    model.train_batch(*data[:4], update=False)
    for each in (model, clean):
        each.fit(data, batch_size=8, verbose=0)
    assert_same_parameters(model.network, clean.network)


def test_train_batch_without_update_adds_up():
    data = make_data()
    model, plain = make_model(), make_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    first = model.train_batch([data[:4][0].numpy()], data[:4][1].numpy(), update=False)
    assert not model.stepped
    model.train_batch(*data[4:8])
    assert model.stepped
    losses = [nn.functional.cross_entropy(plain(x), y) for x, y in (data[:4], data[4:8])]
    sum(losses).backward()
    optimizer.step()
    assert isinstance(first[0], np.ndarray)
    assert first[0] == losses[0].item()
    for a, b in zip(model.network.parameters(), plain.parameters(), strict=True):
        # One backward adds the two losses' gradients in another order than two.
        torch.testing.assert_close(a, b)


def test_single_batches_give_losses_metrics_and_outputs():
    data = make_data()
    x, y = data[:6]
    model = make_model(metrics=Accuracy())
    model.network.eval()
    expected = model.network(x)
    losses, metrics = model.eval_batch(x, y)
    assert losses == [nn.functional.cross_entropy(expected, y).item()]
    assert metrics == [(expected.argmax(1) == y).sum().item() / 6]
    assert np.array_equal(model.predict_batch([x])[0], expected.detach().numpy())
    assert model.mode == "test"
    losses, metrics = model.train_batch(x, y)
    assert len(losses) == len(metrics) == 1
    assert model.mode == "train"


def test_evaluate_is_the_mean_over_samples():
    data = make_data(22)
    model = make_model(metrics=Accuracy(topk=(1, 2)))
    found = model.evaluate(data, batch_size=4, verbose=0)
    model.network.eval()
    with torch.no_grad():
        scores = model.network(data.tensors[0])
    total = nn.functional.cross_entropy(scores, data.tensors[1])
    assert list(found) == ["loss", "acc_top1", "acc_top2"]
    # The mean over six batches is summed in another order.
    assert found["loss"] == [pytest.approx(total.item(), rel=1e-6)]
    hits = [(scores.topk(k).indices == data.tensors[1][:, None]).any(1).sum().item() for k in (1, 2)]
    assert [found["acc_top1"], found["acc_top2"]] == [hit / 22 for hit in hits]


@pytest.mark.parametrize("as_loader", [False, True])
def test_predict_gives_every_batch_and_drops_labels(as_loader):
    data = make_data(22)
    model = make_model()
    model.network.eval()
    with torch.no_grad():
        expected = [model.network(data.tensors[0][i : i + 4]).numpy() for i in range(0, 22, 4)]
    source = DataLoader(data, batch_size=4) if as_loader else data
    found = model.predict(source, batch_size=4, verbose=0)
    assert [array.shape for array in found[0]] == [(4, 3)] * 5 + [(2, 3)]
    assert all(np.array_equal(a, b) for a, b in zip(found[0], expected, strict=True))
    (stacked,) = model.predict(source, batch_size=4, stack_outputs=True, verbose=0)
    assert np.array_equal(stacked, np.concatenate(expected))


def test_several_inputs_outputs_labels_and_losses():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, a, b):
            return self.one(a), self.two(b)

    def loss(p, q, s, t):
        return nn.functional.mse_loss(p, s), nn.functional.mse_loss(q, t)

    torch.manual_seed(0)
    data = TensorDataset(*(torch.randn(6, n) for n in (3, 4, 2, 2)))
    net = Two()
    expected = [part.item() for part in loss(*net(*data.tensors[:2]), *data.tensors[2:])]
    model = Model(net, inputs=["a", "b"])
    model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), loss)
    assert model.evaluate(data, batch_size=6, verbose=0) == {"loss": pytest.approx(expected)}
    first, second = model.predict(data, batch_size=4, verbose=0)
    assert [a.shape for a in first] == [a.shape for a in second] == [(4, 2), (2, 2)]

    plain = copy.deepcopy(net)
    model.fit(data, batch_size=6, verbose=0, shuffle=False)
    sum(loss(*plain(*data.tensors[:2]), *data.tensors[2:])).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_parameters(net, plain)


class TorchModule(nn.Module):
    """The same protocol by a module, as torchmetrics' metrics are, with several values."""

    def __init__(self):
        super().__init__()
        self.sync_on_compute = True
        self.register_buffer("seen", torch.zeros(3))

    def reset(self):
        self.seen.zero_()

    def update(self, preds, target):
        self.seen += preds.new_tensor([1, len(preds), target.sum()])

    def compute(self):
        return {"batches": self.seen[0], "rows": self.seen[1:]}


def test_metrics_of_both_kinds_side_by_side():
    class Zeros(Metric):
        def compute(self, scores, labels):
            return scores, labels == 0

        def update(self, scores, zeros):
            assert isinstance(scores, np.ndarray)
            self.count += int(zeros.sum())

        def accumulate(self):
            return self.count

        def reset(self):
            self.count = 0

        def name(self):
            return "zeros"

    data = make_data(22)
    module = TorchModule()
    metrics = [Accuracy(), TorchMean(), Zeros(), module, Accuracy()]
    metrics[2].reset()
    model = make_model(metrics=metrics)
    assert module.sync_on_compute is False
    found = model.evaluate(data, batch_size=4, verbose=0)
    assert list(found) == ["loss", "acc", "torchmean", "zeros", "batches", "rows", "acc_2"]
    assert found["acc"] == found["acc_2"] == pytest.approx(found["torchmean"])
    assert found["zeros"] == (data.tensors[1] == 0).sum()
    assert found["batches"] == 6
    assert found["rows"].tolist() == [22, data.tensors[1].sum()]
    assert model.evaluate(data, batch_size=4, verbose=0)["zeros"] == found["zeros"]


def test_only_metrics_or_only_a_loss_or_neither():
    data = make_data()
    model = Model(make_net())
    assert model.evaluate(data, verbose=0) == {}
    model.prepare(metrics=Accuracy())
    assert list(model.evaluate(data, verbose=0)) == ["acc"]
    model.prepare(loss=nn.CrossEntropyLoss())
    assert list(model.evaluate(data, verbose=0)) == ["loss"]


@pytest.mark.parametrize(("num_iters", "epochs_run", "steps_run"), [(1, 1, 1), (6, 1, 6), (7, 2, 7), (12, 2, 12)])
def test_num_iters_counts_over_epochs(num_iters, epochs_run, steps_run):
    recorder = Recorder()
    make_model().fit(make_data(), batch_size=4, epochs=99, verbose=0, num_iters=num_iters, callbacks=recorder)
    assert len(recorder.logs("on_epoch_begin")) == epochs_run
    assert len(recorder.logs("on_train_batch_end")) == steps_run
    assert recorder.params["epochs"] == epochs_run


def test_num_iters_that_end_in_a_window_still_step():
    data = make_data()
    model, other = make_model(), make_model()
    model.fit(data, batch_size=4, verbose=0, num_iters=2, accumulate_grad_batches=3, shuffle=False)
    for i in range(2):
        other.train_batch(*data[4 * i : 4 * i + 4], update=i == 1)
    assert_same_parameters(model.network, other.network)


def test_evaluate_stops_after_num_iters():
    data = make_data()
    model = make_model()
    assert model.evaluate(data, 4, verbose=0, num_iters=2) == model.evaluate(TensorDataset(*data[:8]), 4, verbose=0)


def test_eval_freq_and_batch_size_pair():
    recorder = Recorder()
    make_model().fit(make_data(), make_data(), (4, 11), epochs=5, eval_freq=2, verbose=0, callbacks=recorder)
    order = [call[0] for call in recorder.calls if call[0] in ("on_epoch_end", "on_eval_begin")]
    assert order == ["on_epoch_end", "on_eval_begin", "on_epoch_end"] * 2 + ["on_epoch_end", "on_eval_begin"]
    assert [logs["steps"] for logs in recorder.logs("on_eval_begin")] == [2, 2, 2]


def test_modes_are_set_back_part_by_part():
    data = make_data()
    model = make_model()
    net = model.network
    net[1].eval()
    before = [module.training for module in net.modules()]
    model.fit(data, data, batch_size=4, verbose=0)
    model.predict(data, verbose=0)
    assert [module.training for module in net.modules()] == before


class Interrupt(Callback):
    def __init__(self, hook, error):
        self.hook, self.error, self.closed = hook, error, 0
        setattr(self, hook, self.strike)

    def strike(self, *args):
        raise self.error

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("hook", ["on_train_begin", "on_train_batch_end", "on_eval_batch_end", "on_epoch_end"])
def test_an_error_in_a_callback_leaves_a_clean_model(hook, error):
    data = make_data()
    model = make_model()
    model.network[0].eval()
    before = [module.training for module in model.network.modules()]
    callback = Interrupt(hook, error)
    with pytest.raises(type(error)):
        model.fit(data, data, batch_size=4, verbose=0, accumulate_grad_batches=4, callbacks=callback)
    assert [module.training for module in model.network.modules()] == before
    assert all(param.grad is None for param in model.parameters())
    assert callback.closed == 1
    model.fit(data, batch_size=4, verbose=0)


def test_stopping_lasts_for_one_fit():
    class Stop(Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    recorder = Recorder()
    model = make_model()
    model.fit(make_data(), batch_size=4, epochs=3, verbose=0, callbacks=[Stop(), recorder])
    assert len(recorder.logs("on_epoch_end")) == 1
    model.fit(make_data(), batch_size=4, epochs=3, verbose=0, callbacks=recorder)
    assert len(recorder.logs("on_epoch_end")) == 4


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.NLLLoss()])
def test_labels_may_be_a_column_as_in_paddle(loss):
    inputs, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    found = []
    for shape in ((6,), (6, 1)):
        torch.manual_seed(0)
        model = Model(nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)))
        model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), loss, Accuracy())
        found.append([model.train_batch(inputs, labels.reshape(shape)) for _ in range(2)])
        found[-1].append(model.eval_batch(inputs, labels.reshape(shape)))
    flat, column = found
    assert repr(flat) == repr(column)


def test_labels_of_another_loss_keep_their_shape():
    model = Model(nn.Linear(4, 1))
    model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
    inputs, labels = torch.randn(6, 4), torch.ones(6, 1)
    expected = (model.network(inputs) - labels).square().mean().item()
    assert model.eval_batch(inputs, labels)[0] == pytest.approx(expected)
