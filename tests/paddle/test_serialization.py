"""Files: what save wrote load reads, whole or not at all, and without running anything."""

from __future__ import annotations

import copy
import enum
import os
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import dpfuse.paddle as paddle
from dpfuse import DPFuseError
from dpfuse.paddle import Model
from dpfuse.paddle.serialization import written_whole
from dpfuse.paddle.static import InputSpec
from tests.paddle.models import make_data, make_model, make_net


def test_nested_values_come_back(tmp_path):
    tensor = torch.arange(6.0).reshape(2, 3)
    value = {
        "tensor": tensor, "list": [1, 2.5, None, True, "text"], "tuple": (0.9, 0.999), 3: {"deep": tensor.bool()},
        "half": tensor.bfloat16(), "dtype": torch.float64,
    }  # fmt: skip
    paddle.save(value, tmp_path / "new" / "file.pd")
    found = paddle.load(tmp_path / "new" / "file.pd")
    assert list(found) == list(value)
    assert torch.equal(found["tensor"], tensor)
    assert torch.equal(found["half"], value["half"])
    assert torch.equal(found[3]["deep"], tensor.bool())
    assert all(found[key] == value[key] for key in ("list", "tuple", "dtype"))
    assert os.listdir(tmp_path / "new") == ["file.pd"]


def test_numpy_goes_in_and_comes_out_on_demand(tmp_path):
    paddle.save({"a": np.arange(3.0), "n": np.int64(4), "b": [torch.ones(2, dtype=torch.bfloat16)]}, tmp_path / "f")
    found = paddle.load(tmp_path / "f", return_numpy=True)
    assert isinstance(found["a"], np.ndarray)
    assert found["a"].dtype == np.float64
    assert found["a"].tolist() == [0, 1, 2]
    assert found["n"] == 4
    assert found["b"][0].dtype == np.float32
    assert torch.equal(paddle.load(tmp_path / "f")["a"], torch.arange(3.0, dtype=torch.float64))


def test_numpys_numbers_become_pythons_where_they_are_its_subclasses_too(tmp_path):
    value = {"best": np.mean([0.25, 0.75]), np.str_("name"): np.str_("x"), np.float64(2): [np.float32(0.5), np.True_]}
    paddle.save(value, tmp_path / "f")
    found = paddle.load(tmp_path / "f")
    assert found == {"best": 0.5, "name": "x", 2.0: [0.5, True]}
    assert [*map(type, [*found, *found.values()])] == [str, str, float, float, str, list]


def test_a_file_of_torch_with_a_number_of_numpy_is_read(tmp_path):
    state = torch.optim.SGD([torch.ones(1)], lr=0.1 * np.sqrt(4)).state_dict()
    torch.save({**state, "half": np.float16(0.5), "count": np.int64(3), "is": np.True_}, tmp_path / "f")
    with torch.serialization.safe_globals([np.dtype]):
        found = paddle.load(tmp_path / "f")
        assert np.dtype in torch.serialization.get_safe_globals()  # what the program has allowed stays so
    assert (found["param_groups"][0]["lr"], found["half"], found["count"], found["is"]) == (0.2, 0.5, 3, True)
    assert np.dtype not in torch.serialization.get_safe_globals()


class Kind(enum.IntEnum):
    """A number that only this file knows."""

    FIRST = 1


def test_a_state_dict_keeps_its_versions(tmp_path):
    state = nn.BatchNorm1d(3).state_dict()
    paddle.save(state, tmp_path / "f")
    assert paddle.load(tmp_path / "f")._metadata == state._metadata


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [0, {1}]}, r"obj\['a'\]\[1\] is a set"),
        (make_net, "obj is a function"),
        ({"a": Kind.FIRST}, r"obj\['a'\] is a Kind"),
        ({Kind.FIRST: 1}, "a key of obj is a Kind"),
        (nn.Linear(1, 1), "state_dict"),
        ({"o": torch.optim.SGD([torch.ones(1)], lr=1)}, "state_dict"),
    ],
)
def test_what_could_not_be_read_is_not_written(value, text, tmp_path):
    with pytest.raises(TypeError, match=text):
        paddle.save(value, tmp_path / "f")
    assert os.listdir(tmp_path) == []


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    paddle.save({"a": 1}, tmp_path / "f.pd")
    with pytest.raises(RuntimeError, match="full"), written_whole(tmp_path / "f.pd") as temporary:
        temporary.write_bytes(b"half of it")
        raise RuntimeError("disk full")
    assert os.listdir(tmp_path) == ["f.pd"]
    assert paddle.load(tmp_path / "f.pd") == {"a": 1}


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["DPFUSE_TEST_BOMB"],)


@pytest.mark.parametrize("content", ["pickle", "torch", "garbage", "empty"])
def test_files_that_hold_something_else_are_refused_and_not_run(content, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFUSE_TEST_BOMB", str(tmp_path / "exploded"))
    path = tmp_path / "f"
    if content == "pickle":
        path.write_bytes(pickle.dumps(Bomb(), protocol=2))
    elif content == "torch":
        torch.save({"a": Bomb()}, path)
    else:
        path.write_bytes(b"\x93NUMPY" * 9 if content == "garbage" else b"")
    with pytest.raises(ValueError, match=r"cannot be read|could run code; nothing of it was run"):
        paddle.load(path)
    assert not (tmp_path / "exploded").exists()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.pd"):
        paddle.load(tmp_path / "nothing.pd")


@pytest.mark.parametrize("ending", ["", ".pdparams", ".pdopt"])
def test_a_model_comes_back_with_its_optimizer(ending, tmp_path):
    model = make_model()
    model.fit(make_data(), batch_size=4, verbose=0)
    model.save(tmp_path / "a.b" / "model")
    assert sorted(os.listdir(tmp_path / "a.b")) == ["model.pdopt", "model.pdparams"]
    other = make_model()
    other.load(f"{tmp_path}/a.b/model{ending}")
    for each in (model, other):
        each.fit(make_data(), batch_size=4, verbose=0)  # momentum counts
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_parameters_saved_by_torch_or_through_a_wrapper_load(tmp_path):
    for prefix in ("", "module."):
        net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 3))
        torch.save({prefix + key: value for key, value in net.state_dict().items()}, tmp_path / "m.pdparams")
        model = Model(make_net())
        model.load(tmp_path / "m")
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), net.parameters(), strict=True))


class Inner(nn.Module):
    """Has a child with the name of the wrapper's, and an older name of another one."""

    def __init__(self):
        super().__init__()
        self.module, self.top, self.weight = nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.randn(3, 3))
        self._register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(state, prefix, *_):
        for key in [key for key in state if key.startswith(f"{prefix}classifier.")]:
            state[f"{prefix}top.{key.removeprefix(f'{prefix}classifier.')}"] = state.pop(key)

    def forward(self, x):
        return self.top(self.module(x)) @ self.weight


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("old", [False, True])
def test_a_file_with_old_names_of_a_network_with_a_child_called_module_is_loaded(prefix, old, tmp_path):
    net = Inner()
    names = {prefix + (key.replace("top.", "classifier.") if old else key): key for key in net.state_dict()}
    torch.save({key: net.state_dict()[name] for key, name in names.items()}, tmp_path / "m.pdparams")
    model = Model(Inner())
    model.load(tmp_path / "m")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), net.parameters(), strict=True))


def test_reset_optimizer_forgets_its_state(tmp_path):
    model = make_model()
    model.fit(make_data(), batch_size=4, verbose=0)
    model.save(tmp_path / "m")
    model.load(tmp_path / "m", reset_optimizer=True)
    assert not model._stepper.optimizer.state


def test_a_network_that_does_not_fit_is_an_error_or_a_warning(tmp_path):
    model = make_model()
    model.save(tmp_path / "m")
    net = nn.Sequential(nn.Linear(5, 8), nn.Identity(), nn.Identity(), nn.Linear(8, 4), nn.Linear(4, 4))
    before = copy.deepcopy(net.state_dict())
    other = make_model(net)
    other.train_batch(*make_data()[:4])
    moved = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="does not fit") as caught:
        other.load(tmp_path / "m")
    for text in ("'3.weight' has shape (3, 8) in the file, expected (4, 8)", "'4.bias' is not in the file"):
        assert text in str(caught.value)
    assert all(torch.equal(moved[key], value) for key, value in net.state_dict().items())
    assert other._stepper.optimizer.state
    with pytest.warns(UserWarning, match=r"not loaded: '3\.weight'"):
        other.load(tmp_path / "m", skip_mismatch=True)
    assert torch.equal(net[0].weight, model.network[0].weight)
    assert torch.equal(net[4].weight, moved["4.weight"])
    assert not torch.equal(before["4.weight"], moved["4.weight"])
    assert not other._stepper.optimizer.state


def groups(model):
    parameters = model.parameters()
    return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "trained", "damage", "text"),
    [
        (lambda model: torch.optim.Adam(model.parameters()), True, None, "fit the optimizer, Adam"),
        (lambda model: torch.optim.Adam(model.parameters()), False, None, "'betas' is missing"),
        (groups, True, None, "parameter groups"),
        (None, True, b"", "cannot be read"),
        (None, True, [1], "fit the optimizer, SGD"),
    ],
)
def test_an_optimizer_that_does_not_fit_leaves_everything_as_it_was(optimizer, trained, damage, text, tmp_path):
    saved = make_model()
    if trained:
        saved.fit(make_data(), batch_size=4, verbose=0)
    saved.save(tmp_path / "m")
    if isinstance(damage, bytes):
        (tmp_path / "m.pdopt").write_bytes(damage)
    elif damage is not None:
        paddle.save(damage, tmp_path / "m.pdopt")
    model, other = make_model(), make_model()
    for each in (model, other):
        if optimizer is not None:
            each.prepare(optimizer(each), nn.CrossEntropyLoss())
        each.train_batch(*make_data()[:4])
    with pytest.raises(ValueError, match=text) as caught:
        model.load(tmp_path / "m")
    assert "reset_optimizer=True" in str(caught.value)
    for each in (model, other):
        each.fit(make_data(), batch_size=4, verbose=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def scaled(scale):
    model = make_model()
    object.__setattr__(model._stepper.precision, "scaler", torch.amp.GradScaler("cpu", init_scale=scale))
    return model


def test_a_broken_loss_scale_leaves_everything_as_it_was(tmp_path):
    scaled(64.0).save(tmp_path / "m")
    model = scaled(8.0)
    model.load(tmp_path / "m")
    assert model._stepper.precision.scaler.get_scale() == 64.0
    paddle.save({"scale": 3.0}, tmp_path / "m.pdscaler")
    model = scaled(8.0)
    model.fit(make_data(), batch_size=4, verbose=0)
    before = copy.deepcopy(model.network.state_dict())
    with pytest.raises(ValueError, match="reset_optimizer=True"):
        model.load(tmp_path / "m")
    assert model._stepper.precision.scaler.get_scale() == 8.0
    assert model._stepper.optimizer.state
    assert all(torch.equal(before[key], value) for key, value in model.network.state_dict().items())


def test_loading_before_prepare_says_that_the_optimizer_is_left_out(tmp_path):
    make_model().save(tmp_path / "m")
    with pytest.warns(UserWarning, match="call prepare before load"):
        Model(make_net()).load(tmp_path / "m")
    Model(make_net()).load(tmp_path / "m", reset_optimizer=True)


def test_a_file_of_an_optimizer_alone_loads_on_both_sides(tmp_path):
    model = make_model()
    model.fit(make_data(), batch_size=4, verbose=0)
    model.save(tmp_path / "m")
    plain = make_model()._stepper.optimizer
    plain.load_state_dict(paddle.load(tmp_path / "m.pdopt"))
    assert len(plain.state) == 4
    paddle.save(plain.state_dict(), tmp_path / "m.pdopt")  # as before there was a count of epochs
    model.load(tmp_path / "m")
    assert model._stepper.epochs == 0


def test_missing_files_of_a_model(tmp_path):
    model = make_model()
    with pytest.raises(FileNotFoundError, match=r"m\.pdparams"):
        model.load(tmp_path / "m")
    paddle.save(model.network.state_dict(), tmp_path / "m.pdparams")
    with pytest.raises(FileNotFoundError, match="reset_optimizer=True"):
        model.load(tmp_path / "m")
    model.load(tmp_path / "m", reset_optimizer=True)
    Model(make_net()).load(tmp_path / "m")  # without an optimizer there is nothing to restore
    paddle.save([1, 2], tmp_path / "m.pdparams")
    with pytest.raises(ValueError, match="holds a list"):
        model.load(tmp_path / "m")


@pytest.mark.parametrize(("path", "error"), [("", ValueError), ("folder/", ValueError), (3, TypeError)])
def test_a_model_needs_a_name_for_its_files(path, error):
    with pytest.raises(error, match="path"):
        make_model().save(path)
    with pytest.raises(error, match="path"):
        make_model().load(path)


def test_an_exported_model_computes_the_same_for_any_batch(tmp_path):
    net = make_net(dropout=0.5)
    model = Model(net, inputs=InputSpec([None, 5], "float32", "x"))
    model.save(tmp_path / "m", training=False)
    assert net.training
    assert os.listdir(tmp_path) == ["m.pt2"]
    program = torch.export.load(tmp_path / "m.pt2").module()
    for rows in (1, 2, 7):
        x = torch.randn(rows, 5)
        assert np.array_equal(program(x).detach().numpy(), model.predict_batch(x)[0])


def test_an_export_of_several_inputs_with_a_free_length(tmp_path):
    class Attend(nn.Module):
        def forward(self, sequence, weights):
            return torch.einsum("bti,bt->bi", sequence, weights)

    model = Model(Attend(), inputs=[InputSpec([None, None, 3]), InputSpec([None, None])])
    model.save(tmp_path / "m", training=False)
    program = torch.export.load(tmp_path / "m.pt2").module()
    sequence, weights = torch.randn(4, 9, 3), torch.randn(4, 9)
    assert torch.equal(program(sequence, weights), model.network(sequence, weights))


@pytest.mark.parametrize("inputs", [None, ["x"]])
def test_an_export_needs_shapes(inputs, tmp_path):
    with pytest.raises(DPFuseError, match="InputSpec"):
        Model(make_net(), inputs=inputs).save(tmp_path / "m", training=False)
    assert os.listdir(tmp_path) == []
