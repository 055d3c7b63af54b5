"""The page is that of the results, the judge and the trial find what is wrong, and ten models with masks work."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo import trial
from zoo.__main__ import RESULTS
from zoo.everything import ZOO
from zoo.judge import judged
from zoo.models import Entry, labels_of, rows
from zoo.packages import missing
from zoo.page import PAGE, kind_of, page

MASKED = "bert distilbert roberta-tags electra modernbert gpt2-next-token llama t5-encoder-tags wav2vec2 lora-bert"


def entry(*layers, **more):
    return Entry("own", "torch", lambda: nn.Sequential(nn.Linear(5, 8), *layers, nn.Linear(8, 3)), rows, **more)


def normalised(output, y):
    """A loss that compares the records of a batch."""
    return F.cross_entropy(output - output.mean(dim=0), y, reduction="none")


def test_the_page_is_written_from_the_results():
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    tried = [row["name"] for row in results]
    assert PAGE.read_text() == page(results, [name for name in ZOO if name not in tried])
    assert tried == [name for name in ZOO if name in tried]
    assert len(ZOO) == 100


@pytest.mark.parametrize(
    ("one", "category"),
    [
        (entry(nn.ReLU()), "trainable"),
        (entry(nn.Dropout(0.5)), "trainable"),  # it is switched off
        (entry(nn.BatchNorm1d(8)), "mixing"),
        (entry(loss=normalised), "mixing"),
        (entry(nn.LogSigmoid(), nn.Threshold(1.0, float("nan"))), "untrainable"),
        (entry(nn.RReLU()), "untrainable"),  # it draws, and is no dropout
    ],
)
def test_the_judge_knows(one, category):
    assert judged(one).category == category


@pytest.mark.parametrize(
    ("judge", "outcome", "kind"),
    [
        ("trainable", "works", "works"),
        ("trainable", "wrong", "silently wrong"),
        ("trainable", "refused", "refused wrongly"),
        ("trainable", "failed", "fails"),
        ("mixing", "refused", "refused rightly"),
        ("mixing", "wrong", "accepted, but mixes records"),
        ("mixing", "failed", "accepted, but mixes records"),
    ],
)
def test_what_a_result_means(judge, outcome, kind):
    assert kind_of({"judge": judge, "outcome": outcome}) == kind


def scaled(clipped_sum, *args):
    sums, norms = clipped_sum(*args)
    return 1.001 * sums, norms


def in_company(clipped_sum, params, x, y, request):
    sums, norms = clipped_sum(params, x, y, request)
    return sums * (1.0 + 0.001 * len(y)), norms


@pytest.mark.e2e
@pytest.mark.parametrize(("fault", "found"), [(None, "works"), (scaled, "wrong"), (in_company, "wrong")])
def test_a_wrong_gradient_is_found(monkeypatch, fault, found):
    real = trial._train

    def train(*args):
        federated = real(*args)
        if fault is not None:
            federated.clients.engine.clipped_sum = partial(fault, federated.clients.engine.clipped_sum)
        return federated

    monkeypatch.setattr(trial, "_train", train)
    one = entry(nn.ReLU())
    result = trial.tried(one, judged(one))
    assert result["outcome"] == found
    assert result["opacus_error"] < 1e-4


def test_a_refusal_has_its_sentence():
    one = entry(nn.BatchNorm1d(8))
    result = trial.tried(one, judged(one))
    assert (result["judge"], result["outcome"]) == ("mixing", "refused")
    assert "BatchNorm1d" in result["sentence"]


def test_classes_follow_the_records():
    assert labels_of(torch.tensor([0.3, -1.0, 2.0])).tolist() == [1, 0, 2]


@pytest.mark.e2e
@pytest.mark.parametrize("name", MASKED.split())
def test_a_model_with_padding_works(name):
    if absent := missing():
        pytest.skip(absent)
    assert ZOO[name].masked
    result = trial.tried(ZOO[name], judged(ZOO[name]))
    assert kind_of(result) == "works", result
