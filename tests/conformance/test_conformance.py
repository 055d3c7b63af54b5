"""The page of the tests of other projects is that of its results, and the tests find faults in our code."""

import json

import pytest
from conformance.__main__ import PAGE, RESULTS, found, page
from conformance.adapters import unpacked
from conformance.mutations import MUTATIONS

NEEDS = {"test_cipher.py": "cryptography_vectors", "test_jax_privacy.py": "jax_privacy"}


def test_the_page_is_written_from_the_results():
    results = json.loads(RESULTS.read_text())
    assert PAGE.read_text() == page(results)
    assert not any(row["failed"] for row in results["suites"])
    assert {one["fault"] for one in results["mutations"] if one["found"]} == set(MUTATIONS)


@pytest.mark.e2e
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_found(name):
    mutation = MUTATIONS[name]
    if mutation.file in NEEDS:
        unpacked(NEEDS[mutation.file])
    assert found(name, mutation.file, mutation.tests)
