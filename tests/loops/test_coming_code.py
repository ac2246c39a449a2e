"""What the source of a program says about what it may still do."""

from __future__ import annotations

import ast
import sys
from contextlib import nullcontext
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist

import dpfuse
from dpfuse.loop import model as model_module
from dpfuse.loop.coming_averages import weights_may_be_averaged
from dpfuse.loop.coming_code import UnknownCodeError, coming_code, running_lines
from dpfuse.loop.coming_steps import may_step
from tests.loops.nets import batches, loss_of, mlp

AVERAGES = []  # what `look` has seen
STEPS = []
MADE = {}  # where the model was made


def look(waiting=()):
    """What a step would ask of the code around it."""
    AVERAGES.append(weights_may_be_averaged(sys._getframe(), {**MADE}))
    STEPS.append(may_step(sys._getframe(), {**MADE}, waiting))


@pytest.fixture(autouse=True)
def _forget():
    AVERAGES.clear()
    STEPS.clear()
    MADE.clear()


def mean_of(tensor):
    dist.all_reduce(tensor)
    return tensor / 2


def average(params):
    for one in params:
        one.data = mean_of(one.data)


def log(loss, optimizer):
    if sys.flags.interactive:
        dist.all_reduce(loss)
        optimizer.zero_grad()


NEVER = bool(sys.flags.interactive)  # the code is read, and does not run


def before_the_loop(model):
    if NEVER:
        average(model.parameters())
    for _ in range(1):
        look()


def in_the_loop(model):
    for _ in range(1):
        look()
        if NEVER:
            average(model.parameters())


def in_a_loop_around(model):
    for _ in range(1):
        with nullcontext():
            before_the_loop(model)


def behind_the_loop(model):
    with nullcontext():
        try:
            for _ in range(1):
                look()
        finally:
            if NEVER:
                flat = torch.cat([each.flatten() for each in model.state_dict().values()])
                dist.broadcast(flat, 0)


def only_a_loss(model):
    for _ in range(1):
        loss = torch.zeros(())
        look()
        log(loss, torch.optim.SGD(model.parameters()))
        if NEVER:
            dist.all_reduce(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            dist.barrier()


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (before_the_loop, False),
        (in_the_loop, True),
        (in_a_loop_around, True),
        (behind_the_loop, True),
        (only_a_loss, False),
    ],
)
def test_an_average_of_weights_is_found_where_it_may_still_run(program, found):
    program(mlp())
    assert [found] == AVERAGES


def test_nothing_is_concluded_from_code_that_cannot_be_read():
    names = {"look": look}
    exec("def program():\n    look()\n", names)
    code = "import sys\ndef frame():\n    return sys._getframe()\n"
    exec(code, names)
    with pytest.raises(UnknownCodeError):
        coming_code(names["frame"](), {})
    assert weights_may_be_averaged(names["frame"](), {})
    optimizer = torch.optim.SGD(mlp().parameters())
    assert may_step(names["frame"](), {}, [optimizer])
    assert not may_step(names["frame"](), {}, [])


def step_of_a_library(model):
    look()


def test_nothing_is_concluded_where_no_loop_of_the_user_is_around():
    """The loop is that of a library, which may call other functions of the user between two steps."""
    step_of_a_library(mlp())
    assert AVERAGES == [True]


def makes_one_model_after_the_other():
    for _ in range(1):
        model = mlp()
        MADE.update(running_lines(sys._getframe()))
        if NEVER:
            average(model.parameters())
        only_a_loss(model)
    if NEVER:
        average(mlp().parameters())


def makes_a_model():
    model = mlp()
    MADE.update(running_lines(sys._getframe()))
    if NEVER:
        average(model.parameters())
    only_a_loss(model)


def makes_a_model_each_time():
    for _ in range(1):
        makes_a_model()


def epoch_in_the_frame_of_a_function_that_made_a_model():
    MADE[id(sys._getframe()), mlp.__code__] = 1
    for _ in range(1):
        look()


def test_the_frame_of_another_function_with_the_same_id_made_no_model():
    model = mlp()
    for _ in range(1):
        epoch_in_the_frame_of_a_function_that_made_a_model()
        if NEVER:
            average(model.parameters())
    assert AVERAGES == [True]


@pytest.mark.parametrize("program", [makes_one_model_after_the_other, makes_a_model_each_time])
def test_what_is_done_with_the_next_model_does_not_come_for_this_one(program):
    program()
    assert AVERAGES == [False]


def test_a_frame_around_that_cannot_be_read_is_passed_over():
    """As that of `python -c`, which starts the processes of torch.multiprocessing."""
    names = {"only_a_loss": only_a_loss, "mlp": mlp}
    exec("def starts():\n    only_a_loss(mlp())\n", names)
    names["starts"]()
    assert AVERAGES == [False]


def rounds(rank, size, period):
    """Rounds of local steps, each with an optimizer of its own, and an average of the weights behind them."""
    reads, read = [], model_module.weights_may_be_averaged
    wrapped = dpfuse.DistributedDataParallel(mlp())
    with patch.object(model_module, "weights_may_be_averaged", lambda *args: reads.append(0) or read(*args)):
        for task in range(3):
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
            for x, y in batches(rank, period, task):
                with wrapped.no_sync():
                    loss_of(wrapped(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            average(wrapped.parameters())
    return len(reads)


def test_a_program_that_averages_weights_is_read_once(ranks):
    assert ranks(rounds, 24) == [1, 1]


@pytest.mark.parametrize(("fails", "found"), [(1, False), (2, True)])
def test_a_parser_that_fails_is_asked_again_and_then_nothing_is_concluded(fails, found):
    answers = [SystemError("AST constructor recursion depth mismatch")] * fails
    parse = ast.parse
    with patch.object(ast, "parse", lambda source: raise_or(answers, lambda: parse(source))):
        only_a_loss(mlp())
    assert [found] == AVERAGES


def raise_or(errors, call):
    if errors:
        raise errors.pop()
    return call()


def test_reading_keeps_no_local_name_alive():
    def program():
        for _ in range(1):
            large = torch.ones(3)
            kept = ref(large)
            look()
            del large
            return kept() is None

    assert program()
    assert AVERAGES == [False]


def test_reading_leaves_a_dict_that_others_have():
    """As a debugger has it; `locals()` itself is seen in the source."""

    def program(kept):
        mine = 3
        kept.append(sys._getframe().f_locals)
        for _ in range(1):
            look()
        return mine

    kept = []
    assert program(kept) == 3
    assert kept[0]["mine"] == 3
    assert AVERAGES == [False]


def steps_of_one(optimizers, schedule):
    for _ in range(1):
        look(optimizers[1:])
        if NEVER:
            optimizers[0].step()
            schedule.step()


def steps_later(optimizers, schedule):
    for step in range(1):
        look(optimizers[1:])
        if NEVER and step > 30:
            optimizers[1].step()


def steps_of_all(optimizers, schedule):
    for _ in range(1):
        look(optimizers[1:])
        for optimizer in optimizers if NEVER else ():
            optimizer.step()


def steps_of_a_scaler(optimizers, schedule):
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(1):
        look(optimizers[1:])
        if NEVER:
            scaler.step(optimizers[1])


def a_group_is_added(optimizers, schedule):
    for _ in range(1):
        look()
        if NEVER:
            optimizers[0].add_param_group({"params": []})


def an_optimizer_is_made(optimizers, schedule):
    for _ in range(1):
        look()
        if NEVER:
            optimizers[0] = torch.optim.SGD([])


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (steps_of_one, False),
        (steps_later, True),
        (steps_of_all, True),
        (steps_of_a_scaler, True),
        (a_group_is_added, True),
        (an_optimizer_is_made, True),
    ],
)
def test_a_step_of_a_waiting_optimizer_is_found(program, found):
    layers = mlp()
    optimizers = [torch.optim.SGD(layers[place].parameters()) for place in (0, 2)]
    program(optimizers, torch.optim.lr_scheduler.ConstantLR(optimizers[0]))
    assert [found] == STEPS
