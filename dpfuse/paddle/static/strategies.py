"""ExecutionStrategy and BuildStrategy: the settings of ParallelExecutor."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from dpfuse.arguments import integer
from dpfuse.paddle.static.names import suggestion

__all__ = ["BuildStrategy", "ExecutionStrategy"]

# Settings that only Paddle has, with Paddle's defaults. They may be read, and set to their defaults.
WITHOUT_EFFECT: dict[str, Any] = {
    "build_cinn_pass": False,
    "debug_graphviz_path": "",
    "enable_auto_fusion": False,
    "enable_sequential_execution": False,
    "fuse_adamw": False,
    "fuse_all_optimizer_ops": False,
    "fuse_bn_act_ops": False,
    "fuse_bn_add_act_ops": True,
    "fuse_broadcast_ops": False,
    "fuse_dot_product_attention": False,
    "fuse_elewise_add_act_ops": False,
    "fuse_gemm_epilogue": False,
    "fuse_relu_depthwise_conv": False,
    "fuse_resunit": False,
    "fused_attention": False,
    "fused_feedforward": False,
    "memory_optimize": None,
    "sequential_run": False,
    "sync_batch_norm": False,
}


class _Settings:
    """A fixed set of attributes. Each assignment is checked."""

    _defaults: dict[str, Any]

    def __init__(self) -> None:
        self.__dict__.update(self._defaults)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._defaults:
            raise AttributeError(
                f"{type(self).__name__} has no setting {name!r}. {suggestion(name, self._defaults)}",
                name=name,
                obj=self,
            )
        self._check(name, value)
        self.__dict__[name] = value

    def _check(self, name: str, value: Any) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        changed = (f"{name}={value}" for name, value in self.__dict__.items() if value != self._defaults[name])
        return f"{type(self).__name__}({', '.join(changed)})"


class ExecutionStrategy(_Settings):
    """How `ParallelExecutor` runs.

    Attributes:
        num_threads: number of devices that run at the same time; 0 means all. With 1 they run one after the other,
            which makes random operations on CPU devices repeatable.
        num_iteration_per_drop_scope: after every so many runs, the intermediate values and gradients of the last run
            are released.

    Raises:
        AttributeError: Another attribute is set.
        TypeError, ValueError: A value is no integer, or too small.

    Example:
        >>> from dpfuse.paddle import static
        >>> strategy = static.ExecutionStrategy()
        >>> strategy.num_threads = 1
        >>> strategy
        ExecutionStrategy(num_threads=1)
    """

    num_threads: int
    num_iteration_per_drop_scope: int

    _defaults = {"num_threads": 0, "num_iteration_per_drop_scope": 100}  # noqa: RUF012 - never written to

    def _check(self, name: str, value: Any) -> None:
        integer(name, value, 0 if name == "num_threads" else 1)


class BuildStrategy(_Settings):
    """How `ParallelExecutor` averages gradients.

    Attributes:
        fuse_all_reduce_ops: True sends the gradients of several parameters in one buffer, False each alone.
        gradient_scale_strategy: the gradient of the loss on each device. `GradientScaleStrategy.CoeffNumDevice` is
            1 / number of devices, which gives the mean. `One` is 1, which gives the sum. `Customized` is the fed value
            of `LOSS@GRAD`, one per device.
        reduce_strategy: `ReduceStrategy.AllReduce` or `Reduce`. With both, every device updates all parameters, which
            gives the same result.

    Settings of Paddle that have no effect here raise when they are set to another value than their default.

    Raises:
        AttributeError: There is no such setting.
        TypeError: A value has another type.
        ValueError: The setting has no effect here.

    Example:
        >>> from dpfuse.paddle import static
        >>> strategy = static.BuildStrategy()
        >>> strategy.gradient_scale_strategy = static.BuildStrategy.GradientScaleStrategy.One
        >>> strategy.gradient_scale_strategy.name
        'One'
    """

    class GradientScaleStrategy(Enum):
        """The gradient of the loss on each device."""

        CoeffNumDevice = auto()  # 1 / number of devices: the gradients are means
        One = auto()  # 1: the gradients are sums
        Customized = auto()  # the fed value of LOSS@GRAD

    class ReduceStrategy(Enum):
        """How Paddle distributes the work of the update; the result is the same."""

        AllReduce = auto()  # every device updates every parameter
        Reduce = auto()  # in Paddle, every device updates some parameters and sends them

    fuse_all_reduce_ops: bool
    gradient_scale_strategy: GradientScaleStrategy
    reduce_strategy: ReduceStrategy

    _defaults = {  # noqa: RUF012 - never written to
        "fuse_all_reduce_ops": True,
        "gradient_scale_strategy": GradientScaleStrategy.CoeffNumDevice,
        "reduce_strategy": ReduceStrategy.AllReduce,
        **WITHOUT_EFFECT,
    }

    def _check(self, name: str, value: Any) -> None:
        default = self._defaults[name]
        if name in WITHOUT_EFFECT:
            if value != default:
                raise ValueError(
                    f"BuildStrategy.{name} has no effect here, got {value!r}; expected {default!r}, its default. Leave "
                    "it out."
                )
        elif not isinstance(value, type(default)):
            raise TypeError(f"BuildStrategy.{name} must be a {type(default).__qualname__}, got {value!r}")
