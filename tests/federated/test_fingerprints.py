"""A release is free when it is made again only if it is the same: what decides that, and what never repeats."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import FIXED_KEY, PowerCut, blobs, cut_at, small_net
from torch import nn
from torch.nn import functional as F

from dpfl_lightning.client import ClientModule
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.callback import ServerCallback
from dpfl_lightning.federated.fingerprints import module_fingerprint, repeats
from dpfl_lightning.federated.query import Query
from dpfl_lightning.federated.setup import ENGINES
from dpfl_lightning.options import PrivacyOptions
from dpfl_lightning.privacy.events import GaussianEvent
from dpfl_lightning.privacy.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.privacy.schedule import Planned

RESERVE = PrivacyOptions(epsilon=8.0, delta=1e-3, noise_key=FIXED_KEY, reserve_rounds=1)


class Layer(nn.Module):
    """Frozen numbers, a buffer, settings and a function beside a trained layer."""

    def __init__(self, scale=1.0, fixed=0.0, remembered=0.0, act=torch.tanh, how=None):
        super().__init__()
        self.layer, self.scale, self.act, self.how = nn.Linear(6, 3), scale, act, how or {"power": 2}
        self.fixed = nn.Parameter(torch.full((3,), fixed), requires_grad=False)
        self.register_buffer("remembered", torch.full((3,), remembered))

    def forward(self, x):
        return self.act(self.layer(x)) * self.scale + self.fixed + self.remembered


class Noisy(nn.Module):
    """Random without a layer that says so."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(F.dropout(x, 0.01, self.training))


def of(net):
    return module_fingerprint(ClientModule(net))


def test_trained_parameters_do_not_count_and_all_else_does():
    torch.manual_seed(0)
    assert of(Layer()) == of(Layer())  # other random weights
    changed = [{"scale": 2.0}, {"fixed": 1.0}, {"remembered": 1.0}, {"act": torch.relu}, {"how": {"power": 3}}]
    plain = nn.Sequential(nn.Linear(6, 2), nn.Tanh())
    others = [plain, nn.Sequential(nn.Linear(6, 2), nn.ReLU()), nn.Sequential(nn.Linear(6, 2, bias=False), nn.Tanh())]
    found = {of(net) for net in (Layer(), *(Layer(**one) for one in changed), *others)}
    assert len(found) == 1 + len(changed) + len(others)


def load(path, name):
    """A file as the Python module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    python = importlib.util.module_from_spec(spec)
    sys.modules[name] = python
    spec.loader.exec_module(python)
    return python


@pytest.mark.parametrize("changes", ["owners_helper", "owners_net", None])
def test_the_source_of_a_net_and_of_what_it_uses_counts(changes, tmp_path, monkeypatch):
    for name in ("owners_helper", "owners_net"):
        monkeypatch.setitem(sys.modules, name, None)
    helper, net = tmp_path / "owners_helper.py", tmp_path / "owners_net.py"
    helper.write_text("def act(x):\n    return x.relu()\n")
    net.write_text(
        "from torch import nn\nfrom owners_helper import act\n\n\nclass Net(nn.Linear):\n"
        "    def forward(self, x):\n        return act(super().forward(x))\n"
    )
    found = []
    for _ in range(2):
        load(helper, "owners_helper")
        found.append(of(load(net, "owners_net").Net(6, 2)))
        if changes:
            path = tmp_path / f"{changes}.py"
            path.write_text(path.read_text() + "\n# another version\n")
    assert (found[0] == found[1]) == (changes is None)


def test_a_class_without_a_file_is_never_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "typed_in", type(sys)("typed_in"))
    net = type("Net", (nn.Linear,), {"__module__": "typed_in"})(6, 2)
    assert of(net) != of(net)


@pytest.mark.parametrize("net", [Layer(), small_net()], ids=["owner's", "small"])
def test_plain_nets_repeat_their_releases(net):
    assert repeats(ClientModule(net), blobs())


@pytest.mark.parametrize("net", [nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.1)), Noisy()], ids=["layer", "function"])
def test_nets_that_draw_do_not_and_generators_are_left_alone(net):
    state = torch.get_rng_state()
    assert not repeats(ClientModule(net), blobs())
    assert torch.equal(torch.get_rng_state(), state)


def charged_twice(make_loop, first, then, privacy=RESERVE):
    """Whether the round that was broken off is charged again when the run goes on with `then`."""
    broken = make_loop(module=ClientModule(first), privacy=privacy)
    cut_at(broken, 2)
    with pytest.raises(PowerCut):
        broken.run()
    again = make_loop(module=ClientModule(then), privacy=privacy, output_dir=broken.output_dir)
    again.run(resume=True)
    rounds = Counter(charge.round for charge in read_ledger(again.folder.ledger_file))
    assert rounds[1] == rounds[3] == 4 and rounds[2] in (4, 8)
    return rounds[2] == 8


def test_a_round_again_is_free_only_by_the_same_net_that_draws_nothing(make_loop):
    assert not charged_twice(make_loop, Layer(), Layer())
    assert charged_twice(make_loop, Layer(), Layer(act=torch.relu))
    assert charged_twice(make_loop, Noisy(), Noisy())


def test_a_net_that_draws_is_saved_in_every_round(make_loop):
    assert make_loop(module=ClientModule(Noisy()), checkpoint_seconds=10.0).checkpoint_seconds == 0
    assert make_loop(module=ClientModule(Noisy()), privacy=None, checkpoint_seconds=10.0).checkpoint_seconds == 10
    assert make_loop(checkpoint_seconds=10.0).checkpoint_seconds == 10


@pytest.mark.parametrize("engine", ["serial", "fast"])
def test_evaluation_does_not_drop_out(engine, make_loop):
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    loop = make_loop(module=ClientModule(net), engine=ENGINES[engine](), rounds=1)
    loop.run()
    rows = torch.arange(8)
    one, other = (loop.engine.outputs(loop.state.models[0], rows) for _ in range(2))
    assert torch.equal(one, other) and net[1].training


class Mixing(nn.Module):
    """A batch norm of one's own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x - x.mean(dim=0))


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        if len(x) > 1:
            self.seen += x.detach().mean(dim=0)
        return self.layer(x)


@pytest.mark.parametrize(
    ("net", "words"),
    [(Mixing(), "must see one record at a time, got losses that change"), (Remembering(), "a buffer `seen`")],
)
def test_nets_that_mix_or_remember_records_are_refused(net, words, make_loop):
    with pytest.raises(UserError, match=words):
        make_loop(module=ClientModule(net))


@dataclass(frozen=True, kw_only=True)
class Weighed(Query):
    """A question that holds its tensors in a mapping."""

    weights: dict[str, torch.Tensor]
    purpose: str = "weigh"

    def rows(self, client, module, x, y):
        return torch.zeros(1, 1)


class AsksTwice(ServerCallback):
    def __init__(self):
        self._answers = []

    def plan_run(self, schedule, view):
        line = Planned("weigh", GaussianEvent(1.0, 5.0), 2 * view.run.rounds)
        return schedule.replan(lambda _, own: replace(own, planned=(*own.planned, line)))

    def plan_round(self, plan, view):
        for middle in (0.0, 1.0, 0.0):
            weights = torch.zeros(3000)
            weights[1500] = middle
            noise = dict.fromkeys(plan.clients, Gaussian(1.0, 5.0, 1.0, 1.0))
            self._answers.append(float(view.ask(Weighed(mechanism_of=noise, weights={"all": weights}))[0]))
        return plan


def test_questions_that_differ_anywhere_have_answers_of_their_own(make_loop):
    own = AsksTwice()
    make_loop(callbacks=[own], rounds=1, privacy=RESERVE).run()
    first, other, again = own._answers
    assert first == again != other
