"""trl's trainers on a small Llama: `sft` with LoRA of peft, `dpo`, and `grpo` with a reward that is a function."""

import copy
import sys

from datasets import Dataset
from ending import end
from language import SETTINGS, losses_of, make_llama, make_tokenizer, sentence
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

ROWS = 96


def sft(model, **common):
    rows = Dataset.from_list([{"text": sentence(20)} for _ in range(ROWS)])
    settings = SFTConfig(**SETTINGS, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_length=32)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, lora_dropout=0.1, target_modules="all-linear")
    return SFTTrainer(model, args=settings, train_dataset=rows, peft_config=adapters, **common)


def dpo(model, **common):
    texts = {"prompt": 6, "chosen": 10, "rejected": 12}
    rows = Dataset.from_list([{name: sentence(size) for name, size in texts.items()} for _ in range(ROWS)])
    settings = DPOConfig(**SETTINGS, per_device_train_batch_size=4, max_length=32)
    return DPOTrainer(model, ref_model=copy.deepcopy(model), args=settings, train_dataset=rows, **common)


def grpo(model, **common):
    rows = Dataset.from_list([{"prompt": sentence(6)} for _ in range(ROWS)])
    settings = GRPOConfig(**SETTINGS, per_device_train_batch_size=4, num_generations=4, max_completion_length=12)
    reward = lambda completions, **_: [float(len(set(text.split()))) for text in completions]  # noqa: E731
    return GRPOTrainer(model, reward_funcs=reward, args=settings, train_dataset=rows, **common)


def main():
    trainer = {"sft": sft, "dpo": dpo, "grpo": grpo}[sys.argv[2]](make_llama(), processing_class=make_tokenizer())
    trainer.train()
    end(losses_of(trainer), trainer.accelerator.unwrap_model(trainer.model))


if __name__ == "__main__":
    main()
