"""ResNet-50, BERT-large, GPT-2 and ViT-L/16 as published, with random weights. Needs only torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, scaled_dot_product_attention

__all__ = ["BertLarge", "Gpt2", "ResNet50", "VitLarge"]


class _Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions; the input is added to their result."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.bn1(self.conv1(x)), inplace=True)
        y = relu(self.bn2(self.conv2(y)), inplace=True)
        return relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)


class ResNet50(nn.Module):
    """Classifies images of 224 x 224 into 1000 classes. Names and order of the parameters are torchvision's.

    Source: He, Zhang, Ren, Sun: Deep Residual Learning (arXiv 1512.03385), with the stride in the 3 x 3 convolution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        inputs = 64
        for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
            made = []
            for block in range(blocks):
                made.append(_Bottleneck(inputs, width, 2 if stage > 1 and block == 0 else 1))
                inputs = 4 * width
            self.add_module(f"layer{stage}", nn.Sequential(*made))
        self.fc = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(relu(self.bn1(self.conv1(images)), inplace=True))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


class _Layer(nn.Module):
    """Attention and two linear layers, each with a norm after its sum."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.query, self.key, self.value, self.attended = (nn.Linear(hidden, hidden) for _ in range(4))
        self.attended_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.wide, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        parts = [one(x).unflatten(-1, (self._heads, -1)).transpose(1, 2) for one in (self.query, self.key, self.value)]
        seen = scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        x = self.attended_norm(x + self.attended(seen))
        return self.norm(x + self.narrow(gelu(self.wide(x))))


class BertLarge(nn.Module):
    """Maps tokens to the pooled state of the first token. It has no dropout, so that steps can be compared.

    Source: Devlin, Chang, Lee, Toutanova: BERT (arXiv 1810.04805).
    """

    def __init__(self, hidden: int = 1024, layers: int = 24, heads: int = 16) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30522, hidden), nn.Embedding(512, hidden)
        self.types = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.layers = nn.Sequential(*[_Layer(hidden, heads) for _ in range(layers)])
        self.pooler = nn.Linear(hidden, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(places) + self.types(torch.zeros_like(tokens))
        return torch.tanh(self.pooler(self.layers(self.norm(x))[:, 0]))


class _PreNormLayer(nn.Module):
    """Attention and two linear layers, each with a norm before it."""

    def __init__(self, hidden: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self._heads, self._causal = heads, causal
        self.norm, self.inputs, self.attended = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 3 * hidden),
            nn.Linear(hidden, hidden),
        )
        self.wide_norm = nn.LayerNorm(hidden)
        self.wide, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(self.norm(x)).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*parts, is_causal=self._causal).transpose(1, 2).flatten(2)
        x = x + self.attended(seen)
        return x + self.narrow(gelu(self.wide(self.wide_norm(x))))


class Gpt2(nn.Module):
    """Maps tokens to the scores of the next ones. The head is the token embedding; there is no dropout.

    Source: Radford, Wu, Child, Luan, Amodei, Sutskever: Language Models are Unsupervised Multitask Learners.
    """

    def __init__(self, hidden: int = 768, layers: int = 12, heads: int = 12, words: int = 50257) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, hidden), nn.Embedding(1024, hidden)
        self.layers = nn.Sequential(*[_PreNormLayer(hidden, heads, causal=True) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.layers(self.words(tokens) + self.positions(places)))
        return linear(x, self.words.weight)


class VitLarge(nn.Module):
    """Maps images of 224 x 224 to the scores of 1000 classes; patches of 16 x 16, no dropout.

    Source: Dosovitskiy and others: An Image is Worth 16x16 Words (arXiv 2010.11929).
    """

    def __init__(self, hidden: int = 1024, layers: int = 24, heads: int = 16) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.patches = nn.ModuleList([nn.Conv2d(3, hidden, 16, stride=16)])
        self.positions = nn.ParameterList([torch.randn(1, (224 // 16) ** 2 + 1, hidden)])
        self.layers = nn.Sequential(*[_PreNormLayer(hidden, heads, causal=False) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches[0](images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions[0]
        return self.head(self.norm(self.layers(x))[:, 0])
