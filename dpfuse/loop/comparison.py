"""What ranks must have in common, though a difference fails no backward: batches that differ, rates, modes.

It is compared in a few backwards only: in the first ones, and in two of each 128 from then on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dpfuse.engine.plan import Bucket
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import ReportPlace
from dpfuse.engine.streams import capturing
from dpfuse.findings import findings
from dpfuse.loop.compared_words import ComparedWords, Word
from dpfuse.loop.forward_modes import ForwardModes
from dpfuse.loop.input_comparison import InputComparison
from dpfuse.loop.input_hash import InputHash
from dpfuse.loop.learning_rates import LearningRates
from dpfuse.loop.mean_equals_own import OwnAndMean
from dpfuse.loop.training_record import TrainingRecord
from dpfuse.rules.codes import OTHER_MODES, OTHER_RATES

__all__ = ["RankComparison"]


class RankComparison:
    """Collects the words of this rank from forwards and steps, and hands the sums of all ranks to the rules.

    Args:
        module: that is wrapped.
        record: of the model whose gradients are averaged.
        device: of the parameters, such as "cpu".
        size: number of ranks.
        place: of what the ranks tell each other, in the report.

    Attributes:
        own: compares what this rank has with the mean.
        waits: whether the next average is to be told of.
    """

    def __init__(self, module: nn.Module, record: TrainingRecord, device: str, size: int, place: ReportPlace) -> None:
        self._record = record
        self._words = ComparedWords(place, size)
        self._inputs = InputHash()
        self.own = OwnAndMean()
        self._batches = InputComparison(record)
        self._modes = ForwardModes(module, device, record.rank)
        self._rates = LearningRates(record)
        self._found: dict[str, str] = {}  # by code, until the next step
        self.waits = False

    def compare_batches(self) -> None:
        """Compare inputs in the next backwards, also if they were decided to differ."""
        self._batches.begin_again()

    def forward_begins(self, inputs: Any) -> None:
        """Note a forward, whose backward may be compared."""
        self._modes.forward_begins()
        if not self._batches.decided:
            self._inputs.add(inputs)

    def write(self, report: Report, packed: Tensor, bucket: Bucket) -> None:
        """Write the words of this rank into the report, as it is packed.

        Args:
            report: knows the places of the words.
            packed: [numel], where they go.
            bucket: after whose gradients the report is packed.
        """
        self.waits = True
        words: dict[str, Word] = {"there": [1.0], **self._modes.words(), **self._rates.words()}
        if self._inputs.known and not self._batches.decided:
            words |= {"hashed": [1.0], "inputs": self._inputs.word()}
            if self._batches.nearly_told and not capturing():
                words["parallel"] = [float(self.own.is_parallel())]
                params = [*self._record.params().items()]
                self.own.packed(dict(params[index] for index in bucket.params))
        self._words.tell(report, packed, words)
        self._inputs = InputHash()

    def delivered(self) -> None:
        """Hand what is known by now to the rules."""
        self.own.delivered()
        sums = self._words.delivered()
        self.waits = self._words.waits
        if sums is None or not sums.all_set("there"):
            return
        self._record.heard = True
        self._batches.heard(sums)
        for code, text in ((OTHER_MODES, self._modes.heard(sums)), (OTHER_RATES, self._rates.heard(sums))):
            if text is not None:
                self._found[code] = text

    def before_step(self, optimizer: Optimizer) -> None:
        """Say what the rules have found, and note what this step uses."""
        record = self._record
        if record.heard:
            record.heard = False
            self._batches.tell()
            for code in tuple(self._found):
                findings.tell(code, self._found.pop(code), record.level)
        if record.due:
            self._rates.before_step(optimizer)
