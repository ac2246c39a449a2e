"""open_clip's own `main`, from its package, on images and captions that are made here.

It wraps its model with `device_ids=[device]`, which torch refuses for a CPU. This argument alone is taken out.
"""

import json
import os
import random
import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import cpu_torchvision  # noqa: F401
import torch.distributed as dist
from ending import end
from open_clip import add_model_config
from PIL import Image

ARGUMENT, BATCH, RANKS = "device_ids=[device], ", 8, 2
MODEL = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 32, "layers": 3, "width": 128, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 3},
}


def module_of_main():
    """Import the module, with one change of its source."""
    found = find_spec("open_clip_train.main")
    source = Path(found.origin).read_text()
    assert source.count(ARGUMENT) == 2
    module = module_from_spec(found)
    exec(compile(source.replace(ARGUMENT, ""), found.origin, "exec"), module.__dict__)
    return module


def make_data(folder, rows):
    folder.mkdir()
    (folder / "small.json").write_text(json.dumps(MODEL))
    add_model_config(folder / "small.json")
    chosen = random.Random(0)
    lines = ["filepath\ttitle"]
    for row in range(rows):
        Image.frombytes("RGB", (40, 40), chosen.randbytes(4800)).save(folder / f"{row}.png")
        lines.append(f"{folder / str(row)}.png\t{' '.join(chosen.choices(['red', 'dog', 'a', 'tree', 'on'], k=6))}")
    (folder / "data.csv").write_text("\n".join(lines) + "\n")


def main():
    folder = Path(f"data{os.environ['RANK']}")
    make_data(folder, int(sys.argv[1]) * BATCH * RANKS)
    module, models, losses = module_of_main(), [], []
    train = module.train_one_epoch

    def train_one_epoch(model, data, loss, *others, **more):
        models.append(model.module)
        loss.register_forward_hook(lambda *given: losses.append(given[-1]["contrastive_loss"].item()))
        train(model, data, loss, *others, **more)

    module.train_one_epoch = train_one_epoch
    options = "--device cpu --epochs 1 --workers 0 --name run --logs logs --lr 0.001 --warmup 2 --precision fp32"
    gathered = "--dataset-type csv --local-loss --gather-with-grad --grad-clip-norm 1"
    words = [*options.split(), *gathered.split(), "--train-data", folder / "data.csv", "--batch-size", BATCH]
    module.main([str(word) for word in (*words, "--model", "small")])
    end(losses, *models)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
