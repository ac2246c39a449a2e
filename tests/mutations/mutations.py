"""The list of deliberate defects. Each is one that a developer could make, and that gives wrong results.

The list shows what a change of the tests costs. A defect that was found before the change and is not found after it is
a behaviour that is tested no more.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTATIONS", "Mutation"]


@dataclass(frozen=True)
class Mutation:
    """One defect.

    Args:
        name: what is wrong, in a few words.
        file: in which it is, from the root of the repository.
        before: the right text, which occurs once in the file.
        after: the wrong text, in its place.
        tests: files or folders of tests of `make test` that should find it: few, and quick.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


AVERAGING = "tests/distributed/averaging/"
FAILURES = "tests/distributed/failures/"

ENGINE = (
    Mutation(
        "the factor after a sum in float16 leaves out the number of ranks",
        "dpfuse/engine/averaging.py",
        "return Averaging(wire, 1.0 / world_size, float(scale) * world_size)",
        "return Averaging(wire, 1.0 / world_size, float(scale))",
        ("tests/distributed/wires/test_wire_dtype.py",),
    ),
    Mutation(
        "the first parameter that is ready too late is not reported",
        "dpfuse/engine/ready.py",
        "return self.entries[self.sent :] if self.sent >= 0 else []",
        "return self.entries[self.sent + 1 :] if self.sent >= 0 else []",
        ("tests/unit/test_ready.py", AVERAGING + "test_ready_lists.py"),
    ),
    Mutation(
        "freezing inside a window loses what the window has accumulated",
        "dpfuse/engine/bucket.py",
        "return outcome.frozen - outcome.just_frozen - self.parts.feed.held",
        "return outcome.frozen - self.parts.feed.held",
        (AVERAGING + "test_ready_lists.py",),
    ),
    Mutation(
        "the report compares how many parameters are frozen and not which",
        "dpfuse/engine/report_format.py",
        "number_hash(sorted(frozen)) if frozen else 0]",
        "len(frozen)]",
        ("tests/unit/test_report.py", AVERAGING + "test_ready_lists.py"),
    ),
    Mutation(
        "the last forward alone decides whether a backward synchronises",
        "dpfuse/engine/sync_requests.py",
        "(SYNC, TRAIN, False): SYNC,",
        "(SYNC, TRAIN, False): LOCAL,",
        ("tests/unit/test_reducer.py", AVERAGING + "test_sync_rules.py"),
    ),
    Mutation(
        "the number for the order of several models forgets the order",
        "dpfuse/engine/send_order.py",
        "group.told = number_hash((group.told or group.first, turn))",
        "group.told = number_hash(sorted((group.told or group.first, turn)))",
        ("tests/unit/test_send_order.py", AVERAGING + "test_several_models.py"),
    ),
    Mutation(
        "the report of the backward before is added to that of a window",
        "dpfuse/engine/feeds/accumulating.py",
        "            buffer.report.zero_()  # since the report is added, too\n",
        "",
        ("tests/distributed/accumulation/test_in_buckets.py",),
    ),
    Mutation(
        "a rank that cannot add up its part of an ordered sum raises nothing",
        "dpfuse/engine/exchanges/ordered.py",
        "                error = again\n",
        "",
        ("tests/unit/test_ordered_sum.py", FAILURES + "test_injected_failures.py"),
    ),
    Mutation(
        "a gradient is sparse on the ranks unless it is dense on all",
        "dpfuse/engine/exchanges/sparse.py",
        "self._is_dense = bool(headers[:, 1].any())",
        "self._is_dense = bool(headers[:, 1].all())",
        (AVERAGING + "test_sparse.py",),
    ),
    Mutation(
        "the tree of micro-batches joins nodes that are no siblings",
        "dpfuse/engine/micro_batches.py",
        "if left.size != right.size or left.first % (2 * left.size) or left.first + left.size != right.first:",
        "if left.size != right.size or left.first + left.size != right.first:",
        ("tests/unit/test_micro_batches.py", "tests/distributed/same_bits/test_values.py"),
    ),
    Mutation(
        "a backward that died is reported as one without a failure",
        "dpfuse/engine/reading.py",
        "self.failed, self.well = True, False",
        "self.failed, self.well = False, True",
        (FAILURES + "test_interruptions.py", "tests/unit/test_reducer.py"),
    ),
    Mutation(
        "a gradient that other code refers to is overwritten in place",
        "dpfuse/engine/exchanges/in_place.py",
        "return all(map(torch.UntypedStorage.resizable, storages)) and are_private(grads, storages)",
        "return all(map(torch.UntypedStorage.resizable, storages))",
        (AVERAGING + "test_in_place_safety.py", AVERAGING + "test_in_place.py"),
    ),
)

COMM = (
    Mutation(
        "ranks compare only the beginning of long texts",
        "dpfuse/comm/votes.py",
        "*hashlib.sha256(data).digest()",
        "*hashlib.sha256(data[:1024]).digest()",
        ("tests/distributed/model/test_construction.py", "tests/distributed/launch/test_security.py"),
    ),
    Mutation(
        "an all-gather takes the parts of the ranks in the wrong order",
        "dpfuse/comm/collective.py",
        "return together(start_broadcast(row, group, rank) for rank, row in enumerate(rows))",
        "return together(start_broadcast(row, group, size - 1 - rank) for rank, row in enumerate(rows))",
        (AVERAGING + "test_deterministic.py",),
    ),
    Mutation(
        "the sum of a group in Python is left where the group has put it",
        "dpfuse/comm/collective.py",
        "if isinstance(found, Tensor) and found.data_ptr() != self._flat.data_ptr():",
        "if isinstance(found, Tensor) and found.data_ptr() == self._flat.data_ptr():",
        (AVERAGING + "test_python_groups.py",),
    ),
    Mutation(
        "a collective that failed after a while counts as landed",
        "dpfuse/comm/waiting.py",
        "                work.wait(NO_LIMIT)  # raises the error with which the work failed\n",
        "",
        ("tests/unit/test_waiting.py", FAILURES + "test_failed_collectives.py"),
    ),
    Mutation(
        "a work of several stages waits without the limit that it was given",
        "dpfuse/comm/work.py",
        "self._wait_for(self._work, timeout)",
        "self._wait_for(self._work, NO_LIMIT)",
        ("tests/unit/test_work.py", FAILURES + "test_heartbeat.py"),
    ),
    Mutation(
        "buffers without dimensions are sent from memory that they no longer have",
        "dpfuse/comm/flat_broadcast.py",
        "if addresses != self._addresses:",
        "if not self._addresses:",
        ("tests/unit/test_flat_broadcast.py",),
    ),
)

SHARDED = (
    Mutation(
        "the norm of some gradients of a bucket counts the others, too",
        "dpfuse/sharded/norm.py",
        "parts = [region.part] if len(grads) == region.count else [grad.own for grad in grads]",
        "parts = [region.part] if len(grads) <= region.count else [grad.own for grad in grads]",
        ("tests/sharded/test_use.py", "tests/sharded/test_elementwise.py"),
    ),
    Mutation(
        "only the rank with an infinite gradient skips a step",
        "dpfuse/sharded/gradient.py",
        "    collective.all_reduce_max(found_inf, grads[0].region.group)\n",
        "",
        ("tests/sharded/test_use.py",),
    ),
    Mutation(
        "float32 copies lose in each step what 16 bits cannot hold",
        "dpfuse/sharded/masters.py",
        "torch.where(self.values.to(part.dtype) == part, self.values, part.float(), out=self.values)",
        "torch.where(self.values == part.float(), self.values, part.float(), out=self.values)",
        ("tests/sharded/test_masters.py",),
    ),
    Mutation(
        "the most loaded rank gives items away, and takes none in exchange",
        "dpfuse/sharded/owners.py",
        "for back in (None, *taken[max(near - 1, 0) : near + 1]):",
        "for back in (None,):",
        ("tests/sharded/test_owners.py",),
    ),
    Mutation(
        "of two parameters that changed places one is read after it was written",
        "dpfuse/sharded/flat_params.py",
        "values.append(value.clone() if inside else value)",
        "values.append(value)",
        ("tests/sharded/test_changed_in_place.py", "tests/sharded/test_use.py"),
    ),
    Mutation(
        "a parameter without a gradient is updated with the one before it",
        "dpfuse/sharded/elementwise_shard.py",
        "if touched[place] != touched[place - 1]}",
        "if touched[place] > touched[place - 1]}",
        ("tests/sharded/test_states.py", "tests/sharded/test_frozen_meanwhile.py"),
    ),
    Mutation(
        "parameters still travel when a failed backward has raised",
        "dpfuse/sharded/in_backward.py",
        "            self.updates.finish()\n\n    def begin_again",
        "            pass\n\n    def begin_again",
        ("tests/sharded/test_in_backward.py",),
    ),
)

WEIGHTS = (
    Mutation(
        "the smallest set of equal ranks is taken for the right one",
        "dpfuse/weights/which_ranks_differ.py",
        "largest = max(sets.values(), key=len)",
        "largest = min(sets.values(), key=len)",
        ("tests/weights/test_drifts.py",),
    ),
    Mutation(
        "each rank hashes a weight in the order of its own memory",
        "dpfuse/weights/hashing.py",
        "dense_stride(tensor) if agreed is None or not _are_dense(agreed, tensor.shape) else agreed\n",
        "dense_stride(tensor)\n",
        ("tests/weights/test_hashing.py",),
    ),
    Mutation(
        "what has the same hash by chance has it with each seed",
        "dpfuse/engine/tensor_hash.py",
        "first = seed * 977 % ROW",
        "first = 0",
        ("tests/unit/test_tensor_hash.py",),
    ),
    Mutation(
        "weights are compared after each step and not only after the first",
        "dpfuse/weights/states.py",
        "(STEPPED, STEP): (HEAR_BEGINS, STEPPED),",
        "(STEPPED, STEP): (HASH_SLICE_AGAIN, STEPPED),",
        ("tests/weights/test_states.py",),
    ),
    Mutation(
        "the end of a large weight is never hashed",
        "dpfuse/weights/schedule.py",
        "for start in range(0, size, largest)",
        "for start in range(0, max(size - largest, 1), largest)",
        ("tests/weights/test_check.py", "tests/weights/test_drifts.py"),
    ),
)

MUTATIONS = (*ENGINE, *COMM, *SHARDED, *WEIGHTS)
