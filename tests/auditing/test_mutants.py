"""The audit refutes broken builds, whichever engine runs them, and no sound one."""

import dataclasses
from pathlib import Path

import mutants
import numpy as np
import pytest
from conftest import blobs, small_loop

from dpfl_lightning.auditing import attacks, exact, noisy
from dpfl_lightning.auditing.run import audit
from dpfl_lightning.build import ENGINES, build_engine
from dpfl_lightning.config.load import load
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.loop import FederatedLoop, build_loop

pytestmark = pytest.mark.e2e

DIGITS = Path(__file__).parents[2] / "conf" / "digits.yaml"
CONFIDENCE = 0.9999  # of each audit here: a sound build is refuted once in 10,000 runs of a test

EVERYWHERE = [(engine, name) for engine in sorted(ENGINES) for name in mutants.MUTANTS]
SOMEWHERE = [("fast", name) for name in mutants.VARIANTS | mutants.OF_RULES]
SOMEWHERE += [(engine, name) for engine in ("fast", "serial", "trainer") for name in mutants.OF_ALIGNMENT]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Of everything."""
    monkeypatch.setattr(noisy, "VALUES", 1000)
    monkeypatch.setattr(noisy, "STEPS", 300)
    monkeypatch.setattr(attacks, "SIZES", (7, 31))
    monkeypatch.setattr(attacks, "SEARCHED", 2)


def loop_of(engine: str, batch_size: int | None = 20, **privacy) -> FederatedLoop:
    options = {"epsilon": [2.0, 8.0], "delta": 1e-3, **privacy}
    return small_loop(
        blobs(num_clients=2, records=100),
        rounds=2,
        clients=ClientOptions(count=2, batch_size=batch_size, learning_rate=0.3),
        privacy=PrivacyOptions(**options),
        engine=build_engine(engine),
    )


CHECKS = ["sensitivity", "isolation", "tiny norms", "company", "fresh noise", "grid", "answers", "sampling", "noise"]
CHECKS += ["canary", "round", "one run", "one run's curve"]


def audited(engine: str, monkeypatch, only=None, **privacy) -> dict:
    """By the sums of this one engine, which the other tests compare with all the others'."""
    monkeypatch.setattr("dpfl_lightning.auditing.run.ENGINES", [engine])
    releases = 30
    if engine == "trainer":  # it takes 20 ms for each; three of 83 numbers tell half the noise by 9 standard errors
        monkeypatch.setattr(noisy, "VALUES", 160)
        monkeypatch.setattr(exact, "SIZES", (0, 5))  # what fills several passes is summed as by the serial engine
        releases = 10
    return audit(loop_of(engine, **privacy), [0], CONFIDENCE, most_releases=releases, only=only)


def fast_first(cases):
    """The cases of the default engine in every test run, those of the others in the long one."""
    return [case if case[0] == "fast" else pytest.param(*case, marks=pytest.mark.e2e) for case in cases]


@pytest.mark.parametrize("engine, name", fast_first(EVERYWHERE + SOMEWHERE))
def test_a_broken_build_is_refuted(engine, name, monkeypatch):
    mutate, expected = (mutants.MUTANTS | mutants.VARIANTS | mutants.OF_RULES | mutants.OF_ALIGNMENT)[name]
    mutate(monkeypatch)
    found = audited(engine, monkeypatch, only=expected)
    caught = {finding["check"] for finding in found["clients"][0]["findings"] if finding["refuted"]}
    assert expected <= caught, found["clients"][0]["findings"]
    assert {f"client 0: {check}" for check in expected} <= set(found["refuted"])


def of_persons(monkeypatch) -> FederatedLoop:
    monkeypatch.setattr("dpfl_lightning.auditing.run.ENGINES", ["fast"])
    monkeypatch.setattr(exact, "SIZES", (0, 5))
    rng = np.random.default_rng(0)
    y = rng.integers(3, size=300)
    x = (np.eye(6)[y] + rng.normal(size=(300, 6))).astype(np.float32)
    return small_loop(
        Population.from_datasets([(x, y)], held_out=0.0, num_classes=3, persons=[rng.integers(100, size=300)]),
        rounds=2,
        clients=ClientOptions(count=1, batch_size=20, learning_rate=0.3),
        privacy=PrivacyOptions(epsilon=8.0, delta=1e-3, unit="person", rows_per_person=mutants.ROWS),
    )


@pytest.mark.parametrize("name", mutants.OF_PERSONS)
def test_a_build_that_does_not_protect_persons_is_refuted(name, monkeypatch):
    """The canary is a person.

    Rows chosen anew in every step are no mutant: a step still has one clipped gradient of a person, by coins that do
    not depend on others.
    """
    mutate, expected = mutants.OF_PERSONS[name]
    mutate(monkeypatch)
    # of 400 releases the canary takes some 100, by which 2 mu is above mu by more than four standard errors
    found = audit(of_persons(monkeypatch), [0], CONFIDENCE, most_releases=400, only=expected)
    assert {f"client 0: {check}" for check in expected} <= set(found["refuted"]), found["clients"][0]["findings"]


def test_a_build_that_protects_persons_is_not_refuted(monkeypatch):
    found = audit(of_persons(monkeypatch), [0], CONFIDENCE, most_releases=30)
    assert found["refuted"] == [] and not found["not_audited"]
    by_check = {one["check"]: one for one in found["clients"][0]["findings"]}
    assert [*by_check] == CHECKS and "one person moves a release" in by_check["sensitivity"]["what"]
    most = [by_check[name]["figures"]["most"] for name in ("isolation", "tiny norms", "company")]
    assert min(*most, by_check["sensitivity"]["figures"]["most_without_noise"]) > 0.99, "nothing was clipped"
    assert by_check["canary"]["figures"]["canary_over_clip"] == pytest.approx(1, abs=1e-3)


OTHERS = [{"adjacency": "replace_one"}, {"sampling": "shuffle"}, {"epsilon": None, "noise_multiplier": 0.6}]


@pytest.mark.parametrize(
    "engine, privacy",
    [
        *fast_first([(engine, {}) for engine in sorted(ENGINES)]),
        *(pytest.param("fast", other, marks=pytest.mark.e2e) for other in OTHERS),
    ],
    ids=str,
)
def test_a_sound_build_is_not_refuted(engine, privacy, monkeypatch):
    found = audited(engine, monkeypatch, **privacy)
    assert found["refuted"] == [] and not found["not_audited"]
    checks = [finding["check"] for finding in found["clients"][0]["findings"]]
    assert checks == CHECKS
    by_check = {finding["check"]: finding["figures"] for finding in found["clients"][0]["findings"]}
    assert 0.99 < by_check["sensitivity"]["most_without_noise"] <= 1 + exact.TOLERANCE, "nothing was clipped"
    assert by_check["canary"]["canary_over_clip"] == pytest.approx(1, abs=1e-3)


LAPLACE = {"mechanism": "laplace", "delta": 0.0, "batch_size": None}
QUICK = sorted(set(ENGINES) - {"trainer"})


@pytest.mark.parametrize("adjacency", ["add_remove", pytest.param("replace_one", marks=pytest.mark.e2e)])
@pytest.mark.parametrize(("engine",), fast_first([(engine,) for engine in QUICK]))
def test_a_sound_build_with_laplace_noise_is_not_refuted(engine, adjacency, monkeypatch):
    found = audited(engine, monkeypatch, adjacency=adjacency, **LAPLACE)
    assert found["refuted"] == [] and not found["not_audited"]
    assert found["clients"][0]["claim"]["mechanism"] == "laplace"
    figures = {one["check"]: one["figures"] for one in found["clients"][0]["findings"]}
    assert 0.99 < figures["sensitivity"]["most_without_noise"] <= 1 + exact.TOLERANCE, "nothing was clipped"
    assert figures["canary"]["epsilon_claimed"] == pytest.approx(1.0, rel=1e-4), "two releases share a budget of 2"


@pytest.mark.parametrize(
    "mutate, expected",
    [
        (mutants.half_the_noise, {"noise"}),
        (mutants.no_clipping, {"sensitivity"}),
        (mutants.clipped_in_l2, {"sensitivity"}),
        (mutants.gaussian_in_place_of_laplace, {"noise"}),
        (mutants.counted_twice, {"sensitivity", "sampling"}),
        (mutants.floating_point_noise, {"grid"}),
    ],
)
@pytest.mark.parametrize(("engine",), fast_first([(engine,) for engine in QUICK]))
def test_a_broken_build_with_laplace_noise_is_refuted(engine, mutate, expected, monkeypatch):
    mutate(monkeypatch)
    found = audited(engine, monkeypatch, only=expected, **LAPLACE)
    assert expected <= {one["check"] for one in found["clients"][0]["findings"] if one["refuted"]}


def test_hardly_any_laplace_noise_shows_to_the_canary(monkeypatch):
    """A 128th of the planned noise: the likelihood ratio says so, by 300 releases of each kind."""
    monkeypatch.setattr("dpfl_lightning.auditing.run.ENGINES", [])
    for _ in range(7):
        mutants.half_the_noise(monkeypatch)
    found = audit(loop_of("fast", **LAPLACE), [0], CONFIDENCE, only={"canary"})
    (figures,) = [one["figures"] for one in found["clients"][0]["findings"] if one["check"] == "canary"]
    assert figures["epsilon_low"] > figures["epsilon_claimed"]


def test_half_the_noise_shows_to_the_canary_as_well(monkeypatch):
    """By the bound alone: with releases enough to tell 1.5 mu, 2 mu is missed once in 10^6."""
    monkeypatch.setattr("dpfl_lightning.auditing.run.ENGINES", [])
    mutants.half_the_noise(monkeypatch)
    found = audit(loop_of("fast"), [1], CONFIDENCE, only={"canary"})
    (figures,) = [one["figures"] for one in found["clients"][0]["findings"] if one["check"] == "canary"]
    assert figures["mu_low"] > figures["mu_claimed"] and figures["epsilon_low"] > figures["epsilon_claimed"]
    assert figures["tells_ratio"] == 1.5


def test_hardly_any_noise_shows_in_one_run(monkeypatch):
    """162 canaries, nearly all of them guessed; at delta 1e-3 the plain bound needs the usual 95 % to say so."""
    monkeypatch.setattr("dpfl_lightning.auditing.run.ENGINES", [])
    for _ in range(8):
        mutants.half_the_noise(monkeypatch)
    options, _ = load(["--config", str(DIGITS), "--privacy.epsilon", "0.5"])
    found = audit(build_loop(options), [0], CONFIDENCE, most_releases=30, only={"one run"})
    figures = {one["check"]: one["figures"] for one in found["clients"][0]["findings"]}
    assert figures["one run"]["epsilon_low_95"] > figures["one run"]["epsilon_claimed"]
    assert figures["one run's curve"]["most_noise"] < 1
    assert "client 0: one run's curve" in found["refuted"]


def test_what_the_engines_are_told_is_what_the_plan_says(monkeypatch):
    """A mechanism with less noise than was accounted: the claim comes from the schedule, not from the mechanism."""
    monkeypatch.setattr("dpfl_lightning.auditing.run.ENGINES", [])
    real = View.mechanism

    def quieter(self, client, purpose="train"):
        mechanism = real(self, client, purpose)
        return dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 2)

    monkeypatch.setattr(View, "mechanism", quieter)
    found = audit(loop_of("fast"), [0], CONFIDENCE, most_releases=30, only={"noise"})
    assert found["refuted"] == ["client 0: noise"]


EXACT = {"sensitivity", "isolation", "tiny norms", "grid", "fresh noise", "answers"}


def test_nothing_private_is_read(monkeypatch):
    """The clients' records may be anything: what no noise is in stays the same."""
    figures = []
    monkeypatch.setattr(exact, "SIZES", (0, 5))
    monkeypatch.setattr("dpfl_lightning.auditing.run.ENGINES", ["fast"])
    for value in (1.0, float("nan")):
        loop = loop_of("fast")
        loop.population = dataclasses.replace(loop.population, x=loop.population.x * value)
        found = audit(loop, [0], CONFIDENCE, most_releases=4, only=EXACT)
        findings = found["clients"][0]["findings"]
        assert [one["check"] for one in findings] == [check for check in CHECKS if check in EXACT]
        figures.append(
            [findings[0]["figures"]["most_without_noise"], *(one["figures"]["most"] for one in findings[1:3])]
        )
        assert found["refuted"] == []
    assert figures[0] == figures[1]
