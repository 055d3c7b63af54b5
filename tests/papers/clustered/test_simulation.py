"""Made-up updates: their law, what finds their groups, and what is kept of it."""

import numpy as np
import pytest
import torch

from dpfl_lightning.algorithms.update_geometry import Updates, centred_gram
from experiments.papers.clustered import simulation
from experiments.papers.clustered.simulation import (
    methods_at,
    true_groups,
    updates_at,
)

pytestmark = pytest.mark.e2e


def test_cheap_updates_have_the_law_of_drawn_ones():
    """Mean squared distances within and between groups, 300 draws each; seeds 0 to 299. False alarm below 1e-4: 5 %
    is more than four standard errors."""
    num_params, separation = 400, 3.0
    own, other = true_groups() == 1, true_groups() == 2

    def squares(updates: Updates) -> tuple[float, float]:
        diagonal = np.diag(updates.gram)
        distances = diagonal[:, None] + diagonal[None, :] - 2 * updates.gram
        return distances[np.ix_(own, own)][np.triu_indices(6, 1)].mean(), distances[np.ix_(own, other)].mean()

    cheap = np.mean([squares(updates_at(separation, num_params, seed)) for seed in range(300)], axis=0)
    np.testing.assert_allclose(cheap, [2 * num_params, 2 * num_params + (2 * separation) ** 2], rtol=0.01)
    rng = np.random.default_rng(0)
    spread = np.std([squares(updates_at(separation, num_params, seed))[0] for seed in range(300)])
    direct = [squares(_plain(rng.standard_normal((21, num_params))))[0] for _ in range(300)]
    assert spread == pytest.approx(np.std(direct), rel=0.25)  # six standard errors


def _plain(x: np.ndarray) -> Updates:
    return Updates(centred_gram(torch.from_numpy(x)), np.ones(len(x)), x.shape[1])


def test_methods_on_a_small_model(monkeypatch):
    """2,000 parameters, one draw: far apart all but the mixture in all dimensions see four groups; without groups none
    does, and both mixtures see a separation all the same."""
    monkeypatch.setattr(simulation, "SEEDS", (1,))
    far, none = methods_at(25.0, 2000), methods_at(0.0, 2000)
    assert far["ward_ari"] == far["paper_ari"] == 1 and far["split_ari"] > 0.8 and far["paper_groups"] == 4
    assert far["ward_separation"] == pytest.approx(24.7, abs=1.5)
    assert 9 < none["raw_separation"] < 20
    assert none["paper_separation"] == pytest.approx(1.22, abs=0.4)
    assert abs(none["ward_ari"]) < 0.2 and none["split_groups"] == 1
