from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning.config.load import from_mapping, load, to_yaml
from dpfl_lightning.config.options import (
    ClientOptions,
    DataOptions,
    EngineOptions,
    Options,
    PrivacyOptions,
    TrackingOptions,
    all_keys,
    check,
    departures,
)
from dpfl_lightning.config.registry import REGISTRIES, help_text
from dpfl_lightning.config.yaml_text import parse_yaml
from dpfl_lightning.errors import UserError

CONF = Path(__file__).parents[1] / "conf"
NOISE_KEY = "0123456789abcdef" * 2
PRIVATE = ["--privacy.epsilon", "2"]


def options_of(*words: str) -> Options:
    return load([*PRIVATE, *words])[0]


def error_of(*words: str) -> str:
    """The message of what must be a UserError of one line."""
    with pytest.raises(UserError) as caught:
        load(list(words))
    message = str(caught.value)
    assert "\n" not in message and "  " not in message
    return message


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


# ---- what a file and a command line say


def test_defaults_and_overrides() -> None:
    options = options_of("--rounds", "5", "--clients.batch_size=[8,16]", "--clients.count", "2", "--seed=3")
    expected = Options(
        rounds=5,
        seed=3,
        clients=ClientOptions(count=2, batch_size=(8, 16)),
        privacy=PrivacyOptions(epsilon=2.0),
    )
    assert options == expected


def test_command_line_wins_over_file_whatever_their_order(tmp_path: Path) -> None:
    path = written(tmp_path, "rounds: 7\nclients: {count: 3, learning_rate: 0.5}\nprivacy: {epsilon: 1}\n")
    for words in (["--config", path, "--clients.count", "4"], ["--clients.count", "4", f"--config={path}"]):
        options, _ = load(words)
        assert options.rounds == 7 and options.clients == ClientOptions(count=4, learning_rate=0.5)


def test_a_whole_section_on_the_command_line_is_merged(tmp_path: Path) -> None:
    path = written(tmp_path, "clients: {count: 3}\nprivacy: {epsilon: 1}\n")
    options, _ = load(["--config", path, "--clients", "{local_epochs: 2}"])
    assert options.clients == ClientOptions(count=3, local_epochs=2)


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    text = "privacy: {delta: 1e-5, epsilon: {name: uniform, low: 1e-1, high: 2E0}, clip_norm: .inf}"
    options, _ = load(["--config", written(tmp_path, text), "--clients.learning_rate", "1e-2"])
    assert options.privacy is not None
    assert (options.privacy.delta, options.privacy.clip_norm) == (1e-5, float("inf"))
    assert options.privacy.epsilon == {"name": "uniform", "low": 0.1, "high": 2.0}
    assert options.clients.learning_rate == 0.01


def test_text_stays_text() -> None:
    options = options_of("--tracking.experiment", "2024", "--data.folder", "[x]", "--tracking.run_name", "null")
    assert options.tracking == TrackingOptions(experiment="2024", run_name=None)
    assert options.data.folder == "[x]"


def test_null_sections() -> None:
    options, _ = load(["--privacy", "null", "--tracking=null"])
    assert options.privacy is None and options.tracking is None


def test_a_key_below_a_null_section_brings_it_back(tmp_path: Path) -> None:
    path = written(tmp_path, "privacy: null")
    assert load(["--config", path, "--privacy.epsilon", "3"])[0].privacy == PrivacyOptions(epsilon=3.0)
    assert load(["--privacy.epsilon", "3", "--privacy", "null"])[0].privacy is None
    below = ["--config", path, "--privacy.epsilon.name", "dist2"]
    assert load(below)[0].privacy == PrivacyOptions(epsilon={"name": "dist2"})


def test_options_of_names() -> None:
    options = options_of("--strategies.fedprox.pull", "0.1", "--model.width", "3", "--data.partition.a.b", "[1]")
    assert options.strategies == {"fedprox": {"pull": 0.1}}, "in place of the default, as in a file"
    assert options.model == {"name": "cnn_small", "width": 3}
    assert options.data.partition == {"name": "iid", "a": {"b": [1]}}


def test_a_mapping_can_be_given_whole() -> None:
    assert options_of("--strategies", "{pfa: {variant: hdpfl}}").strategies == {"pfa": {"variant": "hdpfl"}}
    assert options_of("--tracking.tags", "{row: a}").tracking == TrackingOptions(tags={"row": "a"})
    with pytest.raises(UserError, match=r"`strategies` must be a mapping, got 'pfa'. Write {pfa: {}}."):
        options_of("--strategies", "pfa")


def test_groups_may_be_given_whole_or_by_option_and_taken_away(tmp_path: Path) -> None:
    assert options_of("--data.groups", "{name: rotation, count: 2}").data.groups == {"name": "rotation", "count": 2}
    by_option = options_of("--data.groups.name", "label_shift", "--data.groups.sizes", "[3, 6]")
    assert by_option.data.groups == {"name": "label_shift", "sizes": [3, 6]}
    path = written(tmp_path, "data: {groups: {name: rotation, sizes: [10, 10]}}\n")
    assert options_of("--config", path, "--data.groups", "null").data.groups is None
    assert options_of("--config", path, "--data.groups.sizes", "[5, 15]").data.groups["sizes"] == [5, 15]


def test_strategies_of_a_file_replace_the_default(tmp_path: Path) -> None:
    path = written(tmp_path, "strategies:\n  uniform:\n  fedprox: {pull: 1}\n")
    options = options_of("--config", path, "--strategies.uniform.x", "y")
    assert options.strategies == {"uniform": {"x": "y"}, "fedprox": {"pull": 1}}


def test_a_new_name_drops_the_options_of_the_old_one(tmp_path: Path) -> None:
    path = written(tmp_path, "data: {partition: {name: shards, max_classes: 3}}\n")
    for words in (
        ["--data.partition.name", "dirichlet", "--data.partition.alpha", "0.1"],
        ["--data.partition.alpha", "0.1", "--data.partition.name", "dirichlet"],
    ):
        options = options_of("--config", path, *words)
        assert options.data.partition == {"name": "dirichlet", "alpha": 0.1}
    same = options_of("--config", path, "--data.partition.name", "shards")
    assert same.data.partition == {"name": "shards", "max_classes": 3}
    assert options_of("--model.class_path", "my.Net").model == {"class_path": "my.Net"}


def test_own_model_is_left_alone() -> None:
    model = {"class_path": "torch.nn.Linear", "init_args": {"in_features": "4", "bias": None}}
    assert from_mapping({"model": model, "privacy": None}).model == model


def test_defaults_are_not_shared() -> None:
    options_of("--strategies.fedprox.pull", "0.1")
    assert Options().strategies == {"size_weighted": {}}


def test_the_commands_own_flags() -> None:
    def flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--resume", metavar="DIR")
        parser.add_argument("--json", action="store_true")
        parser.add_argument("run")

    options, found = load(["--rounds", "3", "there", *PRIVATE, "--json", "--resume", "x"], flags)
    assert (options.rounds, found.run, found.json, found.resume) == (3, "there", True, "x")


def test_a_flag_can_stand_for_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "rounds: 7\nprivacy: null\n")

    def flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--resume")

    def loaded(*words: str) -> Options:
        return load(words, flags, config_of=lambda found: found.resume)[0]

    assert loaded("--resume", path, "--seed", "2") == Options(rounds=7, seed=2, privacy=None)
    assert loaded(*PRIVATE).rounds == 10
    with pytest.raises(UserError, match="`--config` must be left out"):
        loaded("--resume", path, "--config", path)


# ---- what is written


OPTIONS = st.builds(
    Options,
    rounds=st.integers(1, 10**6),
    data=st.builds(DataOptions, folder=st.none() | st.text("ab:#'[]{} 1-"), held_out_per_client=st.floats(0, 0.99)),
    clients=st.builds(
        ClientOptions,
        count=st.just(2),
        batch_size=st.integers(1, 9) | st.tuples(st.integers(1, 9), st.integers(1, 9)),
        learning_rate=st.floats(1e-300, 1e300),
    ),
    privacy=st.none()
    | st.builds(
        PrivacyOptions,
        epsilon=st.floats(1e-6, float("inf")) | st.just({"name": "dist3", "source": "sampled"}),
        noise_key=st.none() | st.just(NOISE_KEY),
    ),
    engine=st.builds(
        EngineOptions, name=st.sampled_from(["fast", "serial", "stacked"]), workers=st.none() | st.integers(1, 8)
    ),
    tracking=st.none() | st.builds(TrackingOptions, run_name=st.sampled_from([None, "1e3", "2024", "on", "a: b"])),
)


@pytest.mark.slow
@settings(deadline=None)
@given(options=OPTIONS)
def test_yaml_round_trip(options: Options) -> None:
    assert from_mapping(parse_yaml(to_yaml(options), "text")) == options
    assert from_mapping(departures(options)) == options


def test_save_and_load(tmp_path: Path) -> None:
    options = options_of("--clients.count", "3", "--privacy.epsilon", "[1,2,3]", "--privacy.noise_key", NOISE_KEY)
    assert options.privacy is not None and options.privacy.noise_key == NOISE_KEY
    (tmp_path / "options.yaml").write_text(to_yaml(options))
    assert load(["--config", str(tmp_path / "options.yaml")])[0] == options


def test_departures() -> None:
    assert departures(Options()) == {}
    options = Options(privacy=None, tracking=None, clients=ClientOptions(count=4), model={"name": "x", "y": 1})
    assert departures(options) == {
        "model": {"name": "x", "y": 1},
        "clients": {"count": 4},
        "privacy": None,
        "tracking": None,
    }


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load(["--print_config", *PRIVATE, "--privacy.noise_key", NOISE_KEY, "--rounds", "4"])
    assert end.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert from_mapping(printed) == options_of("--rounds", "4", "--privacy.noise_key", NOISE_KEY)


# ---- help


def test_help_explains_every_key_quickly_without_torch() -> None:
    script = """
import sys
from dpfl_lightning.config import load as config
try:
    flags = lambda parser: parser.add_argument("--resume", type=len, help="go on")
    config.load(["--help"], flags, prog="a.b", description="Trains.")
except SystemExit as end:
    print(end.code, sorted({"torch", "lightning", "mlflow", "opacus"} & set(sys.modules)))
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # its own time: others may have the cores
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
    assert shown.stdout.endswith("0 []\n")
    text = " ".join(shown.stdout.split())
    assert (
        text.startswith("usage: a.b ") and "Trains." in text and "go on" in text and "<" not in text.replace("< ", "")
    )
    for key, known in all_keys().items():
        assert f"--{key} " in text
        assert known.help and known.help in text


def test_help_lists_the_names_there_are() -> None:
    from dpfl_lightning import data, models, strategies
    from dpfl_lightning.data.datasets import BUILT_IN
    from dpfl_lightning.data.groups import GROUPS, UNITS
    from dpfl_lightning.data.partition import PARTITIONS
    from dpfl_lightning.data.sources import SOURCES
    from dpfl_lightning.privacy.accounting.accountant import get_accountant

    assert data is not None
    for key, names in {
        "data.name": [*SOURCES, *BUILT_IN],
        "data.partition": PARTITIONS,
        "data.groups": GROUPS,
        "data.label_noise": list(UNITS),
        "model": models.MODELS,
        "strategies": list(strategies.STRATEGIES),
    }.items():
        for name in names:
            known = all_keys()[key]
            assert name in f"{known.help} {known.hint}", f"`--help` of {key} does not mention {name}"
    for name in get_args(all_keys()["privacy.accountant"].hint):
        assert get_accountant(name).name == name


# ---- mistakes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rouns: 5", ["`rouns` must be a known key.", "Did you mean `rounds`?"]),
        ("rouns: {}", ["Did you mean `rounds`?"]),
        ("rouns:", ["Did you mean `rounds`?"]),
        ("clients: {batchsize: 3}", ["`clients.batchsize`", "Did you mean `clients.batch_size`?"]),
        ("clients: {batchsize: {}}", ["Did you mean `clients.batch_size`?"]),
        ("epsilon: 3", ["Did you mean `privacy.epsilon`?"]),
        ("clients: {epsilon: 3}", ["Did you mean `privacy.epsilon`?"]),
        ("3: 4", ["`3` must be a known key"]),
        ("rounds: many", ["`rounds` must be a whole number, got 'many'"]),
        ("rounds: 2.5", ["`rounds` must be a whole number, got 2.5"]),
        ("rounds: '5'", ["`rounds` must be a whole number, got '5'"]),
        ("rounds: true", ["got True"]),
        ("rounds: [1]", ["got [1]"]),
        ("rounds:", ["`rounds` must be a whole number, got None"]),
        ("rounds: 0", ["`rounds` must be >= 1, got 0"]),
        ("seed: -1", ["`seed` must be >= 0"]),
        ("data: fashion_mnist", ["`data` must be a mapping of keys", "Write data: {name: fashion_mnist}"]),
        ("data:", ["`data` must be a mapping of keys, got None"]),
        ("data: [1]", ["`data` must be a mapping of keys, got [1]"]),
        ("data: {name: null}", ["`data.name` must be one of fashion_mnist, mnist,", "got None"]),
        ("data: {download: perhaps}", ["`data.download` must be true or false, got 'perhaps'"]),
        ("data: {held_out_per_client: 1.5}", ["a fraction below 1 or a whole number, got 1.5"]),
        ("data: {partition: iid}", ["`data.partition` must be a mapping, got 'iid'", "Write {name: iid}."]),
        ("data: {partition: {alpha: 1}}", ["`data.partition` must have a `name`"]),
        ("data: {test_per_client: 0}", ["`data.test_per_client` must be >= 1, got 0"]),
        ("data: {test_per_clients: 9}", ["Did you mean `data.test_per_client`?"]),
        ("data: {groups: rotation}", ["`data.groups` must be a mapping or null", "Write {name: rotation}."]),
        ("data: {groups: {count: 2}}", ["`data.groups` must have a `name` or be null, got {'count': 2}"]),
        ("data: {group: {count: 2}}", ["`data.group` must be a known key", "Did you mean `data.groups`?"]),
        ("groups: {name: rotation}", ["Did you mean `data.groups`?"]),
        ("model: {name: x, class_path: y.Z}", ["`model` must have a `name` or a `class_path`"]),
        ("strategies: uniform", ["`strategies` must be a mapping", "Write {uniform: {}}."]),
        ("strategies: {uniform: 3}", ["`strategies` must be a mapping"]),
        ("strategies: {}", ["`strategies` must name at least one"]),
        ("clients: {count: 0}", ["`clients.count` must be >= 1"]),
        ("clients: {learning_rate: 0}", ["`clients.learning_rate` must be above 0"]),
        ("clients: {batch_size: [1, 2]}", ["`clients.batch_size` must have 20 values", "got 2"]),
        (
            "clients: {batch_size: [1, x]}",
            ["`clients.batch_size` must be a whole number or a list of whole numbers"],
        ),
        ("privacy: {epsilon: 0}", ["`privacy.epsilon` must be above 0, got 0"]),
        ("privacy: {epsilon: dist1}", ["Write {name: dist1}."]),
        ("privacy: {epsilon: {name: dist11}}", ["`privacy.epsilon.name`", "Did you mean `dist1`?"]),
        ("privacy: {delta: 1}", ["`privacy.delta` must be in [0, 1), got 1"]),
        ("privacy: {clip_norm: -1}", ["`privacy.clip_norm` must be above 0"]),
        ("privacy: {noise_multiplier: -1}", ["`privacy.noise_multiplier` must be >= 0"]),
        ("privacy: {accountant: rpd}", ["one of rdp, prv, gdp, paper_ma, got 'rpd'", "Did you mean `rdp`?"]),
        ("privacy: {noise_key: '12'}", ["`privacy.noise_key` must be 32 hexadecimal digits"]),
        ("privacy: {reserve_rounds: -1}", ["`privacy.reserve_rounds` must be >= 0"]),
        ("evaluation: {every: 0}", ["`evaluation.every` must be >= 1"]),
        ("engine: {workers: 0}", ["`engine.workers` must be >= 1"]),
        ("engine: {name: quick}", ["one of fast, serial, stacked, trainer, got 'quick'"]),
        ("tracking: {experiment: 5}", ["`tracking.experiment` must be text, got 5"]),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, words: list[str]) -> None:
    path = written(tmp_path, text)
    message = error_of("--config", path)
    for word in [*words, f"Set in {path}."]:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds: [1", ["must be valid YAML", "on line "]),
        ("seed: 1\nrounds: 1\nseed: 2\n", ["the key seed a second time on line 3"]),
        ("data:\n  name: digits\n  name: mnist\n", ["the key name a second time on line 3"]),
        ("seed: 1\nprivacy:\n", ["(write `privacy: null` for a run without privacy) on line 2"]),
        ("privacy: !!python/object/apply:os.getcwd []", ["must be valid YAML"]),
        ("- 1", ["must hold a mapping of keys, got [1]"]),
        ("rounds", ["must hold a mapping of keys, got 'rounds'"]),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, words: list[str]) -> None:
    path = written(tmp_path, text)
    message = error_of("--config", path)
    for word in [*words, path]:
        assert word in message


def test_missing_file(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    message = error_of("--config", str(tmp_path / "mime.yaml"))
    assert "mime.yaml': No such file or directory." in message and f"Did you mean `{path}`?" in message
    assert "Is a directory" in error_of("--config", str(tmp_path))
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in error_of("--config", path)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--rouns", "5"], ["`--rouns` must be a known key or flag.", "Did you mean `--rounds`?"]),
        (["--rouns=5"], ["Did you mean `--rounds`?"]),
        (["--confg", "x"], ["Did you mean `--config`?"]),
        (["--epsilon", "1"], ["Did you mean `--privacy.epsilon`?"]),
        (["--client.count", "1"], ["Did you mean `--clients.count`?"]),
        (["--modle.name", "x"], ["Did you mean `--model.name`?"]),
        (["--clients.cout", "1"], ["Did you mean `clients.count`? Set on the command line."]),
        (["--rounds.x", "1"], ["`rounds.x` must be a known key."]),
        (["--rounds"], ["`--rounds` must be followed by a value"]),
        (["--rounds", "--seed", "1"], ["`--rounds` must be followed by a value"]),
        (["--config"], ["--config: expected one argument"]),
        (["--rounds", "many"], ["`rounds` must be a whole number, got 'many'", "Set on the command line."]),
        (["--rounds", "[1"], ["`--rounds` must be valid YAML"]),
        (["--rounds", "-3"], ["`rounds` must be >= 1, got -3"]),
        (
            ["--data.partition.name", "iid", "--privacy.delta", "2"],
            ["`privacy.delta`", "Set on the command line."],
        ),
        (["--privacy.epsilon.name", "dist77"], ["`privacy.epsilon.name`", "Set on the command line."]),
        (["stray"], ["`stray` must be a known key or flag"]),
        (["--model", "cnn_small"], ["Write {name: cnn_small}."]),
        ([], ["`privacy.epsilon` must be a budget from which the noise is computed", "--privacy null"]),
        (["--privacy", "{}"], ["`privacy.epsilon` must be a budget"]),
    ],
)
def test_mistakes_on_the_command_line(words: list[str], parts: list[str]) -> None:
    message = error_of(*words)
    for part in parts:
        assert part in message


def test_a_mistake_names_the_place_that_won(tmp_path: Path) -> None:
    path = written(tmp_path, "rounds: 3\nclients: {count: 2}\nprivacy: {epsilon: [1, 2]}\n")
    assert error_of("--config", path, "--clients.count", "3").endswith(f"Set in {path}.")
    assert error_of("--config", path, "--rounds", "0").endswith("Set on the command line.")


def test_a_flags_own_error_is_kept() -> None:
    def refuse(text: str) -> int:
        raise UserError("`--seeds` must be numbers")

    with pytest.raises(UserError, match=r"^`--seeds` must be numbers$"):
        load(["--seeds", "x"], lambda parser: parser.add_argument("--seeds", type=refuse))
    with pytest.raises(UserError, match=r"invalid int value: 'x'\. See --help"):
        load(["--seeds", "x"], lambda parser: parser.add_argument("--seeds", type=int))


def test_noise_given_alone_reports_only() -> None:
    options = from_mapping({"privacy": {"noise_multiplier": 0}})
    assert options.privacy is not None and options.privacy.epsilon is None
    check(options)


# ---- the gallery


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.name)
def test_gallery_says_what_it_shows_and_writes_only_departures(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    options, _ = load(["--config", str(path)])
    assert departures(from_mapping(parse_yaml(text, "text"))) == departures(options)
    assert yaml.safe_load(yaml.safe_dump(departures(options))) == parse_yaml(text, "text")


# ---- what a command takes


def test_help_of_a_key_lists_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    from dpfl_lightning.strategies import STRATEGIES

    with pytest.raises(SystemExit) as end:
        load(["--strategies.help"])
    said = capsys.readouterr().out
    assert end.value.code == 0
    for name in STRATEGIES:
        assert any(line.startswith(f"{name} ") and len(line.split()) > 3 for line in said.splitlines()), name
    assert re.search("^noise_aware +Robust-HDP: `w_i", said, re.MULTILINE) and "--strategies.help NAME" in said


def test_help_of_a_name_shows_its_docstring_and_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> str:
        with pytest.raises(SystemExit):
            load(words)
        return capsys.readouterr().out

    said = told("--strategies.help", "noise_aware")
    assert "estimated noise" in said and "`hetero_pca`" in said
    assert re.search(r"^--strategies\.noise_aware\.floor +a number \(1e-06\)$", said, re.MULTILINE)
    assert "--data.partition.alpha" in told("--data.partition.help=dirichlet")
    assert "--model.width" in told("--model.help", "convnet") and "no options" in told("--data.partition.help", "iid")
    assert "sizes" in told("--data.groups.help", "rotation") and "share" in told("--data.label_noise.help", "records")
    assert "Did you mean `noise_aware`?" in error_of("--strategies.help", "noise_awar")


def test_every_option_of_a_name_has_a_type_in_words() -> None:
    for key in REGISTRIES:
        for line in help_text(key, None, "").split("\n\n")[0].splitlines():
            name = line.split()[0]
            said = help_text(key, name, "")
            assert "(no docstring)" not in said and "anything" not in said.rpartition("\n--")[2], (key, name)


def test_help_names_the_help_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(["--help"])
    assert "--strategies.help [NAME]" in " ".join(capsys.readouterr().out.split())


def test_a_search_is_not_a_run_and_a_run_is_no_search() -> None:
    from dpfl_lightning.search.options import SweepOptions

    search, run = str(CONF.parent / "sweeps" / "nas_digits.yaml"), str(CONF / "digits.yaml")
    assert f"It configures a search: python -m dpfl_lightning.sweep --config {search}." in error_of("--config", search)
    with pytest.raises(
        UserError, match=r"a section sweep, got '.*'\. It configures a single run: .*fit --config .*digits.yaml"
    ):
        load(["--config", run], section=("sweep", SweepOptions))


def test_a_command_that_takes_some_keys_refuses_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        UserError, match=r"^`--rounds` must be left out of this command, got '5'\. .* accepts only --data\.\*;"
    ):
        load(["--rounds", "5"], takes=["data"])
    assert load([*PRIVATE, "--data.name", "mnist"], takes=["data", "privacy"])[0].data.name == "mnist"
    with pytest.raises(SystemExit):
        load(["--help"], takes=["data"])
    said = capsys.readouterr().out
    assert "--data.name" in said and "--rounds" not in said and "--model" not in said
