"""What all pages share: who looks, what they may do, and how they are answered."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.responses import RedirectResponse, Response

from pipeline.client.cold import cold_reader
from pipeline.core.text import count_text
from pipeline.store.by_id import MessagesById
from pipeline.web.access import ANYBODY, Access, Caller, Right
from pipeline.web.api import Api
from pipeline.web.call import Call, Parameters
from pipeline.web.live import Hub
from pipeline.web.problems import Problem
from pipeline.web.rendering import HEADERS, templates
from pipeline.web.sessions import SESSION_SEC, Sessions, has_proof, is_cookie, new_cookie, proof_of

# What a page says after a change, by the word that the address carries; the number comes along.
NOTICES: Final[Mapping[str, str]] = {
    "scheduled": "The message is scheduled.",
    "known": "A message with this id is known already: nothing was stored.",
    "cancelled": "Cancelled: {}.",
    "moved": "Moved: {}.",
    "now": "Due now: {}.",
    "paused": "The topic is paused: what comes due of it is held.",
    "resumed": "The topic goes on: what was held is delivered.",
    "redriven": "Scheduled again: {}.",
    "purged": "Dropped for good: {}.",
    "gone": "Nothing was changed: it was not there any more, or had changed. This is how it is now.",
}
COUNT_MAX: Final = 1_000_000
PORT: Final = re.compile(r":([0-9]{1,5})\Z")


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who looks at a page: ``caller`` is None if nobody who may; ``cookie`` names their browser, which ``is_new`` or has it."""

    caller: Caller | None
    cookie: str
    is_new: bool

    @property
    def name(self) -> str:
        """What the log calls them."""
        return self.caller.name if self.caller and self.caller.name else "-"


class Site:
    """The pages of an API."""

    def __init__(self, api: Api, access: Access) -> None:
        self.api = api
        self.access = access
        self.sessions = Sessions(api.client, api.shards[0])
        self.templates = templates()
        self.hub = Hub(api, self.templates)
        retention_ms, read_cold = (
            api.settings.drain.id_retention_sec * 1000,
            cold_reader(api.settings, api.client, api.clock),
        )
        self.by_id = MessagesById(api.client, api.shards, retention_ms, read_cold=read_cold)

    async def visitor(self, call: Call) -> Visitor:
        """Return who looks.

        Raises:
            StoreError, TimeoutError: no answer, or an error.
        """
        found = self.stranger(call)
        if found.is_new or not self.access.takes_tokens:
            return found
        mark = await self.api.ask(lambda: self.sessions.read(found.cookie))
        return replace(found, caller=self.access.caller_of(mark))

    def stranger(self, call: Call) -> Visitor:
        """Return who looks without asking who has signed in."""
        cookie = call.cookie(cookie_name(call))
        caller = None if self.access.takes_tokens else ANYBODY
        return Visitor(caller, cookie, False) if is_cookie(cookie) else Visitor(caller, new_cookie(), True)

    async def log_in(self, visitor: Visitor, token: str, address: str) -> Visitor | None:
        """Return the visitor with a session of the token; None if there is no such token.

        Raises:
            Problem: ``rate_exceeded``.
            StoreError, TimeoutError: no answer, or an error.
        """
        mark = self.access.mark_of(token.strip().encode(), address)
        if mark is None:
            return None
        cookie = await self.api.ask(lambda: self.sessions.begin(mark))
        return replace(visitor, caller=self.access.caller_of(mark), cookie=cookie, is_new=True)

    async def log_out(self, visitor: Visitor) -> Visitor:
        """End a session; return a visitor without one.

        Raises:
            StoreError, TimeoutError: no answer, or an error.
        """
        await self.api.ask(lambda: self.sessions.end(visitor.cookie))
        return Visitor(None if self.access.takes_tokens else ANYBODY, new_cookie(), True)

    def check(self, visitor: Visitor, right: Right) -> None:
        """Refuse who may not do something.

        Raises:
            Problem: ``no_token``, ``not_allowed``, ``rate_exceeded``.
        """
        if visitor.caller is None:
            raise Problem("no_token", "Sign in with a token first.")
        self.access.check_right(visitor.caller, right)

    async def enter(self, call: Call, visitor: Visitor, token: str) -> Response:
        """Begin a session of the token in an address, which the browser is led away from."""
        found = await self.log_in(visitor, token, call.address) if self.access.takes_tokens else visitor
        if found is None:
            return self.render("login.html", call, visitor, 401, page="login", next="/", is_wrong=True)
        return self.go(call, found, self.home(found))

    def home(self, visitor: Visitor) -> str:
        """Return the first page for a visitor: a token that may not look may schedule."""
        return "/" if visitor.caller is None or "read" in visitor.caller.rights else "/try"

    def again(self, call: Call) -> Response:
        """Have a browser that followed a link of another site ask again, as our own page: only then it sends its cookie."""
        return Response(self.templates.get_template("again.html").render(target=call.target), 200, HEADERS, "text/html")

    def refuse(self, problem: Problem, call: Call, visitor: Visitor) -> Response:
        """Say what is the matter; who has shown no token may do so now."""
        if problem.word == "no_token" and call.method in ("GET", "HEAD"):
            target = "/" if call.url_path == "/live" else call.target
            return self.render("login.html", call, visitor, 401, page="login", next=target, is_wrong=False)
        text = self.text("problem.html", call, visitor, page="", problem=problem)
        response = Response(
            text, problem.status, HEADERS, "text/html"
        )  # and no cookie: whoever was refused changes none
        response.headers.update({name: value for name, value in problem.headers.items() if name != "WWW-Authenticate"})
        return response

    async def form(self, call: Call, visitor: Visitor, *names: str) -> Parameters:
        """Read a form that was made for this visitor.

        Raises:
            Problem: it was not, or it has other fields.
        """
        given = await call.form(*names, "proof")
        if visitor.is_new or not has_proof(visitor.cookie, given.text("proof")):
            raise Problem("stale_form", "Go back, reload the page, and send the form again.")
        return given

    def render(self, template: str, call: Call, visitor: Visitor, status: int = 200, **values: Any) -> Response:
        """Return a page."""
        return self.with_session(
            Response(self.text(template, call, visitor, **values), status, HEADERS, "text/html"), call, visitor
        )

    def text(self, template: str, call: Call, visitor: Visitor, **values: Any) -> str:
        """Return the text of a page."""
        settings = self.api.settings
        notice, tone = self._notice(call) if values.pop("has_notice", True) else ("", "")
        return self.templates.get_template(template).render(
            may=self.rights(visitor),
            proof=proof_of(visitor.cookie),
            origin=self.origin(call),
            visitor=visitor.caller.name if visitor.caller else "",
            takes_tokens=self.access.takes_tokens,
            is_read_only=settings.api.read_only,
            shows_messages=settings.api.show_messages,
            namespace=settings.redis.namespace,
            notice=notice,
            tone=tone,
            **values,
        )

    def rights(self, visitor: Visitor) -> frozenset[str]:
        """Return what the buttons of a page may offer."""
        if visitor.caller is None:
            return frozenset()
        return visitor.caller.rights & ({"read"} if self.api.settings.api.read_only else visitor.caller.rights)

    def go(
        self, call: Call, visitor: Visitor, path: str, word: str = "", count: int | None = None, more: bool = False
    ) -> Response:
        """Lead the browser to a page, which says by a fixed word, and a number, what was done."""
        query = [f"done={word}"] * bool(word) + [f"count={count}"] * (count is not None) + ["more=1"] * more
        address = path + ("&" if "?" in path else "?") + "&".join(query) if query else path
        return self.with_session(RedirectResponse(address, 303, HEADERS), call, visitor)

    def with_session(self, response: Response, call: Call, visitor: Visitor) -> Response:
        """Return an answer that begins the session, if it is new."""
        if visitor.is_new:
            response.set_cookie(
                cookie_name(call), visitor.cookie, SESSION_SEC, path="/", secure=self.access.is_secure,
                httponly=True, samesite="strict",
            )  # fmt: skip
        return response

    def origin(self, call: Call) -> str:
        """Return under which address a client reaches the API."""
        return self.access.public_url or f"http://{call.header(b'host')}"

    def _notice(self, call: Call) -> tuple[str, str]:
        done = call.quiet_parameters()
        word, count = done.get("done", ""), done.get("count", "")
        if word not in NOTICES:
            return "", ""
        number = int(count) if count.isascii() and count.isdigit() and len(count) < 8 else 0
        said = NOTICES[word].format(count_text(number, "message"))
        is_bad = word in ("gone", "known") or (number == 0 and "{}" in NOTICES[word])
        return said + (" There are more: do it again." if done.get("more") == "1" else ""), "warn" if is_bad else "good"


def cookie_name(call: Call) -> str:
    """Return the name of the cookie: the port is in it that the browser asks, as the servers of a host share their cookies."""
    port = PORT.search(call.header(b"host"))
    return f"duetime-{port[1]}" if port else "duetime"
