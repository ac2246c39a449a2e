"""Parameter shapes of published networks, from their hyper-parameters. Knows no tensor and no timing.

`python -m bench.architectures` writes them to `bench/sizes/`, one file per network, which the benchmarks read.
Sources: ResNet-50, arXiv 1512.03385 with torchvision's names; BERT-large uncased with pooler, arXiv 1810.04805;
GPT-2 small with tied head, Radford et al. 2019; ViT-L/16 at 224 pixels, arXiv 2010.11929 with torchvision's names;
Llama 2 with 7 B parameters, arXiv 2307.09288.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = [
    "ARCHITECTURES",
    "FOLDER",
    "Parameter",
    "bert_large",
    "gpt2",
    "llama_7b",
    "resnet50",
    "tiny_2000",
    "vit_large",
]

FOLDER = Path(__file__).parent / "sizes"

Parameter = tuple[str, tuple[int, ...]]  # name and shape


def resnet50() -> Iterator[Parameter]:
    """161 parameters, 25,557,032 elements."""
    yield from _convolution("conv1", "bn1", 3, 64, 7)
    inputs = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            yield from _convolution(f"{name}.conv1", f"{name}.bn1", inputs, width, 1)
            yield from _convolution(f"{name}.conv2", f"{name}.bn2", width, width, 3)
            yield from _convolution(f"{name}.conv3", f"{name}.bn3", width, 4 * width, 1)
            if block == 0:
                yield from _convolution(f"{name}.downsample.0", f"{name}.downsample.1", inputs, 4 * width, 1)
            inputs = 4 * width
    yield from _linear("fc", inputs, 1000)


def bert_large() -> Iterator[Parameter]:
    """391 parameters, 335,141,888 elements: embeddings, 24 layers and the pooler, without a head for a task."""
    hidden = 1024
    yield "embeddings.word_embeddings.weight", (30522, hidden)
    yield "embeddings.position_embeddings.weight", (512, hidden)
    yield "embeddings.token_type_embeddings.weight", (2, hidden)
    yield from _norm("embeddings.LayerNorm", hidden)
    for index in range(24):
        layer = f"encoder.layer.{index}"
        for part in ("query", "key", "value"):
            yield from _linear(f"{layer}.attention.self.{part}", hidden, hidden)
        yield from _linear(f"{layer}.attention.output.dense", hidden, hidden)
        yield from _norm(f"{layer}.attention.output.LayerNorm", hidden)
        yield from _linear(f"{layer}.intermediate.dense", hidden, 4 * hidden)
        yield from _linear(f"{layer}.output.dense", 4 * hidden, hidden)
        yield from _norm(f"{layer}.output.LayerNorm", hidden)
    yield from _linear("pooler.dense", hidden, hidden)


def gpt2() -> Iterator[Parameter]:
    """148 parameters, 124,439,808 elements; the head is the token embedding."""
    hidden = 768
    yield "wte.weight", (50257, hidden)
    yield "wpe.weight", (1024, hidden)
    for index in range(12):
        yield from _norm(f"h.{index}.ln_1", hidden)
        # These weights are stored as (inputs, outputs).
        yield f"h.{index}.attn.c_attn.weight", (hidden, 3 * hidden)
        yield f"h.{index}.attn.c_attn.bias", (3 * hidden,)
        yield f"h.{index}.attn.c_proj.weight", (hidden, hidden)
        yield f"h.{index}.attn.c_proj.bias", (hidden,)
        yield from _norm(f"h.{index}.ln_2", hidden)
        yield f"h.{index}.mlp.c_fc.weight", (hidden, 4 * hidden)
        yield f"h.{index}.mlp.c_fc.bias", (4 * hidden,)
        yield f"h.{index}.mlp.c_proj.weight", (4 * hidden, hidden)
        yield f"h.{index}.mlp.c_proj.bias", (hidden,)
    yield from _norm("ln_f", hidden)


def vit_large() -> Iterator[Parameter]:
    """296 parameters, 304,326,632 elements."""
    hidden, patch = 1024, 16
    yield "class_token", (1, 1, hidden)
    yield "conv_proj.weight", (hidden, 3, patch, patch)
    yield "conv_proj.bias", (hidden,)
    yield "encoder.pos_embedding", (1, (224 // patch) ** 2 + 1, hidden)
    for index in range(24):
        layer = f"encoder.layers.encoder_layer_{index}"
        yield from _norm(f"{layer}.ln_1", hidden)
        yield f"{layer}.self_attention.in_proj_weight", (3 * hidden, hidden)
        yield f"{layer}.self_attention.in_proj_bias", (3 * hidden,)
        yield from _linear(f"{layer}.self_attention.out_proj", hidden, hidden)
        yield from _norm(f"{layer}.ln_2", hidden)
        yield from _linear(f"{layer}.mlp.0", hidden, 4 * hidden)
        yield from _linear(f"{layer}.mlp.3", 4 * hidden, hidden)
    yield from _norm("encoder.ln", hidden)
    yield from _linear("heads.head", hidden, 1000)


def llama_7b() -> Iterator[Parameter]:
    """291 parameters, 6,738,415,616 elements. Too many for the benchmarks of kernels, so no file has them."""
    hidden, inside = 4096, 11008
    yield "embed_tokens.weight", (32000, hidden)
    for index in range(32):
        layer = f"layers.{index}"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{layer}.self_attn.{part}.weight", (hidden, hidden)
        yield f"{layer}.mlp.gate_proj.weight", (inside, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inside, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inside)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (32000, hidden)


def tiny_2000() -> Iterator[Parameter]:
    """2000 parameters of 4 KB in float32: launches and Python take nearly all of the time."""
    for index in range(2000):
        yield f"weights.{index}", (1024,)


def _linear(name: str, inputs: int, outputs: int) -> Iterator[Parameter]:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, features: int) -> Iterator[Parameter]:
    yield f"{name}.weight", (features,)
    yield f"{name}.bias", (features,)


def _convolution(name: str, norm: str, inputs: int, outputs: int, kernel: int) -> Iterator[Parameter]:
    yield f"{name}.weight", (outputs, inputs, kernel, kernel)
    yield from _norm(norm, outputs)


ARCHITECTURES: dict[str, Callable[[], Iterator[Parameter]]] = {
    "resnet50": resnet50,
    "bert_large": bert_large,
    "gpt2": gpt2,
    "vit_large": vit_large,
    "tiny_2000": tiny_2000,
}


def _write() -> None:
    for name, shapes in ARCHITECTURES.items():
        rows = ",\n".join(json.dumps([parameter, list(shape)]) for parameter, shape in shapes())
        (FOLDER / f"{name}.json").write_text(f"[\n{rows}\n]\n")


if __name__ == "__main__":
    _write()
