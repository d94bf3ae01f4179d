"""One URL that messages are posted to, and what its answers mean."""

from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NoReturn

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, LocationValueError, SSLError

from pipeline.config import TopicSettings
from pipeline.consume.handling import Gone, RetryLater, TargetDown
from pipeline.core.clock import Clock
from pipeline.core.messages import Message
from pipeline.core.text import visible
from pipeline.webhooks.requests import body_of, headers_of

READ_BYTES_MAX = 65_536  # of an answer; with more, its connection is not used again
SHOWN_BYTES = 300  # of an answer that is no success, for the dead letter
GONE, BUSY, UNAVAILABLE = 410, 429, 503


class Target:
    """Posts messages to one URL, over connections that stay open. Threads share one.

    Args:
        settings: of the topic; its ``webhook`` is the URL.

        secrets: that sign what is posted.
    """

    def __init__(self, settings: TopicSettings, secrets: Sequence[bytes], clock: Clock) -> None:
        self._url, self._format = settings.webhook, settings.webhook_format
        self._shown = self._url.partition("?")[0]  # what follows may be a password
        self._secrets = secrets
        self._clock = clock
        self._timeout_ms = settings.webhook_timeout_sec * 1000
        self._wait_sec_max = settings.backoff_ms_max / 1000
        timeout = urllib3.Timeout(connect=settings.webhook_timeout_sec, read=settings.webhook_timeout_sec)
        # Certificates are verified by default.
        self._pools = urllib3.PoolManager(1, maxsize=settings.webhook_concurrency, retries=False, timeout=timeout)

    def post(self, message: Message) -> None:
        """Post a message; returns if the target has taken it.

        Raises:
            Gone: it never will, as it says.
            RetryLater: it failed, perhaps because of the message.
            TargetDown: there was no connection, or the target wants to be left in peace.
        """
        body = body_of(message, self._format)
        headers = headers_of(message, body, self._clock.wall_ms() // 1000, self._secrets, self._format)
        try:
            answer = self._pools.request(
                *("POST", self._url),
                body=body,
                headers=headers,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
        except (
            ConnectTimeoutError,
            SSLError,
            LocationValueError,
        ) as exc:  # the second is also of a name or a connection
            raise TargetDown(f"no connection to {self._shown}: {_why(exc)}") from exc
        except (HTTPError, OSError, ValueError) as exc:
            raise RetryLater(None, f"no answer from {self._shown}: {_why(exc)}") from exc
        start = self._read(answer)
        if not 200 <= answer.status < 300:
            self._fail(answer.status, answer.headers.get("retry-after", ""), start)

    def _fail(self, status: int, retry_after: str, start: bytes) -> NoReturn:
        said = visible(start[:SHOWN_BYTES].decode("utf-8", "replace"))
        text = f"HTTP {status} from {self._shown}{': ' if said else ''}{said}"
        after_sec = wait_sec_of(retry_after, self._clock.wall_ms())
        if after_sec is not None:
            after_sec = min(after_sec, self._wait_sec_max)
        if status == BUSY or (status == UNAVAILABLE and after_sec is not None):
            raise TargetDown(text, after_sec)
        if status == GONE:
            raise Gone(text)
        raise RetryLater(after_sec, text)

    def _read(self, answer: urllib3.BaseHTTPResponse) -> bytes:
        """Return the start of an answer. Its status is known, so nothing that goes wrong here matters any more."""
        end_ms, found = self._clock.monotonic_ms() + self._timeout_ms, b""
        try:
            while len(found) < READ_BYTES_MAX and self._clock.monotonic_ms() < end_ms:
                piece = answer.read1(READ_BYTES_MAX)
                found += piece
                if not piece:
                    answer.release_conn()
                    return found
        except (HTTPError, OSError, ValueError):
            pass
        answer.close()
        return found


def wait_sec_of(retry_after: str, now_ms: int) -> float | None:
    """Return what a ``Retry-After`` says, seconds or a date, in seconds from now; None if it says nothing that can be read."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after[:9])
    try:
        moment = parsedate_to_datetime(retry_after)
    except (ValueError, TypeError, IndexError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.fromtimestamp(now_ms / 1000, UTC)).total_seconds())


def _why(exc: Exception) -> str:
    """Return what happened without the client's names of its own objects."""
    cause = exc.__cause__ or exc.__context__ or exc
    return visible(str(cause) or type(cause).__name__)
