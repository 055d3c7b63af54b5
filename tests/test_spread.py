"""What has an object of its own is named in few files."""

import pytest
from spread import AT_HOME, CONCEPTS, named_in, working_tree

#: concept -> files that may name it
MOST = {
    "persons": 18,
    "noise of a simulation": 34,
    "counts of held-out records": 13,
    "Laplace noise": 20,
    "a task's name, outside its class": 3,
}


@pytest.mark.parametrize("concept", CONCEPTS)
def test_a_concept_is_named_in_few_files(concept):
    files = named_in(working_tree(), concept)
    assert len(files) <= MOST[concept], files


def test_what_is_counted_is_there():
    files = working_tree()
    assert all(named_in(files, concept) for concept in CONCEPTS) and {*CONCEPTS} == {*MOST}
    assert all(home <= files.keys() for home in AT_HOME.values())
