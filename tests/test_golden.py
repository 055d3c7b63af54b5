"""The comparison of two checkouts reads what it compares, and finds what differs."""

import json

import pytest
import torch
from golden import differences, released
from safetensors.torch import save_file

CHARGE = {"round": 1, "number": 0, "clients": [0, [2, 4]], "purpose": "train", "event": {"steps": 3}}
CLIENT = {"epsilon_spent": 1.5}


@pytest.fixture
def run(tmp_path):
    """`run(clients, charges, weight)`: what a run released."""

    def written(clients=(CLIENT,), charges=(CHARGE,), weight=1.0, save=save_file, suffix=".safetensors"):
        (tmp_path / "result.json").write_text(json.dumps({"clients": clients, "test_accuracy": 0.5}))
        (tmp_path / "ledger.jsonl").write_text("\n".join(map(json.dumps, [{}, *charges])))
        for file in tmp_path.glob("model.*"):
            file.unlink()
        save({"weight": torch.full((2,), weight)}, tmp_path / f"model{suffix}")
        return released(tmp_path)

    return written


@pytest.mark.parametrize(
    "changed",
    [{"clients": [{"epsilon_spent": 1.6}]}, {"charges": [{**CHARGE, "clients": [0, [2, 5]]}]}, {"weight": 1 + 2**-23}],
)
def test_what_differs_is_found(run, changed):
    whole = run()
    assert differences({"a": whole, "b": whole}, {"a": run(), "b": run()}) == []
    (told,) = differences({"a": whole, "b": whole}, {"a": run(**changed), "b": whole})
    assert told.startswith("a\n") and "\n-" in told and "\n+" in told
    assert differences({"a": whole}, {}), "an answer that one of them lacks"


@pytest.mark.parametrize(
    ("key", "missing"),
    [
        ("epsilon_spent", {"clients": [{"epsilon": 1.5}]}),
        ("event", {"charges": [{key: value for key, value in CHARGE.items() if key != "event"}]}),
    ],
)
def test_a_missing_key_is_an_error(run, key, missing):
    with pytest.raises(KeyError, match=key):
        run(**missing)


@pytest.mark.parametrize("none", [{"clients": []}, {"clients": [{"epsilon_spent": None}]}, {"charges": []}])
def test_nothing_is_not_compared_with_nothing(run, none):
    with pytest.raises(ValueError, match=r"no (epsilons|charges) to compare"):
        run(**none)


def test_models_are_compared_whatever_wrote_them(run):
    """A checkout from before safetensors writes what `torch.save` does."""
    assert run() == run(save=torch.save, suffix=".pt")
