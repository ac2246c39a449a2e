"""MONAI's trainer on a 3D U-Net, as in its tutorial for several GPUs: images and labels are made by MONAI."""

import sys

import torch
import torch.distributed as dist
from ending import end
from monai.data import DataLoader, Dataset, create_test_image_3d
from monai.engines import SupervisedTrainer
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import Compose, EnsureChannelFirstd, RandRotate90d, ScaleIntensityd
from monai.utils import set_determinism
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

SIZE = 32


def main():
    dist.init_process_group("gloo")
    set_determinism(seed=0)
    pairs = [create_test_image_3d(SIZE, SIZE, SIZE, num_seg_classes=1, rad_max=8) for _ in range(16)]
    keys = ["image", "label"]
    changes = [
        EnsureChannelFirstd(keys, channel_dim="no_channel"),
        ScaleIntensityd("image"),
        RandRotate90d(keys, prob=0.5, spatial_axes=(0, 2)),
    ]
    data = Dataset([dict(zip(keys, pair, strict=True)) for pair in pairs], Compose(changes))
    network = UNet(3, 1, 1, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, dropout=0.1)
    wrapper = DistributedDataParallel(network)
    losses = []
    trainer = SupervisedTrainer(
        torch.device("cpu"),
        max_epochs=1,
        train_data_loader=DataLoader(data, batch_size=2, sampler=DistributedSampler(data)),
        network=wrapper,
        optimizer=torch.optim.Adam(wrapper.parameters(), 1e-3),
        loss_function=DiceLoss(sigmoid=True),
        epoch_length=int(sys.argv[1]),
    )
    trainer.add_event_handler("ITERATION_COMPLETED", lambda engine: losses.append(engine.state.output[0]["loss"]))
    trainer.run()
    end(losses, network)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
