"""A model on disk: tensors and the code that can load them, which nothing but its reader's own words runs."""

import json
import pickletools
import struct

import pytest
import torch
from torch import nn

from dpfl_lightning import load_model
from dpfl_lightning.config.reading import read_safetensors
from dpfl_lightning.errors import UserError
from dpfl_lightning.models import check_net, named
from dpfl_lightning.models.saved import code_of
from dpfl_lightning.runtime.files import write_safetensors

CNN = {"name": "cnn_small", "personal_input": True}


def written(path, net, model=None, shape=(1, 28, 28), classes=10):
    return write_safetensors(path, net.state_dict(), code_of(net, model or {}, shape, classes))


def test_a_model_of_the_package_is_loaded_from_its_file_alone(tmp_path):
    net = named(CNN, (1, 28, 28), 10)
    path = written(tmp_path / "model.safetensors", net, {**CNN, "class_priors": [0.1] * 10, "per_record": True})
    code = read_safetensors(path)[1]
    assert code["class_path"] == "dpfl_lightning.models.named" and code["dpfl_lightning"] and code["torch"]
    assert code["init_args"] == {"model": CNN, "input_shape": [1, 28, 28], "num_classes": 10}
    loaded, x = load_model(path), torch.randn(3, 1, 28, 28)
    assert torch.equal(loaded(x), net.eval()(x)) and not loaded.training


def test_any_other_model_is_made_by_its_reader(tmp_path):
    """The file names the code and imports nothing, whatever it names."""
    given = {"class_path": "os.system", "init_args": {"command": "echo", "weights": "/mnt/of_me/a.bin", "width": 3}}
    path = written(tmp_path / "model.safetensors", nn.Linear(4, 3), given)
    words = r"`net` must be given for this file, got None. .*made by os.system.*'width': 3.*version 0.1.0"
    with pytest.raises(UserError, match=words) as told:
        load_model(path)
    assert "/mnt/of_me" not in str(told.value) and b"/mnt/of_me" not in path.read_bytes()
    net = load_model(path, nn.Linear(4, 3))
    assert torch.equal(net.weight, read_safetensors(path)[0]["weight"])
    with pytest.raises(UserError, match=r"`net` must have the parameters of .*model\.safetensors, got others: "):
        load_model(path, nn.Linear(5, 3))
    unnamed = written(tmp_path / "python.safetensors", nn.Linear(4, 3))
    assert read_safetensors(unnamed)[1]["class_path"] == "torch.nn.modules.linear.Linear"


def test_frozen_parameters_come_with_the_given_model(tmp_path):
    net = nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 2))
    state = {name: value for name, value in net.state_dict().items() if name.startswith("1")}
    path = write_safetensors(tmp_path / "model.safetensors", state, code_of(net, {}, (4,), 2))
    assert torch.equal(load_model(path, net)[0].weight, net[0].weight)


def test_parameters_that_share_memory_are_written_and_the_same_model_gives_the_same_bytes(tmp_path):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    first, second = (written(tmp_path / f"{name}.safetensors", net).read_bytes() for name in "ab")
    assert first == second and torch.equal(read_safetensors(tmp_path / "a.safetensors")[0]["1.weight"], net[0].weight)
    with pytest.raises(ValueError, match="at position"):
        [*pickletools.genops(first)]


def test_what_cannot_be_written_is_refused_before_the_run():
    net = nn.Linear(4, 3)
    net.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))
    with pytest.raises(UserError, match=r"`net.phases` must have a dtype of safetensors, .*got torch.complex128"):
        check_net(net)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", struct.pack("<Q", 1 << 60), struct.pack("<Q", 2) + b"[]", b"\x80\x04N."]
)
def test_a_damaged_file_is_one_sentence(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model.safetensors` must be a file of safetensors, got"):
        load_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize("init_args", [None, [], {"model": {"name": "nope"}, "input_shape": [4], "num_classes": 2}])
def test_a_file_that_describes_no_model_is_one_sentence(init_args, tmp_path):
    code = {"class_path": "dpfl_lightning.models.named", "init_args": init_args}
    path = write_safetensors(tmp_path / "model.safetensors", {}, code)
    with pytest.raises(UserError, match="must"):
        load_model(path)
    assert json.loads(path.read_bytes()[8:].split(b"\0")[0])["__metadata__"]
