"""What a program asks for, and what it is told."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from pipeline.core.due import DELAY_SEC_MAX, EPOCH_MS_MIN, due_ms_of_time, time_of_ms
from pipeline.core.errors import RequestRefused
from pipeline.core.messages import DEFAULT_TOPIC, Message, Reason, Rejection
from pipeline.core.validation import ID_PATTERN, MESSAGE_BYTES_MAX, TOPIC_PATTERN, validate_request
from pipeline.store.base import State

_is_id: Final = re.compile(ID_PATTERN).fullmatch
_is_topic: Final = re.compile(TOPIC_PATTERN).fullmatch

Delay = float | timedelta  # seconds
Due = datetime | str | int  # with a zone; ISO 8601 with a zone; epoch ms UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A message to schedule; give exactly one of ``delay`` and ``due``.

    Args:
        message: what is delivered, 1 byte to 256 KiB of UTF-8.

        delay: seconds from now on, or a ``timedelta``.

        due: a time with a zone, ISO 8601 text with a zone, or epoch ms.

        id: idempotency key: further requests with it are not stored, until 24 hours after the delivery.
    """

    message: str = field(kw_only=False)
    delay: Delay | None = None
    due: Due | None = None
    id: str = ""
    topic: str = DEFAULT_TOPIC
    headers: Mapping[str, str] = field(default_factory=dict)

    def checked(self, arrival_ms: int) -> Message:
        """Return the message that it asks for.

        Raises:
            RequestRefused: it breaks a rule.
        """
        if self._is_usual():
            return Message(arrival_ms + int(self.delay) * 1_000, self.message, self.topic, self.id)  # type: ignore[arg-type]
        fields: dict[str, object] = {"message": self.message, "topic": self.topic}
        fields |= {"id": self.id} if self.id else {}
        fields |= {"headers": {**self.headers}} if self.headers else {}
        if self.delay is not None:
            is_span = isinstance(self.delay, timedelta)
            fields["delay_sec"] = self.delay / timedelta(seconds=1) if is_span else self.delay  # type: ignore[operator]
        if self.due is not None:
            fields["due"] = _unmistakable(due_ms_of(self.due)) if isinstance(self.due, datetime) else self.due
        judged = validate_request(fields, arrival_ms)
        if isinstance(judged, Rejection):
            raise RequestRefused(judged.reason, judged.detail)
        assert isinstance(judged, Message)  # there is no field cancel or replace
        return judged

    def _is_usual(self) -> bool:
        """Say whether it keeps all rules for sure; what is longer or has more goes to the reference, which says what is wrong."""
        return (
            type(self.delay) is int
            and 0 <= self.delay <= DELAY_SEC_MAX
            and self.due is None
            and type(self.message) is str
            and 0 < len(self.message) <= MESSAGE_BYTES_MAX
            and self.message.isascii()
            and (self.id == "" or (type(self.id) is str and _is_id(self.id) is not None))
            and (self.topic == DEFAULT_TOPIC or (type(self.topic) is str and _is_topic(self.topic) is not None))
            and not self.headers
        )


def due_ms_of(due: Due) -> int:
    """Return epoch ms of a time.

    Raises:
        RequestRefused: it has no zone, or is no time.
    """
    if isinstance(due, datetime):
        if due.tzinfo is None:
            raise RequestRefused(Reason.DUE_WITHOUT_ZONE, f"The time {due} has no zone; add tzinfo, such as UTC.")
        return due_ms_of_time(due)
    # By the rules of requests, which know what a number or a text can mean.
    return Request("-", due=due).checked(0).due_ms


def _unmistakable(due_ms: int) -> int | str:
    """Return a due time as a request has it: a small number would be taken for seconds."""
    return time_of_ms(due_ms).isoformat() if 0 <= due_ms < EPOCH_MS_MIN else due_ms


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a request.

    Args:
        id: names the message from now on: its idempotency key, else a handle. A handle is good until something moves the message.

        due_ms: when the message is due that is stored; of a duplicate that waits no longer, what was asked for.

        state: where the message is that is stored.

        is_duplicate: whether its idempotency key was known, so that nothing was stored.

        message: the one that waits; None if that of a duplicate waits no longer.
    """

    id: str
    due_ms: int
    state: State
    is_duplicate: bool
    message: Message | None

    @property
    def due(self) -> datetime:
        """``due_ms`` as a time in UTC."""
        return time_of_ms(self.due_ms)
