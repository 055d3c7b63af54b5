"""An engine that trains each client with a `lightning.Trainer`."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import Profiler
from torch import Tensor
from torch.utils.data import DataLoader

from dpfl_lightning.config.options import EngineOptions
from dpfl_lightning.config.registry import build_object
from dpfl_lightning.errors import UserError, nearest, require, warn_user
from dpfl_lightning.federated.client.client import Client, HeldClients
from dpfl_lightning.federated.client.engines.serial import DrawnBatches, SerialEngine
from dpfl_lightning.federated.client.module import ClientModule, LocalTask
from dpfl_lightning.models.optimizers import PLAIN_SGD
from dpfl_lightning.privacy.noise import Streams

KEY = "engine.trainer"
#: arguments of a Trainer that are passed on, and their values for each client and round
PASSED: dict[str, Any] = {
    "callbacks": None,
    "logger": False,
    "profiler": None,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
    "default_root_dir": None,
    "precision": "32-true",
}
_DEVICE = "The devices of a run are those of engine.device and torchrun."
_STEPS = "The plan says how many local steps are charged."
_KERNELS = "Kernels were chosen and checked before the run, so that no record changes the bits of another."
_SCORES = "A client's training has no validation: evaluation.every says when scores are released."
_FILES = "A run has checkpoints of its own, from which it resumes without noise that is drawn twice."
#: the other arguments, and why a run has no place for them
REFUSED = {
    **dict.fromkeys(("accelerator", "strategy", "devices", "num_nodes", "plugins", "use_distributed_sampler"), _DEVICE),
    **dict.fromkeys(("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "fast_dev_run"), _STEPS),
    **dict.fromkeys(("limit_train_batches", "overfit_batches", "accumulate_grad_batches", "barebones"), _STEPS),
    "reload_dataloaders_every_n_epochs": "Batches are drawn as the accountant assumes.",
    **dict.fromkeys(("deterministic", "benchmark", "sync_batchnorm"), _KERNELS),
    **dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches", "inference_mode"), _SCORES),
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps"), _SCORES),
    "gradient_clip_val": "It would clip the noisy sum; privacy.clip_norm clips the gradient of each record.",
    "gradient_clip_algorithm": "privacy.clip_norm clips the gradient of each record.",
    "detect_anomaly": "An error at a gradient that is not finite would tell of a record.",
    **dict.fromkeys(("enable_checkpointing", "model_registry"), _FILES),
    "enable_autolog_hparams": "Tracking records the options of a run.",
}


class TrainerEngine(SerialEngine):
    """Trains each client by `Trainer.fit`, for its callbacks, loggers and profilers; slower than `SerialEngine`.

    Args:
        arguments: of the Trainer, those of `PASSED`. All clients share the objects among them; a logger gets metrics
            as client/name, by the number of the local step in the run.

    Raises UserError for other arguments, and at `setup` if the Trainer cannot work with these.

    **Privacy** Callbacks see numbers of steps and noisy parameters, no records. They may record exact times.
    """

    name = "trainer"
    description = "a lightning.Trainer for each client and round"
    _usual: ClassVar = ("num_workers", "does not have many workers", "LeafSpec", "no learning rate schedulers")

    def __init__(self, **arguments: Any) -> None:
        for name in arguments:
            require(name not in REFUSED, f"{KEY}.{name}", "be left out", arguments[name], REFUSED.get(name, ""))
            near = nearest(name, [*PASSED])
            require(name in PASSED, f"{KEY}.{name}", f"be one of {', '.join(PASSED)}", arguments[name], near)
        self.arguments = {**PASSED, **arguments}
        precision, must = self.arguments["precision"], "be 32-true, in which gradients were checked"
        require(str(precision) in ("32", "32-true"), f"{KEY}.precision", must, precision)
        listed = self.arguments["callbacks"]
        callbacks = listed if isinstance(listed, list) else [listed] * (listed is not None)
        wrong = next((type(one).__name__ for one in callbacks if not isinstance(one, Callback)), "")
        require(not wrong, f"{KEY}.callbacks", "be a list of Lightning callbacks", wrong)
        logger = self.arguments["logger"]
        must = "be one Lightning logger, or false"
        require(not logger or isinstance(logger, Logger), f"{KEY}.logger", must, logger)
        profiler, names = self.arguments["profiler"], ("simple", "advanced", "pytorch")
        known = profiler is None or profiler in names or isinstance(profiler, Profiler)
        require(known, f"{KEY}.profiler", f"be a Lightning profiler or one of {', '.join(names)}", profiler)
        self._watched = bool(callbacks or logger or self.arguments["profiler"])

    @classmethod
    def of(cls, options: EngineOptions) -> TrainerEngine:
        given = dict(options.trainer)
        if isinstance(listed := given.get("callbacks"), list | tuple):
            named = enumerate(one if isinstance(one, Mapping) else {"class_path": one} for one in listed)
            given["callbacks"] = [build_object(f"{KEY}.callbacks.{place}", one, Callback) for place, one in named]
        for name, base in (("logger", Logger), ("profiler", Profiler)):
            if isinstance(one := given.get(name), Mapping):
                given[name] = build_object(f"{KEY}.{name}", one, base)  # type: ignore[type-abstract]
        return cls(**given)

    def setup(self, module: ClientModule, clients: HeldClients, streams: Streams, sampling: str) -> None:
        super().setup(module, clients, streams, sampling)
        if self._watched:
            if streams.secret is None:
                warn_user("`engine.trainer` may record the exact times of local steps, which no guarantee covers")
            self._rehearse()

    def _rehearse(self) -> None:
        """Let copies of what was given watch two steps that train nothing, before anything is charged."""
        try:
            arguments = {**PASSED, "callbacks": copy.deepcopy(self.arguments["callbacks"])}
        except Exception as error:
            must = "hold what copy.deepcopy copies"
            raise UserError(f"`{KEY}` must {must}, got {type(error).__name__}: {error}.") from error
        if self.arguments["logger"]:
            arguments["logger"] = _OfClient(DummyLogger(), "", 0)
        module = copy.deepcopy(self.module)
        self._fit(_LocalSteps(module, 2, PLAIN_SGD.over(module.trainable, 1.0)), arguments)

    def local_training(self, client: Client, task: LocalTask, start: Tensor, batches: DrawnBatches) -> Tensor:
        self.module.begin(task, start)
        arguments = dict(self.arguments)
        if self.arguments["logger"]:
            names, place = self.clients.population.names, self.clients.places[client.number]
            name = names[place] if names else str(client.number)
            arguments["logger"] = _OfClient(self.arguments["logger"], name, (task.round - 1) * task.steps)
        self._fit(_PrivateSteps(self.module, batches), arguments)
        return self.module.flat

    def _fit(self, steps: _LocalSteps, arguments: Mapping[str, Any]) -> None:
        """Let a Trainer take the steps. Raises UserError for what its callbacks do."""
        device = self.module.device
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # four lines a client and round otherwise
        logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
        with warnings.catch_warnings(), self._errors_of_others():
            for words in self._usual:
                warnings.filterwarnings("ignore", message=f".*{words}.*")
            trainer = L.Trainer(
                accelerator=device.type,
                devices=1 if device.index is None else [device.index],
                max_epochs=1,
                enable_checkpointing=False,
                **arguments,
            )
            try:
                trainer.fit(steps, DataLoader(range(steps.count), batch_size=None))  # type: ignore[arg-type]
            except SystemExit as error:  # a Trainer turns Ctrl-C into it
                raise error.__context__ or error from None
        steps.end()
        self.module.to(device)

    @contextlib.contextmanager
    def _errors_of_others(self) -> Iterator[None]:
        """Turn errors of callbacks, loggers and profilers into a UserError, but not those of a private step."""
        try:
            yield
        except (UserError, StepFailedError):
            raise
        except Exception as error:
            if not self._watched:
                raise
            words = " ".join(f"{error}".split()).rstrip(".")
            raise UserError(f"`{KEY}` must work, got {type(error).__name__}: {words}.") from error


class StepFailedError(Exception):
    """The private step of a client failed, as its cause says."""


class _LocalSteps(L.LightningModule):
    """Local steps of a client in a round, as a Trainer and its callbacks see them. These take no step at all."""

    def __init__(self, module: ClientModule, count: int, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.module, self.count, self._optimizer = module, count, optimizer
        self.automatic_optimization = False
        self._left, self._taken = module.flat, 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self._require_left()
        self.take(batch_idx)
        self._left, self._taken = self.module.flat, self._taken + 1

    def take(self, step: int) -> None:
        """Take one step."""

    def end(self) -> None:
        """Raise UserError unless the steps were taken, and they alone have moved the parameters."""
        self._require_left()
        must, got = "let a client take all its local steps", f"{self._taken} of {self.count}"
        require(self._taken == self.count, KEY, must, got, "A callback has ended the training.")

    def _require_left(self) -> None:
        same = torch.equal(self.module.flat.to(self._left.device), self._left)
        advice = "A callback has changed them, which no noise would cover."
        require(same, KEY, "leave the parameters as a private step has left them", "others", advice)


class _PrivateSteps(_LocalSteps):
    """The steps of a client that was charged. Its records are no batches of the Trainer."""

    def __init__(self, module: ClientModule, batches: DrawnBatches) -> None:
        steps = module.local_optimizer
        super().__init__(module, len(batches), steps.optimizer)
        self._step_on = lambda step: module.training_step(batches[step], step)
        self._schedule = steps.schedule

    def on_fit_start(self) -> None:
        self.module.on_fit_start()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._schedule()  # so that callbacks see the learning rate of the step
        return batch

    def take(self, step: int) -> None:
        try:
            self._step_on(step)
        except UserError:
            raise
        except Exception as error:
            raise StepFailedError(f"{type(error).__name__}: {error}") from error


class _OfClient(Logger):
    """A logger of all clients, for one of them."""

    def __init__(self, logger: Logger, client: str, first_step: int) -> None:
        super().__init__()
        self._logger, self._client, self._first = logger, client, first_step

    @property
    def name(self) -> str | None:
        return self._logger.name

    @property
    def version(self) -> int | str | None:
        return self._logger.version

    @property
    def log_dir(self) -> str | None:
        return self._logger.log_dir

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        named = {f"{self._client}/{name}": value for name, value in metrics.items()}
        self._logger.log_metrics(named, self._first + (step or 0))

    def log_hyperparams(self, params: Any, *args: Any, **options: Any) -> None:
        """Those of a run are recorded by `tracking`."""

    def save(self) -> None:
        self._logger.save()
