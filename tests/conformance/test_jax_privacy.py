"""The tests of `CanaryScoreAuditor` of jax_privacy, with the bounds of our audit in its place; without jax."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from conformance.adapters import Replaced, loaded, unpacked
from scipy.stats import norm

from dpfl_lightning.auditing import bounds
from dpfl_lightning.privacy.accounting.accountant import gaussian_epsilon

pytestmark = pytest.mark.e2e


def hull(inside: np.ndarray, outside: np.ndarray) -> list[tuple[int, int]]:
    """Guess "in" at or above each threshold of the ROC curve's upper hull: (guesses, right ones)."""
    thresholds = np.append(np.union1d(inside, outside), np.inf)
    points = np.stack([np.searchsorted(np.sort(one), thresholds) for one in (inside, outside)], axis=1)
    kept: list[np.ndarray] = []
    for point in points:
        while len(kept) > 1 and not turns_right(kept[-2], kept[-1], point):
            kept.pop()
        kept.append(point)
    return [(len(inside) + len(outside) - int(p.sum()), len(inside) - int(p[0])) for p in kept]


def turns_right(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> bool:
    return (b[0] - a[0]) * (c[1] - b[1]) < (b[1] - a[1]) * (c[0] - b[0])


def library_tests() -> ModuleType:
    """Load the library's file of tests beside its one file that needs no jax; numpy's arrays stand in for jax'."""
    package, jax = ModuleType("jax_privacy"), ModuleType("jax")
    package.auditing = loaded("jax_privacy_auditing", unpacked("jax_privacy/auditing.py"))  # type: ignore[attr-defined]
    jax.numpy = np  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in {"jax_privacy": package, "jax": jax, "jax.numpy": np}.items():
            patch.setitem(sys.modules, name, module)
        return loaded("jax_privacy_auditing_test", unpacked("tests/auditing_test.py"))


tests = library_tests()


class Auditor:
    """The bounds of our audit for scores with and without a canary."""

    def __init__(self, inside, outside) -> None:
        self.inside, self.outside = np.asarray(inside), np.asarray(outside)

    def epsilon_clopper_pearson(self, significance, delta=0.0, one_sided=True, *, threshold_strategy):
        """Both sides of a threshold; its choice and its judgement use the scores in random order."""
        if isinstance(threshold_strategy, tests.auditing.Explicit):
            threshold = np.array([threshold_strategy.threshold])
            return max(0.0, bounds._threshold_bounds(threshold, self.inside, self.outside, significance, delta)[0])
        rng = np.random.default_rng(0)
        scores = rng.permutation(self.inside), rng.permutation(self.outside)
        return bounds.threshold_epsilon(*scores, significance, delta)

    def epsilon_from_gdp(self, significance, delta):
        return self.gaussian(bounds.shift_interval(self.inside, self.outside, significance)[0], delta)

    def epsilon_one_run(self, significance, delta, one_sided=True):
        return bounds.one_run_epsilon(*self.tallies(significance), delta)

    def epsilon_one_run_fdp(self, significance, delta, one_sided=True):
        mu = bounds.one_run_weakness(*self.tallies(significance), bounds.gaussian_curve)
        return self.gaussian(mu, delta)

    def tallies(self, significance):
        """One tally for each point of the hull, the most promising first, which is quicker."""
        tallies = sorted(
            hull(self.inside, self.outside), key=lambda one: -(one[1] - 3 * one[0] ** 0.5) / max(one[0], 1)
        )
        return len(self.inside) + len(self.outside), tallies, significance

    @staticmethod
    def gaussian(mu, delta):
        return float(gaussian_epsilon(np.array([max(mu, 0.0)]), np.array([delta]))[0])


class Bounds(Replaced, tests.CanaryScoreAuditorTest):
    module = tests
    names = {  # noqa: RUF012
        "auditing": SimpleNamespace(
            CanaryScoreAuditor=Auditor,
            _clopper_pearson_upper=lambda k, n, significance: bounds.rate_interval(k, n, significance)[1],
            _one_run_p_value=lambda *args: bounds.one_run_p_value(*args),
            _norm=norm,
            **{name: getattr(tests.auditing, name) for name in ("Explicit", "Bonferroni", "Split", "MultiSplit")},
        )
    }
    left_out = {  # noqa: RUF012
        ".*bootstrap": "our audit has exact intervals and no bootstrap",
        ".*(pareto|tn_fn|raw_counts|signed_area)": "it tests a step of the library's algorithm",
        ".*(tpr_at|auroc|max_accuracy)": "our audit states no such figure",
        r"test_epsilon_clopper_pearson_tight\d": "millions of scores take minutes, as every threshold is tried; "
        "the tests named multi_split are the same ones with fewer",
        ".*(raises|accepts)": "it tests the library's checks of its arguments",
    }
