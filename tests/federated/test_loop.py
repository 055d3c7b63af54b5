"""The loop: hook order, charges, results, what strategies answer, and what is refused."""

import dataclasses
import functools
import json
import math
import os

import pytest
import torch
from conftest import FIXED_KEY, blobs, break_off, private, small_loop, small_net
from fakes import Absent, Recorder, changed_releases
from safetensors.torch import load_file

from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages import update
from dpfl_lightning.federated.messages.jobs import TRAINING, ClassGradients, ProximalTraining
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import HOOKS, Strategy
from dpfl_lightning.privacy.accounting.guarantee import ENDS_BY_RESULTS
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.runtime import stopping
from dpfl_lightning.strategies.aggregation.fedprox import FedProx
from dpfl_lightning.strategies.aggregation.noise_floor import NoiseFloor
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted
from dpfl_lightning.strategies.aggregation.uniform import Uniform

PROXIMAL, WATCHING = FedProx(), Callback()


def a_strategy(**members):
    return type("Odd", (Strategy,), members)()


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A finished run of five rounds, and its result."""
    clients = ClientOptions(count=4, batch_size=16, learning_rate=0.3)
    folder = tmp_path_factory.mktemp("learnt") / "run"
    loop = small_loop(rounds=5, clients=clients, privacy=private([4.0, 6.0, 8.0, 10.0]), output_dir=folder)
    return loop, loop.run()


@pytest.mark.e2e
def test_a_run_learns_and_leaves_its_record(learnt):
    loop, result = learnt
    assert result.test_accuracy > 0.8
    assert result.finished and result.reason == "all 5 rounds are done"
    written = json.loads((loop.output_dir / "result.json").read_text())
    assert written["test_accuracy"] == result.test_accuracy and written["rounds"] == 5
    assert len(written["clients"]) == 4
    for client in written["clients"]:
        assert 0 < client["epsilon_spent"] <= client["epsilon_budget"]
        assert client["epsilon_spent"] > 0.99 * client["epsilon_budget"]
        assert client["steps"] == 5 * -(-client["num_records"] // client["batch_size"])
    accuracies = torch.tensor([client["accuracy"] for client in result.clients], dtype=torch.float64)
    assert bool((accuracies >= 0).all()) and bool((accuracies <= 1).all())
    assert result.accuracy_mean == pytest.approx(float(accuracies.mean()))
    history = result.history()
    assert [one["round"] for one in history] == [1, 2, 3, 4, 5]
    assert history[-1]["test_accuracy"] == result.test_accuracy
    assert history[-1]["clients"]["train_epsilon"]["0"] == result.clients[0]["epsilon_spent"]
    assert result.headline_std == pytest.approx(float(accuracies.std(correction=0)))
    assert result.headline_worst == float(accuracies.min()) == written["headline_worst"]
    for words in ("record", "add or remove", "Poisson", "0.001", "not_covered"):
        assert words in str(written["guarantee"]), words
    assert len(read_ledger(loop.clients.folder.ledger_file)) == 4 * 5
    assert 0 < result.client_seconds <= result.training_seconds <= result.wall_seconds
    assert written["client_seconds"] == result.client_seconds
    net = small_net()
    net.load_state_dict(load_file(loop.output_dir / "model.safetensors"))
    assert torch.equal(torch.nn.utils.parameters_to_vector(net.parameters()), loop.state.models[0])


def test_noise_of_an_update_is_that_of_its_mechanism(learnt):
    loop, result = learnt
    plan = loop.view(loop.state).plan()
    stds = [m.noise_std(steps, 0.3) for m, steps in zip(plan.mechanism_of, plan.steps, strict=True)]
    assert [client["noise_std"] for client in result.clients] == pytest.approx(stds)


def test_a_taken_folder_is_left_alone(learnt, make_loop):
    loop, _ = learnt
    before = {path: path.read_bytes() for path in loop.output_dir.iterdir()}
    with pytest.raises(UserError, match=r"output_dir.*holds another run. Resume it with"):
        make_loop(output_dir=loop.output_dir).run()
    assert before == {path: path.read_bytes() for path in loop.output_dir.iterdir()}


@pytest.mark.e2e
def test_a_run_without_privacy_or_with_shuffled_batches_says_so(make_loop):
    result = make_loop(privacy=PrivacyOptions(epsilon=5.0, delta=1e-3, sampling="shuffle")).run()
    assert "NOT proven" in str(result.guarantee)
    result = make_loop(privacy=None).run()
    assert all(client["epsilon_spent"] is None and client["noise_std"] == 0 for client in result.clients)
    assert "no " in str(result.guarantee).lower()
    json.dumps(result.as_dict(), allow_nan=False)


@pytest.mark.e2e
def test_clients_with_spent_budgets_sit_out_and_the_run_ends_with_the_reason(make_loop):
    privacy = PrivacyOptions(noise_multiplier=2.0, epsilon=[2.5, 3.0, 4.0, 0.01], delta=1e-3, noise_key=FIXED_KEY)
    result = make_loop(privacy=privacy, rounds=500, parts=[Uniform(), seen := Recorder()]).run()
    cohorts = [report.clients for report in seen.reports]
    assert "every client has spent its budget" in result.reason
    assert result.rounds < 500
    assert cohorts[0] == (0, 1, 2) and cohorts[-1] == (2,)
    for client in result.clients:
        assert client["epsilon_spent"] <= client["epsilon_budget"]


class Notes(Strategy, Callback):
    """Notes every hook and what the ledger held when it was called."""

    def __init__(self, calls, ledger_lines):
        self._calls, self._ledger_lines = calls, ledger_lines


def _recording(hook):
    def call(self, *args):
        self._calls.append((hook, self._ledger_lines()))
        return hook == "needs_updates" or getattr(super(Notes, self), hook)(*args)

    return call


for _hook in (*HOOKS, "on_fit_start", "on_round_start", "on_round_end", "on_fit_end"):
    if callable(getattr(Notes, _hook)):
        setattr(Notes, _hook, _recording(_hook))


def test_round_order_and_that_charges_come_before_training(make_loop):
    calls: list = []
    clients = ClientOptions(count=4, batch_size=None)  # with full batches a strategy may plan anew
    loop = make_loop(rounds=2, clients=clients)
    lines = lambda: len(read_ledger(loop.clients.folder.ledger_file)) if hasattr(loop, "folder") else 0  # noqa: E731
    loop.config.strategies.append(Notes(calls, lines))
    train = loop.clients.train

    def spy(*args):
        calls.append(("TRAIN", lines()))
        return train(*args)

    loop.clients.train = spy
    loop.run()

    def one_round(before, after):
        planning = ["exhausted", "stop", "on_round_start", "replan", "plan_round", "needs_updates"]
        training = ["TRAIN", "needs_updates", "weigh", "combine", "scale", "step", "after_step"]
        ending = ["metrics", "state_dict", "final_models", "on_round_end"]
        return [(name, before) for name in planning] + [(name, after) for name in training + ending]

    beginning = [(name, 0) for name in ("plan_run", "describe", "initialise", "state_dict", "on_fit_start")]
    expected = [*beginning, *one_round(0, 4), *one_round(4, 8)]
    assert calls[: len(expected)] == expected
    assert calls[-1] == ("on_fit_end", 8)


def test_a_part_of_another_process_charges_nothing_once_that_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "_starter", os.getppid())

    class Killed(Callback):
        def on_round_end(self, view, report):
            assert report.round == 1
            monkeypatch.setattr(stopping, "_starter", -1)  # the parent is another one

    privacy = private(4.0, accountant="rdp")
    loop = small_loop(parts=[Killed()], privacy=privacy, output_dir=tmp_path / "run", rounds=3)
    with pytest.raises(stopping.Orphaned):
        loop.run()
    assert [charge.round for charge in read_ledger(tmp_path / "run" / "ledger.jsonl")] == [1] * 4


def test_strategies_that_do_not_fit_are_refused(make_loop):
    combine = {"combine": lambda self, updates, weights, view: None}
    for parts, words in (
        (
            [SizeWeighted(), a_strategy(plan_rounds=lambda self, plan, view: plan)],
            r"plan_rounds.*Did you mean `plan_round`",
        ),
        ([a_strategy(role="bas")], r"^`Odd.role` must be one of base, .*, got 'bas'\. Did you mean `base`\?$"),
        ([a_strategy(**combine)], r"`Odd.needs_updates` must be overridden by a strategy that overrides"),
        ([SizeWeighted(), Uniform()], "exactly one aggregation rule .* got size_weighted and uniform"),
        (
            [SizeWeighted(), a_strategy(role="selection"), a_strategy(role="selection")],
            "at most one strategy that limits how",
        ),
        (
            [SizeWeighted(), a_strategy(jobs=(ClassGradients,)), a_strategy(jobs=TRAINING)],
            "for one job of the clients, got .*Odd, for which clients release gradients of classes, beside .*Odd, for "
            "which clients train or clients train with a proximal term. Remove one of them",
        ),
    ):
        with pytest.raises(UserError, match=words):
            make_loop(parts=parts)
    median = a_strategy(**combine, needs_updates=lambda self, plan, view: True)
    with pytest.raises(UserError, match=r"at most one strategy that combines updates \(`combine`\)"):
        make_loop(parts=[SizeWeighted(), median, median]).run()


@pytest.mark.e2e
def test_a_job_that_a_strategy_does_not_know_is_refused_before_a_charge(make_loop):
    """A strategy that states no job may give one to clients that another strategy cannot work with."""
    pulled = lambda self, plan, view: dataclasses.replace(plan, job=ProximalTraining(0.1, view.state.models))  # noqa: E731
    classes = lambda self, plan, view: dataclasses.replace(plan, job=ClassGradients(3))  # noqa: E731
    for plan_round, beside in ((pulled, NoiseFloor()), (classes, FedProx())):
        loop = make_loop(parts=[SizeWeighted(), beside, a_strategy(plan_round=plan_round)])
        with pytest.raises(
            UserError, match=f"`plan_round` must give a job with which {beside.config_name} works: clients"
        ):
            loop.run()
        assert read_ledger(loop.clients.folder.ledger_file) == []


@pytest.mark.e2e
def test_whoever_stops_a_run_by_its_releases_the_guarantee_is_that_of_the_plan(make_loop):
    whole = make_loop(rounds=4).run()
    for hook, as_planned in (("stop", True), ("exhausted", False)):
        early = a_strategy(**{hook: lambda self, view: "enough" if view.round == 3 else None})
        result = make_loop(rounds=4, parts=[SizeWeighted(), early]).run()
        assert (result.rounds, result.reason) == (2, "enough")
        assert (result.guarantee.epsilon == pytest.approx(whole.guarantee.epsilon, rel=1e-6)) == as_planned
        assert (ENDS_BY_RESULTS in result.guarantee.caveats) == as_planned


@pytest.mark.e2e
def test_models_of_their_own_have_a_mean_if_they_began_alike(make_loop, tmp_path):
    """Also in a run that was broken off, and not if they began differently."""

    def initialise(self, state, view, noise=0.0):
        models = state.models[:1].repeat(4, 1)
        models[1:] += noise
        return dataclasses.replace(state, models=models, model_of=(0, 1, 2, 3))

    other = a_strategy(initialise=functools.partialmethod(initialise, noise=1.0))
    alike = a_strategy(initialise=initialise)
    assert make_loop(rounds=1, parts=[SizeWeighted(), other]).run().model is None
    loop = break_off(make_loop(rounds=3, parts=[SizeWeighted(), alike]), 2)
    result = make_loop(rounds=3, parts=[SizeWeighted(), alike], output_dir=loop.output_dir).run(resume=True)
    assert result.model is not None and (loop.output_dir / "model.safetensors").exists()


@pytest.mark.e2e
def test_weights_of_another_shape_or_sign_are_refused(make_loop):
    for role, answer, words in (
        ("base", torch.ones(2, 3), r"3 clients, \[K, C\], got \(2, 3\)"),
        ("route", torch.ones(1), r"got \(1,\)"),
        ("base", [1.0, 1.0, 1.0], "got 'list'"),
        ("route", torch.tensor([1.0, -1.0, 1.0]), r"give numbers >= 0 and finite, got \[1.0, -1.0, 1.0\]"),
        ("base", torch.tensor([1.0, math.nan, 1.0]), "give numbers >= 0 and finite"),
    ):
        odd = a_strategy(role=role, weigh=lambda self, updates, view, answer=answer: answer)
        parts = [odd] if role == "base" else [Uniform(), odd]
        clients = ClientOptions(count=3, batch_size=16)
        with pytest.raises(UserError, match="`weigh of [a-z_.]*Odd` must.*" + words):
            make_loop(blobs(num_clients=3), clients=clients, parts=parts, privacy=None, rounds=1).run()


@pytest.mark.e2e
@pytest.mark.parametrize(("hook", "round", "when"), [("weigh", 2, "in round 2"), ("metrics", 3, "after round 2")])
def test_an_error_in_a_strategy_says_whose_it_is_and_the_run_goes_on(hook, round, when, make_loop):
    broken = True

    def fail(self, *arguments):
        if broken and arguments[-1].round == round:
            raise ZeroDivisionError("mine")
        return getattr(Uniform, hook)(self, *arguments)

    breaks = type("Breaks", (Uniform,), {hook: fail})()
    loop = make_loop(parts=[breaks])
    with pytest.raises(ZeroDivisionError) as caught:
        loop.run()
    again = f"run(resume=True) of a FederatedLoop with output_dir={str(loop.output_dir)!r}"
    assert caught.value.__notes__ == [
        f"This came from the hook `{hook}` of Breaks, {when}.",
        f"The run was saved up to its last checkpoint. When you have fixed the cause, resume with: {again}",
    ]
    broken = False
    resumed, whole = make_loop(parts=[breaks], output_dir=loop.output_dir), make_loop(parts=[breaks])
    assert resumed.run(resume=True).finished and whole.run().finished
    assert torch.equal(resumed.state.models, whole.state.models)


def test_deltas_are_hidden_from_who_did_not_ask_for_them(make_loop):
    seen = []
    peek = {"weigh": lambda self, updates, view: seen.append(updates.deltas)}
    reader = a_strategy(**peek, needs_updates=lambda self, plan, view: True)
    make_loop(parts=[SizeWeighted(), a_strategy(**peek), reader], rounds=1).run()
    assert seen[0] is None and seen[1].shape[0] == 4


@pytest.mark.e2e
@pytest.mark.usefixtures("one_noise")
@pytest.mark.parametrize("updates", [False, True], ids=["streamed", "kept"])
@pytest.mark.parametrize("read_at_once", [{"cpu"}, set()], ids=["cpu", "as on a GPU"])
def test_a_client_with_a_broken_update_is_dropped_whole(make_loop, updates, read_at_once, monkeypatch):
    monkeypatch.setattr(update, "_READ_AT_ONCE", read_at_once)
    loop = make_loop(rounds=1, parts=[seen := Recorder(updates)])
    only = make_loop(rounds=1, parts=[Recorder(updates), Absent({1: (1,)})])
    only.run()
    one_number = torch.eye(1, loop.module.num_params)[0] > 0
    changed_releases(
        loop, lambda round, client, delta: delta.masked_fill(one_number, math.nan) if client == 1 else delta
    )
    loop.run()
    assert seen.reports[0].clients == (0, 2, 3) and seen.reports[0].weights.shape == (1, 3)
    torch.testing.assert_close(loop.state.models, only.state.models, rtol=1e-6, atol=1e-7)


@pytest.mark.e2e
@pytest.mark.usefixtures("one_noise")
def test_updates_are_streamed_unless_somebody_reads_them(make_loop):
    """Same bits, and no [C, P] anywhere: what makes memory independent of the number of clients."""
    seen = []

    def watched(**options):
        loop = make_loop(rounds=2, **options)
        train = loop.clients.train

        def spy(*args):
            seen.append(train(*args))
            return seen[-1]

        loop.clients.train = spy
        loop.run()
        return loop.state.models

    streamed, kept = watched(), watched(parts=[Recorder(updates=True)])
    assert [updates.deltas is None for updates in seen] == [True, True, False, False]
    assert torch.equal(streamed, kept)


class Sees(Strategy):
    """Reads single updates in even rounds; client 1 is absent in round 3."""

    def plan_round(self, plan, view):
        return plan.only(lambda client: client != 1 or view.round != 3)

    def needs_updates(self, plan, view):
        return plan.round % 2 == 0

    def weigh(self, updates, view):
        self.seen = [*getattr(self, "seen", []), updates.deltas is not None]


def tells(metrics: dict) -> Strategy:
    return a_strategy(metrics=lambda self, view: metrics)


@pytest.mark.e2e
def test_metrics_of_strategies_are_reported_and_kept(make_loop):
    of_clients = torch.tensor([1.0, 2.0, float("nan"), 4.0])
    sees = Sees()
    reports, watcher = [], Callback()
    watcher.on_round_end = lambda view, report: reports.append(report)
    loop = make_loop(parts=[sees, tells({"mood": 3}), tells({"height": of_clients}), watcher])
    result = loop.run()
    assert sees.seen == [False, True, False], "single updates are seen in the rounds that ask for them"
    sizes = torch.tensor(loop.population.num_records, dtype=torch.float64)
    torch.testing.assert_close(reports[0].metrics["weight"], sizes / sizes.sum())
    last = reports[2].metrics
    assert last["weight"].isnan().tolist() == [False, True, False, False] and last["mood"] == 3.0
    weights = last["weight"][[0, 2, 3]]
    assert last["largest_weight"] == float(weights.max())
    assert last["effective_clients"] == pytest.approx(float(1 / weights.square().sum()))
    assert result.metrics["height"] == [1.0, 2.0, None, 4.0] and result.metrics["weight"][1] is None
    assert json.loads((loop.output_dir / "result.json").read_text())["metrics"] == result.metrics
    again = make_loop(parts=[Sees()], rounds=3, output_dir=loop.output_dir)
    assert again.run(resume=True).metrics == result.metrics


@pytest.mark.e2e
def test_metrics_of_a_taken_name_or_another_shape_are_refused(make_loop):
    for metrics, words in (
        ([{"mood": 1.0}, {"mood": 2.0}], "'mood', which is reported already"),
        ([{"weight": 1.0}], "'weight', which is reported already"),
        ([{"epsilon": torch.zeros(4)}], "'epsilon', which is reported already"),
        ([{"mood": torch.ones(3)}], r"'mood' of shape \(3,\), not one for each client"),
    ):
        with pytest.raises(RuntimeError, match=words):
            make_loop(parts=[tells(one) for one in metrics], rounds=1).run()


def test_bad_settings_are_one_sentence_and_write_nothing(make_loop, tmp_path):
    for change, words in (
        ({"clients": {"batch_size": 32}}, r"}\. Write ClientOptions\(batch_size=32\)\."),
        ({"privacy": {"epsilon": 2.0}}, "`privacy` must be PrivacyOptions, got .* Write PrivacyOptions"),
        ({"strategies": ["fedprox"]}, "Strategy, got 'fedprox'. Write strategies=dpfl_lightning.strategies.build"),
        ({"strategies": [Uniform]}, r"Write Uniform\(...\)\."),
        (
            {"callbacks": [Uniform]},
            r"must hold instances of Callback or Strategy, .*Write Uniform\(...\)\.",
        ),
        ({"strategies": [PROXIMAL], "callbacks": [PROXIMAL]}, "hold each object once, because it would act twice"),
        ({"callbacks": [WATCHING, WATCHING]}, "hold each object once, because it would act twice, got 'Callback'"),
        ({"strategies": Uniform()}, "`strategies` must be a list of strategies"),
        ({"engine": "quick"}, "`engine` must be one of fast, serial"),
        ({"population": [1]}, "`population` must be a Population, got 'list'"),
        (
            {"clients": ClientOptions(count=4, batch_size=500)},
            r"clients.batch_size.*records, got 500. Client 0 has \d+ records. Give a list .*, or null \(full batches\)",
        ),
        ({"privacy": PrivacyOptions(epsilon=[1.0, 2.0], delta=1e-3)}, "privacy.epsilon.*4 values"),
        ({"rounds": 0}, "`rounds` must be a whole number >= 1, got 0"),
        ({"rounds": 2.5}, "`rounds` must be a whole number >= 1, got 2.5"),
        ({"seed": None}, "`seed` must be a whole number >= 0, got None"),
        ({"evaluate_every": "a"}, "`evaluate_every` must be a whole number >= 1, got 'a'"),
        ({"callbacks": 3}, "`callbacks` must be a list of callbacks, got 3. Write callbacks="),
        ({"engine": 3}, "`engine` must be a name or an Engine, got 3"),
        ({"module": torch.nn.Linear}, "must be a ClientModule or another module, got 'type'"),
    ):
        with pytest.raises(UserError, match=words):
            make_loop(**change).run()
        assert list(tmp_path.iterdir()) == [], words


@pytest.mark.parametrize(
    "section, values, message",
    [
        (
            ClientOptions,
            {"optimizer": "adam"},
            "`clients.optimizer` must be a mapping with a `name`, got 'adam'. Write {name: adam}",
        ),
        (PrivacyOptions, {"mechanism": "Laplace"}, "must be one of gaussian, laplace, got 'Laplace'. Did you mean"),
        (
            PrivacyOptions,
            {"reserve_rounds": -1},
            r"`privacy.reserve_rounds` must be a whole number in \[0, 1e6\], got -1.",
        ),
        (PrivacyOptions, {"clip_norm": float("inf")}, "clip_norm` must be a number > 0 and finite"),
        (PrivacyOptions, {"delta": 1.5}, r"`privacy.delta` must be a number in \[0, 1\) .*, got 1.5"),
        (PrivacyOptions, {"noise_key": "k"}, r"`privacy.noise_key` must be text of 32 hexadecimal digits or null, got"),
        (PrivacyOptions, {"diagnostics": "no"}, "`privacy.diagnostics` must be true or false, got 'no'."),
    ],
)
def test_options_are_checked_in_python_too(section, values, message):
    with pytest.raises(UserError, match=message):
        section(**values)


def test_a_delta_above_one_over_n_is_a_warning(make_loop):
    with pytest.warns(UserWarning, match=r"delta.*1 / records.*0\.1"):
        make_loop(privacy=PrivacyOptions(epsilon=5.0, delta=0.1))
