"""One-shot sets: each client releases the sums of random features of each class once; images then match the means."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.server_training import public_generator, torch_seed
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import FeatureSums
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.models.features import COUNT_WEIGHT, part_weight, record_features
from dpfl_lightning.papers.distillation import costs
from dpfl_lightning.papers.distillation.gradient_matching import SyntheticSet
from dpfl_lightning.papers.distillation.sets import Count, Records, SetStrategy
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.clipping.reference import evaluating
from dpfl_lightning.privacy.mechanism import Mechanism

PURPOSE = "features"
_START_NOISE = 0.1  # standard deviation of what tells the images of a class apart at the start
_NETS_OF_A_STEP = 2
_LARGEST = 1e6  # value of an image that has not diverged


@dataclass
class FeatureMeans(SetStrategy):
    """One-shot sets: clients release sums of random features once, and the server makes images with the same means.

    The only round asks each client for one noisy vector: for each class the sum, over its records, of a constant, of
    the record itself, and of the outputs of `nets` random models for it. Its norm is at most 1 for each record.
    The server moves images from the released mean images until their mean features are those of the records. The
    results of a run are the set (`distilled.safetensors`) and a new model trained on it, as with `distillation`.

    Args:
        nets: number of random models. More describe records better, and share the same norm.
        image_steps: steps of Adam on the images; they cost neither traffic nor privacy.
        image_learning_rate: of Adam; it falls linearly to 0. A step moves a value by about this much.

    **Guarantees** Clients are weighted by the inverse variance of their planned noise. A class with fewer records than
    its count's noise has images of noise.

    **Privacy** One Gaussian release of all records of each client, of sensitivity 1 whatever privacy.clip_norm is, and
    charged before it is computed. Without noise, sums over few records are close to these records, and the run warns.

    Reference: own; mean embeddings as in Harder, Adamczewski and Park (2021), random models in Zhao and Bilen (2023).
    """

    nets: Count = 8
    image_steps: Count = 200
    image_learning_rate: Annotated[float, Interval(gt=0, le=10)] = 0.1

    what = "synthetic images whose mean features in random models match those of clients' records"
    jobs = (FeatureSums,)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._released: tuple[Tensor, float] | None = None  # sums `[G, k]`, and the standard deviation of their noise
        self._set: SyntheticSet | None = None

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        self._check_records(view)
        view.new_model(view.seed)  # raises an error now instead of after the release
        require(schedule.rounds == 1, "rounds", "be 1 for feature_means, whose clients release once", schedule.rounds)

        def with_one_release(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
            """Replace training by one release of features of all records."""
            lines = []
            for line in client_schedule.planned:
                if line.purpose == "train" and isinstance(line.event, NoisedEvent):
                    event, in_l2 = line.event, line.event.clip_order == 2
                    require(in_l2, "privacy.mechanism", "be gaussian for feature_means", event.kind)
                    line = Planned(PURPOSE, event.of(1.0, event.noise_multiplier, 1), line.count)
                lines.append(line)
            return dataclasses.replace(client_schedule, planned=tuple(lines))

        bare = sum(not client.adds_noise for client in schedule.clients)
        must = "be above 0 for all clients or for none: sums without noise would outweigh all others"
        clients = len(schedule.clients)
        require(bare in (0, clients), "privacy.noise_multiplier", must, f"0 for {bare} of {clients}")
        if bare:
            warn_user(
                "strategy feature_means: sums of records of single classes are sent without noise. Where a client has "
                "few records of a class, they are close to these records. Set privacy.epsilon unless this is a study."
            )
        return schedule.replan(with_one_release)

    def describe(self, view: View) -> tuple[str, ...]:
        clients, model = view.facts.num_clients, view.module.num_params
        releases = any(line.purpose == PURPOSE and line.count for one in view.schedule.clients for line in one.planned)
        must = "be a budget that pays for one release of some client"
        require(releases, "privacy.epsilon", must, "less", "Set more, or a larger privacy.noise_multiplier.")
        sent = costs.Sent(clients * self.nets * model, clients * self._numbers(view))
        return (costs.traffic_words(sent, costs.traffic(clients, model, model), clients),)

    def _numbers(self, view: View) -> int:
        """Return how many numbers a client releases."""
        x = view.module.flat.new_zeros(1, *view.facts.input_shape)
        return view.facts.num_classes * (1 + sum(part.shape[1] for part in self._parts(view, self._nets(view), x)))

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        mechanism_of = {
            client: dataclasses.replace(view.mechanism(client, PURPOSE), clip_norm=1.0) for client in plan.clients
        }
        nets = self._nets(view)
        answers = view.ask(FeatureSums(mechanism_of=mechanism_of, nets=nets, num_classes=view.facts.num_classes))
        advice = "Budgets that it spent stay spent. Set privacy.reserve_rounds: 1 to be able to repeat a release."
        require(bool(answers), "strategies.feature_means", "get the release of at least one client", "none", advice)
        clients = list(answers)
        self._released = pooled([answers[i] for i in clients], [mechanism_of[i] for i in clients])
        return plan.only(lambda client: False)

    def _nets(self, view: View) -> Tensor:
        """Return the parameters of the random models, `[M, P]`."""
        seeds = (public_generator(view.seed, "features", number) for number in range(self.nets))
        return torch.stack([view.new_model(torch_seed(seed)) for seed in seeds])

    def _parts(self, view: View, nets: Tensor, x: Tensor) -> list[Tensor]:
        with evaluating(view.module.net):
            return record_features(view.module, nets, x)

    def _matched(self, sums: Tensor, noise_std: float, view: View) -> SyntheticSet:
        """Return images `[G, n, *X]` whose mean features are those of the sums `[G, k]`."""
        sums, nets = sums.to(view.module.flat), self._nets(view)
        start = self._of_noise(view)
        (num_classes, count), pixels = start.images.shape[:2], start.images[0, 0].numel()
        records = (sums[:, :1] / COUNT_WEIGHT).clamp_min(max(noise_std / COUNT_WEIGHT, 1e-12))
        width = (sums.shape[1] - 1 - pixels) // len(nets)
        parts = sums[:, 1:].split([pixels, *[width] * len(nets)], dim=1)
        means = [part / (part_weight(len(parts)) * records) for part in parts]
        # records are normalised: their values have mean square 1
        begin = math.sqrt(pixels) * torch.nn.functional.normalize(means[0])
        images = (begin.view(num_classes, 1, *start.images.shape[2:]) + _START_NOISE * start.images).requires_grad_()
        optimizer = torch.optim.Adam([images], rate := self.image_learning_rate)
        draw, steps = public_generator(view.seed, "nets of steps"), self.image_steps
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
            some = draw.choice(len(nets), min(_NETS_OF_A_STEP, len(nets)), replace=False)
            with torch.enable_grad():
                own = self._parts(view, nets[some], images.flatten(0, 1))
                targets = [means[0], *(means[1 + net] for net in some)]
                apart = [
                    (part.view(num_classes, count, -1).mean(dim=1) - target).square().sum()
                    for part, target in zip(own, targets, strict=True)
                ]
                (slope,) = torch.autograd.grad(torch.stack(apart).sum() * count, images)
            images.grad, before = slope, images.detach().clone()
            optimizer.step()
            if not bool((images.detach().abs() <= _LARGEST).all()):
                warn_user(
                    f"strategy feature_means: step {step + 1} of the images was skipped and ended the steps, because a "
                    f"value was not finite, or above {_LARGEST:g}. Set a smaller {self._key('image_learning_rate')}."
                )
                images = before
                break
        few = self._too_few(sums, noise_std).view(-1, *[1] * (images.dim() - 1))
        return SyntheticSet(torch.where(few, start.images, images.detach()), start.velocity)

    def _too_few(self, sums: Tensor, noise_std: float) -> Tensor:
        """Return which classes have too few records to be shown, `[G]` bool; none if there is noise."""
        counts = (sums[:, 0] / COUNT_WEIGHT).round()
        return (counts < self.min_records_per_target) & (noise_std == 0)

    def _synthetic(self, view: View) -> SyntheticSet:
        if self._released is None:
            return self._of_noise(view)
        if self._set is None:  # after the round and its checkpoint, so a crash here loses no release
            self._set = self._matched(*self._released, view)
        return self._set

    def _records(self, view: View) -> Records:
        return self._synthetic(view).records

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        if self._released is None:
            return {}
        sums, noise_std = self._released
        left_out = {"classes_left_out": float(self._too_few(sums, noise_std).sum())}
        return {**left_out, "feature_noise": float((noise_std * math.sqrt(sums.shape[1]) / sums.norm(dim=1)).mean())}

    def state_dict(self) -> dict[str, Any]:
        return {"released": self._released}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._released, self._set = state["released"], None


def pooled(answers: Sequence[Tensor], mechanisms: Sequence[Mechanism]) -> tuple[Tensor, float]:
    """Return the sum over clients, weighted by the inverse variance of their noise, and its noise's deviation.

    `answers` are noisy sums `[G, k]`, divided by each mechanism's `expected_batch_size`. The largest weight is 1;
    without any noise all are. Post-processing.
    """
    noise = [mechanism.noise_scale(answers[0].numel()) for mechanism in mechanisms]
    weights = [(min(noise) / one) ** 2 if one > 0 else 1.0 for one in noise]
    parts = zip(weights, answers, mechanisms, strict=True)
    total = torch.stack([weight * one.expected_batch_size * answer for weight, answer, one in parts]).sum(dim=0)
    return total, math.sqrt(sum((weight * std) ** 2 for weight, std in zip(weights, noise, strict=True)))
