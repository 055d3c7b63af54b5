"""A user's own clients in a configuration: `data.class_path`."""

import json
import re
import sys

import pytest
from fakes import a_result, a_view

from dpfl_lightning import build
from dpfl_lightning.build import build_module, build_population
from dpfl_lightning.commands.evaluate import main as evaluate_command
from dpfl_lightning.commands.fit import main as fit_command
from dpfl_lightning.commands.ledger import main as ledger_command
from dpfl_lightning.commands.plan import main as plan_command
from dpfl_lightning.commands.sweep import main as sweep_command
from dpfl_lightning.config.load import load
from dpfl_lightning.config.mapping import to_yaml
from dpfl_lightning.config.options import DataOptions, Options
from dpfl_lightning.config.yaml_text import read_yaml
from dpfl_lightning.errors import UserError
from dpfl_lightning.loop import build_loop
from dpfl_lightning.models.tasks import TASKS

CODE = '''
import torch
import lightning as L
from torch.utils.data import DataLoader, TensorDataset
from dpfl_lightning import ClientModule, Population

def own(task=None, metrics=()):
    return ClientModule(torch.nn.Linear(4, 2), task=task, metrics=metrics)

def net(width):
    return torch.nn.Linear(4, width)

def drawn(count, shift=0.0):
    y = torch.arange(count) % 2
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 4, generator=generator) + 3 * y[:, None] + shift, y

def hospitals(sizes=(40, 70, 30)):
    """A mapping of data sets."""
    return dict(zip(("berlin", "rome", "oslo"), (drawn(count) for count in sizes)))

def population():
    return Population.from_datasets(hospitals(), test=drawn(50), num_classes=2)

class Data(L.LightningDataModule):
    def train_dataloader(self):
        return {name: DataLoader(TensorDataset(*pair)) for name, pair in hospitals().items()}

def table(path):
    import pandas
    x, y = drawn(60)
    pandas.DataFrame({"site": ["a", "b"] * 30, "size": x[:, 0].numpy(), "ill": y.numpy()}).to_csv(path, index=False)

number = 3

def broken():
    return {}["ward"]  # broken

class Lazy(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return 1 / 0  # broken_later

def broken_later():
    return [Lazy()]
'''
CONFIG = """
rounds: 3
data: {class_path: hospitals_of_tests.population}
model: {name: logistic}
clients: {batch_size: [16, 16, 8], learning_rate: 0.5}
privacy: {epsilon: [4, 8, 8], delta: 1.0e-3, reserve_rounds: 1}
engine: {device: cpu}
tracking: null
output_dir: run
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder with a user's module and configuration, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    (tmp_path / "hospitals_of_tests.py").write_text(CODE)
    (tmp_path / "own.yaml").write_text(CONFIG)
    yield tmp_path
    sys.modules.pop("hospitals_of_tests", None)


@pytest.mark.e2e
def test_every_command_takes_a_users_clients_by_name(place, capsys, monkeypatch):
    assert plan_command(["--config", "own.yaml", "--json"]) == 0
    planned = capsys.readouterr().out
    assert "berlin" in planned and json.loads(planned.splitlines()[-1])["clients"][2]["name"] == "oslo"

    assert fit_command(["--config", "own.yaml"]) == 0
    printed, result = capsys.readouterr().out, json.loads((place / "run" / "result.json").read_text())
    assert result["test_accuracy"] > 0.8 and [row["name"] for row in result["clients"]] == ["berlin", "rome", "oslo"]
    assert printed.count("rome") == 2, "in the plan and in the summary"
    assert "<td>oslo</td>" in (place / "run" / "guarantee.html").read_text()
    stored = read_yaml("run/options.yaml")
    assert stored["data"]["class_path"] == "hospitals_of_tests.population" and stored["data"]["name"] is None

    assert fit_command(["--resume", "run"]) == 0
    assert ledger_command(["run"]) == 0
    ledger = capsys.readouterr().out
    assert "berlin" in ledger and "Largest epsilon: (" in ledger
    assert evaluate_command(["run"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Test accuracy ")
    assert [line.split()[0] for line in text.splitlines() if "%" in line][1:] == ["berlin", "rome", "oslo"]
    assert evaluate_command(["run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test_accuracy"] == pytest.approx(result["test_accuracy"])

    def another_folder(options):
        raise UserError("`df` must be the path of a file, got 'a.csv'. There is no such file.")

    with monkeypatch.context() as patch:
        patch.setattr(build, "build_population", another_folder)
        assert evaluate_command(["run"]) == 2
    where = "There is no such file. Paths are relative to the working directory in which the run was started."
    assert where in capsys.readouterr().err


def test_an_error_in_the_users_code_is_one_line_with_its_place(place, capsys):
    for function, words in (("broken", "KeyError: 'ward'"), ("broken_later", "ZeroDivisionError: division by zero")):
        path = ["--data.class_path", f"hospitals_of_tests.{function}", "--data.population_args.num_classes", "2"]
        assert plan_command(["--config", "own.yaml", *path]) == 2
        line = 1 + next(i for i, one in enumerate(CODE.splitlines()) if f"# {function}" in one)
        where = f"({place / 'hospitals_of_tests.py'}, line {line})"
        expected = f"error: `data.class_path` must work, got from hospitals_of_tests.{function}: {words} {where}.\n"
        assert capsys.readouterr().err == expected
    (place / "wrong_of_tests.py").write_text("import torch\nsize = 3 +\n")
    assert plan_command(["--config", "own.yaml", "--data.class_path", "wrong_of_tests.size"]) == 2
    assert "SyntaxError: invalid syntax (wrong_of_tests.py, line 2)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--data.class_path", "hospitals_of_tests.hospitals", "--data.population_args", "{num_classes: 2, lazy: true}"],
        ["--data.class_path", "hospitals_of_tests.Data", "--data.population_args.num_classes", "2"],
    ],
)
def test_a_mapping_of_data_sets_and_a_datamodule_become_a_population(words, place):
    options, _ = load(["--config", "own.yaml", *words])
    population = build_population(options)
    assert population.names == ("berlin", "rome", "oslo") and population.num_classes == 2


@pytest.mark.e2e
def test_evaluate_gives_the_scores_of_the_run_with_personal_parameters_or_says_that_it_does_not(place, capsys):
    words = ["--config", "own.yaml", "--model.personal_input", "true", "--clients.learning_rate", "5"]
    assert fit_command(words) == 0 and capsys.readouterr()
    result = json.loads((place / "run" / "result.json").read_text())
    assert evaluate_command(["run", "--json"]) == 0
    with_them = json.loads(capsys.readouterr().out)
    assert with_them["test_loss"] == pytest.approx(result["test_loss"]) and with_them["personal"] is True
    assert [row["loss"] for row in with_them["clients"]] == pytest.approx([row["loss"] for row in result["clients"]])

    for checkpoint in (place / "run").glob("checkpoint*.pt"):
        checkpoint.unlink()
    assert evaluate_command(["run", "--json"]) == 0
    printed = capsys.readouterr()
    without = json.loads(printed.out)
    assert without["test_loss"] != pytest.approx(result["test_loss"]) and without["personal"] is False
    assert "these are not the scores of the run: the personal parameters (input.scale, input.shift)" in printed.err


OWN_MODEL = ["--model.class_path", "hospitals_of_tests.own"]
TASK, METRICS = ["--task", "multiclass"], ["--evaluation.metrics", "[f1, auroc]"]
INIT = ["--model.init_args", "{task: multiclass, metrics: [f1]}"]


@pytest.mark.parametrize(
    "words, task, metrics",
    [
        (OWN_MODEL, None, ()),
        ([*OWN_MODEL, *TASK, *METRICS], "multiclass", ("f1", "auroc")),
        ([*OWN_MODEL, *INIT], "multiclass", ("f1",)),
        ([*OWN_MODEL, *INIT, *TASK, "--evaluation.metrics", "[f1]"], "multiclass", ("f1",)),
        (["--model", "{class_path: hospitals_of_tests.net, init_args: {width: 2}}", *METRICS], None, ("f1", "auroc")),
    ],
)
def test_a_users_module_has_the_task_and_the_metrics_of_the_configuration(words, task, metrics, place):
    options, _ = load(["--config", "own.yaml", *words])
    population = build_population(options)
    module = build_module(options, population)
    assert (module.named_task, tuple(module.metrics)) == (task and TASKS[task], metrics)


@pytest.mark.parametrize("words", [["--model", "{class_path: hospitals_of_tests.net, init_args: {width: 2}}"], []])
def test_losses_of_single_records_are_asked_for_in_the_configuration(words, place):
    for given, expected in ([], False), (["--model.per_record", "true"], True):
        options, _ = load(["--config", "own.yaml", *words, *given])
        assert build_module(options, build_population(options)).per_record is expected


@pytest.mark.parametrize(
    "words, message",
    [
        (
            [*OWN_MODEL, *INIT, *METRICS],
            "`evaluation.metrics` must be ['f1'], got ['f1', 'auroc']. The ClientModule",
        ),
        (
            [*OWN_MODEL, *INIT, "--task", "binary"],
            "`task` must be 'multiclass', got 'binary'. The ClientModule sets it",
        ),
        (
            ["--model.class_path", "hospitals_of_tests.net"],
            "`model.init_args.width` must be given for hospitals_of_tests.net, got None.",
        ),
        (
            ["--model.class_path", "hospitals_of_tests.drawn", "--model.init_args.count", "3"],
            "must return a torch.nn.M",
        ),
        (["--model.class_path", "hospitals_of_tests.number"], "`model.class_path` must be a class or a function"),
        (
            [*OWN_MODEL, "--model.per_record", "true"],
            "`model.per_record` must be left out, got True. Write ClientModule(model, per_record=True).",
        ),
        ([*OWN_MODEL, "--model.per_record", "3"], "`model.per_record` must be true or false, got 3."),
    ],
)
def test_a_users_module_that_does_not_fit_the_configuration_is_refused(words, message, place):
    options, _ = load(["--config", "own.yaml", *words])
    with pytest.raises(UserError, match=re.escape(message)):
        build_module(options, build_population(options))


def test_a_table_needs_no_code(place):
    __import__("pandas")
    sys.path.insert(0, str(place))
    __import__("hospitals_of_tests").table("table.csv")
    arguments = "{df: table.csv, client: site, label: ill, num_classes: 2}"
    words = ["--data.class_path", "dpfl_lightning.Population.from_dataframe", "--data.init_args", arguments]
    assert build_population(load([*words, "--privacy", "null"])[0]).names == ("a", "b")


EQUAL = ["--clients.batch_size", "8", "--privacy.epsilon", "8"]


@pytest.mark.e2e
def test_options_by_name_of_client_in_yaml_and_on_the_command_line(place):
    values = [
        "--privacy.epsilon",
        "{oslo: 8, berlin: 4, rome: 6}",
        "--clients.batch_size",
        "{oslo: 8, rome: 9, berlin: 10}",
    ]
    network = ["--network.latency_seconds", "{rome: 2, oslo: 1, berlin: 3}"]
    config = ["--config", "own.yaml", *values, *network]
    options, _ = load([*config, "--clients.reported_epsilon", "{berlin: 1, oslo: 2, rome: 3}"])
    loop = build_loop(options)
    assert [(one.epsilon, one.batch_size) for one in loop.config.settings] == [(4.0, 10), (6.0, 9), (8.0, 8)]
    assert loop.config.facts.reported_epsilon == (1.0, 3.0, 2.0) and [*loop.traffic._network._latency] == [
        3.0,
        2.0,
        1.0,
    ]
    assert fit_command([*config, "--quiet"]) == 0
    assert fit_command(["--resume", "run", "--quiet"]) == 0
    merged, _ = load([*config, "--privacy.epsilon.rome", "7"])
    assert dict(merged.privacy.epsilon) == {"oslo": 8, "berlin": 4, "rome": 7}
    with pytest.raises(UserError, match=r"be a number > 0, got -1. It is the value of client oslo"):
        load([*config, "--privacy.epsilon", "{oslo: -1, rome: 1, berlin: 1}"])
    with pytest.raises(
        UserError, match=r"each client \(berlin, rome, oslo\), got the unknown paris and no value for oslo"
    ):
        build_loop(load([*config, "--privacy.epsilon", "{berlin: 1, rome: 1, paris: 1}"])[0])
    with pytest.raises(UserError, match="clients without names"):
        load(["--data.name", "digits", "--clients.count", "1", "--privacy.epsilon", "{berlin: 1}"])


PATH = ["--data.class_path", "hospitals_of_tests.hospitals"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--data.name", "digits"], "`data.name` must be null or left out with data.class_path, got 'digits'"),
        (["--data.partition.name", "dirichlet"], "`data.partition` must be null or left out with data.class_path"),
        (
            ["--clients.count", "4", *EQUAL],
            "`clients.count` must be 3, the clients of hospitals_of_tests.population, got 4",
        ),
        (["--data.class_path", "nowhere.population"], "`data.class_path` must be importable, got 'nowhere.population'"),
        (["--data.class_path", "hospitals_of_tests.drawn", "--data.init_args.count", "3"], "must yield or be pairs"),
        (
            ["--data.init_args.size", "3"],
            "`data.init_args.size` must be an argument of hospitals_of_tests.population (it has none), got 3.",
        ),
        (["--data.population_args.lazy", "true"], "`data.population_args` must be left out if class_path makes a Pop"),
        (PATH, "`num_classes` must be the number of classes"),
        (
            ["--data.class_path", "null", "--data.name", "null"],
            "`data.name` must be a data set if there is no data.class_path",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(words, message, place):
    with pytest.raises(UserError, match=re.escape(message)):
        build_loop(load(["--config", "own.yaml", *words])[0])
    assert not (place / "run").exists()


def test_keys_of_other_data_are_dropped_when_a_class_path_replaces_them(place):
    named = place / "named.yaml"
    named.write_text(
        "data: {name: digits, partition: {name: dirichlet, alpha: 1}}\nclients: {count: 7}\nprivacy: null\n"
    )
    options, _ = load(["--config", str(named), "--data.class_path", "hospitals_of_tests.population"])
    assert options.data.name is None and options.data.partition == {"name": "iid"} and options.clients.count is None
    (place / "again.yaml").write_text(to_yaml(options))
    assert load(["--config", "again.yaml"])[0] == options
    with pytest.raises(UserError, match=r"`data.init_args` must be null or left out without data.class_path"):
        load(["--data.init_args.x", "3", "--privacy", "null"])


def test_a_search_that_needs_public_records_refuses_a_users_clients(place, capsys):
    search = "sweep: {name: s, space: {clients.learning_rate: {low: 0.1, high: 1.0}}}"
    (place / "search.yaml").write_text(f"{CONFIG}\n{search}")
    assert sweep_command(["--config", "search.yaml"]) == 2
    assert "`data.class_path` must be null with objective set without a distilled set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("result.json", '{"clients": [', "result.json` must be a file that can be read"),
        ("result.json", "[]", "result.json` must hold a JSON object, got 'list'"),
        ("result.json", '{"format": 1}', "must hold the result of a run, got a file without 'client_embedding'"),
        ("result.json", 9, "result.json` must have the model of each client"),
        ("model.safetensors", "garbage", "model.safetensors` must be a file of safetensors"),
        ("model.safetensors", None, "model.safetensors is gone"),
    ],
)
def test_a_damaged_run_is_one_sentence(file, content, words, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    options = Options(data=DataOptions(name="digits"), model={"name": "logistic"}, privacy=None)
    (run / "options.yaml").write_text(to_yaml(options))
    result = a_result(a_view(run))
    clients = [{**client, "model": content if isinstance(content, int) else 0} for client in result.clients]
    (run / "result.json").write_text(json.dumps({**result.as_dict(), "clients": clients}))
    (run / "model.safetensors").write_text("garbage")
    if content is None:
        (run / file).unlink()
    elif isinstance(content, str):
        (run / file).write_text(content)
    assert evaluate_command([str(run)]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
