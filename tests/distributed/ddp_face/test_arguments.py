"""Building a DistributedDataParallel: arguments, checks and errors, each beside torch's class on the same input."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dpfuse import DistributedDataParallel, DPFuseError
from tests.torch_ddp import TAKES, needs_argument

pytestmark = pytest.mark.usefixtures("group")


def mesh(*shape: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.zeros(shape, dtype=torch.int), mesh_dim_names=tuple("ab"[: len(shape)]))


def on_two_kinds() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def all_ignored() -> nn.Module:
    module = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["weight", "bias"])
    return module


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


ERRORS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], str]] = {
    "nothing to train": (frozen, dict, "not needed when a module doesn't have any parameter that requires a gradient"),
    "no parameter": (nn.ReLU, dict, "not needed when a module doesn't have any parameter that requires a gradient"),
    "all ignored": (all_ignored, dict, "not needed when a module doesn't have any parameter that requires a gradient"),
    "lazy": (lambda: nn.LazyLinear(2), dict, "Modules with uninitialized parameters can't be used with"),
    "two kinds of devices": (on_two_kinds, dict, "input module must be on the same type of devices.*meta"),
    "two device ids": (
        lambda: nn.Linear(2, 2),
        lambda: {"device_ids": [0, 1]},
        "device_ids can only be None or contain a single element",
    ),
    "device id for the CPU": (
        lambda: nn.Linear(2, 2),
        lambda: {"device_ids": [0]},
        r"device_ids and output_device arguments only work with .*GPU modules.*got device_ids \[0\]",
    ),
    "output device for the CPU": (
        lambda: nn.Linear(2, 2),
        lambda: {"output_device": "cuda:0"},
        "device_ids and output_device arguments only work with .*GPU modules.*output_device cuda:0",
    ),
    "group and mesh": (
        lambda: nn.Linear(2, 2),
        lambda: {"process_group": dist.group.WORLD, "device_mesh": mesh(1)},
        "Cannot specify both process_group and device_mesh arguments",
    ),
    "2-D mesh": (lambda: nn.Linear(2, 2), lambda: {"device_mesh": mesh(1, 1)}, "Only 1D device mesh is supported"),
    "SyncBatchNorm on the CPU": (lambda: nn.SyncBatchNorm(2), dict, "SyncBatchNorm layers only work with GPU modules"),
    "half of the delayed": (
        lambda: nn.Linear(2, 2),
        lambda: {"delay_all_reduce_named_params": []},
        "delay_all_reduce_named_params and param_to_hook_all_reduce",
    ),
    "other half of the delayed": (
        lambda: nn.Linear(2, 2),
        lambda: {"param_to_hook_all_reduce": nn.Parameter(torch.zeros(1))},
        "delay_all_reduce_named_params and param_to_hook_all_reduce",
    ),
}


def error_of(cls: Any, module: nn.Module, arguments: dict[str, Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        cls(module, **arguments)
    return caught.value


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_arguments_are_errors_of_torchs_type_and_gist(case):
    make, arguments, pattern = ERRORS[case]
    ours = error_of(DistributedDataParallel, make(), arguments())
    theirs = error_of(TorchDDP, make(), arguments())
    assert type(ours) is type(theirs)
    assert re.search(pattern, str(ours)), ours
    assert re.search(pattern, str(theirs)), theirs


@pytest.mark.parametrize("device_ids", [None, []])
@pytest.mark.parametrize("output_device", [None, 0])
def test_no_device_ids_mean_that_inputs_stay_where_they_are(device_ids, output_device):
    for cls in (DistributedDataParallel, TorchDDP):
        model = cls(nn.Linear(2, 2), device_ids=device_ids, output_device=output_device, dim=1)
        assert (model.device_ids, model.output_device, model.dim) == (None, None, 1)


def test_the_constructors_arguments_are_those_of_torch():
    ours = list(inspect.signature(DistributedDataParallel.__init__).parameters.values())
    theirs = list(inspect.signature(TorchDDP.__init__).parameters.values())
    # The installed torch may be older than the one that ours follows.
    assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]
    # Before its new name came, the default of broadcast_buffers was True. None means the same.
    old = {"broadcast_buffers"} if "forward_sync_buffers" not in TAKES else set()
    assert {p.name for p, q in zip(ours, theirs, strict=False) if p.default != q.default} == old


def test_a_backward_is_never_finalized_by_hand():
    model = DistributedDataParallel(nn.Linear(2, 2), lazy_bucket_allocation=True)
    assert model.lazy_bucket_allocation is True
    assert model.require_manual_backward_finalization is model.should_finalize_after_backward is False
    model.require_manual_backward_finalization = False
    with pytest.raises(RuntimeError, match="was set to True, expected False: gradients are final when backward"):
        model.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match=r"finalize_backward\(\) was called, expected no such call"):
        model.finalize_backward()


DEPRECATED: dict[str, dict[str, Any]] = {
    "check_reduction": {"check_reduction": True},
    "broadcast_buffers": {"broadcast_buffers": True},
    "broadcast_buffers off": {"broadcast_buffers": False},
    "both": {"broadcast_buffers": False, "forward_sync_buffers": True},
}
renamed = needs_argument("forward_sync_buffers")


@pytest.mark.parametrize(
    "case", [case if case == "check_reduction" else pytest.param(case, marks=renamed) for case in DEPRECATED]
)
def test_deprecated_arguments_warn_as_in_torch_at_the_users_line(case):
    caught = []
    for cls in (DistributedDataParallel, TorchDDP):
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            cls(nn.BatchNorm1d(2), **DEPRECATED[case])
        (warning,) = recorded
        caught.append(warning)
    ours, theirs = caught
    assert ours.category is theirs.category is FutureWarning
    assert ours.filename == theirs.filename == __file__
    words = ("check_reduction", "broadcast_buffers", "forward_sync_buffers", "deprecated", "ignored")
    for word in words:
        if word in str(theirs.message):
            assert word in str(ours.message)


SYNC_OPTIONS: list[dict[str, Any]] = [
    {}, {"broadcast_buffers": True}, {"broadcast_buffers": False}, {"forward_sync_buffers": True},
    {"forward_sync_buffers": False}, {"broadcast_buffers": False, "forward_sync_buffers": True},
    {"broadcast_buffers": True, "forward_sync_buffers": False},
]  # fmt: skip


@renamed
@pytest.mark.parametrize("options", SYNC_OPTIONS, ids=str)
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning")
def test_both_names_of_the_buffer_switch_read_as_in_torch(options):
    ours, theirs = (cls(nn.BatchNorm1d(2), **options) for cls in (DistributedDataParallel, TorchDDP))
    assert ours.broadcast_buffers == theirs.broadcast_buffers
    assert ours.forward_sync_buffers == theirs.forward_sync_buffers
    assert ours.will_sync_module_buffers() == theirs.will_sync_module_buffers()
    ours.broadcast_buffers = theirs.broadcast_buffers = False
    assert ours.forward_sync_buffers is theirs.forward_sync_buffers is False


PLAIN = [
    "device", "device_ids", "output_device", "device_type", "dim", "is_multi_device_module", "find_unused_parameters",
    "gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params", "batched_grad_copy", "mixed_precision",
    "require_backward_grad_sync", "require_forward_param_sync", "parameters_to_ignore", "broadcast_bucket_size",
    "_distributed_rank", "_has_rebuilt_buckets", "process_group",
]  # fmt: skip


def test_attributes_are_those_of_torch():
    modules = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    for module in modules:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.bias", "1.running_var"])
    ours, theirs = DistributedDataParallel(modules[0]), TorchDDP(modules[1])
    for name in PLAIN:
        if name == "batched_grad_copy" and name not in TAKES:
            continue
        assert getattr(ours, name) == getattr(theirs, name), name
    for model in (ours, theirs):
        assert [getattr(p, "_ddp_ignored", False) for p in model.module.parameters()] == [False, True, False, False]
    assert list(ours.named_module_buffers) == list(theirs.named_module_buffers)
    assert len(ours.modules_buffers) == len(theirs.modules_buffers) == 2
    assert len(ours._module_parameters) == len(theirs._module_parameters) == 3


def test_torch_finds_the_parameters_of_a_module_that_we_have_wrapped():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for ignored in (["0.bias"], []):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        DistributedDataParallel(module)
        for cls in (DistributedDataParallel, TorchDDP):
            found = list(map(id, cls._get_data_parallel_params(module)))
            assert found == [id(param) for name, param in module.named_parameters() if name not in ignored]
        named = dict(DistributedDataParallel._get_data_parallel_params(module, named_params=True))
        assert [name for name, _ in module.named_parameters() if name not in named] == ignored


@pytest.mark.parametrize("cap", [None, 1, 2.5, 100])
def test_the_cap_that_the_compiler_reads_is_that_of_torch(cap):
    ours, theirs = (cls(nn.Linear(2, 2), bucket_cap_mb=cap) for cls in (DistributedDataParallel, TorchDDP))
    assert ours.bucket_bytes_cap == theirs.bucket_bytes_cap
    assert ours._get_ddp_logging_data()["bucket_cap_bytes"] == ours.bucket_bytes_cap


def test_logging_data_has_torchs_keys_with_torchs_values():
    ours, theirs = (cls(nn.Linear(2, 3)) for cls in (DistributedDataParallel, TorchDDP))
    data, expected = ours._get_ddp_logging_data(), theirs._get_ddp_logging_data()
    own = {"can_set_static_graph", "static_graph"}  # torch writes them later, or never
    assert {key: value for key, value in data.items() if key not in own} == {
        key: expected[key] for key in data.keys() - own
    }


def test_names_that_lightning_and_others_touch_are_there():
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.reducer._rebuild_buckets()
    model.reducer._delay_all_reduce()
    model.reducer.prepare_for_forward()
    model.reducer.prepare_for_backward([])
    model._set_ddp_sink_clone(False)
    model._set_ddp_runtime_logging_sample_rate(10)
    model._check_reducer_finalized()
    for cls in (DistributedDataParallel, TorchDDP):
        with pytest.raises(ValueError, match="sample rate should be equal or greater than 1"):
            cls(nn.Linear(2, 2))._set_ddp_runtime_logging_sample_rate(0)
    model(torch.ones(1, 2)).sum().backward()
    assert model._has_rebuilt_buckets
    model._remove_autograd_hooks()
    assert not any(param._post_accumulate_grad_hooks for param in model.module.parameters())


def test_an_open_backward_is_not_finalized():
    model = DistributedDataParallel(nn.Linear(2, 2))

    def check(_: torch.Tensor) -> None:
        with pytest.raises(DPFuseError, match="a backward is still open"):
            model._check_reducer_finalized()

    model.module.bias.register_hook(check)
    model(torch.ones(1, 2)).sum().backward()


def test_a_one_dimensional_mesh_is_a_group():
    one = mesh(1)
    for cls in (DistributedDataParallel, TorchDDP):
        model = cls(nn.Linear(2, 2), device_mesh=one)
        assert model.process_group is one.get_group()
        assert model.device_mesh is one


def test_an_error_of_one_rank_is_one_on_all(rank, size):
    with pytest.raises(RuntimeError if rank else DPFuseError, match="any parameter that requires a gradient"):
        DistributedDataParallel(nn.Linear(2, 2).requires_grad_(rank == 0))


def test_without_a_process_group_it_is_torchs_error():
    dist.destroy_process_group()
    ours = error_of(DistributedDataParallel, nn.Linear(2, 2), {})
    theirs = error_of(TorchDDP, nn.Linear(2, 2), {})
    assert type(ours) is type(theirs)
    assert all("Default process group has not been initialized" in str(error) for error in (ours, theirs))
