"""Callbacks, loggers and profilers of a `lightning.Trainer` in each client's training."""

import csv
import inspect

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.load import load
from dpfl_lightning.config.options import ClientOptions, EngineOptions, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.engines.trainer import PASSED, REFUSED, TrainerEngine
from dpfl_lightning.federated.client.module import ClientModule

PRIVACY = PrivacyOptions(noise_multiplier=0.5, noise_key="ab" * 16)


class Seen(Callback):
    """What a callback is given."""

    def __init__(self) -> None:
        self.batches: list[object] = []
        self.parameters: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch)
        self.parameters.append(torch.cat([one.detach().flatten() for one in pl_module.parameters()]))


class Moves(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with torch.no_grad():
            next(pl_module.parameters()).add_(1.0)


class Ends(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = True


class Raises(Callback):
    def on_train_start(self, trainer, pl_module):
        raise ValueError("no file")


def trained(make_loop, engine, steps=3, **options):
    loop = make_loop(
        module=ClientModule(nn.Linear(6, 3), **options),
        engine=engine,
        rounds=2,
        privacy=PRIVACY,
        clients=ClientOptions(4, batch_size=None, local_epochs=steps, learning_rate=0.2),
    )
    return loop, loop.run()


def test_every_argument_of_a_trainer_is_passed_or_refused_with_a_reason():
    known = inspect.signature(L.Trainer).parameters.keys()
    assert PASSED.keys() | REFUSED.keys() == known and not PASSED.keys() & REFUSED.keys()
    for name, reason in REFUSED.items():
        with pytest.raises(UserError, match=rf"`engine.trainer.{name}` must be left out.*{reason[:20]}"):
            TrainerEngine(**{name: 1})


@pytest.mark.parametrize(
    "arguments", [{"callback": []}, {"precision": "bf16-mixed"}, {"callbacks": [nn.ReLU()]}, {"profiler": "slow"}]
)
def test_arguments_that_cannot_be_used_are_refused(arguments):
    with pytest.raises(UserError, match=r"`engine.trainer"):
        TrainerEngine(**arguments)


@pytest.mark.e2e
def test_a_trainer_with_callbacks_gives_the_results_of_the_reference(make_loop, tmp_path):
    seen = Seen()
    torch.manual_seed(0)
    expected, _ = trained(make_loop, SerialEngine())
    torch.manual_seed(0)
    actual, result = trained(
        make_loop,
        TrainerEngine(
            callbacks=[seen, LearningRateMonitor()],
            logger=CSVLogger(tmp_path, name="lr"),
            profiler=SimpleProfiler(dirpath=tmp_path, filename="times"),
            precision="32-true",
        ),
    )
    assert torch.equal(actual.module.flat, expected.module.flat)
    assert result.finished
    assert list(tmp_path.rglob("*.jsonl")), "charges are in such files"
    assert seen.batches == [0, 1, 2] * 4 * 2, "numbers of steps, no records"
    assert list(tmp_path.glob("*times*")), "the profiler has written its report"


def test_the_learning_rate_of_every_local_step_is_logged(make_loop, tmp_path):
    def halved(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.8)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    logger = CSVLogger(tmp_path, name="lr", flush_logs_every_n_steps=1)
    trained(make_loop, TrainerEngine(callbacks=[LearningRateMonitor()], logger=logger), steps=2, optimizer=halved)
    with (tmp_path / "lr" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    of_client = {int(row["step"]): float(row["1/lr-SGD"]) for row in rows if row.get("1/lr-SGD")}
    assert of_client == {0: 0.8, 1: 0.4, 2: 0.2, 3: 0.1}, "local steps of both rounds"


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (Moves(), "leave the parameters as a private step has left them"),
        (Ends(), "let a client take all its local steps"),
        (Raises(), "work, got ValueError: no file"),
        (LearningRateMonitor(), "work, got MisconfigurationException"),  # without a logger
    ],
)
def test_a_callback_that_breaks_a_run_is_refused_before_anything_is_charged(callback, words, make_loop, tmp_path):
    with pytest.raises(UserError, match=rf"`engine.trainer` must {words}"):
        trained(make_loop, TrainerEngine(callbacks=[callback]))
    assert [one.name for one in tmp_path.rglob("*.jsonl")] == []


def test_trainers_are_configured_by_class_path(tmp_path):
    monitor = "lightning.pytorch.callbacks.LearningRateMonitor"
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}}
    options = EngineOptions(
        "trainer", trainer={"callbacks": [{"class_path": monitor}], "logger": logger, "profiler": "simple"}
    )
    engine = ENGINES["trainer"].of(options)
    assert isinstance(engine, TrainerEngine)
    callbacks = engine.arguments["callbacks"]
    assert isinstance(callbacks, list)
    assert isinstance(callbacks[0], LearningRateMonitor)
    assert isinstance(engine.arguments["logger"], CSVLogger)
    for name in ("fast", "serial"):
        with pytest.raises(UserError, match=r"`engine.trainer` must be empty for engine"):
            ENGINES[name].of(EngineOptions(name, trainer={"profiler": "simple"}))
    loaded, *_ = load(["--config", "digits", "--engine.name", "trainer", "--engine.trainer.profiler", "simple"])
    assert loaded.engine.trainer == {"profiler": "simple"}


def test_a_progress_bar_can_be_shown():
    assert isinstance(TrainerEngine(callbacks=[RichProgressBar()]).arguments["callbacks"][0], RichProgressBar)
    assert TrainerEngine(enable_progress_bar=True).arguments["enable_progress_bar"] is True
