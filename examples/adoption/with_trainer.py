"""transformers' `Trainer`: one line before it, `dpfuse.patch()`.

    python -m dpfuse.launch --nproc_per_node 2 examples/adoption/with_trainer.py

The line is [1]. A small Llama, made from a config and not downloaded, learns Python from the standard library's
sources, byte by byte, with gradient accumulation and the Trainer's defaults. It is also trained with torch's DDP.
Losses, gradient norms, weights and the checkpoint must be equal bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
from checklist import Checklist, same_bits
from safetensors.torch import load_file
from scratch import shared_folder
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import dpfuse

STEPS = 20
CONTEXT = 64  # bytes


class Sources(Dataset[dict[str, Tensor]]):
    """A few files of Python's standard library, cut into pieces. A token is a byte."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        names = ["argparse.py", "ast.py", "dataclasses.py", "functools.py", "pathlib.py", "textwrap.py", "typing.py"]
        text = b"".join((folder / name).read_bytes() for name in names if (folder / name).is_file())
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.pieces = whole[: len(whole) // CONTEXT * CONTEXT].view(-1, CONTEXT)  # [n, CONTEXT]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def model() -> nn.Module:
    """Return a model with a quarter of a million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    return LlamaForCausalLM(config)


def train(patched: bool, folder: Path) -> tuple[type, list[float], list[Tensor], dict[str, Tensor]]:
    """Train, and return the type of the wrapper, losses with gradient norms, the weights, and the checkpoint."""
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=STEPS,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
    )
    with dpfuse.patch() if patched else contextlib.nullcontext():  # [1] elsewhere just dpfuse.patch()
        trainer = Trainer(model=model(), args=arguments, train_dataset=Sources())
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    numbers = [float(entry[key]) for entry in history for key in ("loss", "grad_norm")]
    saved = load_file(folder / f"checkpoint-{STEPS}" / "model.safetensors")
    return type(trainer.model_wrapped), numbers, list(trainer.model.parameters()), saved


def main() -> None:
    dpfuse.init_parallel_env()
    checklist = Checklist()
    with shared_folder() as folder:
        wrapper, numbers, weights, saved = train(True, folder / "dpfuse")
        torchs, expected, torchs_weights, torchs_saved = train(False, folder / "ddp")
    assert (wrapper, torchs) == (dpfuse.DistributedDataParallel, nn.parallel.DistributedDataParallel)
    name = f"{STEPS} steps, loss {numbers[0]:.3f} to {numbers[-2]:.3f}"
    checklist.check(f"{name}: losses and gradient norms equal DDP's bitwise", same_bits(numbers, expected))
    checklist.check("the trained weights equal DDP's bitwise", same_bits(weights, torchs_weights))
    same = saved.keys() == torchs_saved.keys() and same_bits(saved.values(), (torchs_saved[key] for key in saved))
    checklist.check("the checkpoint has the same keys and values", same)
    checklist.end()


if __name__ == "__main__":
    main()
