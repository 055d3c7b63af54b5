"""Skips what does not apply to our code, with the reason, and breaks our code on purpose if a mutation is named."""

import os
import re

import hypothesis
import pytest
from conformance.mutations import MUTATIONS

#: examples of each property; the libraries run 100
hypothesis.settings.register_profile(
    "conformance",
    max_examples=int(os.environ.get("CONFORMANCE_EXAMPLES", "20")),
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def pytest_ignore_collect(collection_path, config):
    """Quick runs do not import the libraries' tests, which takes seconds."""
    other = collection_path.name.startswith("test_") and collection_path.name != "test_conformance.py"
    return True if other and "not e2e" in config.option.markexpr else None


def pytest_collection_modifyitems(items):
    for item in items:
        for pattern, reason in getattr(getattr(item, "cls", None), "left_out", {}).items():
            if re.match(pattern, item.name):
                item.add_marker(pytest.mark.skip(reason=reason))
                break


@pytest.fixture(scope="session", autouse=True)
def mutation():
    with pytest.MonkeyPatch.context() as patch:
        if name := os.environ.get("CONFORMANCE_MUTATION"):
            MUTATIONS[name].apply(patch)
        yield
