"""Options that are out of range: one sentence that names the key, the value, and what must hold."""

import dataclasses
import math
import re
import types
from dataclasses import dataclass
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Interval

from dpfl_lightning import strategies
from dpfl_lightning.config.registry import help_text
from dpfl_lightning.config.typed import in_words, options_of
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.strategy import Strategy

#: registered strategies whose options are the fields of a dataclass
DECLARED = {name: kind for name, kind in strategies.classes().items() if dataclasses.is_dataclass(kind)}
OPTIONS = [(name, option) for name, kind in DECLARED.items() for option in options_of(kind)]


def alternatives(hint):
    """The types of a union with their intervals, or the one type."""
    union = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else [hint]
    return [(get_args(one)[0], one.__metadata__) if get_origin(one) is Annotated else (one, ()) for one in union]


def bad_values(hint):
    """Values of other types than an annotation permits, and numbers next to its intervals."""
    kinds = {kind for kind, _ in alternatives(hint)}
    if kinds & {int, float}:
        yield from ([1], "much", math.nan, *([] if bool in kinds else [True]), *([] if float in kinds else [1.5, 2.0]))
    if bool in kinds:
        yield from ("no", *([] if kinds & {int, float} else [1]))
    if type(None) not in kinds:
        yield None
    for kind, within in alternatives(hint):
        if get_origin(kind) is Literal:
            yield from (f"{name}x" for name in get_args(kind))
        step = (lambda end, to: end + math.copysign(1, to)) if kind is int else math.nextafter
        for one in within:
            least = one.gt if one.ge is None else step(one.ge, -math.inf)
            most = one.lt if one.le is None else step(one.le, math.inf)
            yield from (kind(value) for value in (least, most) if value is not None)


@pytest.mark.parametrize("name, option", OPTIONS)
def test_a_value_that_the_declaration_excludes_is_one_sentence(name, option):
    hint, bad = options_of(DECLARED[name])[option], 0
    for value in bad_values(hint):
        start = rf"^`strategies\.{name}\.{option}` must be {re.escape(in_words(hint))}, got {re.escape(repr(value))}\."
        with pytest.raises(UserError, match=start):
            strategies.build({name: {option: value}})
        with pytest.raises(UserError, match=start):
            DECLARED[name](**{option: value})
        bad += 1
    assert bad, "nothing is excluded"
    assert in_words(hint) in " ".join(help_text("strategies", name, "").split())


@pytest.mark.parametrize("name, option", OPTIONS)
def test_every_number_has_an_interval(name, option):
    for kind, within in alternatives(options_of(DECLARED[name])[option]):
        assert kind not in (int, float) or any(isinstance(one, Interval) for one in within)


@dataclass
class Declared(Strategy):
    share: Annotated[float, Interval(gt=0, le=1)] = 0.5
    rounds: Annotated[int, Interval(ge=1)] | Literal["all"] | None = None

    role = "base"

    def __post_init__(self):
        super().__post_init__()
        self._seen = 0


class Extended(Declared):
    """Options of its own, which it checks itself, beside those of a strategy that declares them."""

    def __init__(self, more: str, share: float = 1.0) -> None:
        super().__init__(share)
        self._more = more


class Plain(Strategy):
    def __init__(self, share: float = 0.5, most: Annotated[int, Interval(ge=1)] = 1) -> None:
        self.share, self.most = share, most


@pytest.mark.parametrize(
    "kind, options, words",
    [
        ("Declared", {"share": 0}, r"share` must be a number in \(0, 1\], got 0\."),
        (
            "Declared",
            {"rounds": "al"},
            "rounds` must be a whole number >= 1 or all or null, got 'al'. Did you mean `all`?",
        ),
        ("Declared", {"rounds": 0}, "rounds` must be a whole number >= 1 or all or null, got 0"),
        ("Declared", {"_seen": 1}, r"_seen` must be an option of .*Declared \(share, rounds\), got 1"),
        ("Extended", {"more": "x", "share": 2}, r"share` must be a number in \(0, 1\], got 2"),
        ("Extended", {"more": 3}, "more` must be text, got 3"),
        ("Extended", {}, "more` must be given"),
        ("Plain", {"share": "much"}, "share` must be a number, got 'much'"),
        ("Plain", {"most": 0}, "most` must be a whole number >= 1, got 0"),
        ("Plain", {"mots": 0}, "mots` must be an option .* Did you mean `most`?"),
    ],
)
def test_strategies_of_users_declare_options_or_take_arguments(kind, options, words):
    with pytest.raises(UserError, match=words) as error:
        strategies.build({f"{__name__}.{kind}": options})
    assert str(error.value).startswith(f"`strategies.{__name__}.")


def test_options_are_converted_and_may_be_left_out():
    declared, extended, plain = strategies.build(
        {f"{__name__}.Declared": {"share": 1}, f"{__name__}.Extended": {"more": "x"}, f"{__name__}.Plain": None}
    )
    assert isinstance(declared.share, float) and (declared.share, declared.rounds) == (1.0, None)
    assert (extended.share, extended._more, plain.share, plain.most) == (1.0, "x", 0.5, 1)
    assert Declared(rounds="all").rounds == "all" and Declared(1, 3).rounds == 3


#: options that exclude each other: strategy -> (option, value, what the sentence says, other options)
EXCLUDED = [
    ("clustered", "selection_epsilon", 0.1, "not be set .* server_similarity", {"selection": "server_similarity"}),
    ("clustered", "selection_epsilon", 0.1, "not be set with .* paper_argmin", {"selection": "paper_argmin"}),
    ("ifca", "selection_epsilon", 0.1, "not be set with", {"selection": "paper_argmin"}),
    ("ifca", "selection_rounds", 3, "not be set with", {"selection": "exponential"}),
    ("ifca", "loss_bound", 1.0, "not be set with", {"selection": "paper_argmin"}),
    ("distillation", "row_weights", "noise_aware", "equal unless", {"matching": "mse"}),
    ("distillation", "row_weights", "noise_aware", "equal unless aggregation is sum", {"aggregation": "median"}),
]


@pytest.mark.parametrize("name, option, value, words, others", EXCLUDED)
def test_options_that_exclude_each_other_are_one_sentence(name, option, value, words, others):
    with pytest.raises(
        UserError, match=rf"^`strategies\.{name}\.{option}` must .*{words}.* got {re.escape(repr(value))}"
    ):
        strategies.build({name: {option: value, **others}})


def test_every_option_of_a_strategy_is_declared():
    for name, kind in strategies.classes().items():
        assert dataclasses.is_dataclass(kind) or "__init__" not in vars(kind), name
