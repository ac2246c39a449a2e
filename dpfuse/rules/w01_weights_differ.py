"""DPF-W01: the weights of the ranks differ after a step. Also what DPF-L01 says where a suspicion of it was right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpfuse.rules.codes import REST, WEIGHTS
from dpfuse.rules.seen import Seen, Traces, common_steps, name_list, rank_list
from dpfuse.rules.windows import averages_of
from dpfuse.trace_file import BEFORE_STEP, hashes_in

__all__ = [
    "OF_BACKWARDS",
    "TITLE",
    "TOLD_ELSEWHERE",
    "Drift",
    "Measured",
    "Phrases",
    "find",
    "kind_in",
    "text_of_checkpoint",
]

OF_ANOTHER = (
    "On {rank}, backwards that were not synchronised have added to the mean over the ranks before a step; its "
    "message names the place."
)
AS_ANOTHER = "Rank {rank} has seen such a step, too."
# Matches the texts of DPF-L01 of ranks beside the one whose text is to be read.
TOLD_ELSEWHERE = rf"{REST}: rank \d+: (On rank|.*\bRank \d+ has seen such a step, too)"
PAGE = " See DPF-L01 on the page wrong/loops of the documentation."
NAMED = 3  # parameters that are named
TITLE = "the weights of the ranks differ"
EXPECTED, BECAME = "expected equal bits.", "They became different"  # between them a message says what kind it is of
LOOK = "Look for what only some ranks do to weights, gradients, learning rates or optimizer states. "
REMEDY = "Load the checkpoint from before step {first}, or {how}."


@dataclass(frozen=True)
class Phrases:
    """How a message calls what averages, and what sends weights.

    Args:
        averaged: what is counted.
        synchronize: what ends a difference.
    """

    averaged: str
    synchronize: str


OF_BACKWARDS = Phrases(
    "the averaged backward", "call model.synchronize_weights() on every rank, which sends rank 0's weights"
)


@dataclass(frozen=True)
class Measured:
    """How far the weights of one rank lie from those of the rank with which all are compared.

    Args:
        elements: that differ.
        largest: difference of two elements, absolute.
        one_bit: whether one bit of one element differs, and nothing else.
        factor: by which all elements differ; 0 if there is none.
    """

    elements: int
    largest: float
    one_bit: bool
    factor: float


@dataclass(frozen=True)
class Drift:
    """Parameters that differ.

    Args:
        names: of those that differ and were equal before, in the order of the module.
        count: of all parameters that are compared.
        numels: elements of each of them.
        first, last: synchronised backwards between which they became different, from 1; 0 is the start.
        others: the ranks that differ from `reference`.
        reference: the rank with which all are compared: of the largest set of equal ranks, the lowest.
        size: number of ranks.
        measured: of each of `others`, over the parameters that were measured.
        measured_count: parameters that were measured, from the first on.
        frozen: whether no gradient of them is averaged.
        words: for the text.
    """

    names: tuple[str, ...]
    count: int
    numels: tuple[int, ...]
    first: int
    last: int
    others: tuple[int, ...]
    reference: int
    size: int
    measured: tuple[Measured, ...]
    measured_count: int
    frozen: bool = False
    words: Phrases = OF_BACKWARDS

    @property
    def may_be_meant(self) -> bool:
        """Whether a right program may have them so: ranks may keep frozen parameters of their own."""
        return self.frozen and not self._is_one_bit

    @property
    def _is_one_bit(self) -> bool:
        """Whether one bit of one element differs, in a parameter with others."""
        return len(self.names) == 1 and self.numels[0] > 1 and all(one.one_bit for one in self.measured)

    def text(self, rank: int) -> str:
        """Return the message for this rank; apart from its number it is the same on every rank."""
        look = "If each rank is to have its own, ignore this warning. Else: " if self.may_be_meant else ""
        look += LOOK
        return (
            f"{WEIGHTS}: rank {rank}: the weights of the ranks differ after the optimizer's step, {EXPECTED} "
            f"{self._kind()}{BECAME} after {self.words.averaged} {self.first} and before {self.last}. {self._which()} "
            f"{self._ranks()} {self._distance()} {look}{self._remedy()}"
        )

    def text_of_rest(self, rank: int, cause: str, suspects: Sequence[int]) -> str:
        """Return the message for this rank where backwards that were not synchronised have made them differ.

        Args:
            rank: of this process.
            cause: what this rank has seen, in sentences; empty if nothing.
            suspects: ranks that have seen something.
        """
        if not cause:
            cause = OF_ANOTHER.format(rank=f"rank {suspects[0]}" if suspects else "another rank")
        elif rank != suspects[0]:
            cause += f" {AS_ANOTHER.format(rank=suspects[0])}"
        return (
            f"{REST}: rank {rank}: {cause} After the step the weights of the ranks differ. {self._which()} "
            f"{self._distance()} {self._remedy()}{PAGE}"
        )

    def _remedy(self) -> str:
        return REMEDY.format(first=self.first + 1, how=self.words.synchronize)

    def _which(self) -> str:
        named = ", ".join(map(repr, self.names[:NAMED]))
        more = len(self.names) - NAMED
        rest = f" and {more} more" if more > 0 else ""
        verb = "It is parameter" if len(self.names) == 1 else "They are parameters"
        whose = "it" if len(self.names) == 1 else "them"
        frozen = f" No gradient of {whose} is averaged." if self.frozen else ""
        return f"{verb} {named}{rest}; {len(self.names)} of {self.count} differ.{frozen}"

    def _ranks(self) -> str:
        whose = rank_list(self.others)
        if self.size == 2:
            return "Of two ranks none can be said to be right."
        equal = self.size - len(self.others)
        if equal > len(self.others):
            return (
                f"{whose} {'differs' if len(self.others) == 1 else 'differ'} from the {equal} others, which are equal."
            )
        return f"{whose} {'differs' if len(self.others) == 1 else 'differ'} from rank {self.reference}."

    def _distance(self) -> str:
        largest = max(self.measured, key=lambda one: one.largest)
        elements = max(one.elements for one in self.measured)
        total = sum(self.numels[: self.measured_count])
        place = "" if self.measured_count == len(self.names) else f" in the first {self.measured_count} of them"
        return f"The largest difference is {largest.largest:.0e}; {elements} of {total} elements differ{place}."

    def _kind(self) -> str:
        if self._is_one_bit:
            return "It is one bit, as after a fault of memory. "
        factors = {one.factor for one in self.measured}
        if all(factors) and len(factors) == 1:
            factor = factors.pop()
            return f"The values differ by the factor {factor:.6g}, as after weight decay or a scaling on some ranks. "
        if len(self.names) == self.count and self.count > 1:
            return (
                "All parameters differ, as after a step that not all ranks took, or with another learning rate, "
                "clipping or optimizer state. "
            )
        return ""


def kind_in(text: str) -> str:
    """Return the sentence in a message that says what kind of difference it is; empty if there is none.

    Example:
        >>> from dpfuse.rules.w01_weights_differ import kind_in
        >>> kind_in("The weights differ, expected equal bits. It is one bit. They became different after step 3.")
        'It is one bit.'
    """
    return text.partition(EXPECTED)[2].partition(BECAME)[0].strip()


def text_of_checkpoint(rank: int, known: Mapping[str, int]) -> str:
    """Return what a checkpoint that is saved now should say.

    Args:
        rank: of this process.
        known: the parameters that differ, each with the averaged backward of which that is known.
    """
    which = f"parameter {next(iter(known))!r} differs" if len(known) == 1 else f"{len(known)} parameters differ"
    return (
        f"{WEIGHTS}: rank {rank}: a checkpoint is saved while the weights of the ranks differ, expected equal ones: "
        f"{which} since averaged backward {min(known.values())}. The file gets the weights of rank 0. Call "
        "model.synchronize_weights() on every rank first, or load an earlier checkpoint."
    )


def find(traces: Traces) -> Seen | None:
    """Tell of the first step after which weights differ that all ranks have stepped by the same averaged gradients.

    Ranks may well train apart for a while: inside of `no_sync()`, or with a hook that averages over some of them. Their
    weights then differ before such a step, too.
    """
    first = traces[0]
    last: dict[int, tuple[int, bool]] = {}  # by optimizer: its last step, and whether the weights differ since then
    for step in range(common_steps(traces)):
        lines = [trace.steps[step] for trace in traces.values()]
        names = first.optimizers[lines[0]["optimizer"]]["names"]
        if any(trace.optimizers[trace.steps[step]["optimizer"]]["names"] != names for trace in traces.values()):
            continue  # each rank steps its own part
        averages = [averages_of(line) for line in lines]
        is_deep = "parameters" in lines[0]
        if any(("parameters" in line) is not is_deep for line in lines):
            continue  # hashed in two ways, as on ranks whose optimizers have stepped in another order
        texts = [line["parameters" if is_deep else "all_parameters"] for line in lines]
        before, was_apart = last.get(lines[0]["optimizer"], (None, False))
        differ = len({*texts}) > 1
        last[lines[0]["optimizer"]] = step, differ
        if differ and not was_apart and averages[0] and all(one == averages[0] for one in averages):
            columns = zip(*map(hashes_in, texts), strict=False) if is_deep else ()
            found = [name for name, column in zip(names, columns, strict=False) if len({*column}) > 1]
            begun_apart = before is not None and len({line.get(BEFORE_STEP) for line in lines}) > 1
            return Seen(TITLE, _text(step, found, before if begun_apart else None))
    return None


def _text(step: int, names: Sequence[str], before: int | None) -> str:
    """Return what a trace shows.

    Args:
        step: the first after which they differ.
        names: of the parameters that differ, as far as they were hashed one by one.
        before: the step before of that optimizer if they were equal after it and differed when this one began.
    """
    where = f" in {name_list(names)}" if names else ""
    text = (
        f"after step {step} the ranks hold different weights{where}, expected equal ones, since their averaged "
        "gradients are equal"
    )
    if before is None:
        return f"{text}; is each wrapped, trained by the same optimizer, and loaded on every rank?"
    return (
        f"{text}. They were equal after step {before} and differed when step {step} began, so other code than the "
        "optimizer has written them. Do the same on every rank."
    )
