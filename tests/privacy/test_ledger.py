"""The ledger: synced, one writer, counters; and whatever is done to its file is found."""

import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent, NonPrivateEvent, SelectionEvent
from dpfl_lightning.privacy.ledger import file as ledger_file
from dpfl_lightning.privacy.ledger.file import Head, Header, head_bytes, head_file, read_head, verify
from dpfl_lightning.privacy.ledger.ledger import Charge, Ledger, read_ledger
from dpfl_lightning.runtime.strict_json import parsed

TRAIN = GaussianEvent(0.1, 1.5, 10)
HEADER = Header(
    "rdp", "add_remove", "poisson", (1e-4,) * 4, (1.0, 2.0, 3.0, math.inf), ("sizes are public",), {"rounds": 3}
)


def charge(client=0, round=1, number=0, event=None, purpose="train"):
    """By default the event of each client is another one, so that each has its own lines."""
    return Charge(client, round, purpose, event or GaussianEvent(0.1 * (client + 1), 1.5, 10), number)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def written(path):
    """A closed ledger: its header, then rounds 1 to 3 of clients 0 and 1."""
    ledger = Ledger(path, HEADER)
    for round in (1, 2, 3):
        ledger.charge([charge(0, round), charge(1, round)])
    ledger.close()
    return path


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True)


def test_charges_of_a_client_and_round_are_counted_whatever_they_are_for(path):
    """Equal numbers would be equal noise in a simulation, and nothing is free because it looks like a charge before."""
    ledger = Ledger(path, HEADER)
    first = [charge(), charge(number=1), charge(number=2, purpose="other"), charge(client=1), charge(round=2)]
    ledger.charge(first)
    assert Counter(read_ledger(path)) == Counter(first), "a charge is on disk when it returns"
    assert read_head(path) == ledger.head and ledger.head.lines == 6
    assert [len(ledger.charges(*place)) for place in ((0, 1), (1, 1), (0, 2), (3, 1))] == [3, 1, 1, 0]
    ledger.close()
    again = Ledger(path, HEADER)
    assert list(again.charges(0, 1)) == first[:3] and again.used(0, "train") == 3 and again.used(0, "other") == 1
    again.charge([charge()])  # it continues where it ended
    assert len(again.charges(0, 1)) == 4 and again.used(0, "train") == 4 and read_ledger(path)[5:] == [charge()]


def test_everything_is_synced_before_a_charge_returns_the_head_last(path, monkeypatch):
    ledger, synced = Ledger(path, HEADER), []
    monkeypatch.setattr("dpfl_lightning.privacy.ledger.ledger._sync", lambda file: synced.append(os.fstat(file).st_ino))
    ledger.charge([charge(client) for client in range(4)])
    assert synced == [path.stat().st_ino, head_file(path).stat().st_ino]
    ledger.charge([])
    assert len(synced) == 2, "nothing is written where nothing is charged"


def test_it_is_read_back_whole(path):
    events = [
        TRAIN,
        SelectionEvent(0.1, 2),
        GaussianEvent(1.0, 0.0),
        LaplaceEvent(3.0, 4),
        NonPrivateEvent('words, "quoted"'),
    ]
    ledger = Ledger(path, HEADER)
    ledger.charge([charge(round=n, event=event, purpose=str(n)) for n, event in enumerate(events)])
    ledger.close()
    again = Ledger(path, HEADER)
    assert again.events(0) == events
    assert [again.used(0, str(n)) for n in range(len(events))] == [1] * len(events)
    header = verify(path, lambda _: None).header
    assert header == HEADER and header.run == HEADER.run


def test_the_header_of_equal_clients_is_short(path):
    Ledger(path, Header("rdp", "add_remove", "poisson", (1e-4,) * 100_000, (2.0,) * 100_000))
    assert path.stat().st_size < 500
    assert verify(path, lambda _: None).header.epsilon == (2.0,) * 100_000


@pytest.mark.e2e
def test_another_process_is_refused_but_may_read(path):
    ledger = Ledger(path, HEADER)
    ledger.charge([charge()])
    code = (
        "import sys; from pathlib import Path; from dpfl_lightning.privacy.ledger.ledger import *\n"
        "assert len(read_ledger(Path(sys.argv[1]))) == 1\n"
        "Ledger(Path(sys.argv[1]), Header('rdp', 'add_remove', 'poisson', (1e-4,), (1.0,)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 1 and "is being written by another run" in done.stderr
    with pytest.raises(UserError, match="being written by another run"):
        Ledger(path, HEADER)
    ledger.charge([charge(1)])


def test_a_run_whose_charges_mean_something_else_is_refused(written):
    whole = written.read_bytes()
    for key, other in {
        "`accountant` must stay 'rdp'.*, got 'pld'": {"accountant": "pld"},
        "`delta` of client 0": {"delta": (1e-3,) * 4},
        "`epsilon` of client 0": {"epsilon": (9.0,) * 4},
        "`caveats` must stay": {"caveats": ()},
        "`adjacency` must stay": {"adjacency": "replace_one"},
        "`rounds` must stay 3": {"identity": {"rounds": 4}},
        "`seed` must stay None": {"identity": {"rounds": 3, "seed": 1}},
    }.items():
        words = key.replace("` of client 0", " of client 0` must stay")
        with pytest.raises(UserError, match=f"{words}.*start a new run for anything else"):
            Ledger(written, replace(HEADER, **other))
        assert written.read_bytes() == whole
    Ledger(written, HEADER).close()  # a refused ledger is not kept locked


def test_a_write_that_failed_closes_the_ledger(path, monkeypatch):
    ledger = Ledger(path, HEADER)
    with monkeypatch.context() as patch:
        patch.setattr("dpfl_lightning.privacy.ledger.ledger._sync", lambda file: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ledger.charge([charge(0)])
    with pytest.raises(ValueError, match="closed file"):
        ledger.charge([charge(0)])
    assert ledger.used(0, "train") == 0
    assert Ledger(path, HEADER).used(0, "train") == 1, "it may be on disk: it is paid"


def test_a_kill_between_the_lines_and_the_head_loses_nothing(written, monkeypatch):
    ledger = Ledger(written, HEADER)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_write_head", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ledger.charge([charge(0, 4), charge(1, 4)])
    assert read_head(written).lines == 7 and len(lines_of(written)) == 9
    again = Ledger(written, HEADER)
    assert again.used(0, "train") == 4, "on disk is paid"
    assert read_head(written).lines == 7, "nobody has compared the lines with the plan yet"
    again.accept()
    assert read_head(written).lines == again.head.lines == 9


@pytest.mark.parametrize("torn", [b'{"client": 0, "ro', b'{"clie\0\0\0\0\0', b"\0\0\0\n\0\0\n", b"x"])
def test_what_a_crash_tore_was_never_paid_and_is_cut(written, torn):
    whole = written.read_bytes()
    written.write_bytes(whole + torn)
    found = verify(written, lambda _: None)
    assert (found.size, found.torn) == (len(whole), len(torn))
    assert written.read_bytes() == whole + torn, "reading changes nothing"
    ledger = Ledger(written, HEADER)
    assert written.read_bytes() == whole
    ledger.charge([charge(2)])
    assert [one.client for one in read_ledger(written)] == [0, 1, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("head", [None, b"", b"\0" * 128])
def test_a_crash_while_it_was_begun_begins_anew(path, head):
    path.write_bytes(b"")
    if head is not None:
        head_file(path).write_bytes(head)
    Ledger(path, HEADER).close()
    assert read_ledger(path) == [] and read_head(path).lines == 1


@pytest.mark.parametrize("head", [None, b"", b"\0" * 128])
def test_a_header_without_its_end_and_without_a_head_is_no_start(written, head):
    """The head is on disk before the first byte of the ledger: charges that follow no line end are not forgotten."""
    written.write_bytes(left := written.read_bytes().replace(b"\n", b"\r"))
    head_file(written).unlink() if head is None else head_file(written).write_bytes(head)
    with pytest.raises(UserError, match=r"ledger.head` must lie beside"):
        Ledger(written, HEADER)
    assert written.read_bytes() == left


@pytest.mark.parametrize("written", [0, 1])
def test_a_crash_between_the_first_writes_is_no_dead_end(path, monkeypatch, written):
    """A head of 0 lines is written first, then the header, then the head that counts it."""
    writes = []

    def failing(ledger):
        writes.append(ledger.head.lines)
        return write(ledger) if len(writes) <= written else 1 / 0

    write = Ledger._write_head
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_write_head", failing)
        with pytest.raises(ZeroDivisionError):
            Ledger(path, HEADER)
    assert writes == list(range(written + 1)) and len(lines_of(path)) == written
    Ledger(path, HEADER).charge([charge()])
    assert read_head(path).lines == 2


def test_a_crash_between_head_and_header_begins_anew(path):
    path.write_bytes(b'{"ledger"')
    head_file(path).write_bytes(head_bytes(Head("ab" * 16, 0, "")))
    Ledger(path, HEADER).close()
    assert read_head(path).lines == 1 and read_head(path).run == HEADER.run


WRONG = (
    {"steps": 1e308},
    {"steps": 10**400},
    {"sample_rate": "x"},
    {"noise_multiplier": []},
    {"noise_multiplier": None},
)


def forged(lines, number, change):
    """The lines, that one changed, with the chain that it would have had."""
    body = change(lines[number - 1][: -ledger_file._TAIL])
    before = ledger_file.chain_of(lines[number - 2]) if number > 1 else "0" * 32
    return [*lines[: number - 1], ledger_file.sealed(body, before), *lines[number:]]


def cheaper(body):
    assert b"1.5" in body
    return body.replace(b"1.5", b"9.5")


def looser(body):
    return body.replace(b"0.0001", b"0.01")


def newer(body):
    return body.replace(b'"ledger": 3', b'"ledger": 4')


def unchained(lines):
    return [line[: -ledger_file._TAIL] + b"}\n" for line in lines[1:]]


def edited(lines, number):
    return [*lines[: number - 1], cheaper(lines[number - 1]), *lines[number:]]


OTHER_HEADER = ledger_file.header_line(replace(HEADER, run="ff" * 16))
DAMAGE = {
    "edited": (lambda ls: edited(ls, 4), "line 4 a line that does not follow"),
    "the last one edited": (lambda ls: edited(ls, 7), "line 7 a line that does not follow"),
    "edited, its chain too": (
        lambda ls: forged(ls, 4, cheaper),
        "line 5 a line that does not follow",
    ),
    "the last one edited, its chain too": (
        lambda ls: forged(ls, 7, cheaper),
        "line 7 a chain that differs from that in",
    ),
    "the last one torn": (lambda ls: [*ls[:6], ls[6][:-20]], "`ledger.head` counts, got 6: 1 were cut off"),
    "removed": (lambda ls: [*ls[:3], *ls[4:]], "line 4 a line that does not follow"),
    "cut off": (lambda ls: ls[:5], "`ledger.head` counts, got 5: 2 were cut off its end, after line 5"),
    "all cut off": (lambda ls: [], r"the 7 lines that `ledger.head` counts, got 0"),
    "repeated": (lambda ls: [*ls[:4], ls[3], *ls[4:]], "line 5 a line that does not follow"),
    "the last one repeated": (lambda ls: [*ls, ls[-1]], "line 8 a line that does not follow"),
    "appended to itself": (lambda ls: ls + ls, "line 8 a line that does not follow"),
    "swapped": (lambda ls: [*ls[:3], ls[4], ls[3], *ls[5:]], "line 4 a line that does not follow"),
    "another one appended": (lambda ls: [*ls, OTHER_HEADER], "line 8 a line that does not follow"),
    "words": (lambda ls: [*ls[:2], b"nonsense\n", *ls[2:]], "line 3 a line that does not follow"),
    "appended words": (lambda ls: [*ls, b"{}\n"], "line 8 a line that does not follow"),
    "an empty line": (lambda ls: [*ls[:2], b"\n", *ls[2:]], "line 3 a line that does not follow"),
    "an unknown event": (lambda ls: [*ls, ls[-1].replace(b"gaussian", b"gauss")], "line 8 a line that does not follow"),
    "zeros": (lambda ls: [*ls[:3], b"\0\0\n", *ls[4:]], r"got 3: 4 were cut off its end, after line 3"),
    "header edited": (lambda ls: [ls[0].replace(b"0.0001", b"0.01  "), *ls[1:]], "line 1 a line that does not follow"),
    "header edited, its chain too": (
        lambda ls: forged(ls, 1, looser),
        "line 2 a line that does not follow",
    ),
    "no header": (lambda ls: ls[1:], "line 1 a line that does not follow"),
    "no header, a chain made up": (lambda ls: forged(ls[1:], 1, lambda body: body), "line 1 an invalid header"),
    "another header": (lambda ls: [OTHER_HEADER, *ls[1:]], f"run {HEADER.run}, .*got that of run {'ff' * 16} in line"),
    "an older version": (unchained, "line 1 a line that does not follow"),
    "a newer version": (lambda ls: forged(ls, 1, newer)[:1], "must have format 3, got 4"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_named(written, what):
    change, words = DAMAGE[what]
    damaged = b"".join(change(lines_of(written)))
    assert damaged != written.read_bytes()
    written.write_bytes(damaged)
    for read in (read_ledger, lambda path: Ledger(path, HEADER)):
        with pytest.raises(UserError, match=words) as error:
            read(written)
        assert str(error.value).startswith(f"`{written}` must ") and "\n" not in str(error.value)
        assert error.value.args[0].rstrip().endswith(("run.", "wrote it."))
    assert written.read_bytes() == damaged, "and left as it is"


@pytest.mark.parametrize("lines", [0, 1, 5, 7])
def test_a_ledger_without_its_head_is_refused_also_if_only_the_header_is_left(written, lines):
    written.write_bytes(left := b"".join(lines_of(written)[:lines]))
    head_file(written).unlink()
    with pytest.raises(UserError, match=r"ledger.head` must lie beside `ledger.jsonl`, got no such file"):
        read_ledger(written)
    if lines:
        with pytest.raises(UserError, match=r"ledger.head` must lie beside `ledger.jsonl`, got no such file"):
            Ledger(written, HEADER)
    assert not head_file(written).exists() and written.read_bytes() == left


def test_a_run_that_writes_while_its_ledger_is_read_appended_nothing(written):
    """What it writes after the head was read is left for the next time."""
    ledger = Ledger(written, HEADER)
    seen = verify(written, lambda _: ledger.charge([charge(client, 4) for client in range(4)]))
    assert seen.end.lines == 7 and seen.torn == 0 and ledger.head.lines == 7 + 6 * 4
    assert len(read_ledger(written)) == 30


def test_more_lines_after_the_head_than_a_crash_leaves_are_refused(written):
    """One charge of four clients has at most four lines."""
    head, ledger = head_file(written).read_bytes(), Ledger(written, HEADER)
    ledger.charge([charge(client, 4) for client in range(4)])
    ledger.close()
    last = head_file(written).read_bytes()
    head_file(written).write_bytes(head)
    assert len(read_ledger(written)) == 10
    head_file(written).write_bytes(last)
    ledger = Ledger(written, HEADER)
    ledger.charge([charge(0, 5)])
    ledger.close()
    head_file(written).write_bytes(head)
    for read in (read_ledger, lambda path: Ledger(path, HEADER)):
        with pytest.raises(UserError, match=r"one charge of each of 4 clients after the 7 lines .*got 5 lines: some"):
            read(written)


def test_two_charges_of_a_client_after_the_head_are_refused(written):
    """A crash interrupts one charge, which has one line for each client."""
    head, ledger = head_file(written).read_bytes(), Ledger(written, HEADER)
    ledger.charge([charge(0, 4)])
    ledger.charge([charge(0, 5)])
    ledger.close()
    head_file(written).write_bytes(head)
    for read in (read_ledger, lambda path: Ledger(path, HEADER)):
        with pytest.raises(UserError, match=r"one charge of each of 4 clients after the 7 .*got 2 lines: .*older one"):
            read(written)


NEGATIVE = head_bytes(Head("0" * 32, 9, "0" * 32)).replace(b" 9,", b"-9,")


@pytest.mark.parametrize(
    "content", [b"nonsense", b"{}", b'{"run": 1', b"[]", b'{"run": "a", "lines": 3}', b"3", NEGATIVE]
)
def test_a_damaged_head_is_an_error(written, content):
    head_file(written).write_bytes(content)
    with pytest.raises(UserError, match=r"ledger.head` must hold the run, lines and chain"):
        read_ledger(written)


def test_a_checkpoint_tells_a_ledger_that_was_cut_together_with_its_head(written):
    saved, lines = read_head(written), lines_of(written)
    again = Ledger(written, HEADER)
    again.charge([charge(0, 4)])
    again.close()
    Ledger(written, HEADER, saved).close()
    written.write_bytes(b"".join(lines[:5]))
    head_file(written).write_bytes(head_bytes(Head(saved.run, 5, ledger_file.chain_of(lines[4]))))
    with pytest.raises(UserError, match="must hold the 7 lines that the checkpoint counts, got 5"):
        Ledger(written, HEADER, saved)


def test_a_checkpoint_whose_ledger_was_deleted_gets_no_new_one(written):
    saved = read_head(written)
    written.unlink(), head_file(written).unlink()
    with pytest.raises(UserError, match=r"ledger.head` must lie beside `ledger.jsonl`, got no such file"):
        Ledger(written, HEADER, saved)
    assert written.read_bytes() == b"" and not head_file(written).exists()


def test_a_checkpoint_tells_another_ledger_from_its_own(written, tmp_path):
    saved = read_head(written)
    chain = "line 7 a chain that differs from that in the checkpoint"
    other = f"run {HEADER.run}, to which the checkpoint belongs, got that of run {'ee' * 16}"
    for name, run, message in (("cheap", HEADER.run, chain), ("other", "ee" * 16, other)):
        ledger = Ledger(tmp_path / name, replace(HEADER, run=run))
        for round in (1, 2, 3):
            ledger.charge(
                [charge(client, round, event=GaussianEvent(0.1 + 0.1 * client, 9.5, 10)) for client in (0, 1)]
            )
        ledger.close()
        assert len(read_ledger(ledger.path)) == 6, "the chain has no key: it holds by itself"
        with pytest.raises(UserError, match=message):
            Ledger(ledger.path, HEADER, saved)


def test_no_changed_byte_and_no_cut_goes_unseen(path):
    """Every byte and every end: the last cut takes nothing but the last line's newline."""
    ledger = Ledger(path, HEADER)
    ledger.charge([charge(0), charge(1)])
    ledger.close()
    content = path.read_bytes()
    ways = [bytes([0 if at % 5 == 0 else byte ^ 2 if at % 5 == 1 else byte ^ 1]) for at, byte in enumerate(content)]
    changed = [content[:at] + way + content[at + 1 :] for at, way in enumerate(ways)]
    for wrong in [*changed, *(content[:end] for end in range(len(content)))]:
        assert wrong != content
        path.write_bytes(wrong)
        with pytest.raises(UserError):
            read_ledger(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("clients", wrong) for wrong in ([4], [-1], ["x"], 0, [], [1, 1], [1, 0], [[1, 0]], [[0, 4]], [[0, 1, 2]], [[0]])]
    + [("event", {"kind": "x"}), ("release", "a"), ("salt", None), ("clients", [0, [0, 1]]), ("clients", [1.0])]
    + [("event", {"kind": "unprotected", "words": words}) for words in ("a line\nand another", 5)]
    + [("client", 1), ("round", -1), ("round", {}), ("number", None), ("number", True), ("purpose", ["train"])]
    + [("event", {"kind": "gaussian", **vars(TRAIN), **wrong}) for wrong in WRONG],
)
def test_a_well_chained_line_that_means_nothing_is_an_error(written, field, value):
    lines = lines_of(written)

    def change(body):
        return json.dumps({**json.loads(body + b"}"), field: value}).encode()[:-1]

    changed = forged(lines, 7, change)
    written.write_bytes(b"".join(changed))
    head_file(written).write_bytes(head_bytes(Head(HEADER.run, 7, ledger_file.chain_of(changed[-1]))))
    with pytest.raises(UserError, match="line 7 an invalid charge"):
        read_ledger(written)


@pytest.mark.parametrize(
    "text",
    [
        *(b"1" + b"0" * 400, b"9223372036854775808", b"1e999", b"NaN", b"-Infinity", b'{"a": 1, "a": 1}'),
        *(b"\xef\xbb\xbf1", "1".encode("utf-16"), b'"\xff"', b'"\xed\xa0\x80"', b'"\\ud800"', b"[" * 100_000),
    ],
)
def test_json_is_strict(text):
    assert parsed(b'[-9223372036854775808, 1.5, "\xc3\xa9"]') == [-(2**63), 1.5, "\u00e9"]
    with pytest.raises(ValueError):
        parsed(text)


def test_a_header_of_other_types_or_ranges_is_an_error(written):
    """Also if the chain and the head were computed again."""
    header = json.loads(lines_of(written)[0])
    changes = [("clients", value) for value in (0, 10**12, True, 4.0, "4")]
    changes += [("delta", value) for value in (1, -1, "0.001", None, True, [0.1], {})]
    changes += [("epsilon", value) for value in (-1, "nan", True, [1.0], math.nan, math.inf)]
    changes += [("caveats", "abc"), ("caveats", [1]), ("caveats", ["a\nb"]), ("identity", [["a", 1]]), ("ledger", 3.0)]
    changes += [("sampling", "secret batches"), ("accountant", 1), ("adjacency", None), ("more", 1)]
    for key, value in changes:
        body = json.dumps({**{name: header[name] for name in header if name != "chain"}, key: value}).encode()[:-1]
        written.write_bytes(line := ledger_file.sealed(body, "0" * 32))
        head_file(written).write_bytes(head_bytes(Head(HEADER.run, 1, ledger_file.chain_of(line))))
        with pytest.raises(UserError, match="line 1 an invalid header"):
            read_ledger(written)


def test_no_charges_are_hidden_behind_a_zero(written):
    """A crash leaves at most the lines of one charge, of four clients."""
    lines = lines_of(written)
    head_file(written).write_bytes(head_bytes(Head(HEADER.run, 2, ledger_file.chain_of(lines[1]))))
    written.write_bytes(b"".join([*lines[:2], b"\0" + lines[2], *lines[3:6]]))
    assert verify(written, lambda _: None).torn == sum(map(len, lines[2:6])) + 1
    written.write_bytes(b"".join([*lines[:2], b"\0" + lines[2], *lines[3:]]))
    with pytest.raises(UserError, match=r"one charge of each of 4 clients after the 2 lines that .*got 5 lines: some"):
        read_ledger(written)


@pytest.mark.e2e
def test_equal_charges_of_many_clients_are_one_short_line(path):
    """A round of 100,000 clients is a line; of a random tenth, their numbers."""
    ledger = Ledger(path, Header("rdp", "add_remove", "poisson", (1e-4,) * 100_000, (2.0,) * 100_000))
    everyone, tenth = range(100_000), sorted(random.Random(0).sample(range(100_000), 10_000))
    for round, who in ((1, everyone), (2, tenth)):
        ledger.charge([charge(client, round, event=TRAIN) for client in who])
    ledger.close()
    _, first, second = lines_of(path)
    assert len(first) < 300 and len(second) < 70_000
    charges = read_ledger(path)
    assert [one.client for one in charges] == [*everyone, *tenth] and {one.event for one in charges} == {TRAIN}
