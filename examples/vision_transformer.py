"""A vision transformer from a folder, trained on printed digits, is fine-tuned on handwritten ones.

All parameters are trained, with Adam. It needs `pip install transformers`.
"""

from pathlib import Path

import example_pretrained
import torch
from example_data import handwritten_digits
from figure import save_figure
from transformers import AutoModelForImageClassification

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, Progress

SIZES = {"berlin": 800, "paris": 400, "oslo": 200, "test": 397}
EPSILONS = {"berlin": 2.0, "paris": 4.0, "oslo": 8.0}


torch.manual_seed(0)
folder = example_pretrained.vision_transformer(Path("vit"))  # or the folder of a model that you have downloaded
digits = handwritten_digits(SIZES)
test = digits.pop("test")
result = FederatedLoop(
    Population.from_datasets(digits, test, held_out=0, num_classes=10),
    ClientModule(AutoModelForImageClassification.from_pretrained(folder)),
    rounds=15,
    clients=ClientOptions(batch_size=64, learning_rate=2e-3, optimizer={"name": "adam"}),
    privacy=PrivacyOptions(epsilon=EPSILONS, delta=1e-3),
    callbacks=[Progress()],
).run()
save_figure("Which digit?", accuracy=result)
