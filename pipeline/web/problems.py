"""Errors as the API tells them: problem details (RFC 9457), one form for all of them."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from pipeline.core.messages import Reason, Rejection

MEDIA_TYPE: Final = "application/problem+json"

# The status and the meaning of each word but those of ``Reason``.
WORDS: Final[Mapping[str, tuple[int, str]]] = {
    "bad_request": (400, "The request is not HTTP that can be read"),
    "no_token": (401, "The request has no token, or one that is not known"),
    "not_allowed": (403, "The token does not have the right that this takes"),
    "foreign_origin": (403, "The request comes from a web page of somebody else"),
    "stale_form": (403, "The form is not one of this session"),
    "not_found": (404, "There is no such resource"),
    "unknown_id": (
        404,
        "No message is known by this id: never scheduled, or forgotten; of a handle: delivered or moved, too",
    ),
    "wrong_method": (405, "The resource does not take this method"),
    "too_slow": (408, "The request did not come in time"),
    "id_in_use": (409, "Another message waits with this id"),
    "too_late": (409, "The message does not wait any more"),
    "version_differs": (412, "The message that waits is not the version that If-Match names"),
    "count_differs": (412, "The filter matches another number of messages or dead letters than expected"),
    "body_too_long": (413, "The body is longer than allowed"),
    "wrong_content_type": (415, "The body has another content type, or coding, than this takes"),
    "wrong_host": (421, "The Host header names no host of this server"),
    "bad_parameter": (422, "A parameter, or a field of the body, has a value that it does not take"),
    "bad_gzip": (422, "The body is not gzip, although it says so"),
    "key_reused": (422, "The Idempotency-Key came with another body before"),
    "lines_refused": (422, "Some lines are refused, and nothing is stored"),
    "rate_exceeded": (429, "The token has made too many requests, or the address sent too many that are not known"),
    "head_too_long": (431, "The head of the request is longer than allowed"),
    "internal": (500, "The server has failed"),
    "store_error": (500, "Redis answered with an error"),
    "busy": (503, "The server has as much to do as it takes on"),
    "store_away": (503, "Redis does not answer"),
    "took_too_long": (503, "Redis answers, but this took too long; what was to be changed may be, or a part of it"),
    "cold_away": (503, "The message waits in a cold file, which can't be read now, or not by this server"),
    "store_full": (503, "Redis has no memory left; nothing is stored"),
}
RETRY_AFTER_SEC: Final = {
    "rate_exceeded": 1,
    "busy": 1,
    "store_away": 2,
    "took_too_long": 10,
    "cold_away": 10,
    "store_full": 10,
}
TOO_LONG: Final = frozenset((Reason.LINE_TOO_LONG, Reason.MESSAGE_TOO_LONG))


class Problem(Exception):
    """An answer that is an error; raise it anywhere while a request is handled.

    Args:
        word: one of ``WORDS``, or a ``Reason``.

        detail: one sentence about this case.

        members: further members of the body.

        headers: of the answer.

        closes: whether the connection ends with it, because the rest of the request is not read.
    """

    def __init__(
        self, word: str, detail: str, *, headers: Mapping[str, str] | None = None, closes: bool = False, **members: Any
    ) -> None:
        super().__init__(detail)
        self.word = word
        self.status, self.title = meaning_of(word)
        self.detail = detail
        self.members = members
        self.headers = dict(headers or {})
        if word in RETRY_AFTER_SEC:
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_SEC[word]))
        if closes:
            self.headers["Connection"] = "close"

    @classmethod
    def of(cls, rejection: Rejection) -> "Problem":
        """Return the problem of a request that breaks a rule."""
        return cls(rejection.reason, rejection.detail)

    def body(self) -> bytes:
        """Return it as JSON."""
        record = {
            "type": f"/problems/{self.word}",
            "title": self.title,
            "status": self.status,
            "reason": self.word,
            "detail": self.detail,
            **self.members,
        }
        return msgspec.json.encode(record)


def meaning_of(word: str) -> tuple[int, str]:
    """Return the status and the title of a word.

    Raises:
        KeyError: there is no such word.
    """
    if word in WORDS:
        return WORDS[word]
    if word not in set(Reason):
        raise KeyError(word)
    return 413 if word in TOO_LONG else 422, f"The request breaks a rule: {word.replace('_', ' ')}"


def raw_answer(word: str, detail: str) -> bytes:
    """Return a whole HTTP answer, after which the connection ends, for where no request could be read."""
    problem = Problem(word, detail, closes=True)
    body = problem.body()
    lines = [
        f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}",
        f"content-type: {MEDIA_TYPE}",
        f"content-length: {len(body)}",
        *(f"{name.lower()}: {value}" for name, value in problem.headers.items()),
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body
