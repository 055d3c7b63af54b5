"""Options: what a file and a command line give, what is written again, the help, and one sentence for every mistake."""

import argparse
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

import dpfl_lightning
from dpfl_lightning.config.load import load
from dpfl_lightning.config.mapping import check, from_mapping, to_yaml
from dpfl_lightning.config.options import (
    ClientOptions,
    Options,
    PrivacyOptions,
    TrackingOptions,
    all_keys,
    changed_options,
)
from dpfl_lightning.config.registry import REGISTRIES, help_text, names_of
from dpfl_lightning.config.yaml_text import parse_yaml
from dpfl_lightning.errors import UserError
from dpfl_lightning.search.options import SweepOptions

CONF = Path(__file__).parents[1] / "conf"
NOISE_KEY = "0123456789abcdef" * 2
PRIVATE = ["--privacy.epsilon", "2"]


def options_of(*words: str) -> Options:
    return load([*PRIVATE, *words])[0]


def error_of(*words: str) -> str:
    """The message of a UserError, which is one line."""
    with pytest.raises(UserError) as caught:
        load(list(words))
    message = str(caught.value)
    assert "\n" not in message and "  " not in message
    return message


def check_error(message: str, parts: Sequence[str]) -> None:
    assert not [part for part in parts if part not in message], message


@pytest.fixture
def printed(capsys):
    """`printed(*words)`: what a command prints that ends with status 0."""

    def text_of(*words: str, **more) -> str:
        with pytest.raises(SystemExit) as end:
            load(words, **more)
        assert end.value.code == 0
        return capsys.readouterr().out

    return text_of


@pytest.fixture
def write(tmp_path):
    def written(text: str) -> str:
        (tmp_path / "mine.yaml").write_text(text)
        return str(tmp_path / "mine.yaml")

    return written


# ---- files and command lines


def test_defaults_and_overrides():
    options = options_of("--rounds", "5", "--clients.batch_size=[8,16]", "--clients.count", "2", "--seed=3")
    clients = ClientOptions(count=2, batch_size=(8, 16))
    assert options == Options(rounds=5, seed=3, clients=clients, privacy=PrivacyOptions(epsilon=2.0))


def test_the_command_line_wins_over_the_file_in_any_order(write):
    path = write("rounds: 7\nclients: {count: 3, learning_rate: 0.5}\nprivacy: {epsilon: 1}\n")
    for words in (["--config", path, "--clients.count", "4"], ["--clients.count", "4", f"--config={path}"]):
        options, _ = load(words)
        assert options.rounds == 7 and options.clients == ClientOptions(count=4, learning_rate=0.5)
    options, _ = load(["--config", path, "--clients", "{local_epochs: 2}"])
    assert options.clients == ClientOptions(count=3, learning_rate=0.5, local_epochs=2), "sections are merged"


def test_a_name_with_options_may_be_a_mapping_on_the_command_line():
    options = options_of("--task", "{name: quantile_regression, quantile: 0.9}")
    assert options.task == {"name": "quantile_regression", "quantile": 0.9}
    assert options_of("--task", "regression").task == "regression"


def test_numbers_and_texts_are_read_by_the_type_of_the_option(write):
    text = "privacy: {delta: 1e-5, epsilon: {name: uniform, low: 1e-1, high: 2E0}}\n"
    text += "network: {up_megabits_per_second: .inf}"
    options, _ = load(["--config", write(text), "--clients.learning_rate", "1e-2"])
    assert (options.privacy.delta, options.network.up_megabits_per_second) == (1e-5, float("inf"))
    assert options.privacy.epsilon == {"name": "uniform", "low": 0.1, "high": 2.0}
    assert options.clients.learning_rate == 0.01
    options = options_of("--tracking.experiment", "2024", "--data.folder", "[x]", "--tracking.run_name", "null")
    assert options.tracking == TrackingOptions(experiment="2024", run_name=None) and options.data.folder == "[x]"


def test_a_section_can_be_null_and_a_key_below_it_brings_it_back(write):
    options, _ = load(["--privacy", "null", "--tracking=null"])
    assert options.privacy is None and options.tracking is None
    path = write("privacy: null")
    for words, privacy in (
        (["--config", path, "--privacy.epsilon", "3"], PrivacyOptions(epsilon=3.0)),
        (["--privacy.epsilon", "3", "--privacy", "null"], None),
        (["--config", path, "--privacy.epsilon.name", "dist2"], PrivacyOptions(epsilon={"name": "dist2"})),
    ):
        assert load(words)[0].privacy == privacy, words


def test_options_of_names_can_be_given_whole_or_one_by_one(write):
    options = options_of("--strategies.fedprox.pull", "0.1", "--model.width", "3", "--data.partition.a.b", "[1]")
    assert options.strategies == {"fedprox": {"pull": 0.1}}, "in place of the default, as in a file"
    assert Options().strategies == {"size_weighted": {}}, "defaults are not shared"
    assert options.model == {"name": "cnn_small", "width": 3}
    assert options.data.partition == {"name": "iid", "a": {"b": [1]}}
    assert options_of("--strategies", "{pfa: {grouping: top}}").strategies == {"pfa": {"grouping": "top"}}
    assert options_of("--tracking.tags", "{row: a}").tracking == TrackingOptions(tags={"row": "a"})
    path = write("strategies:\n  uniform:\n  fedprox: {pull: 1}\n")
    merged = options_of("--config", path, "--strategies.uniform.x", "y")
    assert merged.strategies == {"uniform": {"x": "y"}, "fedprox": {"pull": 1}}
    model = {"class_path": "torch.nn.Linear", "init_args": {"in_features": "4", "bias": None}}
    assert from_mapping({"model": model, "privacy": None}).model == model, "a user's model is left alone"


def test_a_new_name_drops_the_options_of_the_old_one(write):
    path = write("data: {partition: {name: shards, max_classes: 3}}\n")
    name, alpha = ["--data.partition.name", "dirichlet"], ["--data.partition.alpha", "0.1"]
    for words in ([*name, *alpha], [*alpha, *name]):
        assert options_of("--config", path, *words).data.partition == {"name": "dirichlet", "alpha": 0.1}
    same = options_of("--config", path, "--data.partition.name", "shards")
    assert same.data.partition == {"name": "shards", "max_classes": 3}
    assert options_of("--model.class_path", "my.Net").model == {"class_path": "my.Net"}


def test_a_command_can_add_flags_and_one_can_stand_for_the_file(write):
    path = write("rounds: 7\nprivacy: null\n")

    def flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--resume", metavar="DIR")
        parser.add_argument("--json", action="store_true")
        parser.add_argument("run", nargs="?")

    options, namespace = load(["--rounds", "3", "there", *PRIVATE, "--json", "--resume", "x"], flags)
    assert (options.rounds, namespace.run, namespace.json, namespace.resume) == (3, "there", True, "x")

    def loaded(*words: str) -> Options:
        return load(words, flags, config_of=lambda namespace: namespace.resume)[0]

    assert loaded("--resume", path, "--seed", "2") == Options(rounds=7, seed=2, privacy=None)
    assert loaded(*PRIVATE).rounds == 10
    with pytest.raises(UserError, match="`--config` must be left out"):
        loaded("--resume", path, "--config", path)


@pytest.fixture
def files(tmp_path):
    """`files(*texts)`: the words `--config FILE` for a file of each text, and the paths of the files."""

    def written(*texts: str) -> tuple[list[str], list[str]]:
        paths = [str(tmp_path / f"{number}.yaml") for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            Path(path).write_text(text)
        return [word for path in paths for word in ("--config", path)], paths

    return written


FIRST = """
rounds: 7
clients: {count: 3, batch_size: {name: uniform, low: 4, high: 9}}
privacy: {epsilon: 1}
model: {name: convnet, width: 8}
strategies: {robust_hdp: {floor: 0.1}, fedprox: {pull: 1}}
"""


def test_several_files_are_merged_and_the_later_wins(files):
    words, _ = files(FIRST, "clients: {batch_size: {high: 5}}\nmodel: {width: 16}\nstrategies: {fedprox: {pull: 2}}\n")
    options, _ = load([*words, "--rounds", "1"])
    assert options.rounds == 1 and options.privacy == PrivacyOptions(epsilon=1.0)
    assert options.clients == ClientOptions(count=3, batch_size={"name": "uniform", "low": 4, "high": 5})
    assert options.model == {"name": "convnet", "width": 16}
    assert options.strategies == {"robust_hdp": {"floor": 0.1}, "fedprox": {"pull": 2}}


def test_a_mistake_names_the_file_that_set_the_value(files):
    for first, second, number in (
        ("rounds: 0", "seed: 1", 0),
        ("rounds: 1", "rounds: 0", 1),
        ("model: {name: convnet}", "model: {name: convnte}", 1),
        ("privacy: {epsilon: 0}", "privacy: {delta: 0.1}", 0),
        ("seed: 1", "rouns: 1", 1),
    ):
        words, paths = files(first, second)
        assert error_of(*words).endswith(f"et in {paths[number]}."), second


def test_a_users_strategy_is_set_by_a_dotted_key():
    words = ["--strategies.fedprox.pull", "1", "--strategies.a.b.FedAdam.inner.lr", "2"]
    assert options_of(*words).strategies == {"fedprox": {"pull": 1}, "a.b.FedAdam": {"inner": {"lr": 2}}}
    assert options_of("--strategies.strat.lower.lr", "1").strategies == {"strat.lower": {"lr": 1}}


def test_noise_given_alone_only_reports():
    options = from_mapping({"privacy": {"noise_multiplier": 0}})
    assert options.privacy.epsilon is None
    check(options)


# ---- what is written


def test_saved_and_printed_options_are_loaded_again(tmp_path, printed):
    words = ["--clients.count", "3", "--privacy.epsilon", "[1,2,3]", "--privacy.noise_key", NOISE_KEY]
    options = options_of(*words)
    assert options.privacy.noise_key == NOISE_KEY
    (tmp_path / "options.yaml").write_text(to_yaml(options))
    assert load(["--config", str(tmp_path / "options.yaml")])[0] == options
    assert from_mapping(yaml.safe_load(printed("--print_config", *words))) == options


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.name)
def test_a_file_in_conf_says_what_it_shows_and_writes_only_changed_options(path: Path):
    text = path.read_text()
    assert text.startswith("# ")
    options, _ = load(["--config", str(path)])
    assert changed_options(from_mapping(parse_yaml(text, "text"))) == changed_options(options)
    assert yaml.safe_load(yaml.safe_dump(changed_options(options))) == parse_yaml(text, "text")


# ---- help


def test_help_explains_every_key_quickly_without_torch():
    script = """
import sys
from dpfl_lightning.config import load as config
try:
    flags = lambda parser: parser.add_argument("--resume", type=len, help="go on")
    config.load(["--help", "all"], flags, name="train", description="Trains.")
except SystemExit as end:
    print(end.code, sorted({"torch", "lightning", "mlflow", "opacus"} & set(sys.modules)))
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # seconds of the process: others may use the cores
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
    assert shown.stdout.endswith("0 []\n")
    text = " ".join(shown.stdout.split())
    assert text.startswith("usage: dpfl train ") and "<" not in text.replace("< ", "")
    check_error(text, ["Trains.", "go on"])
    assert max(map(len, shown.stdout.splitlines())) <= 80
    for key, known in all_keys().items():
        assert f"--{key} " in text and known.help and known.help in text


def test_help_of_a_name_shows_its_docstring_and_its_options(printed):
    text = printed("--strategies.help", "robust_hdp")
    assert "from the updates" in text and max(map(len, text.splitlines())) <= 80 and "`hetero_pca`" in text
    assert re.search(r"^--strategies\.robust_hdp\.floor +a number >= 0 and finite \(1e-06\)$", text, re.MULTILINE)
    assert "--data.partition.alpha" in printed("--data.partition.help=dirichlet")
    for words, shown in (
        ("--model.help convnet", "--model.width"),
        ("--data.partition.help iid", "no options"),
        ("--data.groups.help rotation", "sizes"),
        ("--data.label_noise.help records", "share"),
    ):
        assert shown in printed(*words.split())
    assert "Did you mean `noise_aware`?" in error_of("--strategies.help", "noise_awar")


def test_every_option_of_a_name_has_a_type_in_words():
    for key in REGISTRIES:
        for name in names_of(key):
            text = help_text(key, name, "")
            assert "(no docstring)" not in text and "anything" not in text.rpartition("\n--")[2], (key, name)


def test_help_is_short_and_has_every_section_and_key(printed):
    text = printed("--help")
    assert len(text.splitlines()) < 90 and "--rounds" in text and "--network" not in text
    for words, shown in (("--privacy.help", "--privacy.clip_norm"), ("--rounds.help", "number of federated rounds")):
        text = printed(words)
        assert shown in text and "--seed" not in text and max(map(len, text.splitlines())) <= 80
    assert "Did you mean `privacy`?" in error_of("--privcy.help")
    assert printed("--version") == f"dpfl_lightning {dpfl_lightning.__version__}\n"


# ---- mistakes

FILE_MISTAKES = [
    ("rouns: 5", "`rouns` must be a known key.", "Did you mean `rounds`?"),
    ("clients: {batchsize: 3}", "`clients.batchsize`", "Did you mean `clients.batch_size`?"),
    ("epsilon: 3", "Did you mean `privacy.epsilon`?"),
    ("rounds: many", "`rounds` must be a whole number in [1, 1e6], got 'many'"),
    ("rounds: 2.5", "`rounds` must be a whole number in [1, 1e6], got 2.5"),
    ("rounds:", "`rounds` must be a whole number in [1, 1e6], got None"),
    ("rounds: 0", "`rounds` must be a whole number in [1, 1e6], got 0"),
    ("data: fashion_mnist", "`data` must be a mapping of keys", "Write data: {name: fashion_mnist}"),
    ("data: {name: null}", "`data.name` must be a data set if there is no data.class_path", "got None"),
    ("data: {held_out_per_client: 1.5}", "a number in [0, 1) or a whole number in [1, 1e9], got 1.5"),
    (
        "data: {partition: iid}",
        "`data.partition` must be a mapping with a `name`, got 'iid'",
        "Write {name: iid}, or --data.partition.name iid.",
    ),
    ("data: {groups: rotation}", "`data.groups` must be a mapping with a `name` or null", "Write {name: rotation}, or"),
    ("model: {name: x, class_path: y.Z}", "`model` must be a mapping with a `name` or a `class_path`"),
    ("strategies: uniform", "`strategies` must be a mapping", "Write {uniform: {}}, or"),
    ("strategies: {}", "`strategies` must be a mapping of at least one strategy"),
    ("clients: {batch_size: [1, 2]}", "`clients.batch_size` must have 20 values", "got 2"),
    (
        "clients: {batch_size: [1, x]}",
        "`clients.batch_size` must be a whole number in [1, 1e9], got 'x'. It is value 2 of the list.",
    ),
    ("privacy: {epsilon: 0}", "`privacy.epsilon` must be a number > 0 (also one for each client) or null, got 0"),
    ("privacy: {epsilon: dist1}", "Write {name: dist1}, or"),
    ("privacy: {accountant: rpd}", "one of pld, rdp, paper_ma, got 'rpd'", "Did you mean `rdp`?"),
    ("privacy: {noise_key: '12'}", "`privacy.noise_key` must be text of 32 hexadecimal digits"),
    ("engine: {name: quick}", "`engine.name` must be one of ", "fast, serial", "got 'quick'"),
    ("tracking: {experiment: 5}", "`tracking.experiment` must be text, got 5"),
    ("rounds: [1", "must be valid YAML", "on line "),
    ("seed: 1\nrounds: 1\nseed: 2\n", "the key seed a second time on line 3"),
    ("seed: 1\nprivacy:\n", "(write `privacy: null` for a run without privacy) on line 2"),
    ("privacy: !!python/object/apply:os.getcwd []", "must be valid YAML"),
    ("- 1", "must hold a mapping of keys, got [1]"),
]


@pytest.mark.parametrize(("text", "parts"), [(text, parts) for text, *parts in FILE_MISTAKES])
def test_a_mistake_in_a_file_names_key_value_and_file(write, text, parts):
    path = write(text)
    check_error(error_of("--config", path), [*parts, path])


def test_a_file_that_cannot_be_read_is_named(write, tmp_path):
    path = write("")
    message = error_of("--config", str(tmp_path / "mime.yaml"))
    check_error(message, ["mime.yaml': No such file or directory.", f"Did you mean `{path}`?"])
    assert "Is a directory" in error_of("--config", str(tmp_path))
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in error_of("--config", path)


COMMAND_MISTAKES = [
    ("--rouns 5", "`--rouns` must be a known key or flag.", "Did you mean `--rounds`?"),
    ("--epsilon 1", "Did you mean `--privacy.epsilon`?"),
    ("--clients.cout 1", "Did you mean `clients.count`? Set on the command line."),
    ("--rounds", "`--rounds` must be followed by a value"),
    ("--config", "`--config` must be followed by a value."),
    ("--rounds [1", "`--rounds` must be valid YAML"),
    ("--data.partition.name iid --privacy.delta 2", "`privacy.delta`", "Set on the command line."),
    ("stray", "`stray` must be a known key or flag"),
    ("--model cnn_small", "Write {name: cnn_small}, or --model.name cnn_small."),
    (
        "--strategies pfa",
        "`strategies` must be a mapping of at least one strategy, got 'pfa'. Write {pfa: {}}, or --strategies.pfa {}.",
    ),
    ("", "`privacy.epsilon` must be a budget from which the noise is computed", "--privacy null"),
    ("--model mynet.Net", "Write {class_path: mynet.Net}, or --model.class_path mynet.Net."),
    ("--model.name logistik", "`model.name` must be one of cnn_small,", "Did you mean `logistic`? Set on"),
    ("--strategies.pfaa.x 1", "`strategies` must name one of ", "got 'pfaa'. Did you mean `pfa`?"),
    ("--print_config=3", "`--print_config` must be given without a value, got '3'."),
]


@pytest.mark.parametrize(("words", "parts"), [(words, parts) for words, *parts in COMMAND_MISTAKES])
def test_a_mistake_on_the_command_line_names_key_value_and_way_out(words, parts):
    check_error(error_of(*words.split()), parts)


def test_the_file_of_a_search_is_refused_for_a_run_and_the_reverse():
    search, run = str(CONF.parent / "sweeps" / "nas_digits.yaml"), str(CONF / "digits.yaml")
    assert f"It configures a search: python -m dpfl_lightning sweep --config {search}." in error_of("--config", search)
    message = r"a section sweep, got '.*'\. It configures a single run: .*fit --config .*digits.yaml"
    with pytest.raises(UserError, match=message):
        load(["--config", run], section=SweepOptions)


def test_a_command_that_takes_some_keys_refuses_the_others(printed):
    message = r"^`--rounds` must be left out of this command, got '5'\. .* accepts only --data\.\*;"
    with pytest.raises(UserError, match=message):
        load(["--rounds", "5"], takes=["data"])
    assert load([*PRIVATE, "--data.name", "mnist"], takes=["data", "privacy"])[0].data.name == "mnist"
    text = printed("--help", takes=["data"])
    assert "--data.name" in text and "--rounds" not in text and "--model" not in text
