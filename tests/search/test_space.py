"""Search spaces: what may be searched, what is drawn, what a configuration gets of it."""

import pytest

from dpfl_lightning.config.options import ClientOptions, Options
from dpfl_lightning.errors import UserError
from dpfl_lightning.search.options import SweepOptions, check
from dpfl_lightning.search.space import drawn, options_of, parse, probes

RUN = Options(privacy=None, model={"name": "convnet", "width": 16})
SPACE = {"model.width": {"choices": [8, 16]}}


def check_words(error, words):
    assert not [word for word in words if word not in str(error.value)], error.value


@pytest.mark.parametrize(
    ("space", "objective", "words"),
    [
        ({"rounds": {"low": 1, "high": 3}}, "set", ["sweep.space.rounds", "Objective public"]),
        ({"modle.width": {"low": 1, "high": 3}}, "public", ["modle.width", "Did you mean `model`"]),
        ({"data.name": {"choices": ["digits", "mnist"]}}, "public", ["data.name", "A search cannot choose the data"]),
        ({"privacy.epsilon": {"low": 1, "high": 3}}, "private", ["privacy.epsilon", "known before the first one"]),
        ({"model.width": [8, 16]}, "set", ["model.width", "be a mapping", "{choices: [16, 32]}"]),
        ({"model": {"choices": [{"name": "cnn_tiny"}]}}, "set", ["model.choices", "Name other values"]),
        ({"model.width": {"low": 8}}, "set", ["model.width.high", "be given"]),
        ({"model.width": {"low": 9, "high": 8}}, "set", ["model.width.low", "be below high, 8", "9"]),
        ({"clients.learning_rate": {"low": 0, "high": 1, "log": True}}, "set", ["low", "above 0 with log"]),
        ({"model.width": {"low": 8, "high": 16, "step": 0.5}}, "set", ["step", "be whole"]),
        ({"model.width": {"low": 8, "high": 9, "when": {"model.name": "convnet"}}}, "set", ["when", "a key above it"]),
        ({"model.name": {"choices": ["convnet"]}, "model.width": {"choices": [8], "when": {"model.name": "resnet"}}},
         "set", ["when.model.name", "be a choice of model.name (convnet)"]),
        ({"model.name": {"choices": ["convnet"]}, "model.width": {"choices": [8], "when": {"model.name": ["convnet"]}}},
         "set", ["when.model.name", "be a choice of model.name (convnet)", "['convnet']"]),
        ({"model.width": {"low": 4, "high": 9.0}}, "set", ["model.width.high", "same type as low, 4", "Write 9 for"]),
        ({"clients": {"choices": {"a": {"count": 3}}}}, "private", ["sweep.space.clients", "clients.count out"]),
        ({"privacy": {"choices": {"a": {"noise_key": "00"}}}}, "public", ["privacy.noise_key out"]),
        ({"privacy.clip_norm": {"choices": [1, 2]}, "privacy": {"choices": {"a": {"epsilon": 2}, "b": None}}}, "public",
         ["sweep.space.privacy", "precede the keys below it", "privacy.clip_norm"]),
        ({"privacy": {"choices": {"a": {"epsilon": 2}, "b": None}}, "privacy.clip_norm": {"choices": [1, 2]}}, "public",
         ["sweep.space.privacy.clip_norm", "`when` of privacy"]),
        ({"privacy": {"choices": {"a": {"epsilon": 2}, "b": None}},
          "privacy.clip_norm": {"choices": [1, 2], "when": {"privacy": "b"}}}, "public", ["`when` of privacy"]),
    ],
)  # fmt: skip
def test_a_space_that_makes_no_sense_is_refused(space, objective, words):
    with pytest.raises(UserError) as error:
        parse(space, objective)
    check_words(error, words)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"clients.learning_rate": {"low": -1.0, "high": 1.0}}, ["clients.learning_rate", "> 0", "-1.0"]),
        ({"clients.lerning_rate": {"low": 0.1, "high": 1.0}}, ["clients.lerning_rate", "Did you mean"]),
        ({"privacy.accountant": {"choices": ["rdp", "pldd"]}}, ["privacy.accountant", "pldd", "Did you mean `pld`"]),
    ],
)
def test_values_that_no_run_could_have_are_refused(space, words):
    run = options_of(RUN, {}, {}, {"privacy": {"epsilon": 1.0}})
    dimensions = parse(space, "public")
    with pytest.raises(UserError) as error:
        [options_of(run, dimensions, one) for _, candidates in probes(dimensions) for one in candidates]
    check_words(error, words)


def test_a_key_below_another_is_asked_for_where_that_is_something():
    clip_norm = {"choices": [1, 2], "when": {"privacy": "a"}}
    space = parse({"privacy": {"choices": {"a": {"epsilon": 2}, "b": None}}, "privacy.clip_norm": clip_norm}, "public")
    assert options_of(RUN, space, {"privacy": "a", "privacy.clip_norm": 2}).privacy.clip_norm == 2
    parse({"model": {"choices": {"a": {"name": "cnn_tiny"}}}, "model.width": {"choices": [8]}}, "set")


def test_the_last_value_is_one_that_steps_reach():
    space = parse(
        {
            "clients.learning_rate": {"low": 0.1, "high": 0.3, "step": 0.1},
            "model.width": {"low": 8, "high": 30, "step": 8},
        },
        "set",
    )
    assert space["clients.learning_rate"].grid() == [0.1, 0.2, 0.3] and space["clients.learning_rate"].high == 0.3
    assert space["model.width"].grid() == [8, 16, 24] and space["model.width"].high == 24


def test_keys_are_asked_for_where_their_conditions_hold():
    space = parse(
        {
            "model.name": {"choices": ["convnet", "cnn_tiny"]},
            "model.width": {"choices": [8, 16], "when": {"model.name": "convnet"}},
            "model.depth": {"low": 1, "high": 2, "when": {"model.width": 8}},
        },
        "set",
    )
    assert drawn(space, lambda entry: entry.ends()[0]) == {"model.name": "convnet", "model.width": 8, "model.depth": 1}
    assert drawn(space, lambda entry: entry.ends()[-1]) == {"model.name": "cnn_tiny"}


def test_drawn_values_come_into_the_options_after_those_of_trials():
    space = parse({"strategies": {"choices": {"pulled": {"size_weighted": {}, "fedprox": {"pull": 0.1}}}}}, "public")
    options = options_of(RUN, space, {"strategies": "pulled"}, {"rounds": 3, "clients.count": 2})
    assert options.strategies == {"size_weighted": {}, "fedprox": {"pull": 0.1}}
    assert options.rounds == 3 and options.clients == ClientOptions(count=2)
    space = parse({"model.name": {"choices": ["cnn_tiny"]}}, "set")
    drawn_model = options_of(RUN, space, {"model.name": "cnn_tiny"}).model
    assert drawn_model == {"name": "cnn_tiny"}, "without the options of the former one"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"space": {}}, ["sweep.space", "at least one"]),
        ({"scores": ("accuracy", "accuracy")}, ["sweep.scores", "different"]),
        ({"scores": ("accuracy", "num_params"), "pruner": {"name": "median"}}, ["sweep.pruner.name", "several scores"]),
        ({"scores": ("seconds",), "pruner": {"name": "median"}}, ["sweep.pruner.name", "seconds", "end of a trial"]),
        ({"seeds": 2}, ["sweep.seeds", "sweep.networks"]),
        ({"objective": "public", "distilled": "runs/x"}, ["sweep.distilled", "objective public"]),
    ],
)
def test_options_that_contradict_each_other_are_refused(changed, words):
    with pytest.raises(UserError) as error:
        check(SweepOptions(**{"space": SPACE, **changed}))
    check_words(error, words)
