"""A tokenizer of a hundred words, sentences, a small Llama, and settings that trainers of Hugging Face share."""

import random
import sys

import cpu_torchvision  # noqa: F401
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
WORDS = [f"w{number}" for number in range(100)]
QUIET = {"report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
SETTINGS = {"output_dir": "out", "max_steps": int(sys.argv[1]), "use_cpu": True, "bf16": False} | QUIET

_random = random.Random(0)


def sentence(length):
    return " ".join(_random.choices(WORDS, k=length))


def make_tokenizer():
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=64, **names)


def make_llama():
    set_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(SPECIAL + WORDS), max_position_embeddings=64, **sizes, **tokens))


def losses_of(trainer):
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
