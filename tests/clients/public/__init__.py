"""Programs around public libraries, with their trainers where they have one: `make test-public`.

Models and data are made in the programs, and nothing is downloaded. `requirements.txt` pins the libraries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import CompletedProcess

from tests.clients.test_programs import variables
from tests.commands.side_by_side import REPLACED, python
from tests.distributed.processes import ROOT

__all__ = ["PINNED", "PUBLIC", "PublicProgram", "installed", "said_by_dpfuse"]

FOLDER = Path(__file__).resolve().parent
START = {"torch": ("-m", "dpfuse.launch", "--nproc_per_node", 2), "dpfuse": ("-m", "dpfuse", "run", "--ranks", 2)}
START_WITHOUT_RANKS = {"torch": (), "dpfuse": ("-m", "dpfuse", "run")}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HOME": "cache", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
PINNED = dict(line.split("==") for line in (FOLDER / "requirements.txt").read_text().splitlines() if "==" in line)


@dataclass(frozen=True)
class PublicProgram:
    """A program, and what it is started with.

    Args:
        script: its file.
        first: the class of the module that it wraps first.
        steps: for a measurement of some seconds.
        words: what follows the number of steps in its command line.
        starts_ranks: whether it starts its ranks itself.
    """

    script: str
    first: str
    steps: int
    words: tuple[str, ...] = ()
    starts_ranks: bool = False

    def run(self, wrapper: str, folder: Path, steps: int) -> CompletedProcess[str]:
        """Run it in a new folder, with `torch`'s class or with `dpfuse`'s."""
        folder.mkdir(parents=True)
        start = (START_WITHOUT_RANKS if self.starts_ranks else START)[wrapper]
        command = (*start, FOLDER / self.script, steps, *self.words)
        return python(*command, folder=folder, timeout=300, **variables(), **OFFLINE)


PUBLIC = {
    "trl SFT, LoRA of peft": PublicProgram("fine_tuning.py", "PeftModelForCausalLM", 60, ("sft",)),
    "trl DPO": PublicProgram("fine_tuning.py", "LlamaForCausalLM", 60, ("dpo",)),
    "trl GRPO": PublicProgram("fine_tuning.py", "LlamaForCausalLM", 30, ("grpo",)),
    "sentence-transformers": PublicProgram("sentence_pairs.py", "SentenceTransformer", 100),
    "pytorch-metric-learning": PublicProgram("metric_learning.py", "Sequential and Sequential", 150),
    "lightly": PublicProgram("two_views.py", "SimCLR", 40),
    "MONAI": PublicProgram("segmentation_3d.py", "UNet", 60),
    "ignite": PublicProgram("engine.py", "Sequential", 60, starts_ranks=True),
    "timm": PublicProgram("image_classes.py", "ResNet", 60),
    "torchvision detection": PublicProgram("image_tasks.py", "RetinaNet", 14, ("detection",)),
    "torchvision segmentation": PublicProgram("image_tasks.py", "DeepLabV3", 24, ("segmentation",)),
    "open_clip": PublicProgram("contrastive.py", "CLIP", 60),
}


def installed(package: str) -> str | None:
    """The version that is installed, if one is."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def said_by_dpfuse(errors: str) -> list[str]:
    """The lines that dpfuse has written beside the one that says what was replaced."""
    lines = errors.replace(str(ROOT), "").splitlines()  # the folder of the checkout may have that name
    return [line for line in lines if re.search("dpfuse|DPF-", line, re.I) and not REPLACED.match(line)]
