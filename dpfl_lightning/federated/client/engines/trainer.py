"""An engine that trains each client with a `lightning.Trainer`."""

import logging
import warnings
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader

from dpfl_lightning.federated.client.engines.serial import DrawnBatches, SerialEngine
from dpfl_lightning.federated.client.module import LocalTask


class TrainerEngine(SerialEngine):
    """Trains each client by `Trainer.fit`, for features of the Trainer; same results as `SerialEngine`, but slower."""

    name = "trainer"
    description = "a lightning.Trainer for each client and round"

    def local_training(self, task: LocalTask, start: Tensor, batches: DrawnBatches) -> Tensor:
        self.module.begin(task, start)
        device = self.module.device
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # four lines a client and round otherwise
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*num_workers.*|.*does not have many workers.*|.*LeafSpec.*")
            trainer = L.Trainer(
                accelerator=device.type,
                devices=1 if device.index is None else [device.index],
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            try:
                # the default would make lists of tuples
                loader: Any = DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]
                trainer.fit(self.module, loader)
            except SystemExit as error:  # a Trainer turns Ctrl-C into it
                raise error.__context__ or error from None
        self.module.to(device)
        return self.module.flat
