"""The pages in a real browser, under their own policy: what people see and do, and what hostile data and foreign pages can't."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.web import axe
from tests.web.browsing import Visitor, launched, needs_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Request, Route

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("browser"), needs_chromium]


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with launched() as browser:
        yield browser


BAD_PAGE = """<!doctype html><title>bad</title><img src=x><p style="color: #ccc">pale</p>
<script>console.error("it says"); alert(1); fetch("http://127.0.0.1:1/"); throw new Error("broken");</script>"""


def answer(headers: dict[str, str], route: "Route", _: "Request") -> None:
    route.fulfill(headers=headers, body=BAD_PAGE)


def test_whoever_watches_sees_what_a_bad_page_does(browser: "Browser") -> None:
    base = "http://127.0.0.1:9"
    for policy, wanted in (
        ("default-src *; script-src 'unsafe-inline'; style-src 'unsafe-inline'",
         ("it says", "dialog: 1", "request: GET http://127.0.0.1:1/", "error: broken")),
        ("default-src 'none'", ("policy script-src", "policy style-src", "policy img-src")),
    ):  # fmt: skip
        visitor = Visitor(browser, base)
        headers = {"Content-Type": "text/html", "Content-Security-Policy": policy}
        visitor.context.route(f"{base}/", partial(answer, headers))
        page = visitor.open("/")
        page.wait_for_load_state("networkidle")
        said = "\n".join(visitor.complaints)
        assert [each for each in wanted if each not in said] == [], said
        if axe.why_unavailable() is None:
            barriers = axe.find_barriers(page)
            assert any("image-alt" in each for each in barriers) and any("html-has-lang" in each for each in barriers)
        visitor.context.close()
