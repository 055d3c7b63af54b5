"""What strategies that make a synthetic set share: which records they take, a net trained on the set, and its files."""

from collections.abc import Mapping
from typing import Any

import torch

from dpfl_lightning.algorithms.gradient_matching import SyntheticSet
from dpfl_lightning.algorithms.server_training import Training, public_generator, torch_seed, trained_on
from dpfl_lightning.errors import require, require_whole
from dpfl_lightning.federated.messages.evaluation import ClientModels
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.strategies.distillation import costs
from dpfl_lightning.strategies.distillation.artefact import DATA_CARD, DistilledSet
from dpfl_lightning.strategies.distillation.data_card import data_card


class SetStrategy(Strategy, Callback):
    """A strategy whose result is a synthetic set (`distilled.pt`, with its cards) and a new model trained on it.

    Attributes:
        key: of its options in a configuration.
        what: the images are, for the card.
    """

    key: str
    what: str
    trains_on_server = True

    def __init__(self, evaluation_epochs: int, augmentations: tuple[str, ...] = ()) -> None:
        require_whole(f"{self.key}.evaluation_epochs", evaluation_epochs, 1)
        self._evaluation = Training(
            epochs=evaluation_epochs, momentum=0.9, weight_decay=5e-4, decayed=True, augmentations=augmentations
        )

    def final_models(self, state: ServerState, view: View) -> ClientModels:
        init, order = (torch_seed(public_generator(view.seed, "evaluation", which)) for which in (0, 1))
        model = trained_on(view.module, view.new_model(init), self._synthetic(view).records, self._evaluation, order)
        return ClientModels(model[None], (0,) * view.facts.num_clients)

    def on_fit_end(self, view: View, result: RunResult) -> None:
        if result.finished:
            options, sampling = self._told()
            card = costs.card(view, result, self.what, options, sampling)
            x, y = (one.cpu() for one in self._synthetic(view).records)
            made, folder = DistilledSet(x, y, card), view.run.output_dir
            made.save(folder, self.key)
            write_text(folder / DATA_CARD, data_card(made, view.run.options))

    def _synthetic(self, view: View) -> SyntheticSet:
        """Return the set as it is now."""
        raise NotImplementedError

    def _told(self) -> tuple[Mapping[str, Any], str]:
        """Return the options and the sampling for the card."""
        raise NotImplementedError

    def _of_noise(self, images_per_class: int, view: View) -> SyntheticSet:
        facts, like = view.facts, view.module.flat
        generator = torch.Generator().manual_seed(torch_seed(public_generator(view.seed, "images")))
        start = SyntheticSet.of_noise(facts.num_classes, images_per_class, facts.input_shape, generator)
        return start.to(like.device, like.dtype)

    def _check_records(self, view: View) -> None:
        classes, task = view.facts.num_classes, view.module.task
        require(classes >= 2, self.key, "have records of at least 2 classes", classes, "A regression has no classes.")
        one_class = task is None or task.one_class
        require(one_class, "task", "be multiclass or binary for distillation", task and task.name)
        require(_takes_images(view), self.key, "have records that are one floating tensor", view.facts.input_shape)
        must = "be empty, because a net that the server trains has no personal parameters"
        require(not view.module.personal, "personal", must, view.module.personal)


def _takes_images(view: View) -> bool:
    """Return whether the net takes one floating tensor for each record, as synthetic records are."""
    try:
        x = view.module.flat.new_zeros(1, *view.facts.input_shape)
        view.module.sample_loss(view.module.named_trainable, x, torch.zeros(1, dtype=torch.long, device=x.device))
    except (RuntimeError, TypeError):
        return False
    return True
