"""Segmentation: a U-Net of MONAI finds cells in images of three laboratories, and is scored by Dice.

Masks have the shape of the images, [B, 1, height, width]. It needs `pip install monai`.
"""

import torch
from example_data import cells
from figure import save_figure
from monai.networks.nets import UNet

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, Progress

SIZES = {"berlin": 600, "paris": 300, "oslo": 150, "test": 200}
EPSILONS = {"berlin": 2.0, "paris": 4.0, "oslo": 8.0}


torch.manual_seed(0)
net = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), norm="instance")
images = cells(SIZES)
test = images.pop("test")
result = FederatedLoop(
    Population.from_datasets(images, test, held_out=0, num_classes=2),
    ClientModule(net, metrics=["dice"]),
    rounds=10,
    clients=ClientOptions(batch_size=32, learning_rate=3e-3, optimizer={"name": "adam"}),
    privacy=PrivacyOptions(epsilon=EPSILONS, delta=1e-3),
    callbacks=[Progress()],
).run()
save_figure("Where are the cells?", "dice", dice=result)
