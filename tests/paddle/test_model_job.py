"""Model in a job: what is printed, saved, frozen, started by the launcher."""

from __future__ import annotations

import contextlib
import io
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import dpfuse
from dpfuse import DPFuseError
from dpfuse.paddle import Model
from dpfuse.paddle.callbacks import Callback
from dpfuse.paddle.metric import Accuracy
from tests.distributed.processes import launch
from tests.paddle.models import (
    assert_same_parameters,
    make_data,
    make_net,
    make_rank_model,
)


def printed_by(rank, size):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        model = make_rank_model(metrics=Accuracy())
        model.fit(make_data(), make_data(), batch_size=4, log_freq=1, verbose=2)
        model.predict(make_data(), 4, verbose=1)
        model.summary((1, 5))
    return text.getvalue()


def test_only_rank_0_prints(ranks):
    first, second = ranks(printed_by)
    assert second == ""
    assert [line.split(" - ")[0] for line in first.splitlines() if line.startswith("step")] == [
        *["step 1/3", "step 2/3", "step 3/3"] * 2,
        "step 3/3",
    ]


def test_what_cannot_be_shared_is_refused(rank, size):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, scores, labels):
            return self.weight * nn.functional.cross_entropy(scores, labels)

    with pytest.raises(ValueError, match="part of the network"):
        Model(make_net()).prepare(loss=Weighted())

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(make_data())

    with pytest.raises(TypeError, match="cannot be distributed to 2 ranks"):
        make_rank_model().fit(Stream(), verbose=0)


def test_loaders_that_may_surprise_are_pointed_out_on_rank_0(rank, size):
    data = make_data()
    model = make_rank_model()
    sharded = [data[i : i + 2] for i in range(2 * rank, 22 - 2 * rank, 4)]
    if rank == 0:
        with pytest.warns(UserWarning, match="gives every rank all samples"):
            model.fit(DataLoader(data, 4), verbose=0)
        with pytest.warns(UserWarning, match="unknown order"):
            model.evaluate(sharded, verbose=0)
    else:
        model.fit(DataLoader(data, 4), verbose=0)
        model.evaluate(sharded, verbose=0)


def test_torchs_distributed_sampler_shuffles_anew_in_every_epoch(rank, size):
    seen = []

    class Collect(Callback):
        def on_train_batch_end(self, step, logs=None):
            seen.append(logs["loss"][0])

    data = make_data(22)
    sampler = DistributedSampler(data, shuffle=True)
    model = make_rank_model()
    model.prepare(torch.optim.SGD(model.parameters(), lr=0.0), nn.CrossEntropyLoss())
    model.fit(DataLoader(data, 11, sampler=sampler), epochs=2, verbose=0, callbacks=Collect())
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        x, y = data[list(sampler)]
        expected.append(nn.functional.cross_entropy(model.network(x), y).item())
    assert expected[0] != expected[1]
    assert seen == expected


@pytest.mark.slow
def test_a_script_for_one_card_runs_under_launch(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn
            from torch.utils.data import TensorDataset
            from dpfuse import get_rank
            from dpfuse.paddle import Model
            from dpfuse.paddle.metric import Accuracy

            x = torch.eye(8).repeat(4, 1)
            data = TensorDataset(x, x.argmax(1) % 2)
            model = Model(nn.Linear(8, 2))  # every rank begins with other parameters
            model.prepare(torch.optim.SGD(model.parameters(), lr=1.0), nn.CrossEntropyLoss(), Accuracy())
            model.fit(data, data, epochs=4, batch_size=4, verbose=2)
            accuracy = model.evaluate(data, batch_size=5, verbose=0, num_workers=1)["acc"]
            print(f"rank={get_rank()} acc={accuracy}\\n", end="")
            """
        )
    )
    done = launch("--nproc_per_node", 2, script, warm_ranks=True)
    assert done.returncode == 0, done.stderr
    assert "rank=0 acc=1.0" in done.stdout
    assert "rank=1 acc=1.0" in done.stdout
    assert done.stdout.count("step 4/4") == 8  # of rank 0 alone: four epochs and their evaluations


@pytest.mark.ranks(timeout=20)
def test_a_layer_frozen_on_one_rank_is_an_error_on_all(rank, size):
    model = make_rank_model()
    model.network[0].weight.requires_grad_(rank == 0)
    with pytest.raises(DPFuseError, match=r"rank 1 has .*0\.weight.* requires_grad=False"):
        model.fit(make_data(), batch_size=4, verbose=0)


def test_single_batches_are_averaged_when_the_optimizer_steps(rank, size):
    data = make_data()
    model, plain = make_rank_model(rank), make_net()
    x, y = data[4 * rank : 4 * rank + 4]
    with dpfuse.time_communication(model._stepper.parallel) as times:
        model.train_batch(x, y, update=False)
        model.train_batch(x, y)
    assert times.steps == 1
    for _ in range(2):
        nn.functional.cross_entropy(plain(x), y).backward()
    dpfuse.fused_allreduce_gradients(plain.parameters())
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_parameters(model.network, plain)
    # A batch of its own on each rank, without the other.
    if rank == 1:
        assert model.eval_batch(x, y)[0] == nn.functional.cross_entropy(plain(x), y).item()
        model.predict_batch(x)
