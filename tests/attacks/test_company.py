"""A record's clipped gradient has the same bits whatever is computed with it, also by hostile models.

Its place in a pass, the number of records, views of larger tensors and broken neighbours change nothing.
"""

import itertools
import warnings

import pytest
import torch

from dpfl_lightning.auditing.company import companies
from experiments.attacks.nets import NETS
from experiments.attacks.search import SUMS, loss_of, tried

pytestmark = pytest.mark.e2e

SEEDS = {"fast": (1, 3), "serial": (1,)}  # seed 1: 7 records with one thread; 3: 31 records with two
SOME = (
    *("linear 33-7", "linear 64-32", "linear over positions", "conv1d, dilated", "conv2d", "conv2d, pooled"),
    *("transposed conv2d", "group norm", "lstm", "transformer", "embedding", "softplus"),
)


#: they take seconds
SLOW = {("lstm", "serial"), ("transformer", "serial"), ("conv2d", "serial"), ("conv2d, pooled", "serial")}


@pytest.mark.parametrize(
    ("name", "sums"),
    [
        pytest.param(*pair, marks=[pytest.mark.e2e] * (pair in SLOW), id="-".join(pair))
        for pair in itertools.product(SOME, SUMS)
    ],
)
def test_the_company_of_a_record_does_not_change_its_bits(name, sums):
    case = NETS[name]
    net = case.net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # operators without a batching rule
        clipped_sum = SUMS[sums](net, loss_of(net), *case.records(0, 0))
        found = [one for seed in SEEDS[sums] for one in tried(clipped_sum, net, case, seed)]
    assert {one.kind for one in found if one.records} == set()


def test_companies_hold_the_watched_records():
    """Each kind occurs, and the records at the named places are those that are watched, bit for bit."""
    x, y = NETS["lstm"].records(9, 0)
    kinds = set()
    for company in companies(x, y, NETS["lstm"].records(4, 1), torch.Generator().manual_seed(0)):
        kinds.add(company.kind)
        assert torch.equal(company.x[company.places], x[company.watched])
        assert torch.equal(company.y[company.places], y[company.watched])
        if company.kind == "view":
            assert not company.x.is_contiguous() or company.x.storage_offset() > 0
    assert kinds == {"count", "place", "view", "neighbours"}
