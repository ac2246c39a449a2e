"""ParallelExecutor: its arguments, the devices that it finds, and the strategies."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

from dpfuse import DPFuseError
from dpfuse.paddle import static
from tests.paddle.programs import Regression, executor, program_of, sharing, training_program

pytestmark = pytest.mark.usefixtures("two_devices")


def constructed(kind):
    program = training_program(Regression())
    test = program.clone(for_test=True)
    match kind:
        case "use_cuda":
            return static.ParallelExecutor(1, "loss", program)
        case "program":
            return static.ParallelExecutor(False, "loss", Regression())
        case "scope":
            return static.ParallelExecutor(False, "loss", program, scope={})
        case "loss unknown":
            return static.ParallelExecutor(False, "lost", program)
        case "loss is another":
            return static.ParallelExecutor(False, "y", program)
        case "loss is a parameter":
            return static.ParallelExecutor(False, "inner.weight", test)
        case "loss is a gradient":
            return static.ParallelExecutor(False, "y@GRAD", test)
        case "loss is a feed":
            return static.ParallelExecutor(False, "x", test)
        case "loss left out":
            return static.ParallelExecutor(False, main_program=program)
        case "share_vars_from":
            return static.ParallelExecutor(False, main_program=test, share_vars_from=static.Executor("cpu"))
        case "share another module":
            exe = executor(program)
            return static.ParallelExecutor(False, main_program=program_of(Regression()), share_vars_from=exe)
        case "share another scope":
            return static.ParallelExecutor(False, None, test, executor(program), scope=static.Scope())
        case "share other devices":
            exe = executor(program)
            os.environ["CPU_NUM"] = "3"
            return sharing(exe, program)
        case "exec_strategy":
            return executor(program, exec_strategy=static.BuildStrategy())
        case "build_strategy":
            return executor(program, build_strategy={})
        case "trainers":
            return executor(program, num_trainers=2)
        case "trainers not a number":
            return executor(program, num_trainers="2")
        case "no trainers":
            return executor(program, num_trainers=0)
        case "trainer_id":
            return executor(program, trainer_id=1)
        case "trainer_id not a number":
            return executor(program, trainer_id=False)
        case _:
            os.environ["CPU_NUM"] = kind
            return executor(program)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("use_cuda", TypeError, "use_cuda must be True or False, got 1"),
        ("program", TypeError, "program must be an instance of Program, got Regression"),
        ("scope", TypeError, "scope must be an instance of Scope, got dict"),
        ("loss unknown", ValueError, "loss_name 'lost' is no variable.*Did you mean 'loss'"),
        ("loss is another", ValueError, "loss_name is 'y', but the program minimises 'loss'"),
        ("loss is a parameter", ValueError, "loss_name 'inner.weight' is not computed by the program"),
        ("loss is a gradient", ValueError, "loss_name 'y@GRAD' is not computed"),
        ("loss is a feed", ValueError, "loss_name 'x' is not computed"),
        ("loss left out", ValueError, "loss_name is None, but the program minimises 'loss'.*for_test"),
        ("share_vars_from", TypeError, "share_vars_from must be an instance of ParallelExecutor, got Executor"),
        ("share another module", ValueError, "runs another program; expected a clone"),
        ("share another scope", ValueError, "scope is not the scope of share_vars_from"),
        ("share other devices", ValueError, "expected the same devices.*CPU_NUM"),
        ("exec_strategy", TypeError, "exec_strategy must be an instance of ExecutionStrategy, got BuildStrategy"),
        ("build_strategy", TypeError, "build_strategy must be an instance of BuildStrategy, got dict"),
        ("trainers", DPFuseError, "num_trainers=2 without a process group.*init_parallel_env"),
        ("trainers not a number", TypeError, "num_trainers must be an integer, got '2'"),
        ("no trainers", ValueError, "num_trainers must be at least 1, got 0"),
        ("trainer_id", ValueError, "trainer_id=1"),
        ("trainer_id not a number", TypeError, "trainer_id must be an integer"),
        ("0", ValueError, "CPU_NUM is '0'; expected the number of CPU devices"),
        ("two", ValueError, "CPU_NUM is 'two'"),
    ],
)
def test_wrong_arguments_of_the_constructor_are_named(kind, error, text):
    with pytest.raises(error, match=text):
        constructed(kind)


def test_without_cpu_num_there_is_one_device_and_one_hint(monkeypatch):
    monkeypatch.delenv("CPU_NUM")
    program = program_of(Regression())
    with pytest.warns(UserWarning, match="CPU_NUM is not set.*now 1") as caught:
        assert executor(program).device_count == 1
    assert len(caught) == 1
    assert os.environ["CPU_NUM"] == "1"
    assert executor(program).device_count == 1


def test_without_gpus_cuda_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no CUDA device is visible.*use_cuda=False"):
        static.ParallelExecutor(True, "loss", training_program(Regression()))


def test_defaults_are_the_current_program_and_scope():
    program = static.Program()
    with static.program_guard(program):
        y = nn.Linear(1, 1)(static.data("x", [None, 1]))
        exe = static.ParallelExecutor(use_cuda=False)
        assert exe.run([y], {"x": np.ones((2, 1), np.float32)})[0].shape == (2, 1)
        assert static.global_scope().find_var(f"{y.name}.weight") is not None
    assert exe.run([y], {"x": np.ones((2, 1), np.float32)})[0].shape == (2, 1)


def test_a_program_is_run_as_it_was_when_the_executor_was_made():
    program = static.Program()
    with static.program_guard(program):
        y = static.data("x", [None, 1]) * 2
        exe = static.ParallelExecutor(False)
        z = y + 1
    with pytest.raises(ValueError, match="no variable"):
        exe.run([z], {"x": np.ones((2, 1), np.float32)})


class TestPlaces:
    def test_cpu_devices(self):
        assert static.cpu_places() == [torch.device("cpu")] * 2
        assert static.cpu_places(3) == [static.CPUPlace()] * 3

    @pytest.mark.parametrize(("count", "error"), [(0, ValueError), ("2", TypeError), (True, TypeError)])
    def test_a_wrong_count_is_named(self, count, error):
        with pytest.raises(error, match="device_count must be"):
            static.cpu_places(count)

    @pytest.fixture
    def four_gpus(self, monkeypatch):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 4)

    @pytest.mark.usefixtures("four_gpus")
    def test_gpus(self, monkeypatch):
        monkeypatch.delenv("FLAGS_selected_gpus", raising=False)
        assert static.cuda_places() == [static.CUDAPlace(index) for index in range(4)]
        assert static.cuda_places([2, 0]) == [static.CUDAPlace(2), static.CUDAPlace(0)]
        monkeypatch.setenv("FLAGS_selected_gpus", "1, 3")
        assert static.cuda_places() == [static.CUDAPlace(1), static.CUDAPlace(3)]

    @pytest.mark.usefixtures("four_gpus")
    @pytest.mark.parametrize(
        ("ids", "selected", "text"),
        [
            ([4], "", r"device_ids is \[4\]; expected distinct indices from 0 to 3"),
            ([-1], "", r"device_ids is \[-1\]"),
            ([1, 1], "", r"device_ids is \[1, 1\]"),
            ([], "", r"device_ids is \[\]"),
            (None, "7", r"FLAGS_selected_gpus is \[7\]"),
            (None, "one", "FLAGS_selected_gpus is 'one'"),
        ],
    )
    def test_gpus_that_are_not_there_are_named(self, ids, selected, text, monkeypatch):
        monkeypatch.setenv("FLAGS_selected_gpus", selected)
        with pytest.raises(ValueError, match=text):
            static.cuda_places(ids)


class TestStrategies:
    @pytest.mark.parametrize(
        ("strategy", "name", "value", "error", "text"),
        [
            (static.ExecutionStrategy, "num_thread", 1, AttributeError, "'num_thread'. Did you mean 'num_threads'"),
            (static.ExecutionStrategy, "num_threads", -1, ValueError, "num_threads must be at least 0, got -1"),
            (static.ExecutionStrategy, "num_threads", "4", TypeError, "num_threads must be an integer, got '4'"),
            (static.ExecutionStrategy, "num_iteration_per_drop_scope", 0, ValueError, "must be at least 1, got 0"),
            (static.ExecutionStrategy, "num_iteration_per_run", 2, AttributeError, "num_iteration_per_run"),
            (static.BuildStrategy, "fuse_all_reduce", True, AttributeError, "Did you mean 'fuse_all_reduce_ops'"),
            (static.BuildStrategy, "fuse_all_reduce_ops", 1, TypeError, "fuse_all_reduce_ops must be a bool, got 1"),
            (static.BuildStrategy, "gradient_scale_strategy", 1, TypeError, "must be a BuildStrategy.Grad"),
            (static.BuildStrategy, "reduce_strategy", "Reduce", TypeError, "must be a BuildStrategy.ReduceStrategy"),
            (static.BuildStrategy, "sync_batch_norm", True, ValueError, "sync_batch_norm has no effect here, got True"),
            (static.BuildStrategy, "fuse_bn_add_act_ops", False, ValueError, "expected True, its default"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_set_says_why(self, strategy, name, value, error, text):
        with pytest.raises(error, match=text):
            setattr(strategy(), name, value)

    def test_defaults_are_paddles_and_can_be_set(self):
        build, execution = static.BuildStrategy(), static.ExecutionStrategy()
        assert (execution.num_threads, execution.num_iteration_per_drop_scope) == (0, 100)
        assert build.fuse_all_reduce_ops is True
        assert build.gradient_scale_strategy is static.BuildStrategy.GradientScaleStrategy.CoeffNumDevice
        assert build.reduce_strategy is static.BuildStrategy.ReduceStrategy.AllReduce
        build.sync_batch_norm = False
        build.memory_optimize = None
        build.fuse_all_reduce_ops = False
        assert repr(build) == "BuildStrategy(fuse_all_reduce_ops=False)"
        assert static.BuildStrategy().fuse_all_reduce_ops is True
