"""What acts inside the processes of a program that the doctor runs: the wrapper's class, the trace, and the end.

It is imported after `import torch`, which may be one of dpfuse's own imports. So it takes no name from `dpfuse`.
"""

from __future__ import annotations

import atexit
import inspect
import json
import logging
import multiprocessing
import os
import random
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from dpfuse.commands.doctor.call_notes import CallNotes
from dpfuse.commands.doctor.run_request import DONE, OVER, REQUEST, UNWRAPPED, RunRequest, all_done
from dpfuse.commands.own_wrappers import FACES, changes_numbers, for_torch, hear_constructors
from dpfuse.ddp.patch import TORCH_INTERNAL, Patch
from dpfuse.engine.optimizer_step_hook import call_after_steps
from dpfuse.engine.plan import MB
from dpfuse.engine.torch_private import LOADER_ITERATOR
from dpfuse.engine.user_line import INSIDE
from dpfuse.errors import DPFuseError
from dpfuse.findings import LOOP
from dpfuse.measure.communication_times import CommunicationTimes
from dpfuse.model.options import CommonOptions
from dpfuse.trace.attachment import start_tracer
from dpfuse.trace.finite import is_left_out
from dpfuse.trace.tracer import Tracer
from dpfuse.tune import Tuning, autotune
from dpfuse.wrapper import SyncedModule

__all__ = ["start"]

SEED = 20261126
LONGEST_WAIT = 60.0  # seconds for the other ranks at the end
LOOK = 0.5  # seconds between two looks whether another rank has ended
STUCK, GAPS = 5.0, 10  # a rank waits for ended ones after these seconds, and this often the longest step, without one
# How the paths of files begin that hold no state of a program.
NO_STATE = (*(os.path.join(os.path.realpath(path), "") for path in INSIDE if os.path.isabs(path)), "/proc/", "/sys/")
CODE = re.compile(r"DPF-\w+")  # with which a message begins
RECORDED = 5  # backwards that the tuner records with each plan
TORCH_CLASS: Any = nn.parallel.DistributedDataParallel  # whose constructor is replaced
LOADER: Any = DataLoader
SAMPLER: Any = DistributedSampler
# The orders that run dpfuse's classes, and arguments that these get then, unless the program passes them.
OURS: dict[str, CommonOptions] = {"dpfuse": {}, "narrow": {"wire_dtype": torch.bfloat16}, "tuned": {}}
SCALER: Any = torch.amp.GradScaler

_observer: _Observer | None = None


def start() -> None:
    """Act as the variable says. Called once torch is imported."""
    global _observer
    if _observer is None:
        _observer = _Observer(RunRequest(**json.loads(os.environ[REQUEST])))


class _Observer:
    """Acts in one process. What it learns it writes into the folder, at the end or when an exception ends the process.

    Args:
        request: of the doctor.
    """

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self._folder = Path(request.folder)
        self._tracer: Tracer | None = None
        self._wrappers: list[SyncedModule] = []  # ours
        self._replaceable = 0  # wrappers of torch's class itself, or of ours, which take each other's place
        self._derived: dict[str, None] = {}  # classes that derive from these
        self._own = False  # whether the program has written dpfuse's class itself
        self._numeric: dict[str, None] = {}  # its arguments with which numbers are not those of torch's class
        self._unwrapped: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # steps before a model is wrapped
        self._scaled: dict[int, dict[str, Any]] = {}  # by the id of an optimizer, which of its steps a scaler let pass
        self._times: list[CommunicationTimes] = []
        self._tunings: list[Tuning] = []
        self._said: dict[tuple[str, str], dict[str, str]] = {}
        self._samplers: list[_Sampler] = []
        self._passes: WeakKeyDictionary[Any, _Pass] = WeakKeyDictionary()  # by the iterator of a loader
        self._fed: _Pass | None = None  # the pass of the last batch
        self._read: dict[str, None] = {}
        self._written: set[str] = set()
        self._process = os.getpid()
        self._name = f"p{self._process}"  # the rank once it trains: its compilers inherit the variable RANK
        self._rank, self._size = 0, 1
        self._waits = 0  # the process whose thread waits for the others
        self._ends = threading.Lock()  # held by the thread that ends this process
        self._moved = time.monotonic()  # when a step was last made
        self._has_moved = False  # whether one was made
        self._longest = 0.0  # seconds between two steps
        self._seed()
        self._hear_warnings()
        self._hear_log()
        self._hear_exceptions()
        sys.addaudithook(self._hear_files)
        if LOADER_ITERATOR is not None:
            self._watch_loaders(LOADER_ITERATOR)
        self._watch_scalers()
        self._calls = CallNotes(lambda: self._tracer)
        self._watch_torch()
        hear_constructors(self._construct_ours)
        if request.wrapper in OURS:
            Patch({})  # classes that derive from torch's come to torch's constructor
        call_after_steps(self)
        if request.own_ranks:
            threading.Thread(target=self._end_behind_the_ranks, daemon=True).start()
        atexit.register(self._write_facts)

    def _seed(self) -> None:
        """Seed all generators, so that a program that seeds none can be compared with itself."""
        name = multiprocessing.current_process().name
        number = os.environ.get("RANK") or "".join(filter(str.isdigit, name)) or "0"
        seed = SEED + int(number)
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)

    def _watch_torch(self) -> None:
        """Trace what torch's class wraps; give it other buckets if the request says so."""
        construct = TORCH_CLASS.__init__
        signature = inspect.signature(construct)

        @wraps(construct)
        def traced(wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            inner = _caller().startswith(TORCH_INTERNAL)
            if self._request.wrapper == "torch buckets" and not inner:
                kwargs = signature.bind(wrapper, module, *args, **kwargs).arguments  # a size may come by its place
                kwargs["bucket_cap_mb"] = _an_eighth_of(module)
                kwargs.pop("bucket_cap_mb_list", None)
                construct(**kwargs)
            else:
                construct(wrapper, module, *args, **kwargs)
            if not inner:
                self._made(wrapper)

        TORCH_CLASS.__init__ = self._construct_torchs = traced

    def _construct_ours(
        self, plain: Callable[..., None], wrapper: Any, is_own: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """The constructor of dpfuse's classes: makes torch's where the request says so."""
        self._own |= is_own
        self._numeric |= dict.fromkeys(changes_numbers(kwargs))
        if self._request.wrapper in OURS or type(wrapper) not in FACES:
            options = OURS.get(self._request.wrapper, {})
            # A run goes on after a finding, so that all is seen.
            plain(wrapper, *args, **{"check_training": "warn", **options, **kwargs})
            self._made(wrapper)
            return
        object.__setattr__(wrapper, "__class__", TORCH_CLASS)  # as `patch()` does it the other way round
        self._construct_torchs(wrapper, **for_torch(plain, args, kwargs))

    def _made(self, wrapper: Any) -> None:
        if isinstance(wrapper, SyncedModule):
            self._wrappers.append(wrapper)
        if type(wrapper) not in (*FACES, TORCH_CLASS):
            self._derived.setdefault(type(wrapper).__name__)
        self._replaceable += type(wrapper) in (*FACES, TORCH_CLASS)
        if self._tracer is None:
            self._trains()
            self._tracer = start_tracer(
                self._folder,
                self._request.deep,
                self._after_step,
                sketch=self._size > 2,
                buffers=self._request.wrapper == "dpfuse",  # torch's class leaves them apart until the next forward
                finite=True,
            )
        self._tracer.add(wrapper)

    def _trains(self) -> None:
        """Note that this process is a rank, and which one. A rank may be a fork."""
        self._process = os.getpid()
        if dist.is_available() and dist.is_initialized():
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
        else:
            self._rank, self._size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self._name = str(self._rank)
        if self._waits != self._process:
            self._waits, self._moved = self._process, time.monotonic()
            threading.Thread(target=self._end_with_the_others, daemon=True).start()

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`: count where no model is wrapped, and so no tracer counts."""
        if id(optimizer) in self._scaled and is_left_out(optimizer):
            self._scaled[id(optimizer)]["made"][-1] = False  # this step may end the run
        if self._tracer is not None:
            return
        steps = self._unwrapped[optimizer] = self._unwrapped.get(optimizer, 0) + 1
        self._moves_without_line()
        if steps >= self._request.steps:
            self._end()

    def _moves_without_line(self) -> None:
        self._trains()
        self._moves()
        with open(self._folder / f"{UNWRAPPED}{self._rank}", "a") as file:
            file.write(".")

    def _moves(self) -> None:
        now = time.monotonic()
        if self._has_moved:  # before the first step the program starts and compiles, which takes longer
            self._longest = max(self._longest, now - self._moved)
        self._moved, self._has_moved = now, True

    @property
    def _patience(self) -> float:
        """Seconds without a step, after which this rank waits for ranks that have made all theirs."""
        return STUCK + GAPS * self._longest

    def _after_step(self, steps: int) -> None:
        self._moves()
        if self._fed is not None:
            self._fed.step()
            self._fed = None  # a step counts only directly after a batch
        if steps == self._request.deep and not self._times and self._request.wrapper == "dpfuse":
            for wrapper in self._wrappers:
                times = CommunicationTimes()
                wrapper._observe(times)
                self._times.append(times)
        if steps == self._request.deep and not self._tunings and self._request.wrapper == "tuned":
            self._tunings = [autotune(wrapper, RECORDED) for wrapper in self._wrappers]
        if steps >= self._request.steps:
            self._end()

    def _end(self) -> None:
        """End this process here, so that no code of the program after the loop saves or uploads anything."""
        if not self._ends.acquire(blocking=False):
            time.sleep(LONGEST_WAIT)  # the other thread does it
        self._write_facts()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # An ended rank closes its connections, and another one may still receive.
        draft = self._folder / f"ends{self._rank}"
        draft.write_text(str(self._size))
        draft.replace(self._folder / f"{DONE}{self._rank}")
        until = time.monotonic() + max(LONGEST_WAIT, 2 * self._patience)  # a rank that is behind ends itself by then
        while not all_done(self._folder) and time.monotonic() < until:
            time.sleep(0.01)
        while self._request.own_ranks and not self._is_over() and time.monotonic() < until:
            time.sleep(0.01)  # the process that has started this one would go on
        os._exit(0)

    def _is_over(self) -> bool:
        return (self._folder / OVER).exists() or not self._folder.exists()

    def _end_behind_the_ranks(self) -> None:
        """End a process that has started the ranks, or belongs to them, without the code after their end."""
        while not all_done(self._folder) and not self._is_over():
            time.sleep(LOOK / 5)
        if self._waits != os.getpid():
            self._write_facts()
            while not self._is_over():
                time.sleep(LOOK / 5)
            os._exit(0)

    def _end_with_the_others(self) -> None:
        """End this process once it waits for ranks that have ended: one that made fewer steps would wait for ever."""
        while not list(self._folder.glob(f"{DONE}*")) or time.monotonic() - self._moved < self._patience:
            time.sleep(LOOK)
        self._end()

    def _write_facts(self) -> None:
        if os.getpid() != self._process:
            return  # a fork, such as a worker of a loader
        for times in self._times:
            times.finish()
        facts = {
            "communication": [{"steps": one.steps, "collectives": one.collectives, "nbytes": one.nbytes,
                               "seconds": one.seconds, "exposed": one.exposed} for one in self._times],
            "tunings": [{"done": tuning.done, "error": tuning.error} for tuning in self._tunings],
            "findings": list(self._said.values()),
            "samplers": [{"epochs": one.epochs, "set": one.is_set} for one in self._samplers],
            "read": list(self._read),
            "unused": {} if self._tracer is None else self._tracer.unused(),
            "behind": 0 if self._tracer is None else self._tracer.since_step,
            "lines": {} if self._tracer is None else self._tracer.phases.lines,
            "replaceable": self._replaceable,
            "own": self._own,
            "evaluated": {} if self._tracer is None else self._tracer.evaluated,
            "numeric": list(self._numeric),
            "derived": list(self._derived),
            "scaled": list(self._scaled.values()),
            "unwrapped": max(self._unwrapped.values(), default=0),
        }  # fmt: skip
        draft = self._folder / f"draft{self._name}"  # the doctor may end this process meanwhile
        draft.write_text(json.dumps(facts), encoding="utf-8")
        draft.replace(self._folder / f"facts{self._name}.json")

    def _hear_warnings(self) -> None:
        """Note each warning of dpfuse, whatever filters the program has set."""
        plain = warnings.warn

        @wraps(plain)
        def warn(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
            if sys._getframe(1).f_globals.get("__name__", "").startswith("dpfuse."):
                kind = type(message) if isinstance(message, Warning) else category or UserWarning
                self._note("warning", kind.__name__, getattr(message, "code", ""), str(message))
            plain(message, category, stacklevel + 1, *args, **kwargs)

        warnings.warn = warn

    def _hear_log(self) -> None:
        """Note what the checks of the loop log, since it may be meant so."""
        LOOP.addHandler(_Notes(self._note))
        LOOP.setLevel(min(LOOP.getEffectiveLevel(), logging.INFO))

    def _hear_exceptions(self) -> None:
        plain = sys.excepthook

        def hear(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            code = getattr(error, "code", "") if isinstance(error, DPFuseError) else ""
            where = traceback.extract_tb(trace)
            place = f" ({os.path.basename(where[-1].filename)}:{where[-1].lineno})" if where else ""
            self._note("error", kind.__name__, code, f"{error}{place}")
            self._write_facts()
            plain(kind, error, trace)

        sys.excepthook = hear

    def _note(self, what: str, kind: str, code: str, text: str) -> None:
        self._said.setdefault((kind, text), {"what": what, "kind": kind, "code": code, "text": text})

    def _hear_files(self, event: str, args: tuple[Any, ...]) -> None:
        """Note which files the process reads that it has not written itself. It must not raise, and must be quick."""
        if event != "open" or not isinstance(args[0], str):
            return
        path, mode, flags = args
        try:
            path = os.path.realpath(path)  # a link may lead elsewhere in the next run
        except (OSError, ValueError):  # the working folder was removed; the path is none
            return
        writes = flags & (os.O_WRONLY | os.O_RDWR) if isinstance(flags, int) else bool(set(mode or "r") & set("wax+"))
        if writes:
            self._written.add(path)
        elif path not in self._written and not path.startswith(NO_STATE):
            self._read.setdefault(path)

    def _watch_loaders(self, kind: Any) -> None:
        """Time what the iterators of loaders do, of this class, and count the passes over samplers that shuffle."""
        plain_next, plain_iter, plain_set = kind.__next__, LOADER.__iter__, SAMPLER.set_epoch

        @wraps(plain_next)
        def timed(iterator: Any) -> Any:
            if self._tracer is None:
                return plain_next(iterator)
            with self._tracer.phases.inside("loader"):
                batch = plain_next(iterator)
            self._fed = self._passes.get(iterator)
            return batch

        @wraps(plain_iter)
        def begun(loader: Any) -> Any:
            iterator = plain_iter(loader)  # the same one in each pass where workers are persistent
            for sampler in (getattr(loader, "sampler", None), getattr(loader.batch_sampler, "sampler", None)):
                if isinstance(sampler, SAMPLER) and sampler.shuffle and sampler.num_replicas > 1:
                    self._passes[iterator] = _Pass(self._known(sampler), sampler.epoch)
            return iterator

        @wraps(plain_set)
        def set_epoch(sampler: Any, epoch: int) -> None:
            self._known(sampler).is_set = True
            plain_set(sampler, epoch)

        kind.__next__, LOADER.__iter__, SAMPLER.set_epoch = timed, begun, set_epoch

    def _watch_scalers(self) -> None:
        """Count the steps that a scaler makes and skips. One that skips all would not end the run otherwise."""
        plain = SCALER.step

        @wraps(plain)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return plain(scaler, optimizer, *args, **kwargs)
            facts = {"optimizer": type(optimizer).__name__, "made": []}
            made = self._scaled.setdefault(id(optimizer), facts)["made"]
            made.append(True)  # a step that is made may end the run
            result = plain(scaler, optimizer, *args, **kwargs)
            if any(found.item() for found in scaler._found_inf_per_device(optimizer).values()):
                made[-1] = False
                self._moves_without_line()
                if made.count(False) >= self._request.steps:
                    self._end()
            return result

        SCALER.step = step

    def _known(self, sampler: Any) -> _Sampler:
        for one in self._samplers:
            if one.sampler() is sampler:
                return one
        self._samplers.append(_Sampler(ref(sampler)))
        return self._samplers[-1]


@dataclass
class _Sampler:
    """How a sampler is used.

    Args:
        sampler: torch's.
        is_set: whether its `set_epoch` was called.
        epochs: that it had in passes from which the training got its batches.
    """

    sampler: ref[Any]
    is_set: bool = False
    epochs: list[int] = field(default_factory=list)


@dataclass
class _Pass:
    """One pass over a sampler.

    Args:
        sampler: is told of the pass once it counts.
        epoch: that the sampler has.
        steps: that came directly after one of its batches. The second one counts the pass. One may have its batch from
            before: a program may fetch the next batch of its training, and then validate.
    """

    sampler: _Sampler
    epoch: int
    steps: int = 0

    def step(self) -> None:
        """Count a step."""
        self.steps += 1
        if self.steps == 2:
            self.sampler.epochs.append(self.epoch)


class _Notes(logging.Handler):
    """Passes on what is logged.

    Args:
        note: gets what it is, its kind, its code and its text.
    """

    def __init__(self, note: Callable[[str, str, str, str], None]) -> None:
        super().__init__()
        self._pass_on = note

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging.Handler.emit`."""
        text = record.getMessage()
        code = CODE.match(text)
        self._pass_on("log", record.name, code[0] if code else "", text)


def _caller() -> str:
    """Return the name of the module that makes a wrapper, two calls above; that of `patch()` passes calls on."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") == Patch.__module__ and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _an_eighth_of(module: nn.Module) -> float:
    """Return a size in MB, of which the gradients of a module fill about eight."""
    nbytes = sum(param.numel() * param.element_size() for param in module.parameters() if param.requires_grad)
    return max(nbytes / MB / 8, 1e-5)
