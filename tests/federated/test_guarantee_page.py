"""The page: complete, self-contained, escaped, and of a bearable size."""

import re
from html.parser import HTMLParser

from fakes import FRAME, a_result, a_view
from markupsafe import escape

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.privacy.accounting.guarantee import NOT_COVERED, OTHER_RUNS, UNKNOWN_RUNS, Guarantee
from dpfl_lightning.reporting.guarantee_page import guarantee_page

EVIL = "<script>alert('1')</script> & \"q\""


class Reader(HTMLParser):
    """Text, tags and attributes; unbalanced tags are an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    def rows(self) -> int:
        return sum(tag == "tr" for tag, _ in self.tags)


def words_of(page: str) -> str:
    return " ".join(" ".join(Reader(page).text).split())


def a_page(view, guarantees, name=None, **changes):
    clients = [
        {**row, "epsilon_spent": promise.epsilon, "name": name or row["name"]}
        for row, promise in zip(a_result(view).clients, guarantees, strict=True)
    ]
    return guarantee_page(a_result(view, clients=tuple(clients), **changes), guarantees, view.run)


def promise(epsilon, **more):
    return Guarantee(epsilon=epsilon, delta=1e-3, **{**FRAME, "covers": ("570 noised steps in 30 releases",), **more})


def test_a_run_leaves_its_page(make_loop):
    loop = make_loop(privacy=PrivacyOptions(epsilon=[4.0, 6.0, 8.0, 10.0], delta=1e-3))
    result = loop.run()
    words = words_of((loop.output_dir / "guarantee.html").read_text())
    for part in (
        "add or remove one record",
        "Poisson sampling",
        "PLD (dp_accounting, upper bound)",
        "noised gradient steps in 3 releases",
        *(UNKNOWN_RUNS if gap == OTHER_RUNS else gap for gap in NOT_COVERED),
        "No other run on the same records is in the account.",
        f"python -m dpfl_lightning.ledger {loop.output_dir}/ledger.jsonl",
        "all 3 rounds are done",
        "dp-accounting",
        "opacus",
        "≤ 10 at δ = 0.001 is the largest of 4 clients (client 3)",
    ):
        assert part in words, part
    for client in result.clients:
        assert f"{client['noise_multiplier']:.5g}" in words and client["releases"] == 3


def test_nothing_is_loaded_and_nothing_runs(tmp_path):
    page = a_page(a_view(tmp_path), [promise(1.0)] * 3)
    reader = Reader(page)
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "img", "iframe", "object", "a", "form", "base"}
    names = {name for _, attributes in reader.tags for name in attributes}
    assert not {name for name in names if name.startswith("on")} and not names & {"src", "href", "action"}
    assert not re.search(r"https?:|//\w|url\(|@import|javascript:", page)


def test_every_value_is_escaped(tmp_path):
    view = a_view(tmp_path / EVIL.replace("/", ""), engine=EVIL, device=EVIL)
    evil = promise(1.0, sampling=EVIL, accountant=EVIL, adjacency=EVIL, unit=EVIL, covers=(EVIL,), not_covered=(EVIL,))
    bare = promise(float("inf"), unprotected=(EVIL,), caveats=(EVIL,))
    page = a_page(view, [evil, evil, bare], name=EVIL, reason=EVIL)
    assert "<script" not in page and "alert('" not in page
    plain = a_page(a_view(tmp_path), [promise(1.0)] * 3)
    assert {tag for tag, _ in Reader(page).tags} <= {tag for tag, _ in Reader(plain).tags}
    assert words_of(page).count("alert('1')") >= 11
    assert escape(EVIL) in page


def test_no_privacy_is_said_first(make_loop, tmp_path):
    bare = promise(float("inf"), covers=(), unprotected=("training losses were logged",))
    assert "No client has differential privacy." in words_of(a_page(a_view(tmp_path), [bare] * 3))
    mixed = words_of(a_page(a_view(tmp_path), [promise(1.0), bare, promise(2.0)]))
    assert "1 of 3 clients do not have differential privacy. No differential privacy per record: training" in mixed
    assert "no bound" in mixed and "≤" not in mixed.split("What epsilon means")[0]
    loop = make_loop(privacy=None)
    loop.run()
    words = words_of((loop.output_dir / "guarantee.html").read_text())
    assert "No client has differential privacy." in words and "un-noised gradient steps" in words and "≤" not in words


def test_ten_thousand_clients_are_summed_up(tmp_path):
    view = a_view(tmp_path, num_clients=10_000)
    promises = [promise(0.5 + i % 1000 / 1000, covers=(f"{i % 50} steps",)) for i in range(10_000)]
    page = a_page(view, promises)
    assert len(page) < 100_000
    assert Reader(page).rows() == 1 + 200 + 1 + 3
    words = words_of(page)
    for row in ("smallest 100 10 1.25 0.5 1 ", "largest 10,099 10 1.25 1.499 10000 "):
        assert row in words, row
    assert "is the largest of 10,000 clients" in words
    assert "The table shows the 200 of 10,000 clients with the largest epsilon" in words
    assert words.count("see guarantees.json for each client") == 1


def test_an_overspent_budget_is_seen(tmp_path):
    page = a_page(a_view(tmp_path, num_clients=1), [promise(1.5)])  # its budget is 1
    assert 'class="over"' in page and "150.0%" in page
    assert 'class="over"' not in a_page(a_view(tmp_path, num_clients=1), [promise(0.5)])
