"""MNIST's network with `paddle.Model`: the high-level program of "single-machine multi-card training".

    python examples/paddle/mnist_high_level_api.py
    python -m dpfuse.launch --nproc_per_node 2 examples/paddle/mnist_high_level_api.py

Both commands run the same file: `Model` joins the ranks, distributes the data and gathers the results.
"""

from __future__ import annotations

import mnist
import torch
from report import fingerprint, say
from torch import nn

import dpfuse.paddle as paddle


def main() -> None:
    options = mnist.parser("Train on Fashion-MNIST with paddle.Model.").parse_args()
    train_data, test_data = mnist.datasets(options)

    network = mnist.network()
    model = paddle.Model(network)
    model.prepare(torch.optim.Adam(network.parameters()), nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    model.fit(train_data, epochs=options.epochs, batch_size=64, verbose=1)
    result = model.evaluate(test_data, batch_size=64, verbose=0)
    predictions = model.predict(test_data, batch_size=64, stack_outputs=True, verbose=0)[0]

    labels = test_data.tensors[1]
    right = (torch.as_tensor(predictions).argmax(dim=1) == labels).sum().item()
    say(f"evaluated {result['acc']:.4f}, predicted {right} of {len(predictions)}, weights {fingerprint(network)}")


if __name__ == "__main__":
    main()
