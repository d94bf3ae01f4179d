"""Dead letters: list them, schedule them again, drop them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from starlette.responses import Response

from pipeline.config import check_name
from pipeline.core.errors import ConfigError
from pipeline.core.text import span_ms
from pipeline.store.dead_letters import DeadLetters, read_name
from pipeline.store.entries import DeadLetter
from pipeline.store.topics import Topics
from pipeline.web.api import Api
from pipeline.web.call import Call, answer
from pipeline.web.problems import Problem

PAGE, PAGE_MAX = 100, 500  # letters that a listing returns
SCANNED_MAX: Final = 10_000  # letters that one request looks at
PAGE_BYTES: Final = 4 * 1024 * 1024  # of message bodies, after which a page is full
NAMES_MAX: Final = 1_000
FILTERS: Final = ("topic", "group", "reason", "older_than")
CONTENT: Final = frozenset({"message", "headers", "detail"})  # what is not shown where messages are not

Act = Callable[[DeadLetters, DeadLetter, int], bool]  # at this time, epoch ms; whether it was done


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters are meant; "" and 0 leave all."""

    topic: str
    group: str
    reason: str
    older_ms: int

    @classmethod
    def of(cls, given: dict[str, str]) -> "Filter":
        """Read it from its texts.

        Raises:
            Problem: ``bad_parameter``.
        """
        age = given.get("older_than", "")
        older_ms = span_ms(age) if age else 0
        if older_ms is None:
            raise Problem("bad_parameter", f"An age is a number and s, m, h or d, such as 15m, not {age[:80]!r}.")
        try:
            topic = check_name("topic", given["topic"]) if given.get("topic") else ""
        except ConfigError as exc:
            raise Problem("bad_parameter", str(exc)) from exc
        return cls(topic, given.get("group", ""), given.get("reason", ""), older_ms)

    def takes(self, letter: DeadLetter, now_ms: int) -> bool:
        """Say whether a letter is meant."""
        return (
            self.group in ("", letter.group)
            and self.reason in ("", letter.reason)
            and (self.older_ms == 0 or now_ms - letter.died_ms > self.older_ms)
        )


def _walk(api: Api, filter_: Filter, after: tuple[str, int, str] | None = None) -> Iterator[DeadLetter]:
    """Walk the letters of all topics, or of one, behind a place."""
    letters = DeadLetters(api.client, api.shards)
    return letters.of_topics([filter_.topic] if filter_.topic else letters.topics(), after)


async def list_page(api: Api, call: Call) -> Response:
    """Return dead letters, the oldest of each topic first, and a cursor if there may be more."""
    given = call.parameters(*FILTERS, "limit", "cursor")
    limit, cursor = given.number("limit", PAGE, 1, PAGE_MAX), given.text("cursor")
    filter_ = Filter.of({name: given.text(name) for name in FILTERS})
    after = read_name(cursor)
    if cursor and after is None:
        raise Problem("bad_parameter", "The parameter cursor takes what the page before has as its cursor.")

    found, last = await api.ask(lambda: read_page(api, filter_, limit, after))
    record: dict[str, Any] = {"letters": [_listed(api, letter) for letter in found]}
    if last:
        record["cursor"] = last.name
    return answer(record)


def _listed(api: Api, letter: DeadLetter) -> dict[str, Any]:
    record = {"name": letter.name, **letter.to_record()}
    return record if api.settings.api.show_messages else {key: record[key] for key in record.keys() - CONTENT}


def read_page(
    api: Api, filter_: Filter, limit: int, after: tuple[str, int, str] | None
) -> tuple[list[DeadLetter], DeadLetter | None]:
    """Return dead letters behind a place, and the last one that was looked at, None at the end.

    Raises:
        StoreError: no answer, or an error.
    """
    now_ms, size = Topics(api.client, api.shards).now_ms(), 0
    found: list[DeadLetter] = []
    for scanned, letter in enumerate(islice(_walk(api, filter_, after), SCANNED_MAX), start=1):
        if filter_.takes(letter, now_ms):
            found.append(letter)
            size += len(letter.body)
        if len(found) == limit or size >= PAGE_BYTES or scanned == SCANNED_MAX:
            return found, letter
    return found, None


def count(api: Api, filter_: Filter) -> tuple[int, bool]:
    """Return how many of the letters that one request looks at are meant, and whether there may be more.

    Raises:
        StoreError: no answer, or an error.
    """
    topics = Topics(api.client, api.shards)
    if not (filter_.group or filter_.reason or filter_.older_ms):
        names = [filter_.topic] if filter_.topic else DeadLetters(api.client, api.shards).topics()
        total = sum(info.dead for info in topics.look_many(names))
        return min(total, SCANNED_MAX), total > SCANNED_MAX
    now_ms = topics.now_ms()
    meant = [filter_.takes(letter, now_ms) for letter in islice(_walk(api, filter_), SCANNED_MAX + 1)]
    return sum(meant[:SCANNED_MAX]), len(meant) > SCANNED_MAX


def redrive_letter(letters: DeadLetters, letter: DeadLetter, now_ms: int) -> bool:
    """Schedule a letter again."""
    return letters.redrive(letter, now_ms)


def purge_letter(letters: DeadLetters, letter: DeadLetter, now_ms: int) -> bool:
    """Drop a letter."""
    return letters.purge(letter)


async def redrive(api: Api, call: Call) -> Response:
    """Schedule dead letters again, as due now and never tried."""
    return await _answer_change(api, call, "redriven", redrive_letter)


async def purge(api: Api, call: Call) -> Response:
    """Drop dead letters for good."""
    return await _answer_change(api, call, "purged", purge_letter)


async def _answer_change(api: Api, call: Call, done: str, act: Act) -> Response:
    """Do something to the letters that the body names, or to those that its filter takes."""
    call.parameters()
    fields = await call.fields("names", *FILTERS, "all", "expect")
    is_expected = "expect" in fields
    expected = fields.pop("expect", None)
    if is_expected and (type(expected) is not int or not 0 <= expected <= SCANNED_MAX):
        raise Problem("bad_parameter", f"The field expect takes 0 to {SCANNED_MAX}.")
    names, filter_ = _chosen(fields)
    number, has_more = await change(api, names, filter_, expected, act)
    return answer({done: number, "has_more": has_more})


async def change(
    api: Api, names: Sequence[str], filter_: Filter | None, expected: int | None, act: Act
) -> tuple[int, bool]:
    """Do something to the letters of some names, or, with a filter, to those that it takes of the first ``SCANNED_MAX``.

    Returns:
        To how many, and whether there may be more.
    Raises:
        Problem: ``count_differs``: it is another number than expected.
        StoreError, TimeoutError: no answer, or an error: it may be done to some.
    """
    count = 0

    def work() -> tuple[int, bool]:
        nonlocal count
        letters = DeadLetters(api.client, api.shards)
        now_ms = Topics(api.client, api.shards).now_ms()

        def walk() -> Iterator[DeadLetter | None]:
            """Yield what is meant, and at last None if there may be more."""
            if filter_ is None:
                yield from (letter for name in names if (letter := letters.find(name)))
                return
            for scanned, letter in enumerate(_walk(api, filter_)):
                if scanned == SCANNED_MAX:
                    yield None
                    return
                if filter_.takes(letter, now_ms):
                    yield letter

        if expected is not None and count == 0:
            found = sum(1 for _ in walk())
            if found != expected:
                raise Problem("count_differs", f"It is {found}, not {expected}; nothing is changed.", count=found)
        has_more = False
        for letter in walk():
            if letter is None:
                has_more = True
            else:
                count += act(letters, letter, now_ms)
        return count, has_more

    return await api.ask(work)


def _chosen(fields: dict[str, Any]) -> tuple[list[str], Filter | None]:
    """Return the names of letters, or else a filter."""
    has_names = "names" in fields
    names = fields.pop("names", None)
    takes_all = fields.pop("all", False)
    if not isinstance(takes_all, bool) or not all(isinstance(value, str) for value in fields.values()):
        raise Problem("bad_parameter", "The fields of a filter are strings, and all is true or false.")
    if has_names:
        if fields or takes_all:
            raise Problem("bad_parameter", "Give names or a filter, not both.")
        if not isinstance(names, list) or len(names) > NAMES_MAX or not all(isinstance(name, str) for name in names):
            raise Problem(
                "bad_parameter", f"The field names takes a list of at most {NAMES_MAX} names of dead letters."
            )
        return names, None
    if not any(fields.values()) and not takes_all:
        raise Problem("bad_parameter", "Say which: names, a filter, or all.")
    return [], Filter.of(fields)
