"""Files of real Paddle are read without running anything, and fit torch's modules once converted."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dpfuse
import dpfuse.paddle as paddle

GOLDEN = Path(__file__).parents[1] / "golden" / "pdparams"
FACTS = json.loads((GOLDEN / "net.json").read_text())


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()


@pytest.mark.parametrize("name", ["net.pdparams", "net_protocol2.pdparams"])
def test_a_state_dict_of_paddle_is_read_and_computes_the_same_in_torch(name):
    state = paddle.load(GOLDEN / name)
    assert {key: value.tolist() for key, value in state.items()} == FACTS["state"]
    model = net()
    model.load_state_dict(paddle.to_torch_state_dict(state, model))
    output = model(torch.tensor(FACTS["input"]))
    torch.testing.assert_close(output, torch.tensor(FACTS["output"]), rtol=1e-5, atol=1e-6)


def test_optimizer_states_nested_tensors_and_bfloat16_are_read():
    state = paddle.load(GOLDEN / "net.pdopt")
    assert state["linear_0.w_0_moment1_0"].shape == (4, 6)
    first, rest = paddle.load(GOLDEN / "nested.pdparams")
    assert first.tolist() == [1.5, 2.5]
    assert (rest["a"].tolist(), rest["epoch"]) == ([3], 7)
    stored = paddle.load(GOLDEN / "bfloat16.pdparams")  # Paddle stores bfloat16 as uint16
    assert torch.equal(stored.view(torch.bfloat16), torch.ones(2, 2, dtype=torch.bfloat16))
    model = nn.Linear(2, 2, bias=False).bfloat16()
    assert torch.equal(paddle.to_torch_state_dict({"weight": stored}, model)["weight"], torch.ones(2, 2).bfloat16())
    assert isinstance(paddle.load(GOLDEN / "net.pdparams", return_numpy=True)["0.bias"], np.ndarray)


def test_a_model_loads_a_file_of_paddle_in_torchs_layout(tmp_path):
    model = paddle.Model(net())
    shutil.copy(GOLDEN / "net.pdparams", tmp_path / "net.pdparams")
    model.load(tmp_path / "net")
    output = model.network(torch.tensor(FACTS["input"]))
    torch.testing.assert_close(output, torch.tensor(FACTS["output"]), rtol=1e-5, atol=1e-6)


def test_a_square_weight_of_paddle_is_transposed_where_another_layer_is_skipped(tmp_path):
    weight = np.arange(9.0, dtype="float32").reshape(3, 3)
    state = {"0.weight": weight, "0.bias": np.zeros(3, "float32"), "1.weight": np.ones((3, 7), "float32")}
    (tmp_path / "f.pdparams").write_bytes(pickle.dumps(state, protocol=4))
    model = paddle.Model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, bias=False)))
    with pytest.warns(UserWarning, match=r"'1.weight' has shape \(7, 3\) in the file, expected \(2, 3\)"):
        model.load(tmp_path / "f", skip_mismatch=True)
    assert torch.equal(model.network[0].weight, torch.from_numpy(weight.T))


def test_large_arrays_that_paddle_cut_are_joined(tmp_path):
    whole = np.arange(12.0).reshape(3, 4)
    cut = {"w@@.0": whole.ravel()[:5], "w@@.1": whole.ravel()[5:], "b": np.ones(2)}
    cut["UnpackBigParamInfor@@"] = {"w": {"OriginShape": (3, 4), "slices": ["w@@.0", "w@@.1"]}}
    (tmp_path / "f").write_bytes(pickle.dumps(cut, protocol=2))
    found = paddle.load(tmp_path / "f")
    assert sorted(found) == ["b", "w"]
    assert torch.equal(found["w"], torch.from_numpy(whole))


class Runs:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def bomb(path):
    return f"open({os.fspath(path)!r}, 'w').close()"


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "value",
    [
        lambda path: Runs(eval, (bomb(path),)),
        lambda path: Runs(exec, (bomb(path),)),
        lambda path: Runs(os.system, (f"touch {path}",)),
        lambda path: Runs(getattr, ("text", "upper")),
        lambda path: {"a": [np.ones(2), Runs(eval, (bomb(path),))]},
        lambda path: np.array([Runs(eval, (bomb(path),))], dtype=object),
        lambda path: Runs(np.dtype, ("O",)),
        lambda path: Runs(np.dtype, ([("a", "O")],)),
        lambda path: OrderedDict(a=Runs(__import__, ("os",))),
        lambda path: Path("x"),
    ],
)
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, value, protocol):
    mark = tmp_path / "ran"
    (tmp_path / "f.pdparams").write_bytes(pickle.dumps(value(mark), protocol=protocol))
    with pytest.raises(ValueError, match=r"f\.pdparams' names .*nothing of it was run\. Expected arrays of numbers"):
        paddle.load(tmp_path / "f.pdparams")
    assert not mark.exists()


def test_the_pickles_above_would_run(tmp_path):
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(Runs(eval, (bomb(mark),))))
    assert mark.exists()


def test_an_array_that_claims_to_be_huge_allocates_nothing(tmp_path):
    reconstruct = np.ones(1).__reduce__()[0]
    data = pickle.dumps(Runs(reconstruct, (np.ndarray, (10**15,), b"b")), protocol=4)
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(ValueError, match="in place of an empty one"):
        paddle.load(tmp_path / "f")


@pytest.mark.parametrize("length", range(1, 944, 50))
def test_a_cut_file_is_named(tmp_path, length):
    (tmp_path / "f").write_bytes((GOLDEN / "net.pdparams").read_bytes()[:length])
    with pytest.raises(ValueError, match="cannot be read"):
        paddle.load(tmp_path / "f")


@pytest.mark.parametrize(
    ("data", "text"), [(b"101 words", r"cannot be read \(it begins with b'10'\)"), (b"", "it is empty")]
)
def test_another_file_is_refused(tmp_path, data, text):
    (tmp_path / "f.txt").write_bytes(data)
    with pytest.raises(ValueError, match=text):
        paddle.load(tmp_path / "f.txt")
    with pytest.raises(FileNotFoundError, match="is a folder; expected a file"):
        paddle.load(tmp_path)


def test_a_file_of_torch_in_its_old_format_is_named(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "f", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"'.*f' is a file of torch.save in its old format.*torch.load"):
        paddle.load(tmp_path / "f")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.update(extra=torch.ones(1)), "'extra' is in the state dict and not in the model"),
        (lambda state: state.pop("0.bias"), r"has no '0\.bias' \(1 names are missing\)"),
        (lambda state: state.update({"0.bias": torch.ones(5)}), r"'0\.bias' has shape \(5,\).*\(6,\) in the model"),
    ],
)
def test_what_does_not_fit_is_named(change, text):
    state = paddle.load(GOLDEN / "net.pdparams")
    change(state)
    with pytest.raises(ValueError, match=text):
        paddle.to_torch_state_dict(state, net())


WRAPS = {
    "bare": lambda model: model,
    "dp": dpfuse.DataParallel,
    "paddle": paddle.DataParallel,
    "ddp": dpfuse.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
    "compiled": partial(torch.compile, backend="eager"),
    "compiled inside": lambda model: dpfuse.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_are_transposed_for_a_wrapped_model_as_for_a_bare_one(wrap, prefix):
    """Also square ones, of which a shape does not tell."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = WRAPS[wrap](inner)
    state = {"0.weight": torch.arange(9.0).reshape(3, 3), "0.bias": torch.ones(3), "1._mean": torch.full((3,), 2.0)}
    state |= {name: torch.ones(3) for name in ("1.weight", "1.bias", "1._variance")}
    model.load_state_dict(paddle.to_torch_state_dict({prefix + key: value for key, value in state.items()}, model))
    assert torch.equal(inner[0].weight, state["0.weight"].t())
    assert torch.equal(inner[1].running_mean, state["1._mean"])


@pytest.mark.parametrize("path", ["", "sub/"])
def test_save_wants_the_path_of_a_file(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"path must be that of a file, got '{path}'; pass"):
        paddle.save({}, path)
    assert os.listdir(tmp_path) == []


def test_save_takes_paddles_protocols(tmp_path):
    paddle.save({"a": 1}, tmp_path / "f", protocol=2)
    assert paddle.load(tmp_path / "f") == {"a": 1}
    with pytest.raises(ValueError, match="protocol must be 2, 3 or 4, got 5; leave it out"):
        paddle.save({}, tmp_path / "f", protocol=5)


@pytest.mark.filterwarnings("ignore:there is no process group")
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x.pdparams", r"got a str, expected a dict .* Read the file first: set_state_dict\(load\('x\.pdparams'\)\)"),
        (None, "got a NoneType, expected a dict of tensors"),
        ([1, 2], r"got a list, expected a dict .*Pass what state_dict\(\)"),
    ],
)
def test_set_state_dict_wants_a_dict(value, text):
    with pytest.raises(TypeError, match=text):
        paddle.DataParallel(nn.Linear(1, 1)).set_state_dict(value)
