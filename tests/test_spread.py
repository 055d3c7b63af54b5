"""What has an object of its own is named in few files."""

import re

import pytest
from spread import AT_HOME, CONCEPTS, named_in, working_tree

#: concept -> files that may name it
MOST = {
    "persons": 17,
    "noise of a simulation": 10,
    "counts of held-out records": 8,
    "Laplace noise": 8,
    "a task's name, outside its class": 0,
}


@pytest.mark.parametrize("concept", CONCEPTS)
def test_a_concept_is_named_in_few_files(concept):
    files = named_in(working_tree(), concept)
    assert len(files) <= MOST[concept], files


def test_what_is_counted_is_there():
    files = working_tree()
    assert {*CONCEPTS} == {*MOST}
    for concept in CONCEPTS:
        home = AT_HOME.get(concept, set())
        assert home <= files.keys() and (home or named_in(files, concept))
        assert all(re.search(CONCEPTS[concept], files[path]) for path in home)
