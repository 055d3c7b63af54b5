"""What private trials cost together: composition of the releases, and addition where it is not proven."""

import json
import math

import pytest

from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.client_plan import plan
from dpfl_lightning.privacy.accounting.events import Caveat, GaussianEvent, LaplaceEvent, NonPrivateEvent
from dpfl_lightning.privacy.accounting.units import Person, Record
from dpfl_lightning.privacy.compose import Keys, Line
from dpfl_lightning.search.costs import (
    Cost,
    chosen_if,
    composed_costs,
    costs_of,
    details,
    headline,
    set_text,
    stored,
    summary,
)

PLD = get_accountant("pld")


def of_clients(*clients, epsilon=1.0, delta=1e-5, names=(), **changed) -> Cost:
    """Of a run with the events of each client."""
    means = {"adjacency": "add_remove", "sampling": "poisson", "accountant": "pld", "budget": epsilon, **changed}
    deltas = delta if isinstance(delta, tuple) else (delta,) * len(clients)
    return [Line("planned", i, Keys(names[i : i + 1]), events, deltas[i], **means) for i, events in enumerate(clients)]


def cost(*events, **changed) -> Cost:
    """Of a run with one client."""
    return of_clients(events, **changed)


def trial(batch_size: int = 100, rounds: int = 10, **changed) -> Cost:
    """Of a client with 100 records, and epsilon 1 at delta 1e-5."""
    planned = plan(100, batch_size, rounds, 1e-5, epsilon=1.0, accountant=changed.get("accountant", "pld"))
    return cost(*planned.schedule.events(), **changed)


def epsilon(*costs: Cost) -> float:
    (promise,) = composed_costs(costs).values()
    return promise.epsilon


def total_cost(*costs: Cost) -> dict:
    """As a study stores them, with a trial that has not begun its runs."""
    notes = [{"costs": [json.loads(json.dumps(stored(one)))]} for one in costs]
    return summary(costs_of([*notes, {}]))


def test_twenty_full_batch_trials_of_epsilon_1_cost_5_41_and_not_20():
    total = total_cost(*[trial()] * 20)
    assert total["epsilon"] == [pytest.approx(5.41, abs=0.005)] and total["delta"] == [1e-5]
    words = "full batches, accounted by exact Gaussian differential privacy."
    assert total["guarantee"].endswith(f", 1e-05)-differential privacy per record (add or remove one record), {words}")


def test_trials_of_other_batch_sizes_and_rounds_are_composed_by_all_their_releases():
    different = [trial(10, 3), trial(50, 8), trial(100, 20)]
    events = [event for one in different for event in one[0].released]
    assert epsilon(*different) == PLD.epsilon(events, 1e-5)
    assert 1 < epsilon(*different) < 3


def many(*names: str, **noise_of: float) -> Cost:
    """A run of several clients by name."""
    events = tuple((GaussianEvent(1.0, noise_of[name]),) for name in names)
    return of_clients(*events, names=names)


def test_clients_are_composed_by_name_whatever_their_number():
    runs = many("lyon", "oslo", lyon=20.0, oslo=90.0), many("bergen", "oslo", "lyon", bergen=5.0, oslo=80.0, lyon=30.0)
    noises = {"lyon": (20.0, 30.0), "oslo": (90.0, 80.0), "bergen": (5.0,)}
    expected = {name: PLD.epsilon([GaussianEvent(1.0, one) for one in all_], 1e-5) for name, all_ in noises.items()}
    assert {name: promise.epsilon for name, promise in composed_costs(runs).items()} == expected
    total = total_cost(*runs)
    assert dict(zip(total["names"], total["epsilon"], strict=True)) == expected


@pytest.mark.parametrize("names", [(), ("lyon", "oslo")])
def test_other_clients_without_names_may_be_anybody(names):
    events = (GaussianEvent(1.0, 9.0),), (GaussianEvent(1.0, 90.0),)
    one, two = trial(), of_clients(*events, names=names)
    found = {name: promise.epsilon for name, promise in composed_costs([one, two]).items()}
    pairs = {name: PLD.epsilon([*one[0].released, *own], 1e-5) for name, own in zip(names, events, strict=False)}
    assert found == {**pairs, "any client": PLD.epsilon([*one[0].released, *events[0]], 1e-5)}


def test_releases_that_results_chose_are_added_to_what_is_composed():
    fixed, chosen = [trial(10), trial(20)], [trial(10, chosen=True), trial(20, chosen=True)]
    (promise,) = composed_costs([*fixed, *chosen]).values()
    assert promise.epsilon == pytest.approx(epsilon(*fixed) + 2, abs=2e-6) and promise.epsilon >= epsilon(*fixed) + 2
    assert promise.delta == pytest.approx(3e-5)
    assert "and addition of the budgets of 2 runs (results of earlier runs chose its releases" in promise.accountant
    assert epsilon(*chosen) == 2 and not total_cost(*chosen)["composed"]


@pytest.mark.parametrize("changed", [{"accountant": "rdp"}, {"adjacency": "replace_one"}])
def test_runs_of_another_accountant_or_adjacency_are_composed(changed):
    one, two = trial(), trial(**changed)
    accountant = get_accountant("pld", changed.get("adjacency", "add_remove"))
    assert epsilon(one, two) == accountant.epsilon([*one[0].released, *two[0].released], 1e-5)


def test_a_budget_for_adding_a_record_counts_twice_where_records_are_replaced():
    """Replacing a record is removing it and adding another one."""
    chosen, fixed = trial(chosen=True), trial(adjacency="replace_one")
    (promise,) = composed_costs([chosen, fixed]).values()
    assert promise.epsilon == pytest.approx(epsilon(fixed) + 2) and promise.adjacency == "replace one record"
    assert promise.delta == pytest.approx(1e-5 * (2 + math.e)) and promise.delta >= 1e-5 * (2 + math.e)


def test_pure_epsilons_add_up_and_nothing_bounds_a_release_without_noise():
    assert epsilon(*[cost(LaplaceEvent(4.0, 2), delta=0.0, epsilon=0.5)] * 3) == 1.5
    leak = cost(GaussianEvent(1.0, 2.0), NonPrivateEvent("true losses"), epsilon=math.inf)
    (promise,) = composed_costs([trial(), leak]).values()
    assert math.isinf(promise.epsilon) and promise.words().startswith("No differential privacy per record: true losses")
    assert math.isinf(epsilon(trial(), chosen_if(True, leak)))


def test_a_trial_that_died_counts_with_everything_it_planned_and_caveats_are_named_once():
    caveats = [Caveat("a record may live at several clients"), Caveat("another")]
    died, complete = (
        of_clients((event, *caveats), (event,), delta=(1e-5, 1e-4), names=("oslo", "rome"))
        for event in (GaussianEvent(1.0, 9.0), GaussianEvent(1.0, 3.0, 2))
    )
    total = total_cost(died, complete)
    events = [GaussianEvent(1.0, 9.0), GaussianEvent(1.0, 3.0, 2)]
    assert total["epsilon"] == [PLD.epsilon(events, delta) for delta in (1e-5, 1e-4)] and total["runs"] == 2
    assert total["names"] == ["oslo", "rome"] and total["guarantee"].count("Caveat: ") == 2
    assert summary(costs_of([{}])) is None


def test_costs_of_persons_say_so():
    of_persons = {"unit": Person(4)}
    total = total_cost(*[trial(**of_persons)] * 2)
    assert (
        "per person (add or remove one person of one client), full batches of persons, at most 4 rows of each"
        in (total["guarantee"])
    )
    assert "together cost a person of a client at most epsilon" in headline(total)
    known, chosen = trial(unit=Record(4)), trial(unit=Record(4), chosen=True)
    assert "for all records of a person with several" in total_cost(known)["guarantee"]
    assert "nothing is stated for persons with several records" in total_cost(known, chosen)["guarantee"]
    assert (
        "(replace one record by another one of the same person)"
        in total_cost(trial(), trial(**of_persons))["guarantee"]
    )


def test_the_headline_holds_for_every_client():
    total = {
        "epsilon": [2.0, 4.0],
        "delta": [2e-3, 2.4644e-5],
        "names": ["0", "1"],
        "runs": 2,
        "composed": True,
        "unit": "record",
    }
    words = headline(total)
    assert words.startswith("PRIVATE: all trials (2 runs) together")
    assert "at most epsilon 4 at delta 0.002 (client 1 has the largest epsilon; composed)" in words
    text = details({**total, "guarantee": "(4, 2.4644e-05)-differential privacy."}, "Nothing is free.")
    assert "2.4644e-05" in text and "Nothing is free." in text


def test_the_cost_of_a_set_is_named_with_its_guarantee():
    assert "an epsilon without a bound" in set_text({"epsilon_max": None, "delta_max": 1e-3})
    guarantee = "(8, 0.001)-differential privacy per record. Caveat: a record may live at several clients."
    text = set_text({"epsilon_max": 8.0, "delta_max": 1e-3, "guarantee": {"words": guarantee}})
    assert "at most epsilon 8 at delta" in text and text.endswith(f"The set's guarantee: {guarantee}")
