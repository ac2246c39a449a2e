"""transformers' Trainer with a small Llama, which is made and not downloaded; accumulation and clipping are its own."""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from weights import show


class Tokens(Dataset):
    def __init__(self):
        self.rows = torch.randint(64, (96, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main():
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes))
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        max_steps=int(sys.argv[2]),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=Tokens()).train()
    show(model)


if __name__ == "__main__":
    main()
