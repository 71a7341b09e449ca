"""A page of HTML taken apart, and what a browser would fetch for it."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr"}
FETCHED = {
    *("src", "href", "xlink:href", "action", "data", "poster", "srcset", "background", "formaction", "ping"),
}
EVIL = """<script>alert(1)</script><img src=x onerror=alert(2)>"><a href='javascript:alert(3)'>&lt; ${x} </style>"""


class Page(HTMLParser):
    """A page whose tags are closed in their order; its texts are gathered by the tag around them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), "an attribute is given twice"
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data
        if self.rows and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data if "small" not in self.open else f" {data}"

    @property
    def words(self) -> str:
        """All that its tables, paragraphs and lists say."""
        said = [cell for row in self.rows for cell in row]
        return " ".join([*said, *self.texts.get("p", []), *self.texts.get("li", [])])

    def check_sealed_like(self, plain: Page) -> None:
        """Its markup is that of a page of plain words; it loads nothing, and only its own last script may run."""
        assert [tag for tag, _ in self.tags] == [tag for tag, _ in plain.tags]
        found = [value or "" for _, attrs in self.tags for name, value in attrs.items() if name in FETCHED]
        found += re.findall(r"url\(([^)]*)\)|@import", str(self.tags) + "".join(self.texts["style"]))
        within = ("#", "data:,", "data:image/svg+xml;base64,")
        assert [each for each in found if not each.startswith(within)] == []
        assert not [name for _, attrs in self.tags for name in attrs if name.startswith("on")]
        (policy,) = (attrs["content"] or "" for _, attrs in self.tags if "http-equiv" in attrs)
        digest = base64.b64encode(hashlib.sha256(self.texts["script"][-1].encode()).digest()).decode()
        assert policy.startswith("default-src 'none'")
        assert f"script-src 'sha256-{digest}'" in policy
        assert "connect-src" not in policy
