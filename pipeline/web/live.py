"""Pages that follow what happens: one look a second for all who watch, none while nobody does, sent as server-sent events."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec
from jinja2 import Environment

from pipeline.core.errors import StoreError
from pipeline.core.text import utc_text
from pipeline.web import views
from pipeline.web.api import Api
from pipeline.web.problems import Problem

INTERVAL_SEC: Final = 1.0
SHARE: Final = 25  # looks take at most one part in so many of the time: where they take long they are rarer
STREAM_SEC: Final = 300.0  # the browser asks again then, with the session that it has: one that has ended shows no more
QUIET_SEC: Final = 15.0  # after which a line without meaning shows whether anybody is there
# What a page has of parts that change, by the id of the element that each is in.
PARTS: Final = {
    "overview": ("verdict", "tiles", "load", "load-table", "lateness", "lateness-table", "topics", "ingests"),
    "topics": ("topic-list",),
    "topic": ("topic-now", "groups"),
    "loops": ("loop-list", "ingest-list"),
}

View = tuple[str, str]  # a page, and what it is about

log = logging.getLogger(__name__)


class Hub:
    """Looks for all viewers of this process together."""

    def __init__(self, api: Api, templates: Environment) -> None:
        self._api = api
        self._templates = templates
        self._rates = views.Rates()
        self._look: views.Look | None = None
        self._lock = asyncio.Lock()
        self._views: Counter[View] = Counter()
        self._parts: dict[View, dict[str, str] | None] = {}
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[None] | None = None
        self._is_over = False

    async def values(self, view: View) -> dict[str, Any]:
        """Return what a page shows now.

        Raises:
            StoreError, TimeoutError: no answer, or an error.
        """
        page, about = view
        look = await self._recent_look()
        if page == "overview":
            return views.overview(look, self._rates, int(about))
        if page == "loops":
            return views.loops(look)
        read: Callable[..., dict[str, Any]] = views.topics if page == "topics" else views.topic
        return await self._api.ask(lambda: read(self._api, look, self._rates, about))

    async def _recent_look(self) -> views.Look:
        async with self._lock:
            now_ms = self._api.clock.monotonic_ms()
            if self._look is None or now_ms - self._look.at_ms >= INTERVAL_SEC * 1000 / 2:
                self._look = await self._api.ask(lambda: views.read_look(self._api))
                self._rates.add(self._look.at_ms, self._look.counters())
            return self._look

    @property
    def viewers(self) -> int:
        """How many watch."""
        return self._views.total()

    def check_room(self) -> None:
        """Refuse one viewer too many.

        Raises:
            Problem: ``busy``.
        """
        if self._is_over or self.viewers >= self._api.settings.api.viewers_max:
            raise Problem("busy", "Too many pages follow what happens.")

    async def stream(self, view: View) -> AsyncIterator[bytes]:
        """Send what changes of a page, for ``STREAM_SEC`` at most."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + STREAM_SEC
        sent: dict[str, str] = {}
        self._views[view] += 1
        try:
            yield b"retry: 3000\n\n"
            while not self._is_over and loop.time() < ends:
                if self._task is None:
                    self._task = asyncio.create_task(self._run())
                self._next = self._next or loop.create_future()
                done, _ = await asyncio.wait([self._next], timeout=QUIET_SEC)
                if self._is_over:
                    return
                parts = self._parts.get(view) if done else {}
                if not done:
                    yield b": nothing yet\n\n"
                elif parts is None:
                    yield _event("away", {})
                else:
                    changed = {name: text for name, text in parts.items() if sent.get(name) != text}
                    sent = parts
                    yield _event("look", changed)
        finally:
            self._views[view] -= 1
            if self._views[view] == 0:
                del self._views[view]
                self._parts.pop(view, None)

    def close(self) -> None:
        """End all streams at once."""
        self._is_over = True
        self._wake()
        if self._task:
            self._task.cancel()

    def _wake(self) -> None:
        if self._next and not self._next.done():
            self._next.set_result(None)
        self._next = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._views:
                begun, is_away = loop.time(), False
                for view in [*self._views]:
                    parts = await self._parts_of(view)
                    is_away = is_away or parts is None
                    if view in self._views:
                        self._parts[view] = parts
                self._wake()
                took = loop.time() - begun
                await asyncio.sleep(INTERVAL_SEC if is_away else max(INTERVAL_SEC - took, SHARE * took))
        finally:
            self._task = None

    async def _parts_of(self, view: View) -> dict[str, str] | None:
        """Return the parts of a page as they are now; None if they can't be had."""
        try:
            values = await self.values(view)
            parts = await self._api.ask(lambda: self._render(view[0], values))
        except (StoreError, TimeoutError, Problem) as exc:
            log.warning("the pages show nothing new: %s", str(exc) or "the server does not answer")
            return None
        except Exception:
            log.exception("the page %s can't be followed", view[0])
            return None
        return {**parts, "as-of": utc_text(values["now_ms"])}

    def _render(self, page: str, values: dict[str, Any]) -> dict[str, str]:
        return {name: self._templates.get_template(f"parts/{name}.html").render(values) for name in PARTS[page]}


def _event(name: str, parts: dict[str, str]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(parts) + b"\n\n"
