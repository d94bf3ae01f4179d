"""A real browser that watches: what a page logs, breaks, pops up or asks of others is a complaint."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DESKTOP, PHONE = (1280, 900), (390, 844)
WAIT_MS = 15_000
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)")

# Runs before anything of the page; by the debugger, so that the page's own policy does not matter.
WATCH = "document.addEventListener('securitypolicyviolation', (e) => console.error('policy', e.violatedDirective, e.blockedURI))"


class Visitor:
    """A person with a browser of their own, whose ``page`` is at one address."""

    def __init__(
        self, browser: "Browser", base: str, size: tuple[int, int] = DESKTOP, theme: str = "light", **options: Any
    ) -> None:
        self.base = base
        self.complaints: list[str] = []
        viewport: Any = {"width": size[0], "height": size[1]}
        scheme: Any = theme
        self.context = browser.new_context(
            base_url=base, viewport=viewport, color_scheme=scheme, locale="en-GB", timezone_id="UTC", **options
        )
        self.context.set_default_timeout(WAIT_MS)
        self.context.add_init_script(WATCH)
        self.context.on("request", self._check_request)
        self.context.on("console", self._check_console)
        self.context.on("weberror", lambda error: self.complaints.append(f"error: {error.error}"))
        self.context.on("dialog", self._refuse)
        self.page: Page = self.context.new_page()

    def open(self, path: str) -> "Page":
        """Go to an address of the pages."""
        self.page.goto(path)
        return self.page

    def look(self, size: tuple[int, int], theme: Any) -> None:
        """See the same page in a window of another size, and in another theme."""
        self.page.set_viewport_size({"width": size[0], "height": size[1]})
        self.page.emulate_media(color_scheme=theme)

    def taken(self) -> list[str]:
        """Return the complaints so far, and forget them."""
        found, self.complaints = self.complaints, []
        return found

    def _check_request(self, request: "Request") -> None:
        if not request.url.startswith((f"{self.base}/", "data:")) and request.url != self.base:
            self.complaints.append(f"request: {request.method} {request.url}")

    def _check_console(self, message: "ConsoleMessage") -> None:
        url = message.location["url"]
        # A page that says what is wrong has a status of its own; the browser asks for an icon where JSON is shown, or elsewhere.
        is_status = message.text.startswith("Failed to load resource: the server responded with a status of 4")
        is_meant = (is_status and url == self.page.url) or url.endswith("/favicon.ico")
        if message.type in ("error", "warning", "assert") and not is_meant:
            self.complaints.append(f"{message.type}: {message.text} at {url}")

    def _refuse(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()


def wait_for_looks(page: "Page", looks: int, timeout_ms: float = WAIT_MS) -> None:
    """Wait until a page that follows what happens was told so often, or more often, how it is now."""
    fewer = "".join(f":not([data-looks='{number}'])" for number in range(1, looks))
    page.wait_for_selector(f"html[data-looks]{fewer}", state="attached", timeout=timeout_ms)


@contextmanager
def launched() -> Iterator["Browser"]:
    """Run Debian's Chromium; nothing is downloaded."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visiting(browser: "Browser", base: str, *args: Any, **options: Any) -> Iterator[Visitor]:
    """Let somebody visit; there must be no complaint at the end."""
    visitor = Visitor(browser, base, *args, **options)
    try:
        yield visitor
        assert not visitor.complaints, visitor.complaints
    finally:
        visitor.context.close()
