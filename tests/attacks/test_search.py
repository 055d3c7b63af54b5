"""`python -m experiments.attacks search` keeps each pair of net and sum, and goes on where it was stopped."""

import json

import pytest

from experiments.attacks import search


@pytest.mark.e2e
def test_a_search_goes_on_with_its_file(tmp_path, monkeypatch):
    file, tried, whole = tmp_path / "found.json", [], search.tried

    def stops(clipped_sum, net, case, seed):
        tried.append(seed)
        if len(tried) == 3:
            raise KeyboardInterrupt
        return whole(clipped_sum, net, case, seed)

    monkeypatch.setattr(search, "tried", stops)
    with pytest.raises(KeyboardInterrupt):
        search.search(4, ["linear 33-7"], file=file)
    assert [row["sums"] for row in json.loads(file.read_text())["rows"]] == ["fast"]
    found = search.search(4, ["linear 33-7"], file=file)
    assert found == json.loads(file.read_text())
    assert tried == [0, 1, 0, 0, 1]  # two of the first pair, one that was stopped, two of the second
    assert [(row["sums"], row["models"]) for row in found["rows"]] == [("fast", 2), ("serial", 2)]
    search.search(6, ["linear 33-7"], ["fast"], file=file)
    assert tried[5:] == [0, 1, 2, 3, 4, 5]  # as many models as asked
