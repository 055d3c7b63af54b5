"""What a guarantee says: what it covers, what it does not, and in which frame."""

import json
import math

import pytest

from dpfl_lightning.privacy.accounting.accountant import Rdp, get_accountant
from dpfl_lightning.privacy.accounting.events import (
    Caveat,
    GaussianEvent,
    LaplaceEvent,
    NonPrivateEvent,
    SelectionEvent,
)
from dpfl_lightning.privacy.accounting.guarantee import NOT_COVERED, Guarantee, guarantee, released_words, weakest

RDP = get_accountant("rdp")
ROUND, FULL = GaussianEvent(0.02, 1.5, 19), GaussianEvent(1.0, 5.0)


@pytest.mark.parametrize("epsilon", [1.0, math.inf])
def test_one_client_is_not_several(epsilon):
    one = Guarantee(epsilon=epsilon, delta=0.1, sampling="full batches", accountant="RDP")
    assert "the only client" in weakest([one]).words() and "clients" not in weakest([one]).words()
    assert "2 clients" in weakest([one, one]).words() and str(one).endswith("their epsilons add up.")


def test_a_ledger_is_counted_release_by_release():
    promise = guarantee([FULL, *[ROUND] * 30, *[SelectionEvent(0.1)] * 5], 1e-4, RDP)
    assert promise.covers == (
        "1 noised full-batch step in 1 release",
        "570 noised gradient steps in 30 releases",
        "5 selections",
    )


def test_a_schedule_says_how_many_releases_an_event_stands_for():
    events, counts = [FULL, ROUND.repeated(30), SelectionEvent(0.1).repeated(5)], [1, 30, 5]
    ledger = guarantee([FULL, *[ROUND] * 30, *[SelectionEvent(0.1)] * 5], 1e-4, RDP)
    assert guarantee([*events, Caveat("words")], 1e-4, RDP, releases=counts).covers == ledger.covers
    assert guarantee([FULL, ROUND.repeated(0)], 1e-4, RDP, releases=[1, 0]).covers == ledger.covers[:1]


def test_words_name_sampling_accountant_and_caveats():
    events = [FULL, GaussianEvent(0.1, 2.0, 50), Caveat("Data sizes are public.")]
    promise = guarantee(events, 1e-5, RDP)
    assert promise.epsilon == RDP.epsilon(events, 1e-5)
    assert promise.words().endswith(
        "per record (add or remove one record), full and Poisson-sampled batches, "
        "accounted by RDP (Opacus, orders 1.1 to 1024). Caveat: Data sizes are public."
    )
    fallback = guarantee([GaussianEvent(0.1, 0.04, 5)], 1e-5, get_accountant("pld"), sampling="Poisson sampling")
    assert "Poisson sampling, accounted by RDP" in fallback.words() and "epsilon is above 100" in fallback.words()


def test_laplace_releases_are_counted_apart():
    assert released_words([LaplaceEvent(2.0, 3), ROUND], []) == (
        "3 Laplace-noised full-batch steps in 1 release",
        "19 noised gradient steps in 1 release",
    )


def test_nothing_released_covers_nothing():
    promise = guarantee([], 1e-4, RDP)
    assert (promise.epsilon, promise.covers, promise.sampling) == (0.0, (), "no batches")


def test_what_is_never_covered_is_always_said():
    promise = guarantee([ROUND, Caveat("sizes were guessed"), Caveat("sizes were guessed")], 1e-4, RDP)
    assert promise.not_covered == (*NOT_COVERED, "sizes were guessed")
    assert promise.caveats == ("sizes were guessed",)
    assert all(words in " ".join(NOT_COVERED) for words in ("held-out", "public", "other runs"))
    assert Guarantee(epsilon=1.0, delta=0.1, sampling="", accountant="").not_covered == NOT_COVERED


def test_what_was_shown_without_noise_ends_every_guarantee():
    events = [ROUND, NonPrivateEvent("training losses were logged"), Caveat("and more")]
    promise = guarantee(events, 1e-4, RDP)
    assert math.isinf(promise.epsilon)
    assert promise.words() == ("No differential privacy per record: training losses were logged. Caveat: and more.")
    assert promise.covers == ()
    assert promise.not_covered[:2] == ("training losses were logged", "19 noised gradient steps in 1 release")
    assert promise.as_dict()["epsilon"] is None and promise.as_dict()["unprotected"] == ["training losses were logged"]


def test_a_release_without_noise_is_not_covered():
    promise = guarantee([GaussianEvent(0.1, 0.0, 5)], 1e-4, RDP)
    assert promise.covers == () and "5 un-noised gradient steps in 1 release" in promise.not_covered
    assert promise.words() == (
        "No differential privacy per record: updates are sent without noise, and no epsilon bounds what they reveal."
    )


def test_the_adjacency_is_the_accountants():
    assert guarantee([ROUND], 1e-4, RDP).adjacency == "add or remove one record"
    replacing = Rdp()
    replacing.adjacency, replacing.adjacency_words = "replace_one", "replace one record"
    assert "(replace one record)" in guarantee([ROUND], 1e-4, replacing).words()


def test_it_goes_to_json_whole():
    promise = guarantee([ROUND, Caveat("words")], 1e-4, RDP)
    for one in (promise, guarantee([NonPrivateEvent("losses were logged")], 1e-4, RDP), weakest([promise, promise])):
        assert type(one).of(json.loads(json.dumps(one.as_dict(), allow_nan=False))) == one
