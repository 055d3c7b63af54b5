"""A run folder as evidence: each manipulation of it is status 2, with a sentence that names its cause."""

import json
import os
import re
import shutil

import pytest
from conftest import PowerCut, private, small_loop
from key_pairs import make_keys

from dpfl_lightning.errors import UserError
from dpfl_lightning.plan import main
from dpfl_lightning.privacy.accounting.guarantee import in_words
from dpfl_lightning.privacy.ledger import file as ledger_file
from dpfl_lightning.privacy.ledger.file import Head
from dpfl_lightning.privacy.ledger.ledger import Ledger
from dpfl_lightning.privacy.ledger.results import FILTER, guarantee_of_each
from dpfl_lightning.privacy.ledger.signatures import private_keys, write_signatures
from dpfl_lightning.privacy.ledger.verify import read

CLIENTS = 4
RESULTS = ("result.json", "guarantees.json")


class Evidence:
    """A copy of a signed run's folder, another run, the clients' keys, and ways to manipulate the copy."""

    def __init__(self, place, source, name="run"):
        self.run, self.keys, self.other = place / "run", source / "keys", source / "other"
        shutil.copytree(source / name, self.run)
        self.ledger = self.run / "ledger.jsonl"

    @property
    def lines(self):
        return self.ledger.read_bytes().splitlines(keepends=True)

    def write(self, lines):
        self.ledger.write_bytes(b"".join(lines))

    def take(self, *names):
        """Copy files of the other run."""
        for name in names:
            shutil.copy(self.other / name, self.run / name)

    def remove(self, *names):
        for name in names:
            (self.run / name).unlink()

    def link(self, name):
        """Replace a file by a link to the same content."""
        (self.run / name).rename(self.run / "elsewhere")
        (self.run / name).symlink_to(self.run / "elsewhere")

    def edit(self, name, change):
        """Change the content of a JSON file."""
        content = json.loads((self.run / name).read_text())
        change(content)
        (self.run / name).write_text(json.dumps(content))

    def edit_row(self, name, client, **fields):
        def change(content):
            place = content["clients"][client]
            (content["guarantees"][place] if name == "guarantees.json" else place).update(fields)

        self.edit(name, change)

    def forge(self, change, *sealed):
        """Change the fields of all lines, compute the chain again, and write the new head into these files."""
        fields = [json.loads(line) for line in self.lines]
        lines, chain = [], "0" * 32
        for one in change(fields) or fields:
            one.pop("chain", None)
            lines.append(ledger_file._sealed(json.dumps(one).encode()[:-1], chain))
            chain = ledger_file.chain_of(lines[-1])
        self.write(lines)
        self.seal(Head(fields[0]["run"], len(lines), chain), *sealed)

    def seal(self, head, *names):
        if "ledger.head" in names:
            (self.run / "ledger.head").write_bytes(ledger_file.head_bytes(head))
        for name in {"result.json", "guarantees.json"} & {*names}:
            self.edit(name, lambda content: content.update(ledger=head.as_dict()))
        if "ledger.signatures" in names:
            self.edit("ledger.signatures", lambda content: content.update(head=head.as_dict()))
        self.head = head

    def restate(self, *names):
        """Write what the forged ledger says into these results."""
        for name in ("ledger.jsonl", "ledger.head"):
            shutil.copy(self.run / name, self.run / name.replace("ledger", "alone"))
        report = read([self.run / "alone.jsonl"])
        for client, account in enumerate(report.accounts):
            self.edit_row("result.json", client, epsilon_spent=account.epsilon)
            self.edit_row("result.json", client, noise_multiplier=report.events[client][-1].noise_multiplier)
            if "guarantees.json" in names:
                self.edit_row("guarantees.json", client, **report.guarantees()[client].as_dict())
        words = in_words(report.guarantees())
        self.edit("result.json", lambda content: content.update(guarantee=words))


EVERYWHERE = ("ledger.head", *RESULTS, "ledger.signatures")


def first_charge(client, change):
    """A change of the first event of a client."""
    return lambda fields: change(next(one for one in fields[1:] if one["client"] == client)["event"])


def header(**changes):
    return lambda fields: fields[0].update(changes)


def less(event):
    event["noise_multiplier"] *= 2


def rarer(event):
    event["sample_rate"] /= 2


def fewer_steps(event):
    event["steps"] -= 1


def repeated(times):
    return lambda fields: fields + [dict(fields[-1]) for _ in range(times)]


def moved(lines):
    return [*lines[:3], lines[4], lines[3], *lines[5:]]


def rewritten(run, keys=None):
    """Rewrite ledger, head and results together, so that they agree; sign them with some keys."""
    run.forge(first_charge(0, less), *EVERYWHERE)
    run.restate(*RESULTS)
    if keys is not None:
        before = json.loads((run.run / "ledger.signatures").read_text())["signatures"]
        write_signatures(run.ledger, run.head, keys)
        run.edit("ledger.signatures", lambda content: content.update(signatures={**before, **content["signatures"]}))


def with_other_adjacency(run):
    run.forge(header(adjacency="replace_one"), *EVERYWHERE)
    run.restate("result.json")


def swap_signatures(content):
    signatures = content["signatures"]
    signatures["0"], signatures["1"] = signatures["1"], signatures["0"]


def without_results(run, change, *sealed):
    run.remove(*RESULTS)
    run.forge(change, *sealed)


def flip(content):
    text = content["signatures"]["3"]
    content["signatures"]["3"] = ("0" if text[0] != "0" else "1") + text[1:]


def sign_earlier(run, lines):
    """Sign the head of so many lines, as a charge before the last one did."""
    name, chain = json.loads(run.lines[0])["run"], ledger_file.chain_of(run.lines[lines - 1])
    write_signatures(run.ledger, Head(name, lines, chain), private_keys(run.keys / "private", CLIENTS))


def double(path):
    """State the fields of a JSON object again, after other ones."""
    path.write_text(path.read_text().replace("{", '{"clients": [], ', 1))


def head_of(run, lines, chain=None):
    """Write a head of so many lines."""
    name = json.loads(run.lines[0])["run"]
    run.seal(Head(name, lines, chain or ledger_file.chain_of(run.lines[lines - 1])), "ledger.head")


def filtered(run):
    """Claim that later noise followed from earlier releases."""
    accountant = guarantee_of_each(json.loads((run.run / "guarantees.json").read_text()))[1]["accountant"]
    run.edit_row("guarantees.json", 1, accountant=f"{accountant}, {FILTER}")
    run.edit_row("result.json", 1, noise_multiplier=97.0)


# name of the manipulation -> what is done, and the sentence that it gets
MANIPULATIONS = {
    # the ledger alone
    "noise edited": (
        lambda run: run.write([*run.lines[:3], run.lines[3].replace(b'r": 0.', b'r": 9.'), *run.lines[4:]]),
        r"in line 4 a line that was edited, or that follows one",
    ),
    "header edited": (
        lambda run: run.write([run.lines[0].replace(b"0.001", b"0.1"), *run.lines[1:]]),
        r"in line 1 a header that was edited",
    ),
    "line removed": (
        lambda run: run.write(run.lines[:4] + run.lines[5:]),
        r"a line that does not follow line 4: 1 of 9 were removed",
    ),
    "lines moved": (lambda run: run.write(moved(run.lines)), r"the line that belongs after line 5: lines were moved"),
    "line duplicated": (lambda run: run.write(run.lines[:3] + run.lines[2:]), r"in line 4 a copy of line 3"),
    "appended to itself": (lambda run: run.write(run.lines * 2), r"copy of line 1: the file was appended to itself"),
    "two ledgers joined": (
        lambda run: run.write([*run.lines, *(run.other / "ledger.jsonl").read_bytes().splitlines(keepends=True)]),
        r"the header of another ledger, appended to this one",
    ),
    "words inserted": (
        lambda run: run.write([*run.lines[:2], b"words\n", *run.lines[2:]]),
        r"an invalid line: b'words",
    ),
    "end cut off": (lambda run: run.write(run.lines[:7]), r"`ledger.head` counts, got 7: 2 were cut off its end"),
    "last line torn": (lambda run: run.write([*run.lines[:8], run.lines[8][:-9]]), r"got 8: 1 were cut off its end"),
    "emptied": (lambda run: run.write([]), r"must hold the 9 lines that `ledger.head` counts, got 0"),
    "removed": (lambda run: run.remove("ledger.jsonl"), r"`--ledger` must be a ledger, or the folder of a run"),
    "header removed": (lambda run: run.write(run.lines[1:]), r"in line 1 a charge: the header was removed"),
    "chains removed": (
        lambda run: run.write([line[: -ledger_file._TAIL] + b"}\n" for line in run.lines[1:]]),
        r"a charge without a chain: the ledger is from an older version",
    ),
    "a link": (lambda run: run.link("ledger.jsonl"), r"ledger.jsonl` must be a file in the run's folder, got 'a link"),
    # the head
    "no head": (lambda run: run.remove("ledger.head"), r"ledger.head` must lie beside `ledger.jsonl`, got no such"),
    "head damaged": (
        lambda run: (run.run / "ledger.head").write_text("{}"),
        r"ledger.head` must hold the run, lines and chain of `ledger.jsonl`, got b'{}'",
    ),
    "head of another run": (lambda run: run.take("ledger.head"), r"to which `ledger.head` belongs, got that of run"),
    "head of an earlier time": (
        lambda run: head_of(run, 5),
        r"must end after the 5 lines that `ledger.head` counts, because",
    ),
    "head with another chain": (
        lambda run: head_of(run, 9, "ab" * 16),
        r"in line 9 a chain that differs from that in `ledger.head`",
    ),
    "head of more lines": (
        lambda run: head_of(run, 12, "ab" * 16),
        r"must hold the 12 lines that `ledger.head` counts, got 9",
    ),
    "head a link": (lambda run: run.link("ledger.head"), r"ledger.head` must be a file in the run's folder"),
    # ledger and head together
    "ledger and head of another run": (
        lambda run: run.take("ledger.jsonl", "ledger.head"),
        r"to which `result.json` belongs, got that of run",
    ),
    "end cut off, head rewritten": (
        lambda run: run.forge(lambda fields: fields[:6], "ledger.head"),
        r"must hold the 9 lines that `result.json` counts, got 6",
    ),
    "noise edited, chain and head rewritten": (
        lambda run: run.forge(first_charge(0, less), "ledger.head"),
        r"in line 9 a chain that differs from that in `result.json`",
    ),
    "charge appended, chain and head rewritten": (
        lambda run: run.forge(repeated(1), "ledger.head"),
        r"must end after the 9 lines that `result.json` counts, because",
    ),
    "bytes appended": (
        lambda run: run.write([*run.lines, b'{"client": 0']),
        r"must end with a complete line, because the run has finished, got 12 more bytes",
    ),
    # chain, and every copy of the head
    "noise edited, heads rewritten": (
        lambda run: run.forge(first_charge(0, less), *EVERYWHERE),
        r"result.json` must state epsilon_spent [\d.]+ of client 0, as the ledger does",
    ),
    "rate edited, heads rewritten": (
        lambda run: run.forge(first_charge(1, rarer), *EVERYWHERE),
        r"result.json` must state epsilon_spent [\d.]+ of client 1, as the ledger does, got (5.99999|6.0)",
    ),
    "steps edited, heads rewritten": (
        lambda run: run.forge(first_charge(2, fewer_steps), *EVERYWHERE),
        r"result.json` must state steps \d+ of client 2, as the ledger does",
    ),
    "charge removed, heads rewritten": (
        lambda run: run.forge(lambda fields: fields[:-1], *EVERYWHERE),
        r"result.json` must state releases 1 of client 3, as the ledger does, got 2",
    ),
    "budgets edited, heads rewritten": (
        lambda run: run.forge(header(epsilon=99.0), *EVERYWHERE),
        r"result.json` must state epsilon_budget 99.0 of client 0, as the ledger does",
    ),
    "deltas edited, heads rewritten": (
        lambda run: run.forge(header(delta=0.1), *EVERYWHERE),
        r"result.json` must state delta 0.1 of client 0, as the ledger does, got 0.001",
    ),
    "accountant edited, heads rewritten": (
        lambda run: run.forge(header(accountant="best"), *EVERYWHERE),
        r"`accountant` must be one of",
    ),
    "adjacency edited, heads rewritten": (
        with_other_adjacency,
        r"guarantees.json` must state epsilon [\d.]+ of client 0, as the ledger does",
    ),
    "sampling edited, heads rewritten": (
        lambda run: run.forge(header(sampling="shuffle"), *EVERYWHERE),
        r"result.json` must state guarantee .*NOT proven.*, as the ledger does, got",
    ),
    "caveat removed, heads rewritten": (
        lambda run: run.forge(header(caveats=[]), *EVERYWHERE),
        r"must state simulated False, as the ledger does, got True",
    ),
    "client removed, heads rewritten": (
        lambda run: run.forge(header(clients=3, delta=0.001, epsilon=8.0), *EVERYWHERE),
        r"in line 5 an invalid charge",
    ),
    "records edited, heads rewritten": (
        lambda run: run.forge(lambda fields: fields[0]["identity"].update({"clients.num_records": 9999}), *EVERYWHERE),
        r"result.json` must state num_records 9999 of client 0",
    ),
    "format edited, heads rewritten": (
        lambda run: run.forge(header(ledger=99), *EVERYWHERE),
        r"must have format \d+, got 99 in line 1",
    ),
    # results
    "result's epsilon removed": (
        lambda run: run.edit_row("result.json", 3, epsilon_spent=None),
        r"result.json` must state epsilon_spent [\d.]+ of client 3, as the ledger does, got None",
    ),
    "result's client removed": (
        lambda run: run.edit("result.json", lambda content: content["clients"].pop()),
        r"result.json` must hold 4 clients, as the ledger does",
    ),
    "result's guarantee edited": (
        lambda run: run.edit("result.json", lambda content: content.update(guarantee="Perfect secrecy.")),
        r"result.json` must state guarantee .*, as the ledger does, got 'Perfect secrecy.'",
    ),
    "result with the words of a filter": (
        lambda run: run.edit("result.json", lambda content: content.update(guarantee=f"(1, 0)-privacy, {FILTER}")),
        r"result.json` must state guarantee .*, as the ledger does, got '\(1, 0\)-privacy",
    ),
    "result's guarantee continued": (
        lambda run: run.edit("result.json", lambda content: content.update(guarantee=content["guarantee"] + " Or 0.")),
        r"result.json` must state guarantee '.*add up.', as the ledger does, got '.* Or 0.'",
    ),
    "result's guarantee cut": (
        lambda run: run.edit(
            "result.json", lambda content: content.update(guarantee=content["guarantee"].split(" Not covered")[0])
        ),
        r"result.json` must state guarantee .* Not covered: test.*, as the ledger does, got '.* updates.'",
    ),
    "result's noise edited": (
        lambda run: run.edit("result.json", lambda content: content.update(noise="none")),
        r"result.json` must state noise .*, as the ledger does, got 'none'",
    ),
    "result's noise multiplier edited": (
        lambda run: run.edit_row("result.json", 1, noise_multiplier=99.0),
        r"result.json` must state noise_multiplier [\d.]+ of client 1, as the ledger does, got 99.0",
    ),
    "result's batch size edited": (
        lambda run: run.edit_row("result.json", 1, batch_size=1),
        r"result.json` must state batch_size \d+ of client 1, as the ledger does, got 1\b",
    ),
    "result's epsilon a little less": (
        lambda run: run.edit_row("result.json", 1, epsilon_spent=5.9995),
        r"result.json` must state epsilon_spent [\d.]+ of client 1, as the ledger does, got 5.9995\.",
    ),
    "guarantee's accountant edited": (
        lambda run: run.edit_row("guarantees.json", 1, accountant="an oracle"),
        r"guarantees.json` must state accountant .* of client 1, as the ledger does, got 'an oracle'",
    ),
    "guarantee with more fields": (
        lambda run: run.edit_row("guarantees.json", 1, true_epsilon=0.1),
        r"guarantees.json` must hold what a run writes only, got \['true_epsilon'\]",
    ),
    "result's delta edited": (
        lambda run: run.edit_row("result.json", 2, delta=0.0009999),
        r"result.json` must state delta 0.001 of client 2, as the ledger does, got 0.0009999",
    ),
    "result's head removed": (
        lambda run: run.edit("result.json", lambda content: content.pop("ledger")),
        r"result.json` must hold the run, lines and chain of the ledger, got None",
    ),
    "result damaged": (
        lambda run: (run.run / "result.json").write_text('{"ledger"'),
        r"/result.json` must be a JSON object .*, got b'{.ledger.'",
    ),
    "result a link": (lambda run: run.link("result.json"), r"result.json` must be a file in the run's .*, got 'a link"),
    "guarantees of another run": (
        lambda run: run.take("guarantees.json"),
        r"to which `guarantees.json` belongs, got that of run",
    ),
    "guarantee's epsilon edited": (
        lambda run: run.edit_row("guarantees.json", 1, epsilon=0.5),
        r"guarantees.json` must state epsilon [\d.]+ of client 1, as the ledger does, got 0.5",
    ),
    "guarantee's delta edited": (
        lambda run: run.edit_row("guarantees.json", 1, delta=1e-9),
        r"guarantees.json` must state delta 0.001 of client 1, as the ledger does, got 1e-09",
    ),
    "guarantee's relation edited": (
        lambda run: run.edit_row("guarantees.json", 2, adjacency="replace one record"),
        r"guarantees.json` must state adjacency 'add or remove one record' of client 2",
    ),
    "guarantee's caveats removed": (
        lambda run: run.edit_row("guarantees.json", 2, caveats=[]),
        r"guarantees.json` must state caveats \['a simulation.*\] of client 2",
    ),
    "guarantee's words edited": (
        lambda run: run.edit_row("guarantees.json", 0, words="Perfect secrecy."),
        r"guarantees.json` must state words .* of client 0, as the ledger does, got 'Perfect secrecy.'",
    ),
    "guarantee's covers edited": (
        lambda run: run.edit_row("guarantees.json", 3, covers=["everything"]),
        r"guarantees.json` must state covers .* of client 3, as the ledger does, got \['everything'\]",
    ),
    "clients' guarantees exchanged": (
        lambda run: run.edit("guarantees.json", lambda content: content["clients"].__setitem__(slice(2, 4), [3, 2])),
        r"guarantees.json` must state epsilon [\d.]+ of client 2, as the ledger does",
    ),
    "a guarantee of no client": (
        lambda run: run.edit("guarantees.json", lambda content: content["guarantees"].append({"words": "Perfect."})),
        r"guarantees.json` must hold the guarantees of its clients only, 5, got \[0, 1, 2, 3\]",
    ),
    "a client without a guarantee": (
        lambda run: run.edit("guarantees.json", lambda content: content["clients"].pop()),
        r"guarantees.json` must hold 4 clients, as the ledger does, got \[0, 1, 2\]",
    ),
    "a place counted from the end": (
        lambda run: run.edit("guarantees.json", lambda content: content["clients"].__setitem__(3, -1)),
        r"guarantees.json` must hold the guarantees of its clients only, 4, got \[-1, 0, 1, 2\]",
    ),
    "result's clients exchanged": (
        lambda run: run.edit("result.json", lambda content: content["clients"].reverse()),
        r"result.json` must state client 0 of client 0, as the ledger does, got 3",
    ),
    "invalid charge, heads rewritten": (
        lambda run: run.forge(lambda fields: fields[2].update(number=-1), *EVERYWHERE),
        r"in line 3 an invalid charge",
    ),
    "guarantees damaged": (
        lambda run: (run.run / "guarantees.json").write_text("[]"),
        r"/guarantees.json` must be a JSON object in UTF-8 with each key once, .*, got b'\[\]'",
    ),
    "result's rounds edited": (
        lambda run: run.edit("result.json", lambda content: content.update(rounds=999)),
        r"result.json` must state rounds from 1 to 2, as the ledger does, got 999\.",
    ),
    "result's rounds and noise edited": (
        lambda run: (
            run.edit("result.json", lambda content: content.update(rounds=1)),
            run.edit_row("result.json", 2, noise_multiplier=98.0),
        ),
        r"result.json` must state noise_multiplier [\d.]+ of client 2, as the ledger does, got 98.0",
    ),
    "the words of a filter in both results": (
        filtered,
        r"guarantees.json` must state accountant .* of client 1, as the ledger does, got '.*as a privacy filter|"
        r"result.json` must state noise_multiplier [\d.]+ of client 1, as the ledger does, got 97.0",
    ),
    "result's client with more fields": (
        lambda run: run.edit_row("result.json", 1, epsilon=0.01),
        r"result.json` must hold what a run writes only, got \['epsilon'\]",
    ),
    "result with more fields": (
        lambda run: run.edit("result.json", lambda content: content.update(note="(0.1, 0)-DP")),
        r"result.json` must hold what a run writes only, got \['note'\]",
    ),
    "result unfinished": (
        lambda run: run.edit("result.json", lambda content: content.update(finished=False)),
        r"result.json` must state finished True, as the ledger does, got False",
    ),
    "result removed": (
        lambda run: run.remove("result.json"),
        r"result.json` must lie beside guarantees.json, because the run has finished, got 'no such file'",
    ),
    "guarantees removed": (
        lambda run: run.remove("guarantees.json"),
        r"guarantees.json` must lie beside result.json, because the run has finished, got 'no such file'",
    ),
    "result's client a truth value": (
        lambda run: run.edit("result.json", lambda content: content["clients"][1].update(client=True)),
        r"result.json` must state client 1 of client 1, as the ledger does, got True",
    ),
    "result's releases with a point": (
        lambda run: run.edit_row("result.json", 1, releases=2.0),
        r"result.json` must state releases 2 of client 1, as the ledger does, got 2\.0",
    ),
    "result in UTF-16": (
        lambda run: (run.run / "result.json").write_bytes((run.run / "result.json").read_text().encode("utf-16")),
        r"/result.json` must be a JSON object in UTF-8 with each key once, .*, got b'\\xff\\xfe",
    ),
    "result that is no number": (
        lambda run: (run.run / "result.json").write_text('{"clients": NaN}'),
        r"/result.json` must be a JSON object .* finite numbers of 64 bits, got b'{\"clients\": NaN}'",
    ),
    # files that are no files of a run
    "signatures emptied": (
        lambda run: (run.run / "ledger.signatures").write_bytes(b""),
        r"must hold a head and hexadecimal signatures of clients for `ledger.jsonl`, got b''",
    ),
    "nobody's signatures": (
        lambda run: run.edit("ledger.signatures", lambda content: content["signatures"].clear()),
        r"must hold a head and hexadecimal signatures of clients for `ledger.jsonl`, got b.{.head",
    ),
    "a signature of no client": (
        lambda run: run.edit("ledger.signatures", lambda content: content["signatures"].update({"9": "00"})),
        r"ledger.signatures` must hold signatures of the 4 clients, got one of client 9\.",
    ),
    "head emptied": (
        lambda run: (run.run / "ledger.head").write_bytes(b""),
        r"ledger.head` must lie beside `ledger.jsonl`, got an empty one",
    ),
    "result a folder": (
        lambda run: (run.remove("result.json"), (run.run / "result.json").mkdir()),
        r"result.json` must be a file in the run's folder, got 'a folder",
    ),
    "guarantees a pipe": (
        lambda run: (run.remove("guarantees.json"), os.mkfifo(run.run / "guarantees.json")),
        r"guarantees.json` must be a file in the run's folder, got 'a folder or a device'",
    ),
    "head nested": (
        lambda run: (run.run / "ledger.head").write_text("[" * 100_000),
        r"ledger.head` must hold the run, lines and chain of `ledger.jsonl`, got b'\[\[",
    ),
    "guarantees with a key twice": (
        lambda run: double(run.run / "guarantees.json"),
        r"/guarantees.json` must be a JSON object in UTF-8 with each key once, .*, got b'{.clients.",
    ),
    "run's name edited, heads rewritten": (
        lambda run: without_results(run, header(run="\x1b[31m" + "0" * 27), "ledger.head"),
        r"ledger.head` must hold the run, lines and chain of `ledger.jsonl`, got b'{.run.: .+u001b",
    ),
    "purpose edited, heads rewritten": (
        lambda run: run.forge(lambda fields: fields[3].update(purpose="\x1b[2J"), *EVERYWHERE),
        r"in line 4 an invalid charge",
    ),
    "purpose of half a character, heads rewritten": (
        lambda run: run.forge(lambda fields: fields[5].update(purpose="\ud800"), *EVERYWHERE),
        r"in line 6 an invalid charge",
    ),
    "rate above 1, heads rewritten": (
        lambda run: run.forge(first_charge(1, lambda event: event.update(sample_rate=2.0)), *EVERYWHERE),
        r"ledger.jsonl` must hold events that can be composed, got an error: `sample_rate` must be",
    ),
    # signatures
    "end cut off, head rewritten, no results": (
        lambda run: without_results(run, lambda fields: fields[:6], "ledger.head"),
        r"must hold the 9 lines that `ledger.signatures` counts, got 6",
    ),
    "noise edited, head rewritten, no results": (
        lambda run: without_results(run, first_charge(0, less), "ledger.head"),
        r"in line 9 a chain that differs from that in `ledger.signatures`",
    ),
    "charges appended, head rewritten, no results": (
        lambda run: without_results(run, repeated(5), "ledger.head"),
        r"must have at most 4 lines after the 9 that `ledger.signatures` counts",
    ),
    "charges appended, no results": (
        lambda run: without_results(run, repeated(5)),
        r"must have at most 4 lines after the 9 that `ledger.head` counts",
    ),
    "signed end of an earlier time": (
        lambda run: sign_earlier(run, 7),
        r"must end after the 7 lines that `ledger.signatures` counts, because the run has finished, got 9",
    ),
    "signatures of another run": (
        lambda run: run.take("ledger.signatures"),
        r"to which `ledger.signatures` belongs, got that of run",
    ),
    "signatures damaged": (
        lambda run: (run.run / "ledger.signatures").write_text("[1]"),
        r"ledger.signatures` must hold a head and hexadecimal signatures of clients for `ledger.jsonl`, got b'\[1\]'",
    ),
    "signatures removed": (lambda run: run.remove("ledger.signatures"), r"key, got none of client 0, 1, 2, 3\."),
    "a signature removed": (
        lambda run: run.edit("ledger.signatures", lambda content: content["signatures"].pop("2")),
        r"must hold a signature of every client with a key, got none of client 2\.",
    ),
    "signatures swapped": (
        lambda run: run.edit("ledger.signatures", swap_signatures),
        r"got another signature for client 0, 1: the ledger was rewritten",
    ),
    "a signature edited": (lambda run: run.edit("ledger.signatures", flip), r"got another signature for client 3: "),
    "signatures a link": (lambda run: run.link("ledger.signatures"), r"ledger.signatures` must be a file in the run's"),
    "everything rewritten": (rewritten, r"got another signature for client 0, 1, 2, 3: the ledger was rewritten"),
    "everything rewritten by client 0": (
        lambda run: rewritten(run, {0: private_keys(run.keys / "private", CLIENTS)[0]}),
        r"got another signature for client 1, 2, 3: the ledger was rewritten",
    ),
}
#: what shows if somebody has the clients' public keys
ONLY_WITH_KEYS = (
    "signatures removed",
    "a signature removed",
    "signatures swapped",
    "a signature edited",
    "everything rewritten",
    "everything rewritten by client 0",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A signed run, another one, and the clients' keys."""
    place = tmp_path_factory.mktemp("source")
    make_keys(place / "keys")
    for seed, name in enumerate(("run", "other")):
        privacy = private([4.0, 6.0, 8.0, 10.0], signing_keys=str(place / "keys" / "private"))
        small_loop(privacy=privacy, rounds=2, seed=seed, output_dir=place / name).run()
    return place


def command(run, *more, signed=True):
    keys = ["--public_keys", str(run.keys / "public")] if signed else []
    return main(["--ledger", str(run.run), *keys, *more])


def test_an_unchanged_run_is_verified(source, tmp_path, capsys):
    run = Evidence(tmp_path, source)
    assert command(run, "--export", str(tmp_path / "events.json")) == 0 and (tmp_path / "events.json").exists()
    text = capsys.readouterr().out.splitlines()
    words = "its end, and the budgets, deltas, epsilons, numbers of releases and guarantees that follow from it."
    assert f"result.json and guarantees.json in its folder state {words}" in text
    assert "Its end was signed by the holders of the keys of client 0, 1, 2, 3." in text
    assert command(run, "--json") == 0
    (ledger,) = json.loads(capsys.readouterr().out)["ledgers"]
    assert ledger["signatures_verified"] == ledger["signed_by"] == [0, 1, 2, 3]
    assert ledger["compared_with"] == list(RESULTS)


def test_every_manipulation_has_a_sentence_that_no_other_one_has(source, tmp_path, capsys):
    sentences = {}
    for number, (name, (manipulate, _)) in enumerate(MANIPULATIONS.items()):
        place = tmp_path / str(number)
        place.mkdir()
        run = Evidence(place, source)
        manipulate(run)
        signed = name in ONLY_WITH_KEYS
        assert not signed or command(run, signed=False) == 0, name
        capsys.readouterr()
        assert command(run, "--export", str(place / "events.json"), signed=signed) == 2, name
        output = capsys.readouterr()
        assert output.out == "" and output.err.startswith("error: `") and output.err.count("\n") == 1, name
        assert not (place / "events.json").exists(), name
        sentences[name] = output.err.strip()
    assert len(sentences) >= 30
    for name, (_, words) in MANIPULATIONS.items():
        assert [other for other, sentence in sentences.items() if re.search(words, sentence)] == [name], sentences[name]


def test_names_and_rights_of_files_are_one_sentence(source, tmp_path, capsys, monkeypatch):
    run = Evidence(tmp_path, source)
    assert command(run, "--export", str(tmp_path / ("e" * 300))) == 2
    assert main(["--ledger", "l" * 300]) == 2
    assert command(run, "--accountant", "") == 2

    def refused(path, *how):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(ledger_file, "open", refused, raising=False)
    assert command(run) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("` must ")[2].partition(". ")[0] for line in lines] == [
        *["be a file that can be read, or written for --export, got File name too long"] * 2,
        "be one of pld, rdp, paper_ma, got ''.",
        "be a file that can be read, or written for --export, got Permission denied",
    ]


def test_only_signatures_show_that_everything_was_rewritten(source, tmp_path, capsys):
    run = Evidence(tmp_path, source)
    rewritten(run)
    assert command(run, signed=False) == 0
    text = capsys.readouterr().out
    assert "Its signatures were not verified (--public_keys)" in text and run.head.chain in text
    run.remove("ledger.signatures")
    assert command(run, signed=False) == 0
    assert "No client signed it: nobody would notice if" in capsys.readouterr().out
    assert command(run) == 2


def test_an_interrupted_run_is_verified_without_results(source, tmp_path, capsys):
    run = Evidence(tmp_path, source)
    run.remove(*RESULTS)
    assert command(run) == 0 and "There is no result.json in its folder" in capsys.readouterr().out
    signatures = (run.run / "ledger.signatures").read_bytes()
    run.forge(repeated(3), "ledger.head")
    assert command(run) == 0, "a crash left the lines of one charge after the signatures"
    text = capsys.readouterr().out
    assert "Its first 9 lines were signed" in text and "The last 3 are unsigned: " in text
    assert signatures == (run.run / "ledger.signatures").read_bytes()


def test_a_run_that_has_just_begun_is_not_called_a_wrong_file(source, tmp_path):
    run = Evidence(tmp_path, source)
    run.remove(*RESULTS, "ledger.signatures")
    run.write([])
    (run.run / "ledger.head").write_bytes(ledger_file.head_bytes(Head("0" * 32, 0, "")))
    with pytest.raises(UserError, match=r"got no complete line. If the run has just begun, wait for its first round"):
        read([run.ledger])


# ---- a resumed run neither signs nor relies on lines that somebody appended


def of_round(round, **event):
    """Lines of all clients like their last ones."""

    def more(fields):
        lines = [{**one, "round": round, "event": {**one["event"], **event}} for one in fields[-CLIENTS:]]
        return [*fields, *lines]

    return more


def shown(fields):
    """Lines that look as if the clients had paid for what they show."""
    event = {"kind": "gaussian", "sample_rate": 1.0, "noise_multiplier": 1e9, "steps": 1}
    places = [{"client": client, "round": 0, "number": 0} for client in range(CLIENTS)]
    return [*fields, *({**place, "purpose": "shown", "event": event} for place in places)]


def unplanned(fields):
    return [{**one, "purpose": "other"} if one.get("round") == 3 else one for one in of_round(3)(fields)]


def overtaking(fields):
    """A planned line with the number of a later charge."""
    return [{**one, "number": 1} if one.get("round") == 3 else one for one in of_round(3)(fields)]


#: whether it is a simulation, the round before whose charge it is cut, what is appended, and the refusal
RESUMED = {
    "harmless lines for what is shown": (False, 0, shown, "what the .* 1 releases for 'shown'"),
    "less noise in a simulation": (
        True,
        3,
        of_round(3, noise_multiplier=50.0),
        "what the .* 3 releases for 'train'",
    ),
    "less noise": (False, 3, of_round(3, noise_multiplier=50.0), "what the .* 3 releases for 'train'"),
    "unplanned lines": (False, 3, unplanned, "what the .* 1 releases for 'other'"),
    "a line of another number": (True, 3, overtaking, "number the charges of client 0 in round 3 from 0"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_signs_no_line_that_it_would_not_charge(name, source, tmp_path, monkeypatch):
    simulated, cut, change, words = RESUMED[name]
    key = {} if simulated else {"noise_key": None, "diagnostics": cut == 0}

    def loop():
        privacy = private([4.0, 6.0, 8.0, 10.0], signing_keys=str(source / "keys" / "private"), **key)
        return small_loop(privacy=privacy, rounds=3, output_dir=tmp_path / "cut")

    def charge(ledger, charges):
        if charges and charges[0].round == cut:
            raise PowerCut
        return write(ledger, charges)

    write = Ledger.charge
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge", charge)
        with pytest.raises(PowerCut):
            loop().run()
    run = Evidence(tmp_path, tmp_path, "cut")
    run.forge(change, "ledger.head")
    for file in ("ledger.jsonl", "ledger.head"):
        shutil.copy(run.run / file, tmp_path / "cut")
    signatures = (tmp_path / "cut" / "ledger.signatures").read_bytes()
    with pytest.raises(UserError, match=rf"ledger.jsonl` must (hold )?{words}"):
        loop().run(resume=True)
    assert (tmp_path / "cut" / "ledger.signatures").read_bytes() == signatures
    assert not (tmp_path / "cut" / "result.json").exists()
