"""What strategies that make a synthetic set share: which records they take, the training on the set, and its files."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.server_training import Training, public_generator, torch_seed, trained_on
from dpfl_lightning.config.typed import options_of
from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.evaluation import ClientModels
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.papers.distillation.gradient_matching import SyntheticSet
from dpfl_lightning.papers.sets.cards import card, data_card
from dpfl_lightning.papers.sets.distilled_set import DATA_CARD, DistilledSet
from dpfl_lightning.runtime.files import write_text

Count = Annotated[int, Interval(ge=1)]
Records = tuple[Tensor, Tensor]


@dataclass
class SetStrategy(Strategy, Callback):
    """A strategy whose result is a synthetic set (`distilled.safetensors`, with cards) and a new model trained on it.

    Args:
        images_per_class: number of images of each class.
        min_records_per_target: without noise, a class with fewer records in a round is left out of it: its images
            stay as they are, at first noise.
        evaluation_epochs: epochs on the set with which the final model is trained.

    Attributes:
        what: the images are, for the card.
    """

    images_per_class: Count = 10
    min_records_per_target: Count = 32
    evaluation_epochs: Count = 300

    what: ClassVar[str]
    role = "base"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._augmentations: tuple[str, ...] = ()  # of images in training
        self._sampling = "full"  # of the records of a release, for the card

    def final_models(self, state: ServerState, view: View) -> ClientModels:
        init, order = (torch_seed(public_generator(view.seed, "evaluation", which)) for which in (0, 1))
        how = Training(
            self.evaluation_epochs, momentum=0.9, weight_decay=5e-4, decayed=True, augmentations=self._augmentations
        )
        start, sets = view.new_model(init), self._training_sets(view)
        models = torch.stack([trained_on(view.module, start, records, how, order) for records in sets])
        one_for_all = (0,) * view.facts.num_clients
        return ClientModels(models, one_for_all if len(sets) == 1 else tuple(range(len(sets))))

    def on_fit_end(self, view: View, result: RunResult) -> None:
        if result.finished:
            options = {name: getattr(self, name) for name in options_of(type(self))}
            x, y = (one.cpu() for one in self._records(view))
            made = DistilledSet(x, y, card(view, result, self.what, options, self._sampling))
            made.save(view.run.output_dir, f"strategies.{self.config_name}")
            write_text(view.run.output_dir / DATA_CARD, data_card(made, view.run.options))

    def _records(self, view: View) -> Records:
        """Return the set as it is now: images `[n, *X]` and labels `[n]`."""
        raise NotImplementedError

    def _training_sets(self, view: View) -> list[Records]:
        """Return what final models are trained on: one set for all clients, or one for each client."""
        return [self._records(view)]

    def _of_noise(self, view: View, *numbers: int) -> SyntheticSet:
        """Return the images to begin with; further `numbers` give other ones."""
        facts, like = view.facts, view.module.flat
        generator = torch.Generator().manual_seed(torch_seed(public_generator(view.seed, "images", *numbers)))
        start = SyntheticSet.of_noise(facts.num_classes, self.images_per_class, facts.input_shape, generator)
        return start.to(like.device, like.dtype)

    def _check_records(self, view: View) -> None:
        classes, task, key = view.facts.num_classes, view.module.task, f"strategies.{self.config_name}"
        require(classes >= 2, key, "have records of at least 2 classes", classes, "A regression has no classes.")
        one_class = task is None or task.one_class
        require(one_class, "task", "be multiclass or binary for distillation", task and task.name)
        require(_takes_images(view), key, "have records that are one floating tensor", view.facts.input_shape)
        must = "be empty, because a model that the server trains has no personal parameters"
        require(not view.module.personal, "personal", must, view.module.personal)


def _takes_images(view: View) -> bool:
    """Return whether the model takes one floating tensor for each record, as synthetic records are."""
    try:
        x = view.module.flat.new_zeros(1, *view.facts.input_shape)
        view.module.sample_loss(view.module.named_trainable, x, torch.zeros(1, dtype=torch.long, device=x.device))
    except (RuntimeError, TypeError):
        return False
    return True
