"""One request while it is answered: its headers, parameters and body, read within bounds."""

import asyncio
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, quote

import msgspec
from starlette.responses import Response

from pipeline.client.requests import due_ms_of
from pipeline.config import ApiSettings, check_name
from pipeline.core.errors import ConfigError, RequestRefused
from pipeline.core.messages import Reason
from pipeline.web.problems import Problem

JSON: Final = b"application/json"
MERGE_PATCH: Final = b"application/merge-patch+json"
LINES: Final = b"application/x-ndjson"
FORM: Final = b"application/x-www-form-urlencoded"
SMALL_BODY_BYTES_MAX: Final = 256 * 1024  # of a body that is neither a message nor a batch
FORM_BYTES_MAX: Final = 2 * 1024 * 1024  # a message of 256 KiB has three times as many, and its headers come along
PARAMETERS_MAX: Final = 50
TIME_LENGTH_MAX: Final = 100
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
ALWAYS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer."""


class Reading:
    """How many bytes of bodies are held, of all requests."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max

    def take(self, count: int) -> None:
        """Hold some more.

        Raises:
            Problem: ``busy``.
        """
        if self.bytes + count > self._bytes_max:
            raise Problem("busy", "Too many bodies are being read.", closes=True)
        self.bytes += count


class Call:
    """A request."""

    def __init__(self, scope: Mapping[str, Any], receive: Any, settings: ApiSettings, reading: Reading) -> None:
        self.method: str = scope["method"]
        self._headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        self.headers: dict[bytes, bytes] = dict(self._headers)
        self.path: Mapping[str, str] = scope.get("path_params", {})
        self.url_path: str = scope["path"]
        self.peer: str = (scope.get("client") or ("",))[0]  # the other end of the connection; "" of a unix socket
        self.address = self.peer  # from where it comes, as far as proxies are trusted
        given = self.header(b"x-request-id")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        self.held = 0  # bytes of its body
        self._query: bytes = scope["query_string"]
        self._receive = receive
        self._settings = settings
        self._reading = reading

    @property
    def forwarded(self) -> str:
        """Return the addresses that proxies say, the nearest one last, "" if there are none."""
        lines = [value for name, value in self._headers if name == b"x-forwarded-for"]
        return b",".join(lines).decode("latin-1")

    def release(self) -> None:
        """Let go of the body."""
        self._reading.bytes -= self.held
        self.held = 0

    @property
    def wants_page(self) -> bool:
        """Say whether an error is shown as a page: a program that asks for JSON gets problem details."""
        accept = self.headers.get(b"accept", b"")
        return b"json" not in accept or b"text/html" in accept

    def header(self, name: bytes) -> str:
        """Return the text of a header, "" if it is not there."""
        return self.headers.get(name, b"").decode("latin-1").strip()

    @property
    def target(self) -> str:
        """What was asked for: path and query, as they were sent."""
        path = quote(self.url_path, safe="/~:@!$&'()*+,;=")
        return f"{path}?{self._query.decode('latin-1')}" if self._query else path

    def cookie(self, name: str) -> str:
        """Return the value of a cookie, "" if it is not there."""
        for pair in self.header(b"cookie").split(";"):
            found, _, value = pair.strip().partition("=")
            if found == name:
                return value
        return ""

    async def body(
        self,
        content_type: bytes,
        limit: int,
        too_long: str = "body_too_long",
        packed: bool = False,
        also: Sequence[bytes] = (),
    ) -> bytes:
        """Read the body.

        Args:
            limit: how many bytes it may have.

            too_long: the word of the problem of one that has more.

            packed: whether it may have a content coding, which is left to the caller.

            also: further content types that are taken.

        Raises:
            Problem: it has another type, is too long, or too slow.
            ClientGone: it ended early.
        """
        given = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if given != content_type and given not in also:
            raise Problem("wrong_content_type", f"Send Content-Type: {content_type.decode()}.", closes=True)
        coding = self.headers.get(b"content-encoding", b"identity").strip().lower()
        if coding not in ((b"identity", b"gzip") if packed else (b"identity",)):
            raise Problem(
                "wrong_content_type", f"Send no Content-Encoding{' but gzip' if packed else ''}.", closes=True
            )
        length = self.headers.get(b"content-length", b"0")
        if int(length) > limit:
            raise self._too_long(too_long, limit)
        try:
            async with asyncio.timeout(self._settings.body_timeout_sec):
                return await self._read(limit, too_long)
        except TimeoutError:
            detail = f"A body must be there within {self._settings.body_timeout_sec:g} s."
            raise Problem("too_slow", detail, closes=True) from None

    async def _read(self, limit: int, too_long: str) -> bytes:
        chunks: list[bytes] = []
        size, has_more = 0, True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk: bytes = message["body"]
            has_more = message["more_body"]
            size += len(chunk)
            if size > limit:
                raise self._too_long(too_long, limit)
            self._reading.take(len(chunk))
            self.held += len(chunk)
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _too_long(self, word: str, limit: int) -> Problem:
        return Problem(word, f"At most {limit} bytes are allowed.", closes=True)

    async def fields(self, *names: str, also: Sequence[bytes] = ()) -> dict[str, Any]:
        """Read the body as a JSON object with some of these fields.

        Raises:
            Problem: it is something else.
            ClientGone: it ended early.
        """
        body = await self.body(JSON, SMALL_BODY_BYTES_MAX, also=also)
        try:
            found = json.loads(body, object_pairs_hook=_object_of)
        except (ValueError, RecursionError) as exc:
            raise Problem(Reason.NOT_JSON, "The body is not JSON.") from exc
        if not isinstance(found, dict):
            raise Problem(Reason.NOT_AN_OBJECT, "The body is JSON but not an object with fields.")
        for name in found.keys() - {*names}:
            raise Problem(Reason.UNKNOWN_FIELD, f"The field {name[:80]!r} is not one of {', '.join(names)}.")
        return found

    async def form(self, *names: str) -> "Parameters":
        """Read the body as a form, which may have these fields.

        Raises:
            Problem: it is something else, or has a field that it should not, or one of them twice.
            ClientGone: it ended early.
        """
        return _parameters(await self.body(FORM, FORM_BYTES_MAX), names, "utf-8")

    def quiet_parameters(self) -> dict[str, str]:
        """Return the query whatever it is, for what a page only shows."""
        try:
            return dict(parse_qsl(self._query.decode("latin-1"), max_num_fields=PARAMETERS_MAX))
        except ValueError:
            return {}

    def parameters(self, *names: str) -> "Parameters":
        """Return the query, which may have these parameters.

        Raises:
            Problem: it has others, or one of them twice.
        """
        return _parameters(self._query, names, "latin-1")


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise Problem(Reason.DUPLICATE_KEY, f"The field {twice[:80]!r} is there twice.")
    return found


def _parameters(encoded: bytes, names: Sequence[str], encoding: str) -> "Parameters":
    try:
        text = encoded.decode(encoding, "replace")
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=PARAMETERS_MAX)
    except ValueError as exc:
        raise Problem("bad_parameter", "There are too many parameters.") from exc
    given = dict(pairs)
    for name in given.keys() - {*names}:
        takes = f"it takes {', '.join(names)}" if names else "it takes none"
        raise Problem("bad_parameter", f"There is no parameter {name[:80]!r}; {takes}.")
    if len(given) < len(pairs):
        raise Problem("bad_parameter", "A parameter is there twice.")
    return Parameters(given)


class Parameters:
    """Values that are given as text; a method raises ``bad_parameter`` for one that is not fit."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def text(self, name: str) -> str:
        """Return a value as it is, "" if it is not given."""
        return self._given.get(name, "")

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """Return a whole number."""
        text = self._given.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 16 and least <= int(text) <= most):
            raise Problem("bad_parameter", f"The parameter {name} takes {least} to {most}, not {text[:80]!r}.")
        return int(text)

    def flag(self, name: str) -> bool:
        """Return whether a value is 1."""
        text = self._given.get(name, "0")
        if text not in ("0", "1"):
            raise Problem("bad_parameter", f"The parameter {name} takes 0 or 1, not {text[:80]!r}.")
        return text == "1"

    def time_ms(self, name: str, default: int) -> int:
        """Return a time, ISO 8601 with a zone or epoch ms, as epoch ms."""
        text = self._given.get(name)
        if text is None:
            return default
        if len(text) > TIME_LENGTH_MAX:
            raise Problem(
                "bad_parameter", f"The parameter {name} takes a time of at most {TIME_LENGTH_MAX} characters."
            )
        value = int(text) if text.isascii() and text.isdigit() else text
        return self._read(name, lambda: due_ms_of(value))

    def span_ms(self, default: tuple[int, int]) -> tuple[int, int]:
        """Return the times ``from`` and ``to``."""
        from_ms, to_ms = self.time_ms("from", default[0]), self.time_ms("to", default[1])
        if from_ms > to_ms:
            raise Problem("bad_parameter", "The time from lies behind the time to.")
        return from_ms, to_ms

    def topic(self, name: str) -> str:
        """Return the name of a topic, "" if it is not given."""
        text = self._given.get(name, "")
        return self._read(name, lambda: check_name("topic", text)) if text else ""

    def _read(self, name: str, read: Callable[[], T]) -> T:
        try:
            return read()
        except (RequestRefused, ConfigError, ValueError) as exc:
            raise Problem("bad_parameter", f"The parameter {name}: {exc}") from exc


def answer(record: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer of JSON."""
    return Response(msgspec.json.encode(record), status, {**ALWAYS, **(headers or {})}, "application/json")


def problem_answer(problem: Problem) -> Response:
    """Return an answer that is an error."""
    return Response(problem.body(), problem.status, {**ALWAYS, **problem.headers}, "application/problem+json")


def text_answer(text: str | bytes, media_type: str = "text/plain") -> Response:
    """Return an answer of text."""
    return Response(text, 200, ALWAYS, media_type)
