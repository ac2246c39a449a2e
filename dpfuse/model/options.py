"""What a wrapper was asked for. Each option that both wrappers take is declared here, and nowhere else.

Knows no module and no process group.
"""

from __future__ import annotations

import inspect
import os
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Any, Literal, TypedDict, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch

from dpfuse.arguments import flag, real
from dpfuse.engine.averaging import Wire, averaging_for
from dpfuse.engine.plan import NO_WISHES, BucketPlan, BucketRule
from dpfuse.exclusions import refuse
from dpfuse.model.plan_file import RULES, given_plan

__all__ = [
    "CommonOptions",
    "SyncOptions",
    "check_names",
    "check_values",
    "filled",
    "siblings",
    "takes_common_options",
]

Face = TypeVar("Face", bound=type)
WIDTH = 112  # columns of a docstring
SAME = (  # what these call the same: DataParallel and DistributedDataParallel, or replicate and the latter
    ("layers", "module"),
    ("group", "process_group"),
    ("comm_buffer_size", "bucket_cap_mb"),
    ("broadcast_buffers", "forward_sync_buffers"),
    ("mesh", "device_mesh"),
)


@dataclass(frozen=True)
class Option:
    """The declaration of one option.

    Args:
        text: what it does, for the docstrings of the wrappers.
        check: raises TypeError or ValueError for a value that cannot be used; gets the option's name and the value.
        other_defaults: by the name of a wrapper, where its default differs.
    """

    default: Any
    text: str
    check: Callable[[str, Any], object] = lambda name, value: None
    other_defaults: Mapping[str, Any] = field(default_factory=dict)

    def default_of(self, face: type) -> Any:
        """Return the default of a wrapper."""
        return self.other_defaults.get(face.__name__, self.default)


def _count_or(*others: bool | None, remedy: str) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if any(value is other for other in others) or (is_number and value >= 1):
            return
        listed = ", ".join(map(str, others))
        raise (ValueError if is_number else TypeError)(
            f"{name} must be {listed} or a whole number of at least 1, got {value!r} of type {type(value).__name__}; "
            f"for example {name}={remedy}"
        )

    return check


def _one_of(*choices: str, remedy: str) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if value not in choices:
            quoted = [repr(choice) for choice in choices]
            listed = " or ".join(quoted) if len(quoted) == 2 else f"one of {', '.join(quoted)}"
            raise ValueError(f"{name} must be {listed}, got {value!r}; {remedy}")

    return check


def _seconds(name: str, value: Any) -> None:
    real(name, value, "a number of seconds", f"pass for example {name}=60.0")
    if not value > 0:
        raise ValueError(f"{name} must be > 0 s, got {value!r}; float('inf') waits for silent ranks for ever")


def _wire(name: str, value: Any) -> None:
    Wire.of(value)


def _rule_or_plan(name: str, value: Any) -> None:
    given_plan(value)


class CommonOptions(TypedDict, total=False):
    """The options of both wrappers. To add one, declare it here and read it where it has an effect."""

    wire_dtype: Annotated[
        torch.dtype | tuple[torch.dtype, torch.dtype] | None,
        Option(
            None,
            "the dtype in which gradients travel: torch.float16, torch.bfloat16, torch.float32, or, with a scale for "
            "each block of 32, torch.float8_e4m3fn or torch.float8_e5m2. None is their own, which float64 always "
            "keeps. `.grad` keeps the parameter's dtype, and is private where another one travels. Values are scaled "
            "in float32 and rounded once before the sum. A dtype alone is added up by an all-reduce, which rounds "
            "after each addition. A pair such as (torch.bfloat16, torch.float32) sends the first, and adds up in "
            "float32 in the order of the ranks, with one rounding: as many bytes, by all-to-all and all-gather. "
            "float8 is always added up so.",
            _wire,
        ),
    ]
    error_feedback: Annotated[
        bool,
        Option(
            False,
            "True adds what rounding to `wire_dtype` takes from a gradient to the next one, so that over many steps "
            "nothing is lost. It costs 4 bytes per parameter. Save `model.error_feedback` with a checkpoint.",
            flag,
        ),
    ]
    check_finite: Annotated[
        Literal["off", "warn", "raise"],
        Option(
            "off",
            '"raise" makes it an error on every rank if a rank sends a gradient with NaN or infinite values, "warn" a '
            "warning on that rank. Both name parameters, how many values, and the step. On the CPU that happens in "
            "that backward; on a GPU, without waiting for it, by the end of the next.",
            _one_of("off", "warn", "raise", remedy='pass "raise" to hear of them, or leave it out to send them unseen'),
        ),
    ]
    check: Annotated[
        str,
        Option(
            "deferred",
            'when a failure of another rank raises where gradients are on a GPU. "deferred" is at the end of the next '
            'backward at the latest, and until then this one\'s gradients are NaN. "strict" waits for the GPU in each '
            "backward and raises in the same one. On the CPU that is always so.",
            _one_of("deferred", "strict", remedy="strict waits for the GPU in each backward"),
        ),
    ]
    check_training: Annotated[
        Literal["raise", "warn", "log", "off"],
        Option(
            "raise",
            "what becomes of a finding about a training in which no rank fails: weights that differ between ranks "
            "after a step, local gradients in a step, the same batches on all ranks, learning rates or modes that "
            'differ. "raise" makes the first two an error of `backward()` on every rank, and warns of the rest. "warn" '
            'warns of all, "log" writes all into the logs `dpfuse.weights` and `dpfuse.loop`. In each case the log '
            "`dpfuse.slow` tells which rank keeps the others waiting, in which phase of a step, and since when. "
            '"off" looks at nothing. Each step hashes a small part of the weights, and some bits travel with the '
            "gradients; no collective is added.",
            _one_of("raise", "warn", "log", "off", remedy='leave it out to hear of what is wrong, or pass "off"'),
            {"DistributedDataParallel": "warn"},
        ),
    ]
    deterministic: Annotated[
        bool,
        Option(
            False,
            "True adds up in the order of the ranks, in float32 (float64 for float64), and rounds once. The bits of a "
            "gradient then depend neither on the buffer sizes nor on what else is in its bucket. Buckets keep the "
            "order of registration. It costs time where all-to-all is slower than all-reduce.",
            flag,
        ),
    ]
    fixed_micro_batches: Annotated[
        int | None,
        Option(
            None,
            "the number of micro-batches in each step, on any number of ranks. `micro_batches()` deals them. Their "
            "gradients are added in one fixed binary tree in float32 and divided by their number, so weights have the "
            "same bits on 1, 2, 3 or more ranks of one kind of machine. torch then computes with one thread, or with "
            "`DPFUSE_THREADS`. Layers whose statistics depend on the rank, such as BatchNorm, are refused.",
            _count_or(None, remedy="8 is right for 1 to 8 ranks"),
        ),
    ]
    accumulate_in_buckets: Annotated[
        bool,
        Option(
            False,
            "True adds gradients up in the communication buffers while backwards inside `no_sync()` run, in float32 "
            "for 16-bit parameters too, and leaves None in `.grad` until the synchronised one. A window of batches "
            "then needs hardly any memory for gradients beside the buffers. `optimizer.zero_grad()` cannot see what "
            "is there: `zero_grad()` or `discard_accumulated()` of the wrapper drops a window.",
            flag,
        ),
    ]
    metrics: Annotated[
        bool | int,
        Option(
            False,
            "True measures each synchronised backward for `metrics()`: times, bytes, norm, and the gradient noise "
            "scale. That reads the gradients twice more. A number n measures every n-th one, and the rest cost "
            "nothing.",
            _count_or(True, False, remedy="20 measures every 20th synchronised backward"),
        ),
    ]
    plan: Annotated[
        Literal["ramp", "greedy", "auto"] | BucketPlan | str | os.PathLike[str],
        Option(
            "ramp",
            "how gradients are put into buckets after the first synchronised backward, which shows their order. "
            '"ramp" makes the first and the last bucket small and those between them a fifth of the model, or a '
            'quarter on CPUs, within the sizes that were passed. "greedy" fills each bucket up to its size, as before '
            "that backward. Models of less than 512 KB, or 4 MB on a CPU, are always cut like that. "
            '"auto" begins as "ramp" and calls `dpfuse.autotune`, which measures some backwards and chooses buckets '
            "of any size; its result is in `tuning`. A `BucketPlan`, or the path of a file that `plan.save()` wrote, "
            "gives the buckets themselves, from the first backward on.",
            _rule_or_plan,
        ),
    ]
    stall_timeout: Annotated[
        float,
        Option(
            60.0,
            "seconds without a sign of life of a rank, or with all ranks stuck, after which waiting ranks raise an "
            "error; `inf` waits for ever. A rank that is alive is waited for as long as it takes.",
            _seconds,
        ),
    ]


siblings: list[Callable[..., Any]] = []  # the wrappers, and functions that take their options
_DECLARED: dict[str, Option] = {
    name: get_args(hint)[1] for name, hint in get_type_hints(CommonOptions, include_extras=True).items()
}


def _type_text(name: str) -> str:
    """Return the type of an option as a source would have it, the same in every version of Python."""
    hint = get_type_hints(CommonOptions)[name]
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return " | ".join("None" if part is type(None) else inspect.formatannotation(part) for part in parts)


def filled(options: CommonOptions, face: type) -> CommonOptions:
    """Return these options of a wrapper, and the defaults of all others.

    Raises:
        TypeError: there is no such option.

    Example:
        >>> from dpfuse import DataParallel
        >>> from dpfuse.model.options import filled
        >>> filled({"deterministic": True}, DataParallel)["stall_timeout"]
        60.0
    """
    for name in options:
        if name not in _DECLARED:
            raise TypeError(f"{face.__name__}() got an unexpected keyword argument {name!r}{_hint(name, face)}")
    return cast(CommonOptions, {name: option.default_of(face) for name, option in _DECLARED.items()} | options)


def check_names(options: CommonOptions, caller: str, face: type) -> None:
    """Raise TypeError for what is none of these options, which `caller` keeps for wrappers that are made later."""
    known = inspect.signature(face).parameters
    for name in options:
        if name not in _DECLARED:
            own = name if name in known else _called_here(name, known)
            hint = f"; pass {own} where the model is wrapped" if own else _nearest(name, list(_DECLARED))
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")


def check_values(options: CommonOptions) -> None:
    """Raise TypeError or ValueError for a value of one of these options that cannot be used; the text names it."""
    for name, value in options.items():
        _DECLARED[name].check(name, value)


def _hint(name: str, face: type) -> str:
    """Say what may be meant by an argument that a wrapper does not have."""
    known = list(inspect.signature(face).parameters)
    for other in siblings:
        parameter = inspect.signature(other).parameters.get(name)
        if parameter is not None and parameter.kind is not parameter.VAR_KEYWORD:
            here = _called_here(name, known)
            remedy = f"here it is {here}" if here else f"leave it out, or use dpfuse.{other.__name__}"
            return f", which is one of {other.__name__}; {remedy}"
    return _nearest(name, known)


def _called_here(name: str, known: Iterable[str]) -> str | None:
    """Return what this wrapper calls an argument of the other one, if it has one like it."""
    return next((each for pair in SAME if name in pair for each in pair if each in known and each != name), None)


def _nearest(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}" if close else f"; expected one of {', '.join(known)}"


def takes_common_options(face: Face) -> Face:
    """Show the options, which the class takes as `**options`, in its signature and in its docstring's `Args`."""
    siblings.append(face)
    construct: Any = vars(face)["__init__"]
    signature = inspect.signature(construct)
    kept = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=option.default_of(face), annotation=_type_text(name)
        )
        for name, option in _DECLARED.items()
    ]
    construct.__signature__ = signature.replace(parameters=[*kept, *added])
    del construct.__annotations__["options"]  # for tools that read types, too, each option is an argument
    construct.__annotations__ |= get_type_hints(CommonOptions)
    if face.__doc__ is None:  # python -OO
        return face
    texts = [
        textwrap.fill(f"{name}: {option.text}", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, option in _DECLARED.items()
    ]
    before, raises, after = inspect.cleandoc(face.__doc__).partition("\n\nRaises:")
    assert raises, f"{face.__name__}: the docstring has no section of errors after its arguments"
    face.__doc__ = "\n".join([before, *texts]) + raises + after
    return face


@dataclass(frozen=True)
class SyncOptions:
    """The wrapper's options; sizes in MB of 1048576 bytes. Their meaning is documented where users pass them."""

    comm_buffer_size: float | None  # None begins with `DEFAULT_SIZE`, and is larger later where that is best
    last_comm_buffer_size: float
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    broadcast_buffers: bool
    common: CommonOptions = field(hash=False)
    gradient_scale: float | None = None
    reduce_dtype: torch.dtype | None = None  # mixed_precision's word for wire_dtype
    forward_dtype: torch.dtype | None = None  # in which the module computes; None is that of its parameters
    ignored: frozenset[str] = frozenset()  # parameters and buffers to leave alone, by name
    send_buffers_at_start: bool = True
    rule: BucketRule = NO_WISHES  # for the buckets
    seed: int = 0  # of fixed micro-batches, that of rank 0; the wrapper finds out
    steps: int = 0  # of fixed micro-batches that are done; a copy goes on from there
    threads: int = 0  # with which fixed micro-batches are computed; the wrapper sets it
    registered: bool = False  # whether buckets lie in memory that the back end has registered; the wrapper finds out

    def check(self) -> None:
        """Raises TypeError or ValueError for a value that cannot be used; the planner checks the sizes."""
        common = self.common
        if isinstance(self.comm_buffer_size, str):
            raise TypeError(
                f"comm_buffer_size must be a number of MB or None, got {self.comm_buffer_size!r} of type str; "
                "pass for example comm_buffer_size=25"
            )
        for name in ("find_unused_parameters", "gradient_as_bucket_view", "broadcast_buffers"):
            flag(name, getattr(self, name))
        check_values(common)
        try:
            averaging_for("float32", 1, self.gradient_scale)
        except (TypeError, ValueError) as error:
            raise type(error)(f"gradient_{error}") from None  # there the argument is called scale
        if self.gradient_scale is not None and not 1e-6 <= abs(self.gradient_scale) <= 1e6:
            raise ValueError(
                f"gradient_scale must be between 1e-6 and 1e6, or between -1e6 and -1e-6, got {self.gradient_scale!r}; "
                "beyond that 16-bit gradients vanish or overflow. Scale the loss, or leave it out for the mean."
            )
        wire_dtype = common["wire_dtype"]
        if common["error_feedback"] and not self.wire.narrows:
            raise ValueError(
                f"error_feedback=True was passed with wire_dtype={wire_dtype!r}, expected a narrow wire: nothing "
                "is rounded away that could be sent later. Pass for example wire_dtype=torch.bfloat16, or leave "
                "error_feedback out."
            )
        in_use = self.in_use
        for name, words in in_use.items():
            refuse(name, f"{words} was passed with", in_use, ValueError)

    def facts(self) -> dict[str, Any]:
        """Return all options by name, for the comparison with the other ranks."""
        facts = asdict(self)
        common: dict[str, Any] = facts.pop("common")
        threads = facts.pop("threads")
        common = common | ({"DPFUSE_THREADS": threads} if threads else {})
        given = {} if self.follows_rule else {"plan": "given"}  # its buckets are compared, and not where it comes from
        return common | given | facts

    def with_plan_read(self) -> SyncOptions:
        """Return the options with the plan itself in place of its file, which may change or go.

        Raises:
            TypeError, ValueError: as `given_plan`.
        """
        plan = given_plan(self.common["plan"])
        return self if plan is None else replace(self, common=self.common | {"plan": plan})

    @property
    def follows_rule(self) -> bool:
        """Whether buckets are made by a rule, and not given."""
        return self.common["plan"] in RULES

    @property
    def autotune(self) -> bool:
        """Whether the buckets of the rule are only those to begin with."""
        return self.common["plan"] == "auto"

    @cached_property
    def wire(self) -> Wire:
        """How gradients travel: the one type that all parts of the library take for it."""
        common = self.common
        needed = torch.float32 if common["accumulate_in_buckets"] else None
        return Wire.of(common["wire_dtype"] or self.reduce_dtype or needed)

    @property
    def micro_batches(self) -> int | None:
        """The fixed number of micro-batches in a step, if there is one."""
        return self.common["fixed_micro_batches"]

    @property
    def strict(self) -> bool:
        """Whether to wait in each backward for what the peers report."""
        return self.common["check"] == "strict"

    @property
    def wants_params_alone(self) -> bool:
        """Whether another wrapper of the same parameters would spoil what this one does."""
        common = self.common
        takes = common["accumulate_in_buckets"] or self.micro_batches is not None
        return self.gradient_scale is not None or takes

    @property
    def in_use(self) -> dict[str, str]:
        """What these options ask for of what `dpfuse.exclusions` names, in words."""
        common, wire, reduce_dtype = self.common, self.wire, f"reduce_dtype={self.reduce_dtype} of mixed_precision"
        wire_dtype = f"wire_dtype={common['wire_dtype']}"
        travels = reduce_dtype if common["wire_dtype"] is None else wire_dtype
        in_use = {
            name: f"{name}={value!r}"
            for name, value in common.items()
            if name != "plan" and value != _DECLARED[name].default
        }
        others = [
            ("find_unused_parameters", self.find_unused_parameters, "find_unused_parameters=True"),
            ("broadcast_buffers", self.broadcast_buffers, "broadcast_buffers=True"),
            ("gradient_scale", self.gradient_scale is not None, f"gradient_scale={self.gradient_scale}"),
            ("check_finite raises", common["check_finite"] == "raise", "check_finite='raise'"),
            ("mixed_precision", self.forward_dtype is not None, "mixed_precision"),
            ("given plan", not self.follows_rule, "a plan"),
            ("bucket_cap_mb_list", bool(self.rule.caps), "bucket_cap_mb_list"),
            ("auto", self.autotune, 'plan="auto"'),
            ("bucket rule", self.rule != NO_WISHES, "bucket_cap_mb_list or delay_all_reduce_named_params"),
            ("wire", common["wire_dtype"] is not None, wire_dtype),
            ("another reduce_dtype", self.reduce_dtype not in (None, _travelling(common["wire_dtype"])), reduce_dtype),
            ("narrow wire", wire.narrows, travels),
            ("float8 wire", wire.is_fp8, travels),
        ]
        return in_use | {name: words for name, holds, words in others if holds}


def _travelling(wire_dtype: torch.dtype | tuple[torch.dtype, torch.dtype] | None) -> torch.dtype | None:
    """Return the dtype that travels: the first of a pair."""
    return wire_dtype[0] if isinstance(wire_dtype, tuple) else wire_dtype
