"""LEAF's FEMNIST and loans of Lending Club, from small files in their true format."""

import csv
import gzip
import json

import numpy as np
import pytest
import torch

from dpfl_lightning.config.load import load as load_options
from dpfl_lightning.data import datasets, own_files
from dpfl_lightning.errors import UserError


def leaf(folder, part, writers, records=3):
    """A file as LEAF writes it."""
    drawn = np.random.default_rng(len(writers))
    data = {
        name: {"x": drawn.random((records, 784)).round(4).tolist(), "y": drawn.integers(0, 62, records).tolist()}
        for name in writers
    }
    text = {"users": writers, "num_samples": [records] * len(writers), "user_data": data}
    (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / part / f"all_data_0_niid_0_keep_0_{part}_9.json").write_text(json.dumps(text))
    return data


def one_writer(x, y) -> str:
    return json.dumps({"users": ["a"], "user_data": {"a": {"x": x, "y": y}}})


def test_femnist_is_read_as_leaf_writes_it(tmp_path):
    data = leaf(tmp_path, "train", ["f0001_41", "f0005_26"])
    leaf(tmp_path, "test", ["f0001_41"], records=2)
    found = datasets.load("femnist", str(tmp_path))
    assert found.x.shape == (6, 1, 28, 28) and found.test_x.shape == (2, 1, 28, 28) and found.num_classes == 62
    first = torch.tensor(data["f0001_41"]["x"][0]).view(1, 28, 28)
    torch.testing.assert_close(found.x[0], 2 * first - 1)
    assert found.y.tolist() == data["f0001_41"]["y"] + data["f0005_26"]["y"]
    assert found.origin == {}, "its records count as the user's own"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"users": ["a"]}', "must be a JSON file of LEAF, with users and user_data, got a file without 'user_data'"),
        ('{"users": ["a"], "user_data": {}}', "must be a JSON file of LEAF, .*got a file without 'a'"),
        ('{"users": ["a"], "user_data": {"a": 1}}', "must be a JSON file of LEAF"),
        ('{"users": [], "user_data": {}}', "hold at least one writer, got 'none'"),
        ("[1]", "must hold a JSON object, got 'list'"),
        ("[1", "must be a file that can be read, got .*Expecting ',' delimiter"),
        ("[" * 100_000, "must be a file that can be read, got .*recursion"),
        (b"\xff\xfe{}", "must be a file that can be read, got .*not UTF-8"),
        (one_writer([[0.5] * 10], [1]), "images of 784 numbers from 0 to 1, one per label, got \\(1, 10\\)"),
        (one_writer([[0.5] * 784, [0.5]], [1, 1]), "must be a JSON file of LEAF"),
        (one_writer([[float("nan")] * 784], [1]), "images of 784 numbers"),
        (one_writer([[0.5] * 784], ["one"]), "must be a JSON file of LEAF"),
        (one_writer([[0.5] * 784], 1), "one per label"),
        (one_writer([[0.5] * 784], [1.5]), "classes from 0 to 61, got \\[1.5\\]"),
        (one_writer([[0.5] * 784], [float("nan")]), "classes from 0 to 61, got \\[nan\\]"),
        (one_writer([[0.5] * 784], [62]), "classes from 0 to 61"),
    ],
    ids=range(16),
)
def test_files_that_are_not_leafs_are_refused_in_one_sentence(text, words, tmp_path):
    (tmp_path / "train").mkdir()
    file = tmp_path / "train" / "a.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=words) as error:
        datasets.load("femnist", str(tmp_path))
    said = str(error.value)
    assert said.startswith(f"`{file}` must ") and "\n" not in said and len(said) < 700
    assert said.endswith("Run LEAF's data/femnist/preprocess.sh, and set data.folder to its folder `data`.")


def test_a_folder_is_asked_for(tmp_path):
    with pytest.raises(UserError, match=r"`data.folder` must be the folder with your files of femnist"):
        datasets.load("femnist")
    with pytest.raises(UserError, match=r"must hold JSON files of LEAF.*preprocess.sh"):
        datasets.load("femnist", str(tmp_path))
    with pytest.raises(UserError, match=r"must hold one CSV file of loans"):
        datasets.load("lending_club", str(tmp_path))


def loans(folder, count=90):
    """A file with the columns and forms of the published one."""
    drawn = np.random.default_rng(5)
    numbers = [f"number_{place}" for place in range(12)]
    with (folder / "accepted_2007_to_2018Q4.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, ["id", "member_id", "int_rate", "grade", "desc", "mths_since_last", *numbers])
        rows.writeheader()
        for row in range(count):
            values = {name: round(float(one), 3) for name, one in zip(numbers, drawn.normal(5, 3, 12), strict=True)}
            missing = "" if row % 3 else "12"
            known = {
                "id": row,
                "member_id": "",
                "int_rate": f" {row / 10}%",
                "grade": "ABC"[row % 3],
                "desc": f"t{row}",
            }
            rows.writerow({**known, "mths_since_last": missing, **values})


def test_loans_are_encoded_by_the_public_ones_alone(tmp_path):
    loans(tmp_path)
    found = own_files.lending_club(tmp_path, public=40)
    assert found.x.shape == (40, 10) and found.test_x.shape == (10, 10) and found.num_classes == 1
    assert found.test_y[:2].tolist() == pytest.approx([4.0, 4.5]) and found.y[0].item() == pytest.approx(4.1)
    changed = (tmp_path / "accepted_2007_to_2018Q4.csv").read_text().splitlines()
    changed[-1] = changed[-1].replace(changed[-1].split(",")[-1], "1000000")
    (tmp_path / "accepted_2007_to_2018Q4.csv").write_text("\n".join(changed))
    again = own_files.lending_club(tmp_path, public=40)
    assert torch.equal(again.x[:-1], found.x[:-1]) and not torch.equal(again.x[-1], found.x[-1])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b""),
        ("a.csv", b"int_rate,a\n1,2,3,4\n1\n5,6,7,8,9\n"),
        ("a.csv", b"int_rate\n\xff\xfe\n"),
        ("a.csv.gz", b"int_rate\n1\n"),
        ("a.csv.gz", gzip.compress(b"int_rate\n" * 99)[:-9]),
    ],
    ids=["empty", "rows of other lengths", "no UTF-8", "no gzip", "cut off"],
)
def test_files_that_are_no_loans_are_refused_in_one_sentence(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        UserError, match=rf"^`.*{name}` must be a CSV file of loans, got .+\. Such as accepted_2007"
    ) as error:
        datasets.load("lending_club", str(tmp_path))
    assert "\n" not in str(error.value)


def test_too_few_loans_are_refused(tmp_path):
    loans(tmp_path)
    with pytest.raises(UserError, match="more than 10010 loans"):
        datasets.load("lending_club", str(tmp_path))


def test_both_are_names_of_a_configuration(tmp_path):
    leaf(tmp_path, "train", ["f0001_41"])
    options, *_ = load_options(["--data.name", "femnist", "--data.folder", str(tmp_path), "--privacy.epsilon", "2"])
    assert options.data.name == "femnist"
