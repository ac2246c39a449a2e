"""The list of faults: what is done, and what dpfuse owes.

The numbers of the hazards are those of the list of hazards that the issue of this suite names: 1a ranks that differ,
1b ranks that take different paths, 1c modules that change, 1e tensors and numbers, 1f processes. 1g is weights.
"""

from __future__ import annotations

from dataclasses import replace

from tests.faults import job
from tests.faults.fault import NOTHING, RIGHT, Expected, Fault, Outcome, named
from tests.faults.programs import changes, differ, drifts, paths, silences, tensors

__all__ = ["BY_NAME", "CHECKED", "FAULTS", "ORDINARY", "STALL_TIMEOUT"]

STALL_TIMEOUT = 4.0  # seconds; longer than the stalls that must be survived
SILENT = {"stall_timeout": STALL_TIMEOUT}
AT_STALL = STALL_TIMEOUT + 3  # until every rank knows; two are owed, and one is for a busy machine
CHECKED = {"check_finite": "raise"}
WEIGHTS = 15.0  # seconds until weights that differ are named: 64 steps


def drifted(*words: str) -> Expected:
    """Weights that differ are named: by an error, or by a warning where that is the default."""
    return named("DPF-W01", *words, within=WEIGHTS)


FAULTS = [
    # Ranks that do not hold the same.
    Fault("model_shape", "1a 1", "rank 1's third layer is wider", differ.model_shape,
          named("rank 1", "layers.2.weight")),
    Fault("model_count", "1a 1", "rank 1 has one layer more", differ.model_count, named("rank 1", "layers.4.weight")),
    Fault("model_order", "1a 2", "rank 1 registers two equal layers the other way round", differ.model_order,
          named("rank 1", "second.weight")),
    Fault("model_dtype", "1a 3", "rank 1's model is float64", differ.model_dtype, named("rank 1", "layers.0.weight")),
    Fault("bucket_size", "1a 4", "rank 1 has larger buckets", differ.bucket_size, named("rank 1", "option")),
    Fault("bn_buffers", "1a 5", "rank 1's BatchNorm has other statistics", differ.bn_buffers, RIGHT),
    Fault("eval_one_rank", "1a 6", "rank 0 alone evaluates under no_grad", differ.eval_one_rank, RIGHT),
    # Ranks that take different paths.
    Fault("unused_one_rank", "1b 8", "rank 1 does not use a layer", paths.unused_one_rank, RIGHT),
    Fault("unused_everywhere", "1b 8", "no rank uses a layer", paths.unused_everywhere, RIGHT),
    Fault("unused_now_and_then", "1b 8", "the ranks leave a layer out in turns", paths.unused_now_and_then, RIGHT),
    Fault("no_sync_one_rank", "1b 9", "rank 1 runs one step inside no_sync()", paths.no_sync_one_rank,
          named("rank 1", "no_sync()")),
    Fault("accumulation", "1b 9", "two micro-batches a step, the first inside no_sync()", paths.accumulation, RIGHT),
    Fault("skipped_micro_batch", "1b 9", "rank 1 leaves a micro-batch out", paths.skipped_micro_batch,
          named("rank 1 has run 1 backward", "no_sync()")),
    Fault("skipped_backward", "1b 9", "rank 1 leaves a backward out after its forward", paths.skipped_backward,
          named("rank 1 has run 1 forward without a backward")),
    Fault("exception_caught", "1b 9", "a forward fails on rank 1, which goes on with the next batch",
          paths.exception_caught, named("rank 1", "its forward has raised in step 3 with RuntimeError"), victims=(1,)),
    Fault("wrappers_swapped", "1b 9", "rank 1 runs two wrapped models in the other order", paths.wrappers_swapped,
          named("rank 1", "wrapped model number 2")),
    Fault("uneven_steps", "1b 10", "rank 1 has one step less and waits in a barrier", paths.uneven_steps,
          named("rank 1", "barrier", within=10), SILENT, victims=(1,), slow=True),
    Fault("exception_exit", "1b 11", "rank 1 raises between two steps and ends", paths.exception_exit,
          named("rank 1", "ValueError: planted", within=5), victims=(1,)),
    Fault("exception_mid_backward_caught", "1b 12", "rank 1's backward fails, and all go on with the next batch",
          paths.exception_mid_backward_caught, RIGHT),
    Fault("kill_mid_backward", "1b 13", "rank 1 is killed in the middle of a backward", paths.kill_mid_backward,
          named("rank 1 ended", within=5), victims=(1,)),
    Fault("freeze_rank", "1b 14", "rank 1 is stopped in the middle of a backward, and continued at the end",
          paths.freeze_rank, named("rank 1", within=AT_STALL), SILENT, victims=(1,)),
    Fault("stall_short", "1b 15", f"rank 1 sleeps for {silences.STALL:g} s", silences.stall_short, RIGHT, SILENT),
    Fault("gil_held", "1b 15", f"rank 1 holds the GIL for {silences.STALL:g} s", silences.gil_held, RIGHT, SILENT),
    Fault("link_down", "1b 14", "two machines: the link of one goes down", silences.steps_through_a_fault,
          named("rank {peer}", within=AT_STALL), SILENT, slow=True, cable="down"),
    Fault("frames_vanish", "1b 14", "two machines: what they send each other vanishes", silences.steps_through_a_fault,
          named("rank {peer}", within=AT_STALL), SILENT, slow=True, cable="vanishes"),
    Fault("blip", "1b 15", "two machines: nothing arrives for 5 s", silences.steps_through_a_fault, RIGHT,
          {"stall_timeout": 12.0}, slow=True, cable="blip"),
    Fault("user_collectives", "1b 16", "all-reduces of the program between the backwards", paths.user_collectives,
          RIGHT),
    # Modules that change, wrappers that are bypassed or copied.
    Fault("param_replaced", "1c 17", "a layer is replaced", changes.param_replaced, RIGHT),
    Fault("param_replaced_one_rank", "1c 17", "a layer is replaced on rank 1", changes.param_replaced_one_rank,
          named("rank 1")),
    Fault("param_added", "1c 17", "a layer is added", changes.param_added, RIGHT),
    Fault("module_converted", "1c 18", "the model is converted to float64", changes.module_converted, RIGHT),
    Fault("unfrozen_after_wrap", "1c 19", "a frozen layer is unfrozen", changes.unfrozen_after_wrap, RIGHT),
    Fault("frozen_after_wrap", "1c 19", "a layer is frozen", changes.frozen_after_wrap, RIGHT),
    Fault("inner_module_called", "1c 20", "model.module(x) is called instead of model(x)",
          changes.inner_module_called, RIGHT),
    Fault("two_backwards", "1c 21", "two forwards, then two backwards", changes.two_backwards, RIGHT),
    Fault("no_sync_unused", "1c 22", "accumulation of 1 to 4 micro-batches, a layer unused in some",
          changes.no_sync_unused, RIGHT),
    Fault("deepcopy_wrapped", "1c 23", "a deep copy of the wrapper is trained, then the wrapper",
          changes.deepcopy_wrapped, RIGHT),
    Fault("pickle_wrapped", "1c 23", "the wrapper is pickled, loaded and trained", changes.pickle_wrapped, RIGHT),
    Fault("activation_checkpoint", "1c 24", "layers are checkpointed, in both ways that torch has",
          changes.activation_checkpoint, RIGHT),
    Fault("zeroed_to_none", "1c 25", "half of the gradients are set to None inside a window",
          changes.zeroed_to_none, RIGHT),
    # Tensors and numbers.
    Fault("strided_grads", "1e 35", "gradients are transposed, expanded, with gaps, channels-last",
          tensors.strided_grads, RIGHT),
    Fault("zero_size", "1e 36", "a parameter without elements", tensors.zero_size, RIGHT),
    Fault("tied", "1e 36", "two layers share a weight", tensors.tied, RIGHT),
    Fault("complex", "1e 36", "a complex parameter", tensors.complex_parameter, RIGHT),
    Fault("sparse", "1e 36", "an embedding with sparse gradients", tensors.sparse_gradients, RIGHT),
    Fault("meta", "1e 36", "a parameter of rank 1 is on the meta device", tensors.meta_parameter,
          named("meta")),
    Fault("several_dtypes", "1e 36", "float32 and float64 parameters", tensors.several_dtypes, RIGHT),
    Fault("fp16_large", "1e 37", "float16 gradients whose sum overflows", tensors.fp16_large, RIGHT),
    Fault("nan_one_rank", "1e 38", "a NaN in a gradient of rank 1", tensors.nan_one_rank, NOTHING),
    Fault("nan_checked", "1e 38", 'a NaN in a gradient of rank 1, with check_finite="raise"', tensors.nan_one_rank,
          named("rank 1"), CHECKED),
    # Weights that leave those of the other rank.
    Fault("drift_weight", "1g 1", "one weight of rank 1 changes between two steps", drifts.weight,
          drifted("net.layers.0.weight", "1 of 6 differ"), slow=True),
    Fault("drift_bit", "1g 2", "one bit of a frozen weight of rank 1 flips", drifts.bit,
          drifted("frozen.layers.0.weight", "one bit")),
    Fault("drift_rate", "1g 3", "rank 1 has another learning rate", drifts.rate,
          drifted("net.layers.0.weight"), slow=True),
    Fault("drift_state", "1g 4", "the optimizer's states of rank 1 change", drifts.state,
          drifted("net.layers.0.weight"), slow=True),
    # Processes.
    Fault("plain", "1f 43", "nothing goes wrong", silences.plain, RIGHT),
]  # fmt: skip

# With a sharded optimizer, these programs read or keep a gradient, or train what is in no parameter group.
NOT_ZEROED = named("call optimizer.zero_grad() before the next backward")
IN_NO_GROUP = named("are in no parameter group")
REFUSED = named("whose gradient is sparse or complex")
SHARDED = {
    "no_sync_one_rank": NOT_ZEROED,
    "module_converted": NOT_ZEROED,
    "two_backwards": NOT_ZEROED,
    "zeroed_to_none": NOT_ZEROED,
    "param_replaced": IN_NO_GROUP,
    "param_added": IN_NO_GROUP,
    "complex": REFUSED,
    "sparse": REFUSED,
    # A step sends each part of the weights from the rank that has updated it.
    **dict.fromkeys(("drift_weight", "drift_rate", "drift_state"), RIGHT),
}

# While parameters are updated in backward, an update cannot be taken back.
CHANGED = named("the parameters of the model have changed, with step_in_backward=True")
USED_UP = named("call optimizer.step() and optimizer.zero_grad() before the next backward")
UNUSED = named("no rank has used parameter")
SECOND = named("a second backward began before optimizer.step()")
UPDATED = SHARDED | {
    "unused_everywhere": UNUSED,
    "no_sync_one_rank": USED_UP,
    "param_replaced": CHANGED,
    "param_added": CHANGED,
    "unfrozen_after_wrap": CHANGED,
    "module_converted": USED_UP,
    "two_backwards": SECOND,
    "fp16_large": SECOND,
    "no_sync_unused": named("parameters are updated before backward has ended"),
    "zeroed_to_none": USED_UP,
}
# Where check_training is "warn", as it is on the face of torch.
WARNED = {
    fault.name: replace(fault.expected, outcome=Outcome.WARNED, within=0)
    for fault in FAULTS
    if fault.hazard.startswith("1g")
}
# torch's wrapper is asked for the rank alone.
NAMES_RANK = {
    fault.name: replace(fault.expected, words=("rank 1",))
    for fault in FAULTS
    if any(word.startswith("rank 1") for word in fault.expected.words)
}
ELSEWHERE = dict.fromkeys(job.TORCH, NAMES_RANK) | {"dpfuse": WARNED, job.SHARDED: SHARDED, job.IN_BACKWARD: UPDATED}
FAULTS = [
    replace(fault, elsewhere={face: own[fault.name] for face, own in ELSEWHERE.items() if fault.name in own})
    for fault in FAULTS
]
BY_NAME = {fault.name: fault for fault in FAULTS}
assert len(BY_NAME) == len(FAULTS)

# Nothing goes wrong here: played all the same, and not counted as a fault.
ORDINARY = {
    *("accumulation", "stall_short", "gil_held", "user_collectives", "no_sync_unused", "deepcopy_wrapped"),
    *("pickle_wrapped", "activation_checkpoint", "zeroed_to_none", "strided_grads", "zero_size", "tied", "complex"),
    *("sparse", "several_dtypes", "fp16_large", "plain", "second_job"),
}
