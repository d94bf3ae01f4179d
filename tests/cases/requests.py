"""Every rule of a request, accepted and refused, edges first: run through the reference and through the parsing of files."""

from dataclasses import dataclass
from typing import Final

from pipeline.core.messages import Cancellation, Message, Reason, Replacement
from pipeline.core.validation import MESSAGE_BYTES_MAX, REQUEST_BYTES_MAX, Kind

ARRIVAL_MS: Final = 1_700_000_000_123
DAY_MS: Final = 86_400_000
DUE_MS: Final = 1_700_000_000_005  # of every line whose due time does not matter

Expected = Message | Replacement | Cancellation | Reason | None


@dataclass(frozen=True, slots=True)
class Case:
    """One line and what becomes of it; ``expected`` None is a blank line."""

    name: str
    line: bytes
    expected: Expected
    kind: Kind = "json"
    header: str | None = None
    arrival_ms: int = ARRIVAL_MS


def _bytes(line: str | bytes) -> bytes:
    return line if isinstance(line, bytes) else line.encode()


def _json(name: str, line: str | bytes, expected: Expected) -> Case:
    return Case(name, _bytes(line), expected)


def _due(name: str, value: str, expected: int | Reason) -> Case:
    """A JSON line whose only variable is the value of due."""
    wanted = Message(expected, "m") if isinstance(expected, int) else expected
    return _json(f"due {name}", f'{{"message":"m","due":{value}}}', wanted)


def _delay(name: str, value: str, expected_ms: int | Reason, field: str = "delay_sec") -> Case:
    wanted = Message(ARRIVAL_MS + expected_ms, "m") if isinstance(expected_ms, int) else expected_ms
    return _json(f"{field} {name}", f'{{"message":"m","{field}":{value}}}', wanted)


def _message(name: str, value: str, expected: str | Reason) -> Case:
    wanted = Message(DUE_MS, expected) if type(expected) is str else expected
    return _json(f"message {name}", f'{{"message":{value},"due":1700000000005}}', wanted)


def _field(name: str, text: str, expected: Expected) -> Case:
    """A valid line with one more field."""
    return _json(name, f'{{"message":"m","due":1700000000005,{text}}}', expected)


def _csv(name: str, header: str, row: str, expected: Expected) -> Case:
    return Case(f"csv {name}", _bytes(row), expected, "csv", header)


PLAIN: Final = Message(DUE_MS, "m")

_LINES: Final = [
    _json("an object with nothing around it", '{"message":"m","due":1700000000005}', PLAIN),
    _json("JSON whitespace everywhere", ' \t{ "message" : "m" ,\t"due" : 1700000000005 } \t', PLAIN),
    _json("fields in another order", '{"due":1700000000005,"message":"m"}', PLAIN),
    _json("a name written with escapes", '{"\\u006dessage":"m","due":1700000000005}', PLAIN),
    _json("empty line", "", None),
    _json("blanks only", " \t\r ", None),
    _json("a vertical tab is not blank", "\x0b", Reason.NOT_JSON),
    _json("a no-break space is not blank", "\u00a0", Reason.NOT_JSON),
    _json("an em space before the object", '\u2003{"message":"m","due":1700000000005}', Reason.NOT_JSON),
    _json("a NUL after the object", '{"message":"m","due":1700000000005}\0', Reason.TRAILING_TEXT),
    _json("a NUL alone", "\0", Reason.NOT_JSON),
    _json("a byte order mark that starts no file", '\ufeff{"message":"m","due":1700000000005}', Reason.NOT_JSON),
    _json("garbage", "hello", Reason.NOT_JSON),
    _json("half an object", '{"message":"m","due":1700000000005', Reason.NOT_JSON),
    _json("a text that takes in what follows", '"{', Reason.NOT_JSON),
    _json("single quotes", "{'message':'m','due':1700000000005}", Reason.NOT_JSON),
    _json("trailing comma", '{"message":"m","due":1700000000005,}', Reason.NOT_JSON),
    _json("a comment", '{"message":"m",/*x*/"due":1700000000005}', Reason.NOT_JSON),
    _json("a line comment", '{"message":"m","due":1700000000005}// x', Reason.TRAILING_TEXT),
    _json("bare names", '{message:"m",due:1700000000005}', Reason.NOT_JSON),
    _json("a raw tab in a text", '{"message":"a\tb","due":1700000000005}', Reason.NOT_JSON),
    _json("an unknown escape", '{"message":"\\x41","due":1700000000005}', Reason.NOT_JSON),
    _json("a short escape", '{"message":"\\u12","due":1700000000005}', Reason.NOT_JSON),
    _json("text after the object", '{"message":"m","due":1700000000005} junk', Reason.TRAILING_TEXT),
    _json(
        "two objects", '{"message":"m","due":1700000000005}{"message":"n","due":1700000000005}', Reason.TRAILING_TEXT
    ),
    _json(
        "two objects with a comma",
        '{"message":"m","due":1700000000005},{"message":"n"}',
        Reason.TRAILING_TEXT,
    ),
    _json("a bracket too many", '{"message":"m","due":1700000000005}]', Reason.TRAILING_TEXT),
    _json("a brace too many", '{"message":"m","due":1700000000005}}', Reason.TRAILING_TEXT),
    _json("a brace too many and junk", '{"message":"m","due":1700000000005}} junk', Reason.TRAILING_TEXT),
    _json("a comma too many", '{"message":"m","due":1700000000005},', Reason.TRAILING_TEXT),
    _json("a guard of one's own", '{"message":"m","due":1700000000005},"guard":1} junk', Reason.TRAILING_TEXT),
    _json(
        "a guard written with escapes",
        '{"message":"m","due":1700000000005},"\\u0067uard":1} junk',
        Reason.TRAILING_TEXT,
    ),
    _json(
        "a message that names the guard",
        '{"message":"\\"guard\\":1}","due":1700000000005}',
        Message(DUE_MS, '"guard":1}'),
    ),
    _json("an array", '[{"message":"m","due":1700000000005}]', Reason.NOT_AN_OBJECT),
    _json("a text", '"message"', Reason.NOT_AN_OBJECT),
    _json("null", "null", Reason.NOT_AN_OBJECT),
    _json("an empty object", "{}", Reason.MISSING_MESSAGE),
    _json("1500 nested arrays", "[" * 1500 + "]" * 1500, Reason.TOO_DEEP),
    _json(
        "a field of 900 nested arrays", '{"message":' + "[" * 900 + "]" * 900 + ',"due":1700000000005}', Reason.TOO_DEEP
    ),
    _json(
        "a field of 60 nested arrays", '{"message":' + "[" * 60 + "]" * 60 + ',"due":1700000000005}', Reason.WRONG_TYPE
    ),
    _json("a field of 200 arrays in a row", '{"message":[' + "[]," * 200 + '1],"due":1700000000005}', Reason.TOO_DEEP),
    _json("60 nested objects", '{"a":' * 60 + "1" + "}" * 60, Reason.UNKNOWN_FIELD),
    _json("a million brackets", "[" * 1_000_000, Reason.TOO_DEEP),
    _json(
        "a million brackets in a text",
        '{"message":"' + "[" * 200_000 + '","due":1700000000005}',
        Message(DUE_MS, "[" * 200_000),
    ),
    _json(
        "a million backslashes",
        '{"message":"' + "{" * 70 + "\\\\" * 1_000_000 + '","due":1700000000005}',
        Reason.MESSAGE_TOO_LONG,
    ),
    _json("900 nested objects", '{"a":' * 900 + "1" + "}" * 900, Reason.TOO_DEEP),
    _json("980 nested objects", '{"message":' * 980 + "1" + "}" * 980, Reason.TOO_DEEP),
    _json(
        "nested headers",
        '{"message":"m","due":1700000000005,"headers":' + '{"a":' * 900 + "1" + "}" * 901,
        Reason.TOO_DEEP,
    ),
    _json(
        "many brackets in the message",
        '{"message":"' + '[{\\"' * 900 + '","due":1700000000005}',
        Message(DUE_MS, '[{"' * 900),
    ),
    _json(
        "many brackets and headers",
        '{"message":"' + "[{" * 99 + '","due":1700000000005,"headers":{"[":"{"}}',
        Message(DUE_MS, "[{" * 99, headers={"[": "{"}),
    ),
    _json("the same field twice", '{"message":"m","message":"m","due":1700000000005}', Reason.DUPLICATE_KEY),
    _json("twice with escapes", '{"message":"m","\\u006dessage":"m","due":1700000000005}', Reason.DUPLICATE_KEY),
    _json(
        "the same header twice", '{"message":"m","due":1700000000005,"headers":{"a":"1","a":"1"}}', Reason.DUPLICATE_KEY
    ),
    _json("not UTF-8", b'{"message":"\xff","due":1700000000005}', Reason.NOT_UTF8),
    _json("half a character", b'{"message":"\xe2\x82","due":1700000000005}', Reason.NOT_UTF8),
    _json("half a character before a line end", b'{"message":"m","due":1700000000005}\xc3', Reason.NOT_UTF8),
    _json("a surrogate in UTF-8", b'{"message":"\xed\xa0\x80","due":1700000000005}', Reason.NOT_UTF8),
    _json("an overlong form", b'{"message":"\xc0\xaf","due":1700000000005}', Reason.NOT_UTF8),
    _json("a code beyond Unicode", b'{"message":"\xf4\x90\x80\x80","due":1700000000005}', Reason.NOT_UTF8),
    _json("the longest line", '{"message":"m","due":1700000000005}'.ljust(REQUEST_BYTES_MAX), PLAIN),
    _json("a longer line", '{"message":"m","due":1700000000005}'.ljust(REQUEST_BYTES_MAX + 1), Reason.LINE_TOO_LONG),
    _json("a long blank line", " " * (REQUEST_BYTES_MAX + 1), Reason.LINE_TOO_LONG),
    _field("an unknown field", '"note":"x"', Reason.UNKNOWN_FIELD),
    _field("an unknown field beside headers", '"headers":{"a":"b"},"hello":{"x":"y"}', Reason.UNKNOWN_FIELD),
    _field("an unknown field of the headers' type", '"headers":{"a":"b"},"hello":{"a":"b"}', Reason.UNKNOWN_FIELD),
    _field("a name in capitals", '"Topic":"t"', Reason.UNKNOWN_FIELD),
    _field("an empty name", '"":"t"', Reason.UNKNOWN_FIELD),
    _field("a name that imitates a schema", '"id: STRING, message":"t"', Reason.UNKNOWN_FIELD),
]

_MESSAGES: Final = [
    _json("no message", '{"due":1700000000005}', Reason.MISSING_MESSAGE),
    _message("empty", '""', Reason.EMPTY_MESSAGE),
    _message("of one space", '" "', " "),
    _message("with escapes", r'"a\n\t\"\\\/\u0000\u001f\u00e9\ud83d\ude00"', 'a\n\t"\\/\0\x1fé😀'),
    _message("beyond ASCII", '"é\u2028😀\x7f\ufeff\ufffd"', "é\u2028😀\x7f\ufeff\ufffd"),
    _message("of a noncharacter", '"\uffff"', "\uffff"),
    _message("that looks like a number", '"1"', "1"),
    _message("with half a pair", r'"\ud800"', Reason.NOT_JSON),
    _message("with a pair reversed", r'"\ude00\ud83d"', Reason.NOT_JSON),
    _message("of the greatest size", f'"{"é" * (MESSAGE_BYTES_MAX // 2)}"', "é" * (MESSAGE_BYTES_MAX // 2)),
    _message("a byte longer", f'"{"é" * (MESSAGE_BYTES_MAX // 2)}a"', Reason.MESSAGE_TOO_LONG),
    *[_message(f"of {value}", value, Reason.WRONG_TYPE) for value in ("1", "1.5", "true", "null", '["m"]', '{"a":1}')],
]

_DELAYS: Final = [
    _delay("zero", "0", 0),
    _delay("minus zero", "-0", 0),
    _delay("minus zero with a fraction", "-0.0", 0),
    _delay("whole", "10", 10_000),
    _delay("of a fraction", "1.5", 1_500),
    _delay("of a millisecond", "0.001", 1),
    _delay("of less than a millisecond", "0.0001", 1),
    _delay("of a microsecond more", "1.000001", 1_001),
    _delay("of less than half a microsecond more", "1.0000004", 1_000),
    _delay("of half a microsecond more", "1.0000005", 1_001),
    _delay("just below half a microsecond more", "1.00000049999999999999", 1_000),
    _delay("of 0.1 + 0.2", "0.30000000000000004", 300),
    _delay("with an exponent", "1e2", 100_000),
    _delay("with a big exponent and a small number", "25E-1", 2_500),
    _delay("with an exponent, half a microsecond more", "10.000005e-1", 1_001),
    _delay("that vanishes", "1e-400", 0),
    _delay("below zero that vanishes", "-1e-400", 0),
    _delay("of 60 digits", "1." + "0" * 59 + "1", 1_000),
    _delay("of many zeros", "1." + "0" * 500, 1_000),
    _delay("of 366 days", "31622400", 366 * DAY_MS),
    _delay("of 366 days with an exponent", "3.16224e7", 366 * DAY_MS),
    _delay("of 366 days and a millisecond", "31622400.001", Reason.DELAY_OUT_OF_RANGE),
    _delay("of 366 days and a hundred nanoseconds", "31622400.0000001", Reason.DELAY_OUT_OF_RANGE),
    _delay("of 366 days and a second", "31622401", Reason.DELAY_OUT_OF_RANGE),
    _delay("below zero", "-1", Reason.DELAY_OUT_OF_RANGE),
    _delay("a little below zero", "-0.0000001", Reason.DELAY_OUT_OF_RANGE),
    _delay("of 20 digits", "1" * 20, Reason.DELAY_OUT_OF_RANGE),
    _delay("of 400 digits", "1" * 400, Reason.DELAY_OUT_OF_RANGE),
    _delay("of 1000 digits behind the point", "0." + "0" * 999 + "1", 0),
    _delay("of 1001 digits behind the point", "0." + "0" * 1000 + "1", Reason.NOT_JSON),
    _delay("of 1000 digits", "1." + "0" * 999, 1_000),
    _delay("of 1001 digits", "1." + "0" * 1000, Reason.NOT_JSON),
    _delay("of infinity", "1e400", Reason.DELAY_OUT_OF_RANGE),
    _delay("of a huge exponent", "1e99999999999", Reason.DELAY_OUT_OF_RANGE),
    *[_delay(f"of {value}", value, Reason.WRONG_TYPE) for value in ('"10"', "true", "null", "[1]", '{"s":1}', '""')],
    *[
        _delay(f"of {value}", value, Reason.NOT_JSON)
        for value in ("NaN", "Infinity", "-Infinity", "01", "+1", "1.", ".5", "0x10", "1e", "--1", "1_000", "١")
    ],
    _delay("whole", "10", 10_000, field="countdown"),
    _delay("of a fraction", "0.25", 250, field="countdown"),
    _delay("as text", '"10"', Reason.WRONG_TYPE, field="countdown"),
    _delay("below zero", "-0.5", Reason.DELAY_OUT_OF_RANGE, field="countdown"),
    _json("no due at all", '{"message":"m"}', Reason.MISSING_DUE),
    _json("delay_sec and due", '{"message":"m","delay_sec":1,"due":1700000000005}', Reason.BOTH_DUE),
    _json("delay_sec and countdown", '{"message":"m","delay_sec":1,"countdown":1}', Reason.BOTH_DUE),
    _json("all three", '{"message":"m","delay_sec":1,"countdown":1,"due":1700000000005}', Reason.BOTH_DUE),
]

NEW_YEAR_2026_MS: Final = 1_767_225_600_000

_DUES: Final = [
    _due("of the smallest number of ms", "100000000000", 100_000_000_000),
    *[
        _due(f"in seconds, {value}", value, Reason.DUE_IN_SECONDS)
        for value in ("1795291276", "99999999999", "0", "-0", "5")
    ],
    _due("before the epoch", "-1", Reason.DUE_OUT_OF_RANGE),
    _due("in the last millisecond", "253402300799999", 253_402_300_799_999),
    _due("after the last millisecond", "253402300800000", Reason.DUE_OUT_OF_RANGE),
    _due("beyond what a double holds", "9007199254740993", Reason.DUE_OUT_OF_RANGE),
    _due("of 18 digits", "9" * 18, Reason.DUE_OUT_OF_RANGE),
    _due("of 20 digits", "12345678901234567890", Reason.DUE_OUT_OF_RANGE),
    _due("of 400 digits", "1" * 400, Reason.DUE_OUT_OF_RANGE),
    *[
        _due(f"of {value}", value, Reason.WRONG_TYPE)
        for value in ("1.0", "1e3", "1E3", "0.5", "true", "null", "[5]", "{}")
    ],
    _due("in UTC", '"2026-01-01T00:00:00Z"', NEW_YEAR_2026_MS),
    _due("in small letters", '"2026-01-01t00:00:00z"', NEW_YEAR_2026_MS),
    _due("with a space", '"2026-01-01 00:00:00Z"', NEW_YEAR_2026_MS),
    _due("without seconds", '"2026-01-01T00:00Z"', NEW_YEAR_2026_MS),
    _due("without seconds, with an offset", '"2026-01-01T02:30+0230"', NEW_YEAR_2026_MS),
    _due("with an offset of hours", '"2026-01-01T02:00:00+02"', NEW_YEAR_2026_MS),
    _due("with an offset below zero", '"2025-12-31T18:30:00-05:30"', NEW_YEAR_2026_MS),
    _due("with an offset of minus zero", '"2026-01-01T00:00:00-00:00"', NEW_YEAR_2026_MS),
    _due("with the largest offset", '"2026-01-01T18:00:00+18:00"', NEW_YEAR_2026_MS),
    _due("with the smallest offset", '"2025-12-31T06:00:00-1800"', NEW_YEAR_2026_MS),
    _due("with a larger offset", '"2026-01-01T18:01:00+18:01"', Reason.NOT_A_TIME),
    _due("with an offset of 25 hours", '"2026-01-01T00:00:00+25:00"', Reason.NOT_A_TIME),
    _due("with an offset of 60 minutes", '"2026-01-01T00:00:00+01:60"', Reason.NOT_A_TIME),
    _due("with milliseconds", '"2026-01-01T00:00:00.123Z"', NEW_YEAR_2026_MS + 123),
    _due("with a comma", '"2026-01-01T00:00:00,5+00:00"', NEW_YEAR_2026_MS + 500),
    _due("with microseconds, up", '"2026-01-01T00:00:00.123001Z"', NEW_YEAR_2026_MS + 124),
    _due("with nanoseconds, cut", '"2026-01-01T00:00:00.123000999Z"', NEW_YEAR_2026_MS + 123),
    _due("with ten digits", '"2026-01-01T00:00:00.1234567890Z"', Reason.NOT_A_TIME),
    _due("with a point and no digits", '"2026-01-01T00:00:00.Z"', Reason.NOT_A_TIME),
    _due("with a fraction of minutes", '"2026-01-01T00:00.5Z"', Reason.NOT_A_TIME),
    _due("on a leap day", '"2024-02-29T00:00:00Z"', 1_709_164_800_000),
    _due("on no leap day", '"2026-02-29T00:00:00Z"', Reason.NOT_A_TIME),
    _due("on no leap day of a century", '"2100-02-29T00:00:00Z"', Reason.NOT_A_TIME),
    _due("in month 0", '"2026-00-01T00:00:00Z"', Reason.NOT_A_TIME),
    _due("in month 13", '"2026-13-01T00:00:00Z"', Reason.NOT_A_TIME),
    _due("on day 0", '"2026-01-00T00:00:00Z"', Reason.NOT_A_TIME),
    _due("on April 31", '"2026-04-31T00:00:00Z"', Reason.NOT_A_TIME),
    _due("at hour 24", '"2026-01-01T24:00:00Z"', Reason.NOT_A_TIME),
    _due("at minute 60", '"2026-01-01T00:60:00Z"', Reason.NOT_A_TIME),
    _due("at second 60", '"2026-01-01T00:00:60Z"', Reason.NOT_A_TIME),
    _due("as the epoch in ISO", '"1970-01-01T00:00:00Z"', 0),
    _due("in 1969 there and 1970 here", '"1969-12-31T23:00:00-01:00"', 0),
    _due("in 1970 there and 1969 here", '"1970-01-01T00:00:00+01:00"', Reason.DUE_OUT_OF_RANGE),
    _due("a microsecond before 1970", '"1969-12-31T23:59:59.999999Z"', Reason.DUE_OUT_OF_RANGE),
    _due("in 1900", '"1900-01-01T00:00:00Z"', Reason.DUE_OUT_OF_RANGE),
    _due("in year 1", '"0001-01-01T00:00:00+18:00"', Reason.DUE_OUT_OF_RANGE),
    _due("in year 0", '"0000-01-01T00:00:00Z"', Reason.NOT_A_TIME),
    _due("at the end of 9999", '"9999-12-31T23:59:59.999Z"', 253_402_300_799_999),
    _due("in the last microsecond of 9999", '"9999-12-31T23:59:59.999999Z"', Reason.DUE_OUT_OF_RANGE),
    _due("after 9999 here", '"9999-12-31T23:59:59-01:00"', Reason.DUE_OUT_OF_RANGE),
    _due("in year 10000", '"10000-01-01T00:00:00Z"', Reason.NOT_A_TIME),
    _due("with a sign before the year", '"+2026-01-01T00:00:00Z"', Reason.NOT_A_TIME),
    _due("without a zone", '"2026-01-01T00:00:00"', Reason.DUE_WITHOUT_ZONE),
    _due("without a zone and seconds", '"2026-01-01 00:00"', Reason.DUE_WITHOUT_ZONE),
    *[
        _due(f"of {text!r}", f'"{text}"', Reason.NOT_A_TIME)
        for text in (
            "",
            "soon",
            "2026",
            "2026-01-01",
            "2026-01-01Z",
            "20260101T000000Z",
            "2026-W01-1T00:00:00Z",
            "5",
            "2026-01-01T00:00:00 Z",
            " 2026-01-01T00:00:00Z",
            "2026-01-01T00:00:00Z ",
            "2026-1-1T00:00:00Z",
            "2026-01-01T0:00:00Z",
            "2026-01-01T00:00:00UTC",
            "2026-01-01T00:00:00 Europe/Berlin",
            "2026-01-01T00:00:00+2",
            "2026-01-01T00:00:00+02:0",
            "2026-01-01T00:00:00+020",
            "٢٠٢٦-01-01T00:00:00Z",
            "2026-01-01T00:00:00Z\\n",
            "2026-01-01T00:00:00Z\\u0000",
        )
    ],
]

_OTHERS: Final = [
    _field("an id", '"id":"a"', Message(DUE_MS, "m", id="a")),
    _field("an id of every character", '"id":"Az09._:-"', Message(DUE_MS, "m", id="Az09._:-")),
    _field("the longest id", f'"id":"{"i" * 128}"', Message(DUE_MS, "m", id="i" * 128)),
    _field("a longer id", f'"id":"{"i" * 129}"', Reason.BAD_ID),
    *[
        _field(f"id {text!r}", f'"id":"{text}"', Reason.BAD_ID)
        for text in ("", "a b", "a/b", "é", "a\\n", "\\n", "{a}")
    ],
    *[_field(f"id {value}", f'"id":{value}', Reason.WRONG_TYPE) for value in ("1", "null", "true", '{"x":1}', '["a"]')],
    _field("a topic", '"topic":"t"', Message(DUE_MS, "m", topic="t")),
    _field("the default topic by name", '"topic":"default"', PLAIN),
    _field("the longest topic", f'"topic":"{"t" * 64}"', Message(DUE_MS, "m", topic="t" * 64)),
    _field("a longer topic", f'"topic":"{"t" * 65}"', Reason.BAD_TOPIC),
    *[_field(f"topic {t!r}", f'"topic":"{t}"', Reason.BAD_TOPIC) for t in ("", "a:b", "a b", "*", "{a}", "a\\r", "ä")],
    *[_field(f"topic {value}", f'"topic":{value}', Reason.WRONG_TYPE) for value in ("1", "null", "false", "{}")],
    _field("empty headers", '"headers":{}', PLAIN),
    _field("a header", '"headers":{"a":"b"}', Message(DUE_MS, "m", headers={"a": "b"})),
    _field("an empty header", '"headers":{"":""}', Message(DUE_MS, "m", headers={"": ""})),
    _field(
        "headers named after fields",
        '"headers":{"id":"1","due":"2"}',
        Message(DUE_MS, "m", headers={"due": "2", "id": "1"}),
    ),
    _field(
        "headers with odd names",
        r'"headers":{"a b":"1","c`d":"2",": STRING>, id: STRING":"3","é😀":"4","\uffff":"5","\u0001\"\\":"\u001f\n","`":"6"}',
        Message(
            DUE_MS,
            "m",
            headers={
                "a b": "1",
                "c`d": "2",
                ": STRING>, id: STRING": "3",
                "é😀": "4",
                "\uffff": "5",
                '\x01"\\': "\x1f\n",
                "`": "6",
            },
        ),
    ),
    _field("headers that look like numbers", '"headers":{"1":"2"}', Message(DUE_MS, "m", headers={"1": "2"})),
    _field(
        "everything at once",
        '"id":"i","topic":"t","headers":{"b":"2","a":"1"}',
        Message(DUE_MS, "m", "t", "i", {"a": "1", "b": "2"}),
    ),
    _field(
        "a header's name of 50000",
        f'"headers":{{"{"k" * 50_000}":""}}',
        Message(DUE_MS, "m", headers={"k" * 50_000: ""}),
    ),
    _field("a header's name of 50001", f'"headers":{{"{"k" * 50_001}":""}}', Reason.NOT_JSON),
    _field("a header with half a pair", r'"headers":{"a":"\udc00"}', Reason.NOT_JSON),
    _field("a header's name with half a pair", r'"headers":{"\udc00":"a"}', Reason.NOT_JSON),
    *[
        _field(f"header {value}", f'"headers":{{"a":"b","c":{value}}}', Reason.BAD_HEADERS)
        for value in ("1", "null", "true", "{}", '["a"]', '{"a":"b"}')
    ],
    *[
        _field(f"headers {value}", f'"headers":{value}', Reason.BAD_HEADERS)
        for value in ("1", "null", '"a"', "[]", '[{"a":"b"}]')
    ],
]

REPLACEMENT: Final = Replacement(Message(DUE_MS, "m", id="a"))
_NOT_ALONE: Final = Reason.CANCEL_NOT_ALONE

_CHANGES: Final = [
    _field("a replacement", '"id":"a","replace":true', REPLACEMENT),
    _json(
        "a replacement with everything",
        '{"replace":true,"id":"a","due":1700000000005,"message":"m","topic":"t","headers":{"a":"b"}}',
        Replacement(Message(DUE_MS, "m", "t", "a", {"a": "b"})),
    ),
    _json("a replacement with a delay", '{"message":"m","delay_sec":1,"id":"a","replace":true}',
          Replacement(Message(ARRIVAL_MS + 1_000, "m", id="a"))),
    _field("no replacement, with an id", '"id":"a","replace":false', Message(DUE_MS, "m", id="a")),
    _field("no replacement, without an id", '"replace":false', PLAIN),
    _field("a replacement without an id", '"replace":true', Reason.REPLACE_WITHOUT_ID),
    _field("a replacement with a bad id", '"id":"a b","replace":true', Reason.BAD_ID),
    _field("replace twice", '"id":"a","replace":true,"replace":true', Reason.DUPLICATE_KEY),
    _json("a replacement without a message", '{"due":1700000000005,"id":"a","replace":true}', Reason.MISSING_MESSAGE),
    _json("a replacement without a due time", '{"message":"m","id":"a","replace":true}', Reason.MISSING_DUE),
    *[
        _field(f"replace {value}", f'"id":"a","replace":{value}', Reason.WRONG_TYPE)
        for value in ("1", "0", "null", '"true"', '"false"', '""', "{}", "[true]")
    ],
    _json("a cancellation", '{"cancel":"a"}', Cancellation("a")),
    _json("a cancellation with blanks", ' { "cancel" : "trial-42" } ', Cancellation("trial-42")),
    _json("a cancellation with escapes", '{"\\u0063ancel":"\\u0061"}', Cancellation("a")),
    _json("a cancellation of the longest id", f'{{"cancel":"{"i" * 128}"}}', Cancellation("i" * 128)),
    _json("a cancellation that replaces nothing", '{"cancel":"a","replace":false}', Cancellation("a")),
    _json("a cancellation of a longer id", f'{{"cancel":"{"i" * 129}"}}', Reason.BAD_ID),
    *[
        _json(f"a cancellation of {text!r}", f'{{"cancel":"{text}"}}', Reason.BAD_ID)
        for text in ("", "a b", "é", "a\\n", "~a")
    ],
    *[
        _json(f"a cancellation of {value}", f'{{"cancel":{value}}}', Reason.WRONG_TYPE)
        for value in ("1", "null", "true", "{}", '["a"]')
    ],
    *[
        _json(f"a cancellation with {name}", f'{{"cancel":"a","{name}":{value}}}', _NOT_ALONE)
        for name, value in (
            ("id", '"a"'), ("message", '"m"'), ("delay_sec", "1"), ("countdown", "1"), ("due", "1700000000005"),
            ("topic", '"t"'), ("headers", '{"a":"b"}'), ("replace", "true"),
        )
    ],
    _json("a cancellation of a bad id with more", '{"cancel":"a b","message":"m"}', _NOT_ALONE),
    _json("a cancellation with replace null", '{"cancel":"a","replace":null}', Reason.WRONG_TYPE),
    _json("a cancellation with an unknown field", '{"cancel":"a","note":"n"}', Reason.UNKNOWN_FIELD),
    _json("cancel twice", '{"cancel":"a","cancel":"a"}', Reason.DUPLICATE_KEY),
]  # fmt: skip

_HEADER: Final = "message,delay_sec,due,id,topic,headers"
_ALL: Final = f"{_HEADER},cancel,replace"

_CSV: Final = [
    _csv("row", "message,due", "m,1700000000005", PLAIN),
    _csv("row in another order", "due,message", "1700000000005,m", PLAIN),
    _csv("names trimmed", " message\t, due ", "m,1700000000005", PLAIN),
    _csv("names quoted", '"message","due"', "m,1700000000005", PLAIN),
    _csv("blank row", "message,due", " \t", None),
    _csv("blank row under a bad header", "massage,due", "", None),
    _csv("quoted cells", "message,due", '"m","1700000000005"', PLAIN),
    _csv("comma and quotes in a cell", "message,due", '"a ""b"", c",1700000000005', Message(DUE_MS, 'a "b", c')),
    _csv("a cell of two quotes", "message,due", '"""""",1700000000005', Message(DUE_MS, '""')),
    _csv("backslashes are themselves", "message,due", r'"a\",1700000000005', Message(DUE_MS, "a\\")),
    _csv("escapes are themselves", "message,due", r"a\u0041\n,1700000000005", Message(DUE_MS, r"a\u0041\n")),
    _csv("blanks belong to the cell", "message,due", " m ,1700000000005", Message(DUE_MS, " m ")),
    _csv("JSON in a message", "message,due", '"{""a"":1}",1700000000005', Message(DUE_MS, '{"a":1}')),
    _csv("control characters", "message,due", "a\0\x01\tb,1700000000005", Message(DUE_MS, "a\0\x01\tb")),
    _csv("beyond ASCII", "message,due", "é😀\u2028,1700000000005", Message(DUE_MS, "é😀\u2028")),
    _csv("message null is a text", "message,due", "null,1700000000005", Message(DUE_MS, "null")),
    _csv(
        "longest message",
        "message,due",
        "x" * MESSAGE_BYTES_MAX + ",1700000000005",
        Message(DUE_MS, "x" * MESSAGE_BYTES_MAX),
    ),
    _csv("longer message", "message,due", "x" * (MESSAGE_BYTES_MAX + 1) + ",1700000000005", Reason.MESSAGE_TOO_LONG),
    _csv("a long quoted cell", "message,due", '"' + '""' * 1_000_000 + '",1700000000005', Reason.MESSAGE_TOO_LONG),
    _csv("a million cells", "message,due", "," * 1_000_000, Reason.RAGGED_ROW),
    _csv("a longer line", "message,due", "x" * (REQUEST_BYTES_MAX + 1), Reason.LINE_TOO_LONG),
    _csv("everything", _HEADER, 'm,,1700000000005,i,t,"{""a"":""b""}"', Message(DUE_MS, "m", "t", "i", {"a": "b"})),
    _csv("empty cells are absent", _HEADER, "m,0.5,,,,", Message(ARRIVAL_MS + 500, "m")),
    _csv("empty quoted cells are absent", _HEADER, 'm,0.5,"","","",""', Message(ARRIVAL_MS + 500, "m")),
    _csv("countdown", "countdown,message", "2e0,m", Message(ARRIVAL_MS + 2_000, "m")),
    _csv("delay of 50 digits", "delay_sec,message", "1." + "0" * 50, Reason.RAGGED_ROW),
    _csv("delay of many digits", "delay_sec,message", "1." + "0" * 50 + ",m", Message(ARRIVAL_MS + 1_000, "m")),
    _csv("delay of too many digits", "delay_sec,message", "1." + "0" * 1000 + ",m", Reason.NOT_JSON),
    _csv("ISO due", "message,due", "m,2026-01-01T00:00:00Z", Message(NEW_YEAR_2026_MS, "m")),
    _csv("due in seconds", "message,due", "m,1795291276", Reason.DUE_IN_SECONDS),
    _csv("due without a zone", "message,due", "m,2026-01-01T00:00:00", Reason.DUE_WITHOUT_ZONE),
    _csv("header without message", "due", "1700000000005", Reason.MISSING_MESSAGE),
    _csv("empty message", "message,due", ",1700000000005", Reason.MISSING_MESSAGE),
    _csv("no due", "message,due", "m,", Reason.MISSING_DUE),
    _csv("no due column", "message", "m", Reason.MISSING_DUE),
    _csv("delay and due", _HEADER, "m,1,1700000000005,,,", Reason.BOTH_DUE),
    _csv("delay out of range", "message,delay_sec", "m,-1", Reason.DELAY_OUT_OF_RANGE),
    _csv("infinite delay", "message,delay_sec", "m,1e400", Reason.DELAY_OUT_OF_RANGE),
    *[
        _csv(f"delay {cell!r}", "message,delay_sec", f"m,{cell}", Reason.WRONG_TYPE)
        for cell in (
            "soon",
            " 1",
            "1 ",
            "+1",
            "01",
            "1.",
            ".5",
            "NaN",
            "Infinity",
            "true",
            "null",
            '"""1"""',
            "0x1",
            "1\r ",
            "١",
        )
    ],
    *[
        _csv(f"due {cell!r}", "message,due", f"m,{cell}", Reason.NOT_A_TIME)
        for cell in ("soon", " 5", "05", "-5", "5.0", "1e3", "null", '"""2026-01-01T00:00:00Z"""', "{}")
    ],
    _csv("due out of range", "message,due", "m,253402300800000", Reason.DUE_OUT_OF_RANGE),
    _csv("due of 20 digits", "message,due", "m,12345678901234567890", Reason.DUE_OUT_OF_RANGE),
    _csv("bad id", "message,due,id", "m,1700000000005,a b", Reason.BAD_ID),
    _csv("id of digits", "message,due,id", "m,1700000000005,1", Message(DUE_MS, "m", id="1")),
    _csv("bad topic", "message,due,topic", "m,1700000000005,a b", Reason.BAD_TOPIC),
    *[
        _csv(f"headers {cell!r}", "message,due,headers", f'm,1700000000005,"{cell}"', Reason.BAD_HEADERS)
        for cell in (
            "x",
            "1",
            "null",
            "[]",
            "{",
            "{} x",
            '{""a"":1}',
            "{},",
            '{},""topic"":""x""',
            '""a""',
            "{}} x",
            '{""a"":""\\ud800""}',
            '{""a"":NaN}',
        )
    ],
    _csv("headers empty", "message,due,headers", "m,1700000000005,{}", PLAIN),
    _csv(
        "headers with blanks",
        "message,due,headers",
        'm,1700000000005," {""a"" : ""b""} "',
        Message(DUE_MS, "m", headers={"a": "b"}),
    ),
    _csv(
        "headers nested",
        "message,due,headers",
        'm,1700000000005,"' + '{""a"":' * 900 + "1" + "}" * 900 + '"',
        Reason.BAD_HEADERS,
    ),
    _csv(
        "many brackets",
        "message,due,headers",
        "{[" * 99 + ',1700000000005,"{""a"":""{""}"',
        Message(DUE_MS, "{[" * 99, headers={"a": "{"}),
    ),
    _csv(
        "headers twice the same",
        "message,due,headers",
        'm,1700000000005,"{""a"":""b"",""a"":""b""}"',
        Reason.BAD_HEADERS,
    ),
    _csv("a cell too few", "message,due,id", "m,1700000000005", Reason.RAGGED_ROW),
    _csv("a cell too many", "message,due", "m,1700000000005,", Reason.RAGGED_ROW),
    _csv("an open quote", "message,due", '"m,1700000000005', Reason.BAD_CSV_ROW),
    _csv("a quote inside", "message,due", 'm"n,1700000000005', Reason.BAD_CSV_ROW),
    _csv("text after a quote", "message,due", '"m"n,1700000000005', Reason.BAD_CSV_ROW),
    _csv("blank before a quote", "message,due", ' "m",1700000000005', Reason.BAD_CSV_ROW),
    _csv("unknown column", "message,due,note", "m,1700000000005,x", Reason.BAD_CSV_HEADER),
    _csv("column twice", "message,due,due", "m,1700000000005,1700000000005", Reason.BAD_CSV_HEADER),
    _csv("column in capitals", "Message,due", "m,1700000000005", Reason.BAD_CSV_HEADER),
    _csv("column without a name", "message,due,", "m,1700000000005,", Reason.BAD_CSV_HEADER),
    _csv("header with an open quote", '"message,due', "m,1700000000005", Reason.BAD_CSV_HEADER),
    _csv("empty header", "", "m", Reason.BAD_CSV_HEADER),
    _csv("replacement", "message,due,id,replace", "m,1700000000005,a,true", REPLACEMENT),
    _csv("no replacement", "message,due,id,replace", "m,1700000000005,a,false", Message(DUE_MS, "m", id="a")),
    _csv("replace empty", "message,due,id,replace", "m,1700000000005,a,", Message(DUE_MS, "m", id="a")),
    *[
        _csv(f"replace {cell!r}", "message,due,id,replace", f"m,1700000000005,a,{cell}", Reason.WRONG_TYPE)
        for cell in ("True", "TRUE", " true", "1", "0", "yes", "null", '"""true"""')
    ],
    _csv("replacement without an id", "message,due,id,replace", "m,1700000000005,,true", Reason.REPLACE_WITHOUT_ID),
    _csv("cancellation", "cancel", "a", Cancellation("a")),
    _csv("cancellation of digits", "cancel", "1", Cancellation("1")),
    _csv("cancellation among requests", _ALL, ",,,,,,a,", Cancellation("a")),
    _csv("cancellation that replaces nothing", _ALL, ",,,,,,a,false", Cancellation("a")),
    _csv("cancellation and replacement", _ALL, ",,,,,,a,true", Reason.CANCEL_NOT_ALONE),
    _csv("cancellation with a message", _ALL, "m,,,,,,a,", Reason.CANCEL_NOT_ALONE),
    _csv("cancellation of a bad id", _ALL, ",,,,,,a b,", Reason.BAD_ID),
    _csv("request with an empty cancellation", _ALL, "m,,1700000000005,,,,,", PLAIN),
    Case("csv not UTF-8", b"m\xff,1700000000005", Reason.NOT_UTF8, "csv", "message,due"),
]

_SOCKET: Final = [
    Case("sock line", b'{"message":"m","delay_sec":1}', Message(1_000, "m"), "sock", arrival_ms=0),
    Case(
        "sock line of a late year",
        b'{"message":"m","delay_sec":1}',
        Reason.DUE_OUT_OF_RANGE,
        "sock",
        arrival_ms=253_402_300_799_999,
    ),
    Case("sock line with tabs", b'\t{"message":\t"m","due":1700000000005}', PLAIN, "sock", arrival_ms=7),
    Case(
        "sock line with a due in seconds",
        b'{"message":"m","due":1795291276}',
        Reason.DUE_IN_SECONDS,
        "sock",
        arrival_ms=7,
    ),
    Case("sock cancellation", b'{"cancel":"a"}', Cancellation("a"), "sock", arrival_ms=7),
    Case("sock blank line", b" \t", None, "sock", arrival_ms=7),
    Case("sock garbage", b"x", Reason.NOT_JSON, "sock", arrival_ms=7),
]

CASES: Final = [*_LINES, *_MESSAGES, *_DELAYS, *_DUES, *_OTHERS, *_CHANGES, *_CSV, *_SOCKET]
