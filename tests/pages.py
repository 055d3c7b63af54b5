"""Pages as their readers see them: text, rows, and tags that are balanced."""

from html.parser import HTMLParser

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
