"""DistributedStrategy: Paddle's fields and defaults, and what is said about values that cannot work."""

from __future__ import annotations

import copy

import pytest

from dpfuse.paddle.distributed import fleet
from dpfuse.paddle.distributed.fleet.strategy_fields import SUPPORTED, UNSUPPORTED


@pytest.fixture
def strategy():
    return fleet.DistributedStrategy()


def test_defaults_are_paddles(strategy):
    assert (strategy.fuse_grad_size_in_MB, strategy.last_comm_group_size_MB) == (32, 1.0)
    assert (strategy.fuse_all_reduce_ops, strategy.find_unused_parameters) == (True, False)
    assert (strategy.fp16_allreduce, strategy.sync_batch_norm, strategy.gradient_merge) == (False, False, False)
    assert strategy.gradient_merge_configs == {"k_steps": 1, "avg": True}
    assert strategy.gradient_scale_configs == {"scale_strategy": "avg", "scale_gradient": False}
    assert strategy.hybrid_configs["dp_degree"] == -1
    assert (strategy.amp, strategy.nccl_comm_num, strategy.without_graph_optimization) == (False, 1, True)


@pytest.mark.parametrize("name", [*SUPPORTED, *UNSUPPORTED])
def test_every_field_can_be_read_and_set_to_its_default(strategy, name):
    value = getattr(strategy, name)
    setattr(strategy, name, value)
    assert getattr(strategy, name) == value
    assert strategy == fleet.DistributedStrategy()
    assert name in dir(strategy)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fuse_grad_size_in_MB", 0),
        ("fuse_grad_size_in_MB", 0.5),
        ("fuse_grad_size_in_MB", float("inf")),
        ("last_comm_group_size_MB", 0.001),
        ("fuse_all_reduce_ops", False),
        ("find_unused_parameters", True),
        ("fp16_allreduce", True),
        ("sync_batch_norm", True),
        ("gradient_merge", True),
    ],
)
def test_a_supported_field_keeps_what_it_is_set_to(strategy, name, value):
    setattr(strategy, name, value)
    assert getattr(strategy, name) == value
    assert f"{name}={value!r}" in repr(strategy)
    assert copy.deepcopy(strategy) == strategy != fleet.DistributedStrategy()


def test_a_dict_changes_only_the_keys_it_has(strategy):
    strategy.gradient_merge_configs = {"k_steps": 4}
    strategy.gradient_scale_configs = {"scale_strategy": "sum"}
    assert strategy.gradient_merge_configs == {"k_steps": 4, "avg": True}
    assert strategy.gradient_scale_configs == {"scale_strategy": "sum", "scale_gradient": False}
    assert fleet.DistributedStrategy().gradient_merge_configs["k_steps"] == 1


def test_what_is_read_cannot_be_changed_behind_the_strategys_back(strategy):
    with pytest.raises(TypeError):
        strategy.gradient_merge_configs["k_steps"] = 4
    assert strategy.gradient_merge_configs["k_steps"] == 1


def test_no_strategy_shares_a_list_that_can_be_changed(strategy):
    with pytest.raises(AttributeError):
        strategy.amp_configs["custom_white_list"].append("conv")
    assert list(fleet.DistributedStrategy().amp_configs["custom_white_list"]) == []
    strategy.amp_configs = {"custom_white_list": []}
    strategy.lamb_configs = {"exclude_from_weight_decay": ()}
    with pytest.raises(ValueError, match=r"amp_configs is not supported: got .*\('conv',\)"):
        strategy.amp_configs = {"custom_white_list": ["conv"]}
    values = [value for field in UNSUPPORTED.values() for value in (field.values() if type(field) is dict else [field])]
    assert {type(value) for value in values} <= {bool, int, float, str, tuple, type(None)}


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("fuse_grad_size_in_MB", -1, ValueError, "at least 0, got -1"),
        ("fuse_grad_size_in_MB", float("nan"), ValueError, "got nan"),
        ("fuse_grad_size_in_MB", "32", TypeError, "must be a number, got '32' of type str"),
        ("fuse_grad_size_in_MB", True, TypeError, "must be a number"),
        ("last_comm_group_size_MB", 0, ValueError, "above 0 MB, got 0"),
        ("last_comm_group_size_MB", -1.0, ValueError, "at least 0"),
        ("find_unused_parameters", 1, TypeError, "True or False, got 1 of type int"),
        ("gradient_merge_configs", 4, TypeError, "must be a dict"),
        ("gradient_merge_configs", {"k_steps": 0}, ValueError, r"\['k_steps'\] must be at least 1"),
        ("gradient_merge_configs", {"k_steps": 2.0}, TypeError, "must be an integer"),
        ("gradient_merge_configs", {"avg": "yes"}, TypeError, r"\['avg'\] must be True or False"),
        ("gradient_scale_configs", {"scale_strategy": "mean"}, ValueError, "'avg', 'sum' or 'customized', got 'mean'"),
        ("hybrid_configs", {"mp_degree": 2}, ValueError, "must be 1, got 2; there is data parallelism only"),
        ("hybrid_configs", {"dp_degree": 0}, ValueError, "at least 1"),
        ("gradient_merge_configs", {"ksteps": 2}, AttributeError, "no key 'ksteps'. Did you mean 'k_steps'"),
        ("gradient_scale_configs", {"zzz": 2}, AttributeError, "no key 'zzz'. Known are 'scale_strategy'"),
        ("amp_configs", {"init_loss_scalin": 2.0}, AttributeError, "Did you mean 'init_loss_scaling'"),
        ("amp", True, ValueError, "amp is not supported: got True, expected False; use torch.autocast"),
        ("amp_configs", {"incr_ratio": 3.0}, ValueError, "use torch.autocast"),
        ("recompute", True, ValueError, "torch.utils.checkpoint"),
        ("sharding_configs", {"stage": 2}, ValueError, "FSDP"),
        ("a_sync", 0, TypeError, "a_sync must be True or False"),
        ("a_sync_configs", {"k_steps": 4}, ValueError, "no parameter-server mode"),
        ("nccl_comm_num", 2, ValueError, "expected 1; it has no effect on data parallelism here"),
        ("build_strategy", object(), ValueError, "ParallelExecutor"),
        ("fuse_grad_size", 3, AttributeError, "no field 'fuse_grad_size'; did you mean 'fuse_grad_size_in_MB'"),
        ("fuse_grad_size_in_mb", 3, AttributeError, "did you mean 'fuse_grad_size_in_MB'"),
        ("zzzz", 3, AttributeError, "no field 'zzzz'$"),
    ],
)
def test_values_that_cannot_work_are_refused_on_assignment(strategy, name, value, error, text):
    with pytest.raises(error, match=text):
        setattr(strategy, name, value)
    assert strategy == fleet.DistributedStrategy()


def test_a_sync_is_accepted_since_it_changes_nothing(strategy):
    strategy.a_sync = False
    assert strategy.a_sync is False


def test_reading_an_unknown_field_suggests_a_known_one(strategy):
    with pytest.raises(AttributeError, match="did you mean 'gradient_merge'"):
        _ = strategy.gradient_merg


def test_the_text_names_every_supported_field(strategy):
    assert all(f"{name}=" in repr(strategy) for name in SUPPORTED)
    assert strategy != 3
