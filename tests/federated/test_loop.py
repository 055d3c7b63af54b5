"""The loop: hook order, charges, results, bad folders, spent budgets."""

from __future__ import annotations

import json
import math

import pytest
import torch
from conftest import FIXED_KEY, blobs, small_net

from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import HOOKS, Strategy
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted
from dpfl_lightning.strategies.aggregation.uniform import Uniform


def test_a_run_learns_and_leaves_its_record(make_loop):
    loop = make_loop(rounds=5)
    result = loop.run()
    assert result.test_accuracy > 0.8
    assert result.finished and result.reason == "all 5 rounds are done"
    written = json.loads((loop.output_dir / "result.json").read_text())
    assert written["test_accuracy"] == result.test_accuracy and written["rounds"] == 5
    assert len(written["clients"]) == 4
    for client in written["clients"]:
        assert 0 < client["epsilon_spent"] <= client["epsilon_budget"]
        assert client["epsilon_spent"] > 0.99 * client["epsilon_budget"]
        assert client["steps"] == 5 * -(-client["num_records"] // client["batch_size"])
        assert 0 <= client["accuracy"] <= 1
    for words in ("record", "add or remove", "Poisson", "0.001", "Not covered"):
        assert words in written["guarantee"], words
    assert len(read_ledger(loop.clients.folder.ledger_file)) == 4 * 5
    net = small_net()
    net.load_state_dict(torch.load(loop.output_dir / "model.pt", weights_only=True))
    assert torch.equal(torch.nn.utils.parameters_to_vector(net.parameters()), loop.state.models[0])


def test_shuffled_batches_are_said_not_to_be_proven(make_loop):
    result = make_loop(privacy=PrivacyOptions(epsilon=5.0, delta=1e-3, sampling="shuffle")).run()
    assert "NOT proven" in result.guarantee


def test_a_run_without_privacy_says_so(make_loop):
    result = make_loop(privacy=None).run()
    assert all(client["epsilon_spent"] is None for client in result.clients)
    assert "no " in result.guarantee.lower()
    json.dumps(result.as_dict(), allow_nan=False)


def test_what_a_plan_solved_a_run_does_not_solve_again(make_loop, monkeypatch):
    planned = make_loop().plan_schedule()
    monkeypatch.setattr(
        "dpfl_lightning.privacy.accounting.schedule._smallest_noise", lambda plans, *_: {0: []}[len(plans)]
    )
    assert make_loop().plan_schedule() == planned


def test_a_taken_folder_is_left_alone(make_loop, tmp_path):
    loop = make_loop()
    loop.run()
    before = {path: path.read_bytes() for path in loop.output_dir.iterdir()}
    with pytest.raises(UserError, match=r"output_dir.*holds another run"):
        make_loop(output_dir=loop.output_dir).run()
    assert before == {path: path.read_bytes() for path in loop.output_dir.iterdir()}


def test_clients_with_spent_budgets_sit_out_and_the_run_ends_with_the_reason(make_loop):
    privacy = PrivacyOptions(noise_multiplier=2.0, epsilon=[2.5, 3.0, 4.0, 0.01], delta=1e-3, noise_key=FIXED_KEY)
    cohorts = []
    loop = make_loop(
        privacy=privacy, rounds=500, parts=[Uniform(), OnRound(lambda report: cohorts.append(report.clients))]
    )
    result = loop.run()
    assert "every client has spent its budget" in result.reason
    assert result.rounds < 500
    assert cohorts[0] == (0, 1, 2) and cohorts[-1] == (2,)
    for client in result.clients:
        assert client["epsilon_spent"] <= client["epsilon_budget"]


class OnRound(Callback):
    def __init__(self, see):
        self._see = see

    def on_round_end(self, view, report):
        self._see(report)


class Recorder(Strategy, Callback):
    """Notes every hook and what the ledger held when it was called."""

    def __init__(self, calls, ledger_lines):
        self._calls, self._ledger_lines = calls, ledger_lines


def _recording(hook):
    def call(self, *args):
        self._calls.append((hook, self._ledger_lines()))
        return hook == "needs_updates" or getattr(super(Recorder, self), hook)(*args)

    return call


for _hook in (*HOOKS, "on_fit_start", "on_round_start", "on_round_end", "on_fit_end"):
    if callable(getattr(Recorder, _hook)):
        setattr(Recorder, _hook, _recording(_hook))


def test_round_order_and_that_charges_come_before_training(make_loop):
    calls: list = []
    loop = make_loop(rounds=2)
    lines = lambda: len(read_ledger(loop.clients.folder.ledger_file)) if hasattr(loop, "folder") else 0  # noqa: E731
    loop.strategies.append(Recorder(calls, lines))
    train = loop.clients.engine.train

    def spy(*args):
        calls.append(("TRAIN", lines()))
        return train(*args)

    loop.clients.engine.train = spy
    loop.run()

    def one_round(before, after, last):
        verbs = [
            ("stop", before),
            ("on_round_start", before),
            ("replan", before),
            ("plan_round", before),
            ("needs_updates", after),
            ("TRAIN", after),
            ("needs_updates", after),
        ]
        verbs += [
            (name, after)
            for name in ("weigh", "combine", "scale", "step", "after_step", "metrics", "state_dict", "final_models")
        ]
        return [*verbs, ("on_round_end", after)]

    expected = [
        ("plan_run", 0),
        ("describe", 0),
        ("initialise", 0),
        ("state_dict", 0),
        ("on_fit_start", 0),
        *one_round(0, 4, False),
        *one_round(4, 8, True),
    ]
    assert calls[: len(expected)] == expected
    assert calls[-1] == ("on_fit_end", 8)


def test_a_misspelt_hook_is_heard(make_loop):
    odd = type("Odd", (Strategy,), {"plan_rounds": lambda self, plan, view: plan})
    with pytest.raises(UserError, match=r"plan_rounds.*Did you mean `plan_round`"):
        make_loop(parts=[SizeWeighted(), odd()])


def test_an_unknown_role_and_a_combination_without_updates_are_refused(make_loop):
    odd = type("Odd", (Strategy,), {"role": "bas"})
    with pytest.raises(UserError, match=r"^`Odd.role` must be one of base, .*, got 'bas'\. Did you mean `base`\?$"):
        make_loop(parts=[odd()])
    odd = type("Odd", (Strategy,), {"combine": lambda self, updates, weights, view: None})
    with pytest.raises(UserError, match=r"`Odd.needs_updates` must be overridden by a strategy that overrides"):
        make_loop(parts=[odd()])


class Breaks(Strategy):
    """Its hook raises at the view of that round, until it is mended."""

    mended = False
    role = "base"

    def __init__(self, hook: str, round: int) -> None:
        self._where = (hook, round)

    def _maybe(self, hook, view):
        if (hook, view.round) == self._where and not Breaks.mended:
            raise ZeroDivisionError("mine")

    def weigh(self, updates, view):
        self._maybe("weigh", view)
        return torch.ones(len(updates.clients))

    def metrics(self, view):
        self._maybe("metrics", view)
        return {}


@pytest.mark.parametrize(("hook", "round", "when"), [("weigh", 2, "in round 2"), ("metrics", 3, "after round 2")])
def test_an_error_in_a_strategy_says_whose_it_is_and_the_run_goes_on(hook, round, when, make_loop, monkeypatch):
    loop = make_loop(parts=[Breaks(hook, round)])
    with pytest.raises(ZeroDivisionError) as caught:
        loop.run()
    again = f"run(resume=True) of a FederatedLoop with output_dir={str(loop.output_dir)!r}"
    assert caught.value.__notes__ == [
        f"This came from the hook `{hook}` of Breaks, {when}.",
        f"The run is kept; when this is mended, resume with: {again}",
    ]
    monkeypatch.setattr(Breaks, "mended", True)
    resumed = make_loop(parts=[Breaks(hook, round)], output_dir=loop.output_dir)
    whole = make_loop(parts=[Breaks(hook, round)])
    assert resumed.run(resume=True).finished and whole.run().finished
    assert torch.equal(resumed.state.models, whole.state.models)


def test_two_base_rules_and_two_answers_are_errors(make_loop):
    with pytest.raises(UserError, match="exactly one base rule"):
        make_loop(parts=[SizeWeighted(), Uniform()])
    answer = type(
        "Median",
        (Strategy,),
        {"combine": lambda self, updates, weights, view: None, "needs_updates": lambda self, plan, view: True},
    )
    with pytest.raises(UserError, match="`combine` must be answered by one strategy"):
        make_loop(parts=[SizeWeighted(), answer(), answer()]).run()


def test_deltas_are_hidden_from_who_did_not_ask_for_them(make_loop):
    seen = []
    peek = type("Peek", (Strategy,), {"weigh": lambda self, updates, view: seen.append(updates.deltas)})
    reader = type("Reader", (peek,), {"needs_updates": lambda self, plan, view: True})
    make_loop(parts=[SizeWeighted(), peek(), reader()], rounds=1).run()
    assert seen[0] is None and seen[1].shape[0] == 4


class ReadsUpdates(Strategy):
    def needs_updates(self, plan, view):
        return True

    def after_step(self, state, updates, view):
        assert updates.released.shape == (len(updates.clients), state.models.shape[1])
        return state


@pytest.mark.usefixtures("one_noise")
@pytest.mark.parametrize("parts", [[], [ReadsUpdates()]], ids=["streamed", "kept"])
def test_a_client_with_a_broken_update_is_dropped_whole(make_loop, parts):
    loop = make_loop(rounds=1, parts=parts)
    only = make_loop(rounds=1, parts=[*parts, Without(1)])
    only.run()
    releases = loop.clients.engine.releases

    def broken(*args):
        for row, delta in releases(*args):
            delta[0] = float("nan") if row == 1 else delta[0]
            yield row, delta

    loop.clients.engine.releases = broken
    weights = []
    loop.callbacks.append(OnRound(lambda report: weights.append((report.clients, report.weights))))
    loop.run()
    assert weights[0][0] == (0, 2, 3) and weights[0][1].shape == (1, 3)
    torch.testing.assert_close(loop.state.models, only.state.models, rtol=1e-6, atol=1e-7)


class Without(Strategy):
    def __init__(self, client):
        self._client = client

    def plan_round(self, plan, view):
        return plan.only(lambda client: client != self._client)


def test_a_round_in_which_every_update_is_broken_changes_nothing(make_loop):
    loop = make_loop(rounds=1)
    start = loop.module.flat
    loop.clients.engine.releases = lambda plan, *_: ((row, start * float("inf")) for row in range(len(plan.clients)))
    result = loop.run()
    assert torch.equal(loop.state.models[0], start) and result.reason == "the one round is done"


@pytest.mark.usefixtures("one_noise")
def test_updates_are_streamed_unless_somebody_reads_them(make_loop):
    """Same bits, and no [C, P] anywhere: what makes memory independent of the number of clients."""
    seen = []

    def watched(**options):
        loop = make_loop(rounds=2, **options)
        train = loop.clients.engine.train

        def spy(*args):
            seen.append(train(*args))
            return seen[-1]

        loop.clients.engine.train = spy
        loop.run()
        return loop.state.models

    streamed, kept = watched(), watched(parts=[ReadsUpdates()])
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


def test_a_strategy_says_in_which_rounds_it_sees_updates(make_loop):
    own = Sees()
    make_loop(parts=[own], rounds=4).run()
    assert own.seen == [False, True, False, True]


class Tells(Strategy):
    def __init__(self, told):
        self._told = told

    def metrics(self, view):
        return self._told


def test_what_strategies_tell_is_reported_and_kept(make_loop):
    reports = []
    of_clients = torch.tensor([1.0, 2.0, float("nan"), 4.0])
    parts = [Sees(), Tells({"mood": 3}), Tells({"height": of_clients}), OnRound(reports.append)]
    loop = make_loop(parts=parts, rounds=3)
    result = loop.run()
    sizes = torch.tensor(loop.population.num_records, dtype=torch.float64)
    torch.testing.assert_close(reports[0].metrics["weight"], sizes / sizes.sum())
    told = reports[2].metrics
    assert told["weight"].isnan().tolist() == [False, True, False, False] and told["mood"] == 3.0
    own = told["weight"][[0, 2, 3]]
    assert told["largest_weight"] == float(own.max())
    assert told["effective_clients"] == pytest.approx(float(1 / own.square().sum()))
    assert result.metrics["height"] == [1.0, 2.0, None, 4.0] and result.metrics["weight"][1] is None
    assert json.loads((loop.output_dir / "result.json").read_text())["metrics"] == result.metrics
    again = make_loop(parts=[Sees()], rounds=3, output_dir=loop.output_dir)
    assert again.run(resume=True).metrics == result.metrics


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([{"mood": 1.0}, {"mood": 2.0}], "'mood', which is reported already"),
        ([{"weight": 1.0}], "'weight', which is reported already"),
        ([{"epsilon": torch.zeros(4)}], "'epsilon', which is reported already"),
        ([{"mood": torch.ones(3)}], r"'mood' of shape \(3,\), not one for each client"),
    ],
)
def test_what_cannot_be_told(told, words, make_loop):
    with pytest.raises(RuntimeError, match=words):
        make_loop(parts=[Tells(one) for one in told], rounds=1).run()


def test_a_strategys_caveats_are_in_every_guarantee(make_loop):
    own = type("Odd", (Strategy,), {"caveats": ("a toy",)})()
    loop = make_loop(parts=[own], rounds=1)
    result = loop.run()
    assert "Caveat: a toy." in result.guarantee
    assert all(one.caveats[-1] == "a toy" for one in loop.clients.budgets.guarantees())


def test_how_unequally_clients_are_served(make_loop):
    loop = make_loop(rounds=2)
    result = loop.run()
    accuracies = torch.tensor([client["accuracy"] for client in result.clients], dtype=torch.float64)
    assert result.accuracy_mean == pytest.approx(float(accuracies.mean()))
    assert result.accuracy_std == pytest.approx(float(accuracies.std(correction=0)))
    assert result.accuracy_worst == float(accuracies.min())
    assert json.loads((loop.output_dir / "result.json").read_text())["accuracy_worst"] == result.accuracy_worst


def test_noise_of_an_update_is_that_of_its_mechanism(make_loop):
    loop = make_loop(rounds=1)
    result = loop.run()
    plan = loop.view(loop.state).plan()
    stds = [m.noise_std(steps, 0.3) for m, steps in zip(plan.mechanism_of, plan.steps, strict=True)]
    assert [client["noise_std"] for client in result.clients] == pytest.approx(stds)
    assert all(client["noise_std"] == 0 for client in make_loop(privacy=None, rounds=1).run().clients)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clients": ClientOptions(count=4, batch_size=500)}, "clients.batch_size.*records.*500"),
        ({"privacy": PrivacyOptions(epsilon=[1.0, 2.0], delta=1e-3)}, "privacy.epsilon.*4 values"),
        ({"privacy": PrivacyOptions(epsilon=-1.0, delta=1e-3)}, "epsilon"),
        ({"privacy": PrivacyOptions(epsilon=1.0, delta=1.5)}, "delta"),
        ({"rounds": 0}, "rounds"),
    ],
)
def test_bad_settings_are_one_sentence_and_write_nothing(change, words, make_loop, tmp_path):
    with pytest.raises(UserError, match=words):
        make_loop(**change).run()
    assert list(tmp_path.iterdir()) == []


def test_a_delta_above_one_over_n_is_a_warning(make_loop):
    with pytest.warns(UserWarning, match=r"delta.*1 / records.*0\.1"):
        make_loop(privacy=PrivacyOptions(epsilon=5.0, delta=0.1))


def test_your_own_data_and_model_in_ten_lines(tmp_path):
    from dpfl_lightning import FederatedLoop, Population

    hospitals = [(torch.randn(50, 4), torch.randint(2, (50,))) for _ in range(3)]
    population = Population.from_datasets(hospitals)
    module = ClientModule(torch.nn.Linear(4, 2))
    clients, privacy = ClientOptions(batch_size=10), PrivacyOptions(epsilon=3.0, delta=1e-3)
    loop = FederatedLoop(population, module, rounds=2, clients=clients, privacy=privacy, output_dir=tmp_path / "mine")
    assert loop.run().finished


def test_regression_reports_a_loss(make_loop):
    from dpfl_lightning import Population

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 50, 3, generator=generator)
    pairs = [(one, one @ torch.tensor([1.0, -2.0, 0.5])) for one in x]
    loop = make_loop(
        population=Population.from_datasets(pairs),
        module=ClientModule(torch.nn.Linear(3, 1)),
        clients=ClientOptions(count=4, batch_size=10, learning_rate=0.1),
        privacy=PrivacyOptions(noise_multiplier=0.1, clip_norm=5.0, delta=1e-3),
        rounds=5,
    )
    result = loop.run()
    assert result.test_accuracy is None and result.test_loss < 0.3


def test_blobs_are_unequal():
    assert len(set(blobs().num_records)) == 4


class Trains(Strategy):
    trains_on_server = True


@pytest.mark.parametrize(("parts", "foretold"), [([], True), ([Trains()], False)], ids=["clients", "server"])
def test_the_time_of_a_run_is_foretold_where_clients_take_it(parts, foretold, make_loop):
    loop = make_loop(parts=parts)
    loop.run()
    assert math.isfinite(loop.info.estimated_seconds) is foretold
