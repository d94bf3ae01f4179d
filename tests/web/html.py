"""What a browser would make of a page: its elements and attributes, without a browser."""

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "hr", "img"}
HTML_ID = re.compile(r"[a-z][a-z0-9_-]*")


class Page(HTMLParser):
    """A page that was parsed; ``elements`` are tags with their attributes, in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), "an attribute is there twice"
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for found, attributes in self.elements if found == tag]

    def fields(self, action: str) -> dict[str, str]:
        """Return what the form that leads to ``action`` would send, if it has one."""
        found: dict[str, str] = {}
        is_inside = False
        for tag, attributes in self.elements:
            if tag == "form":
                is_inside = attributes.get("action") == action
            elif is_inside and tag == "input":
                found.setdefault(attributes["name"], attributes.get("value", ""))
        return found

    def shape(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return what there is of elements and names of attributes, which no data should change."""
        return [(tag, tuple(attributes)) for tag, attributes in self.elements]

    def text(self) -> str:
        return "".join(self.texts)


def check(text: str) -> Page:
    """Parse a page of ours, and check what all of them have to keep."""
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert len(page.all("h1")) == len(page.all("main")) == text.count("<title>", 0, text.index("</head>")) == 1
    [html] = page.all("html")
    assert html["lang"] == "en"
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    labels = {label["for"] for label in page.all("label")}
    fields = [
        field for tag in ("input", "textarea", "select") for field in page.all(tag) if field.get("type") != "hidden"
    ]
    assert all(field["id"] in labels for field in fields), "a field has no label"
    assert all(cell.get("scope") for cell in page.all("th")), "a header of a table has no scope"
    for tag, attributes in page.elements:
        assert "style" not in attributes and tag not in ("style", "iframe", "object", "base"), tag
        assert not [name for name in attributes if name.startswith("on")], attributes
        for name in ("href", "src", "action"):
            assert attributes.get(name, "/").startswith(("/", "#")), "it leads elsewhere"
        assert tag != "script" or attributes["src"].startswith("/static/")
        for name in ("aria-labelledby", "aria-describedby", "for"):
            assert attributes.get(name, ids[0]) in ids or name == "for", f"{attributes} names no element"
        assert "scroll" not in attributes.get("class", "").split() or attributes["tabindex"] == "0"
    for one in {each for each in ids if ids.count(each) > 1}:
        raise AssertionError(f"the id {one} is there twice")
    assert all(HTML_ID.fullmatch(each) for each in ids), ids
    return page
