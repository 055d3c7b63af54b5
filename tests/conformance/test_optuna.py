"""The tests of Optuna's storages and samplers, on those of a search as we open and configure them."""

import optuna
import pytest
from optuna.testing import pytest_samplers, pytest_storages

from dpfl_lightning.search.options import SweepOptions
from dpfl_lightning.search.samplers import SAMPLERS, sampler
from dpfl_lightning.search.storage import opened

pytestmark = pytest.mark.e2e


class TestStorage(pytest_storages.StorageTestCase):
    """The database of a search: heartbeats, exclusive transactions of SQLite, one timeout for all workers."""

    @pytest.fixture
    def storage(self, tmp_path):
        study, storage = opened(
            SweepOptions(name="study"), f"sqlite:///{tmp_path}/study.db", {"accuracy": True}, given_up
        )
        storage.delete_study(study._study_id)
        yield storage
        storage.remove_session()
        storage.engine.dispose()


def given_up(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
    """Do nothing with a trial whose worker is gone."""


def sampler_tests(name: str, *tests: type, **options) -> type:
    """Return these tests for our sampler of that name."""

    @pytest.fixture
    def ours(self):
        return lambda: sampler(SweepOptions(sampler={"name": name, **options}), {}, seed=0, shared=0)

    return type(f"TestSampler_{name}", tests, {"sampler": ours})


BASIC, SEVERAL = pytest_samplers.BasicSamplerTestCase, pytest_samplers.MultiObjectiveSamplerTestCase
RELATIVE = pytest_samplers.RelativeSamplerTestCase
#: a grid has no values but those that it is given, and Optuna has no such tests for its grid
TESTED = [name for name in SAMPLERS if name != "grid"]
globals().update({f"TestSampler_{name}": sampler_tests(name, BASIC, SEVERAL) for name in TESTED})
TestSampler_gp_relative = pytest.mark.slow(sampler_tests("gp", RELATIVE, startup_trials=0))
TestSampler_tpe_multivariate = sampler_tests("tpe", BASIC, SEVERAL, RELATIVE, multivariate=True, startup_trials=0)
