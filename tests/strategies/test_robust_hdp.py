"""Robust-HDP in runs: its weights, what it reads, bounds, warnings, and several models."""

import dataclasses
import math
import warnings

import pytest
import torch
from conftest import blobs, private
from estimated_rounds import kept, some_deltas, updates_of
from fakes import Recorder

from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.papers.robust_hdp.noise_estimators import (
    EstimatorOptions,
    estimate,
    estimate_by_group,
    judged_groups,
)
from dpfl_lightning.papers.robust_hdp.noise_weights import weights
from dpfl_lightning.papers.robust_hdp.robust_hdp import RobustHdp
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware

pytestmark = pytest.mark.filterwarnings("ignore:strategy robust_hdp.*clients count:UserWarning")
BLIND = ("rpca", "hetero_pca", "raw_norm", "mean_residual")


def run(make_loop, rounds=5, **options):
    """A loop that has run under these weights, and what was seen."""
    loop = make_loop(parts=[RobustHdp(**options), seen := Recorder()], rounds=rounds)
    loop.run()
    return loop, seen


def many(make_loop, count, parts, **options):
    return make_loop(
        blobs(num_clients=count, records=30),
        privacy=private(),
        clients=ClientOptions(count=count, batch_size=8, learning_rate=0.1),
        parts=parts,
        **options,
    )


def test_a_bound_that_no_weights_can_meet_is_refused(make_loop):
    with pytest.raises(UserError, match=r"`strategies.robust_hdp.max_weight` must be at least 1 / 5, .*got 0.1"):
        many(make_loop, 5, [RobustHdp(max_weight=0.1)]).run()


@pytest.mark.parametrize("option", [{"rows": 100}, {"blocks": None}, {"row_choice": "head"}])
def test_blocks_of_robust_pca_reach_it_and_no_other_estimator(option, view):
    options = {"rows": 20, "blocks": 2} | option
    deltas = some_deltas()
    expected = weights(estimate(deltas, EstimatorOptions("rpca", **options)).noise_var)
    torch.testing.assert_close(RobustHdp("rpca", **options).weigh(updates_of(deltas), view), expected)
    name = next(iter(option))
    with pytest.raises(UserError, match=rf"robust_hdp.{name}` must be left out with estimator hetero_pca"):
        RobustHdp(**option)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 84}, r"rows` must be at most the 83 parameters of the model, got 84\. null takes all"),
        (
            {"rows": 20, "blocks": 5},
            r"blocks` must be at most 4, as 83 parameters have so many of 20 rows, got 5\. null",
        ),
        ({"blocks": 2}, r"blocks` must be at most 1, as 83 parameters have so many of 83 rows, got 2"),
    ],
)
def test_more_rows_or_blocks_than_there_are_are_refused_before_any_charge(options, words, make_loop, tmp_path):
    """83 parameters. The default of `rows`, the paper's for large models, takes the whole of a small one."""
    loop = make_loop(parts=[RobustHdp("rpca", **options)], output_dir=tmp_path / "refused")
    with pytest.raises(UserError, match=rf"`strategies\.robust_hdp\.{words}"):
        loop.run()
    assert not (tmp_path / "refused" / "ledger.jsonl").exists()
    for fits in ({"rows": 83}, {"rows": 20, "blocks": 4}, {"blocks": None}, {}):
        make_loop(parts=[RobustHdp("rpca", **fits)]).plan_schedule()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "estimated"),
    [
        (1, [True] * 5),
        (2, [True, False, True, False, True]),
        (3, [True, False, False, True, False]),
        (0, [True, False, False, False, False]),
        ("first_round", [True, False, False, False, False]),
    ],
)
def test_updates_are_kept_only_in_rounds_that_estimate(every, estimated, make_loop):
    _, seen = run(make_loop, reestimate_every=every)
    assert kept(seen) == estimated
    last = [max(round for round in range(now + 1) if estimated[round]) for now in range(5)]
    metrics = [report.metrics for report in seen.reports]
    assert [one["rounds_since_estimate"] for one in metrics] == [now - then for now, then in enumerate(last)]
    assert ["hetero_pca_last_move" in one for one in metrics] == estimated, "diagnostics are of a round that has some"


@pytest.mark.parametrize("estimator", BLIND)
def test_weights_of_least_noise_are_the_pure_functions_and_reported_noise_is_not_read(estimator, view):
    deltas, rule = some_deltas(), {"floor": 1e-3, "max_weight": 0.6}
    expected = weights(estimate(deltas, EstimatorOptions(estimator)).noise_var, **rule)
    plain, other = (
        RobustHdp(estimator, **rule).weigh(updates_of(deltas, noise_std=noise_std), view)
        for noise_std in ((1.0, 2.0, 3.0, 4.0), (9.0, 0.0, 1e9, math.nan))
    )
    torch.testing.assert_close(plain, expected)
    assert torch.equal(plain, other)


@pytest.mark.e2e
def test_the_oracle_weighs_by_true_noise_and_the_run_says_that_it_is_a_simulation(make_loop):
    loop, seen = run(make_loop, estimator="oracle", rounds=1)
    std = torch.tensor([client["noise_std"] for client in loop.run(resume=True).clients], dtype=torch.float64)
    torch.testing.assert_close(seen.reports[0].weights[0], std**-2 / (std**-2).sum())
    torch.testing.assert_close(seen.reports[0].metrics["estimated_noise_std"], std)
    guarantees = loop.clients.budgets.guarantees()
    assert all("simulation" in one.words() and "oracle" in one.not_covered[-1] for one in guarantees)
    assert "simulation" in (loop.output_dir / "guarantee.html").read_text()
    honest, _ = run(make_loop, rounds=1)
    assert not any("oracle" in one for one in honest.clients.budgets.guarantees()[0].not_covered)
    silent = Recorder()
    make_loop(parts=[RobustHdp("oracle"), silent], privacy=None, rounds=1).run()
    assert silent.reports[0].weights.tolist() == [[0.25] * 4]


@pytest.mark.e2e
def test_the_cap_holds_in_the_weights_of_the_round_and_bounds_a_zero_update(make_loop, view):
    _, free = run(make_loop, rounds=1)
    _, seen = run(make_loop, rounds=1, max_weight=0.3)
    assert float(free.reports[0].weights.max()) > 0.3
    assert float(seen.reports[0].weights.max()) == pytest.approx(0.3)
    assert seen.reports[0].metrics["largest_weight"] == float(seen.reports[0].weights.max())
    deltas = some_deltas()
    deltas[1] = 0
    assert float(RobustHdp().weigh(updates_of(deltas), view)[1]) > 0.99
    assert float(RobustHdp(max_weight=0.5).weigh(updates_of(deltas), view)[1]) == pytest.approx(0.5)
    assert float(NoiseAware("estimated").weigh(updates_of(deltas), view)[1]) == 0


def test_users_are_warned_once_that_few_clients_count(view):
    deltas = some_deltas(4)
    deltas[1] *= 1e-3
    strategy = RobustHdp()
    with pytest.warns(UserNotice, match=r"1\.0 of 4 clients count \(client 1 has 100% of the weight"):
        strategy.weigh(updates_of(deltas), view)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.weigh(updates_of(deltas), view)
        NoiseAware("estimated").weigh(updates_of(deltas), view)


@pytest.mark.parametrize(("batch_size", "warned"), [([8, 16, 8, 8], 1), (8, 0)])
@pytest.mark.parametrize("data", [{"partition": {"name": "shards"}}, {"groups": {"name": "rotation", "count": 2}}])
def test_users_are_warned_of_unlike_data_with_unlike_batches(data, batch_size, warned, make_loop):
    clients = ClientOptions(count=4, batch_size=batch_size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_loop(parts=[RobustHdp()], options={"data": data}, clients=clients).plan_schedule()
        make_loop(parts=[NoiseAware()], options={"data": data}, clients=clients).plan_schedule()
    assert sum("largest batches" in str(one.message) for one in caught) == warned


class TwoClusters(Strategy):
    """After the first round odd and even clients have two models; from round 4 client 0 may change its cluster."""

    def __init__(self, regroup=False):
        self._regroup = regroup

    def plan_round(self, plan, view):
        model_of = [client % len(view.state.models) for client in plan.clients]
        if self._regroup and view.round >= 4:
            model_of[0] = 1
        return dataclasses.replace(plan, model_of=tuple(model_of))

    def after_step(self, state, updates, view):
        if len(state.models) == 2:
            return state
        model_of = tuple(client % 2 for client in range(view.facts.num_clients))
        return dataclasses.replace(state, models=state.models.repeat(2, 1), model_of=model_of)


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 16])
def test_in_clusters_weights_are_those_of_each_cluster_by_itself(count, make_loop):
    """Six clients are judged together, twice eight apart; a cap holds in each cluster."""
    strategy, seen = RobustHdp("raw_norm", max_weight=0.35), Recorder(updates=True)
    many(make_loop, count, [strategy, TwoClusters(), seen], rounds=2).run()
    report, updates = seen.reports[1], seen.updates[1]
    squares = (updates.deltas.double() ** 2).sum(dim=1)
    for model in (0, 1):
        rows = [client for client in range(count) if client % 2 == model]
        expected = weights(squares[rows], max_weight=0.35)
        torch.testing.assert_close(report.weights[model, rows], expected)
    assert float(report.metrics["weight"].sum()) == pytest.approx(2)
    assert report.metrics["effective_clients"] == pytest.approx(float((1 / report.weights.square().sum(dim=1)).sum()))
    assert len(strategy._known.group.unique()) == (2 if count == 16 else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "estimated"),
    [
        (0, [True, False, False, False, False]),  # all together in round 1: variances of one estimate serve any cluster
        (2, [True, False, True, True, False]),  # apart in round 3: client 0 has no variance in its new cluster
    ],
)
def test_clients_that_were_judged_apart_are_not_mixed_later(every, estimated, make_loop):
    seen = Recorder()
    parts = [RobustHdp("raw_norm", reestimate_every=every), TwoClusters(regroup=True), seen]
    many(make_loop, 18, parts, rounds=5).run()
    assert kept(seen) == estimated


def test_groups_are_estimated_apart_where_every_model_has_enough_and_the_worst_is_reported():
    apart, together = [list(range(8)), list(range(8, 16))], [list(range(8)), list(range(8, 15))]
    assert judged_groups(apart, 16) == apart and judged_groups(together, 15) == [list(range(15))]
    deltas = torch.cat([some_deltas(9, 200), some_deltas(9, 200, seed=1)])
    options, models = EstimatorOptions(), [list(range(9)), list(range(9, 18))]
    judged = estimate_by_group(deltas, models, options)
    one, two = (estimate(part, options) for part in (deltas[:9], deltas[9:]))
    torch.testing.assert_close(judged.noise_var, torch.cat([one.noise_var, two.noise_var]))
    assert judged.diagnostics["iterations"] == max(one.diagnostics["iterations"], two.diagnostics["iterations"])
    deltas[9:16] = math.nan  # two are left, are taken by their lengths, and have no diagnostics
    assert estimate_by_group(deltas, models, options).diagnostics == one.diagnostics


def test_models_that_are_judged_together_show_a_direction_each():
    """Four models of five clients: with one direction for all, signals of the others would count as noise."""
    models, noise = [list(range(model, 20, 4)) for model in range(4)], torch.linspace(1, 3, 20)
    draws = torch.randn(24, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 4000**0.5
    deltas = 3 * draws[:4][torch.arange(20) % 4] + noise[:, None] * draws[4:]
    share = weights(estimate_by_group(deltas, models, EstimatorOptions("hetero_pca")).noise_var)
    excess = float((share**2 * noise**2).sum() * (1 / noise**2).sum())
    assert excess < 1.05
