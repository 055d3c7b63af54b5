"""No noise protects two different values: separate runs, seeds, questions, edits, copies and restored folders."""

import functools
import itertools
import json
import shutil
from types import ModuleType

import pytest
import torch
from attack_tools import Asks, CutBetweenRounds, Releases, cut_after_training, independent, noise_apart
from conftest import FIXED_KEY, PowerCut, small_loop, small_net
from torch import nn
from torch.nn import functional as F

from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.commands.ledger import main as ledger
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.answers import rows_of
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.query import MeanLoss
from dpfl_lightning.federated.server.results import read_guarantees
from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.papers.baselines.ifca import Ifca
from dpfl_lightning.privacy.ledger.ledger import read_ledger

pytestmark = pytest.mark.e2e

NOISE = 100.0  # so much that the clipped sums, of at most 78 records, are lost in it
RATE = 0.25


def run_of(folder, seen=None, *, module=None, seed=0, rounds=3, parts=(), rate=RATE, **privacy) -> FederatedLoop:
    """A loop of four clients with full batches, one step a round, and no budget but the schedule's.

    No account tells a copy what the run has spent: it would leave nothing for its rounds.
    """
    return small_loop(
        module=module,
        rounds=rounds,
        clients=ClientOptions(count=4, batch_size=None, learning_rate=rate),
        privacy=PrivacyOptions(**{"noise_multiplier": NOISE, "delta": 1e-3, "account": None, **privacy}),
        parts=[*parts, *([] if seen is None else [seen])],
        seed=seed,
        output_dir=folder,
        engine=SerialEngine(),  # which calls a loss as it is
    )


def assert_independent(loop: FederatedLoop, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Each client's two releases, `[C, P]`, have different noise."""
    for client in range(4):
        noise_std = RATE * NOISE / loop.config.settings[client].num_records  # of one number of the client's update
        apart = noise_apart(ours[client], theirs[client], noise_std)
        assert independent(apart), f"the noise of two releases differs by {apart:.2g} standard deviations"


def releases(folder, round: int = 1, resume: bool = False, **options) -> tuple[FederatedLoop, torch.Tensor]:
    seen = Releases()
    loop = run_of(folder, seen, **options)
    loop.run(resume=resume)
    return loop, seen.of_round[round]


OTHERS = [{"seed": 1}, {"rate": 2 * RATE}, {"rounds": 2}, {"clip_norm": 2.0}, {"noise_multiplier": 2 * NOISE}]


@pytest.mark.parametrize(
    "other, key",
    [*((other, FIXED_KEY) for other in OTHERS), (OTHERS[0], None), (OTHERS[1], None), ({}, None)],
    ids=lambda given: "default" if given is None else given if isinstance(given, str) else next(iter(given), "nothing"),
)
def test_runs_that_differ_have_noise_of_their_own(other, key, tmp_path):
    """A given key repeats a run, and no other one: what two runs release would give the noise away.

    Without a key even runs of one configuration differ.
    """
    loop, ours = releases(tmp_path / "first", noise_key=key, rounds=1)
    _, theirs = releases(tmp_path / "second", **{"noise_key": key, "rounds": 1, **other})
    unit = {"rate": 2, "clip_norm": 2, "noise_multiplier": 2}.get(next(iter(other), ""), 1)  # of the other's noise
    assert_independent(loop, ours, theirs / unit)


def test_a_simulation_repeats_itself_and_promises_nothing(tmp_path):
    results = []
    for name in ("first", "second"):
        seen = Releases()
        results.append((run_of(tmp_path / name, seen, noise_key=FIXED_KEY, epsilon=8.0).run(), seen.of_round))
    (first, ours), (_, theirs) = results
    assert all(torch.equal(ours[round], theirs[round]) for round in (1, 2, 3))
    assert "nobody is protected" in first.guarantee.words()


def test_seeds_with_a_key_promise_nothing(tmp_path, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    argv = ["--config", "conf/digits.yaml", "--rounds", "1", "--tracking", "null", "--privacy.noise_key", FIXED_KEY]
    assert fit([*argv, "--seeds", "0,1", "--output_dir", str(tmp_path / "runs")]) == 0
    for folder in ("", "seed_0", "seed_1"):
        result = json.loads((tmp_path / "runs" / folder / "result.json").read_text())
        assert "nobody is protected" in str(result["guarantee"])


class Another(MeanLoss):
    """Another question, of the same fields."""


@rows_of(Another)
def _constant(query, client, module, x, y):
    return torch.ones(len(x), 1)


@pytest.mark.parametrize("kinds", [(MeanLoss, MeanLoss), (MeanLoss, Another)], ids=["twice the same", "two classes"])
def test_questions_with_equal_fields_are_two_releases(kinds, tmp_path):
    asks = Asks(kinds, NOISE)
    run_of(tmp_path / "run", asks, rounds=1).run()
    first, second = asks.answers
    charges = [charge for charge in read_ledger(tmp_path / "run" / "ledger.jsonl") if charge.purpose == "loss"]
    assert len(charges) == 2 * 4, "every answer is paid for"
    assert all(first[client] != second[client] for client in range(4)), "and has noise of its own"


class Smoothed:
    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing

    def loss(self, output, y):
        return F.cross_entropy(output, y, reduction="none", label_smoothing=self.smoothing)


def by_default(smoothing: float):
    return lambda output, y, smoothing=smoothing: Smoothed(smoothing).loss(output, y)


def by_closure(smoothing: float):
    return lambda output, y: Smoothed(smoothing).loss(output, y)


#: ways to give a loss its smoothing
LOSSES = {
    "bound method": lambda smoothing: Smoothed(smoothing).loss,
    "default": by_default,
    "closure": by_closure,
    "partial": lambda smoothing: functools.partial(F.cross_entropy, reduction="none", label_smoothing=smoothing),
    "module": lambda smoothing: nn.CrossEntropyLoss(reduction="none", label_smoothing=smoothing),
}

CALLS = ModuleType("calls")  # what modules keep is not compared after a pass
CALLS.numbers = itertools.count()


def counting(output, y):
    """A loss that counts its calls in training: the same records have another gradient each time."""
    factor = 0.01 + next(CALLS.numbers) % 7 if torch.is_grad_enabled() else 1.0
    return F.cross_entropy(output, y, reduction="none") * factor


def broken_off(folder, module: ClientModule, round: int = 2) -> torch.Tensor:
    """What was released in the round in which the power failed, `[C, P]`: somebody may have seen it."""
    loop = run_of(folder, Releases(), module=module, reserve_rounds=1)
    seen = cut_after_training(loop, round)
    with pytest.raises(PowerCut):
        loop.run()
    return seen[round]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_smoothing_that_was_edited_is_refused(loss, tmp_path):
    folder = tmp_path / "run"
    broken_off(folder, ClientModule(small_net(), loss(0.0)))
    before = (folder / "ledger.jsonl").read_bytes()
    with pytest.raises(UserError, match="module"):
        run_of(folder, Releases(), module=ClientModule(small_net(), loss(0.3)), reserve_rounds=1).run(resume=True)
    assert (folder / "ledger.jsonl").read_bytes() == before


def test_a_loss_that_counts_its_calls_is_refused(tmp_path):
    with pytest.raises(UserError, match="must keep nothing of a pass for the next one, got `numbers` of"):
        run_of(tmp_path / "run", Releases(), module=ClientModule(small_net(), counting)).run()


def test_a_round_that_was_broken_off_is_charged_again_with_other_noise(tmp_path):
    folder = tmp_path / "run"
    before = broken_off(folder, ClientModule(small_net()))
    loop, after = releases(folder, 2, resume=True, module=ClientModule(small_net()), reserve_rounds=1)
    assert sum(charge.round == 2 for charge in read_ledger(folder / "ledger.jsonl")) == 2 * 4
    assert_independent(loop, before, after)


@pytest.mark.parametrize(
    "rate, restored", [(RATE, False), (2 * RATE, False), (RATE, True)], ids=["copy", "copy with another rate", "backup"]
)
def test_a_copy_or_restored_backup_that_is_resumed_has_other_noise(rate, restored, tmp_path):
    folder, copy = tmp_path / "run", tmp_path / "copy"
    with pytest.raises(PowerCut):
        run_of(folder, Releases(), parts=[CutBetweenRounds(1)]).run()
    shutil.copytree(folder, copy)
    ours, theirs = Releases(), Releases()
    loop = run_of(folder, ours)
    loop.run(resume=True)
    if restored:
        shutil.rmtree(folder)
        copy = copy.rename(folder)
    try:
        run_of(copy, theirs, rate=rate).run(resume=True)
    except UserError:
        assert rate != RATE and not theirs.of_round, "what changes nothing is no mistake"
        return
    for round in (2, 3):
        assert_independent(loop, ours.of_round[round], theirs.of_round[round] / (rate / RATE))


@pytest.mark.parametrize("selection", ["paper_argmin", "exponential_frozen"])
def test_choices_without_noise_are_covered_by_no_epsilon(selection, tmp_path, capsys):
    result = small_loop(
        rounds=2,
        privacy=PrivacyOptions(epsilon=8.0, delta=1e-3),
        parts=[Ifca(num_clusters=2, selection=selection)],
        output_dir=tmp_path / "run",
    ).run()
    bare = selection == "paper_argmin"
    assert [one["epsilon_spent"] is None for one in result.clients] == [bare] * 4
    promises = read_guarantees(tmp_path / "run")
    assert [one["epsilon"] is None for one in promises] == [bare] * 4
    assert ledger([str(tmp_path / "run"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["epsilon"] is None for one in again["clients"]] == [bare] * 4
