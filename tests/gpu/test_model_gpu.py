"""Model on a GPU: where the network goes, float16 with a loss scale, and ranks that share the GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpfuse.paddle import Model
from dpfuse.paddle.io import DistributedBatchSampler
from dpfuse.paddle.metric import Accuracy
from dpfuse.paddle.static import InputSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def make_data(samples=22):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 5, generator=generator)
    return TensorDataset(x, torch.randint(3, (samples,), generator=generator))


def make_model(amp=None):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)  # before the network moves
    model = Model(net)
    model.prepare(optimizer, nn.CrossEntropyLoss(), Accuracy(), amp_configs=amp)
    return model


def test_the_network_moves_and_an_earlier_optimizer_trains_it():
    model = make_model()
    model.fit(make_data(), batch_size=4, epochs=2, verbose=0)

    plain = make_net().cuda()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(make_data(), batch_sampler=DistributedBatchSampler(make_data(), 4, 1, 0, shuffle=True))
    for _ in range(2):
        for x, y in loader:
            nn.functional.cross_entropy(plain(x.cuda()), y.cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(model.network.named_parameters(), plain.parameters(), strict=True):
        assert a.is_cuda
        assert torch.equal(a, b), name


def test_a_network_that_is_on_a_gpu_stays_where_it_is():
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    model = Model(make_net().to(device))
    assert next(model.network.parameters()).device == device
    assert model.predict_batch(np.ones((2, 5), dtype=np.float32))[0].shape == (2, 3)


def test_results_are_on_the_cpu():
    model = make_model()
    (outputs,) = model.predict(make_data(), batch_size=4, stack_outputs=True, verbose=0)
    assert isinstance(outputs, np.ndarray)
    assert outputs.shape == (22, 3)
    losses, _ = model.train_batch(*make_data()[:4])
    assert isinstance(losses[0], np.ndarray)


def test_float16_trains_with_a_loss_scale_that_is_saved(tmp_path):
    model = make_model({"level": "O1", "init_loss_scaling": 1024.0, "incr_every_n_steps": 3})
    seen = []
    hook = model.network[0].register_forward_hook(lambda module, taken, given: seen.append(given.dtype))
    model.fit(make_data(), batch_size=4, verbose=0)
    model.evaluate(make_data(), batch_size=22, verbose=0)
    hook.remove()
    assert seen == [torch.float16] * 6 + [torch.float32]
    assert all(param.dtype == torch.float32 and param.isfinite().all() for param in model.parameters())
    scaler = model._stepper.precision.scaler
    assert scaler.get_scale() == 4096.0  # doubled twice in six steps
    model.save(tmp_path / "m")
    assert sorted(os.listdir(tmp_path)) == ["m.pdopt", "m.pdparams", "m.pdscaler"]
    other = make_model("O1")
    other.load(tmp_path / "m")
    assert other._stepper.precision.scaler.get_scale() == 4096.0


def test_a_constant_loss_scale_stays():
    model = make_model({"init_loss_scaling": 8.0, "use_dynamic_loss_scaling": False, "incr_every_n_steps": 1})
    model.fit(make_data(), batch_size=4, verbose=0, accumulate_grad_batches=2)
    assert model._stepper.precision.scaler.get_scale() == 8.0


def test_an_exported_model_runs_on_the_gpu(tmp_path):
    model = Model(make_net(), inputs=InputSpec([None, 5]))
    model.save(tmp_path / "m", training=False)
    program = torch.export.load(tmp_path / "m.pt2").module()
    x = torch.randn(6, 5, device="cuda")
    torch.testing.assert_close(program(x), torch.from_numpy(model.predict_batch(x)[0]).cuda())


def on_a_shared_gpu(rank, size):
    torch.cuda.set_device(0)
    model = make_model()
    assert next(model.network.parameters()).is_cuda
    found = model.evaluate(make_data(23), batch_size=4, verbose=0)
    (outputs,) = model.predict(make_data(23), batch_size=4, stack_outputs=True, verbose=0)
    model.fit(make_data(23), make_data(23), batch_size=4, epochs=2, verbose=0)
    return found, outputs.tolist(), [param.tolist() for param in model.parameters()]


def test_ranks_that_share_a_gpu_evaluate_as_one_process_does(ranks):
    model = make_model()
    expected = model.evaluate(make_data(23), batch_size=4, verbose=0)
    (outputs,) = model.predict(make_data(23), batch_size=4, stack_outputs=True, verbose=0)
    first, second = ranks(on_a_shared_gpu, timeout=120)
    assert first == second
    assert first[0]["acc"] == expected["acc"]
    # The last batch is split over the ranks, and a matrix product of fewer rows may round otherwise.
    assert first[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    np.testing.assert_allclose(first[1], outputs, rtol=1e-4, atol=1e-5)
