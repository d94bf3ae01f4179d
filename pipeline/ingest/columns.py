"""The rules of a request as Spark columns: the same as ``core/validation.py``, at millions of lines.

JSON is parsed as VARIANT, which refuses what JSON leaves loose (duplicate keys, NaN, lone surrogates). The types of all fields
then show in one text, ``schema_of_variant``, so one pattern checks names, types and "exactly one due" at once. No expression
here may raise on what users send: ANSI mode is on, so a cast is a ``try_`` cast and a number is bounded before arithmetic.
"""

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F

from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.core.csv_rows import CELL_PATTERN, COLUMN_NAMES, ROW_PATTERN
from pipeline.core.due import DELAY_SEC_MAX, DUE_MS_MAX, EPOCH_MS_PATTERN, NUMBER_PATTERN, ZONED_TIME_PATTERN
from pipeline.core.ids import LINE_NO_LENGTH
from pipeline.core.messages import BODY_JSON, BODY_PLAIN, DEFAULT_TOPIC
from pipeline.core.validation import (
    BLANK_PATTERN,
    BRACKETS_MAX,
    ID_PATTERN,
    JSON_TEXT_PATTERN,
    MESSAGE_BYTES_MAX,
    TOPIC_PATTERN,
)

# A parsed line is {"line": <the line>, "guard": <hash of the line>}. Names in its schema are sorted, so the one field that
# tells the due time (countdown, delay_sec or due) comes first.
_LINE_SCHEMA: Final = "OBJECT<guard: BIGINT, line: OBJECT<"
_GUARD: Final = "guard"
_OTHER_FIELDS: Final = [
    f"{headers}{caller_id}message: STRING{topic}>>"
    for headers in ("", "headers: HEADERS, ")
    for caller_id in ("", "id: STRING, ")
    for topic in ("", ", topic: STRING")
]
# Nearly every line has one of these types, and looking them up costs a tenth of matching the pattern.
_USUAL_SCHEMAS: Final = [
    f"{_LINE_SCHEMA}{due}, {others}"
    for due in ("delay_sec: BIGINT", "countdown: BIGINT", "due: BIGINT", "due: STRING")
    for others in _OTHER_FIELDS
]
_FRACTION_SCHEMA_PATTERN: Final = (
    _LINE_SCHEMA + r"(?:countdown|delay_sec): (?:DOUBLE|DECIMAL\([0-9]+,[0-9]+\)), " + f"(?:{'|'.join(_OTHER_FIELDS)})"
)
# A name is bare or in back-quotes, doubled inside. Possessive throughout: Java recurses on any other repetition of a group.
_NAME_PATTERN: Final = r"(?:[^`:]++|`[^`]*+(?:``[^`]*+)*+`)"
_HEADERS_SCHEMA_PATTERN: Final = rf"OBJECT<(?:{_NAME_PATTERN}: STRING(?:, {_NAME_PATTERN}: STRING)*+)?+>"
_SHALLOW_PATTERN: Final = r"[^\[{]*+(?:\{[^\[{]*+){0,2}+"
_EMPTY_OBJECT_SCHEMA: Final = "OBJECT<>"


def matches(text: Column, pattern: str) -> Column:
    """Match a whole text, as ``re.fullmatch`` does."""
    return F.rlike(text, F.lit(rf"\A(?:{pattern})\z"))


def is_blank(line: Column) -> Column:
    """Say whether a line holds nothing but spaces, tabs and carriage returns."""
    # Most lines are objects, and this spares them the pattern.
    return F.when(F.startswith(line, F.lit("{")), F.lit(False)).otherwise(matches(line, BLANK_PATTERN))


def is_shallow(text: Column) -> Column:
    """Say whether JSON text is not nested more deeply than is safe to look into; true for every request.

    Spark walks a VARIANT recursively, and some 900 nested objects overflow the stack, which ends the executor: one line could stop
    the pipeline for good. Few opening brackets can't nest deeply. Where there are many, those outside of texts are counted, and
    a request has two at most: its own and that of its headers.
    """

    def is_few(bracket: str) -> Column:
        return F.octet_length(F.substring_index(text, bracket, BRACKETS_MAX)) == F.octet_length(text)

    outside = F.regexp_replace(text, F.lit(JSON_TEXT_PATTERN), F.lit(""))
    return (is_few("{") & is_few("[")) | matches(outside, _SHALLOW_PATTERN)


def parse_guarded_json(text: Column) -> Column:
    """Parse JSON text, and let nothing follow it; null if it is no JSON or too deep for a request.

    Spark's parser stops after the first value and ignores the rest. So the text is embedded in front of its own hash: with
    anything but one whole value in it, the hash is not read, or not where ``is_guarded`` looks for it.
    """
    guard = F.xxhash64(text).cast("string")
    guarded = F.concat(F.lit('{"line":'), text, F.lit(f',"{_GUARD}":'), guard, F.lit("}"))
    return F.try_parse_json(F.when(is_shallow(text), guarded))


def is_guarded(document: Column, text: Column) -> Column:
    """Say whether a document of ``parse_guarded_json``, known to have just a line and a guard, holds the whole text."""
    # Only a text that names the guard itself, plainly or with escapes, can have put another one in its place.
    is_suspect = F.contains(text, F.lit(_GUARD)) | F.contains(text, F.lit("\\u"))
    return ~is_suspect | (F.try_variant_get(document, f"$.{_GUARD}", "bigint") == F.xxhash64(text))


def is_one_value(document: Column, text: Column) -> Column:
    """Say whether a document of ``parse_guarded_json`` has just a line and a guard, and the whole text in the line."""
    line_schema = F.schema_of_variant(F.try_variant_get(document, "$.line", "variant"))
    whole_schema = F.concat(F.lit("OBJECT<guard: BIGINT, line: "), line_schema, F.lit(">"))
    is_whole = (F.schema_of_variant(document) == whole_schema) & is_guarded(document, text)
    return F.coalesce(is_whole, F.lit(False))


def headers_schema_of(document: Column, schema: Column) -> Column:
    """Return the type of the headers; null if there are none."""
    headers = F.try_variant_get(document, "$.line.headers", "variant")
    return F.when(F.contains(schema, F.lit("headers: ")), F.schema_of_variant(headers))


def is_request_schema(schema: Column, headers_schema: Column) -> Column:
    """Say whether the names and types of a parsed line are those of a request."""
    # The text of the headers' own type is taken out first, as names in it can hold anything, this pattern included.
    known = F.when(headers_schema.isNull(), schema).otherwise(F.replace(schema, headers_schema, F.lit("HEADERS")))
    return (known.isin(_USUAL_SCHEMAS) | matches(known, _FRACTION_SCHEMA_PATTERN)) & (
        headers_schema.isNull() | matches(headers_schema, _HEADERS_SCHEMA_PATTERN)
    )


def headers_of(document: Column, headers_schema: Column) -> Column:
    """Return the headers as a map; null if there are none."""
    headers = F.try_variant_get(document, "$.line.headers", "map<string,string>")
    return F.when(headers_schema != F.lit(_EMPTY_OBJECT_SCHEMA), headers)


def text_field(document: Column, schema: Column, name: str) -> Column:
    """Return a field of the line as text; null if absent."""
    return F.when(F.contains(schema, F.lit(f"{name}: ")), F.try_variant_get(document, f"$.line.{name}", "string"))


def time_of(document: Column, schema: Column) -> Column:
    """Return the value, as VARIANT, of the one field that tells the due time."""

    def value(name: str) -> Column:
        return F.try_variant_get(document, f"$.line.{name}", "variant")

    delay = F.when(_starts(schema, "delay_sec"), value("delay_sec")).when(
        _starts(schema, "countdown"), value("countdown")
    )
    return delay.when(_starts(schema, "due"), value("due"))


def delay_ms_of(time: Column, schema: Column) -> Column:
    """Return the delay in ms: HALF_UP to the microsecond, then up to the ms; null if there is none within 0..366 days."""
    whole, seconds = time.try_cast("bigint"), time.try_cast("double")
    # The 14 digits of this decimal survive the way through a double, which costs a tenth of decimal arithmetic.
    micros = F.floor(time.try_cast("decimal(18,6)").cast("double") * 1e6 + 0.5)
    is_whole = _starts(schema, "delay_sec: BIGINT") | _starts(schema, "countdown: BIGINT")
    return F.when(is_whole, F.when(whole.between(F.lit(0), F.lit(DELAY_SEC_MAX)), whole * 1000)).when(
        ~_starts(schema, "due") & seconds.between(F.lit(0.0), F.lit(float(DELAY_SEC_MAX))), F.ceil(micros / 1000)
    )


def due_text_of(time: Column, schema: Column) -> Column:
    """Return the due time if it is a text, in the form that ``due_micros_of`` reads; null if not, or if it has no zone."""
    text = F.when(_starts(schema, "due: STRING"), time.try_cast("string"))
    return F.when(matches(text, ZONED_TIME_PATTERN), F.translate(text, "tz,", "TZ."))


def due_micros_of(due_text: Column) -> Column:
    """Return the microseconds since 1970 of a text that ``due_text_of`` let through; null if there is no such time."""
    # Spark reads a zone only behind seconds.
    with_seconds = F.concat(F.left(due_text, F.lit(16)), F.lit(":00"), F.substr(due_text, F.lit(17)))
    has_seconds = F.substr(due_text, F.lit(17), F.lit(1)) == F.lit(":")
    return F.unix_micros(F.when(has_seconds, due_text).otherwise(with_seconds).try_cast("timestamp"))


def due_ms_of(time: Column, schema: Column, due_micros: Column, arrival_ms: Column, delay_ms: Column) -> Column:
    """Return the due time in ms UTC, rounded up; null if there is none in the years 1970 to 9999."""
    return (
        F.when(_starts(schema, "due: BIGINT"), time.try_cast("bigint"))
        # A microsecond before 1970 is before 1970, though rounding up would make it 0.
        .when(_starts(schema, "due: STRING"), F.when(due_micros >= 0, F.ceil(due_micros / 1000)))
        .otherwise(arrival_ms + delay_ms)
    )


def is_due_in_range(due_ms: Column) -> Column:
    """Say whether a due time lies in the years 1970 to 9999."""
    return due_ms.between(F.lit(0), F.lit(DUE_MS_MAX))


def bucket_start_ms_of(due_ms: Column) -> Column:
    """Return the start of the bucket of a due time that is not negative, ms UTC."""
    return due_ms - due_ms % F.lit(BUCKET_WIDTH_MS)


def is_message(message: Column) -> Column:
    """Say whether a message is neither empty nor too long."""
    return F.octet_length(message).between(F.lit(1), F.lit(MESSAGE_BYTES_MAX))


def is_absent_or_id(caller_id: Column) -> Column:
    """Say whether the caller's id is well formed."""
    return caller_id.isNull() | matches(caller_id, ID_PATTERN)


def is_absent_or_topic(topic: Column) -> Column:
    """Say whether the topic is well formed."""
    return topic.isNull() | matches(topic, TOPIC_PATTERN)


def member_of(
    file_token: Column, line_no: Column, message: Column, topic: Column, caller_id: Column, headers: Column
) -> Column:
    """Write the stored member, byte for byte as ``core.messages.encode_member`` does."""
    message_id = F.concat(file_token, F.lpad(F.lower(F.hex(line_no)), LINE_NO_LENGTH, "0"))
    other_topic = F.nullif(topic, F.lit(DEFAULT_TOPIC))
    body = F.struct(
        message.alias("message"), other_topic.alias("topic"), caller_id.alias("id"), headers.alias("headers")
    )
    is_plain = other_topic.isNull() & caller_id.isNull() & headers.isNull()
    return F.when(is_plain, F.concat(message_id, F.lit(BODY_PLAIN), message)).otherwise(
        F.concat(message_id, F.lit(BODY_JSON), F.to_json(body))
    )


def csv_cells(line: Column) -> Column:
    """Split a CSV row into its cells, still quoted; null if its quotes are not those of RFC 4180."""
    cells = F.regexp_extract_all(F.concat(F.lit(","), line), F.lit(f",({CELL_PATTERN})"), F.lit(1))
    return F.when(matches(line, ROW_PATTERN), cells)


def csv_names(header: Column) -> Column:
    """Return the names of a CSV header line; null if one is unknown or there twice."""
    names = F.transform(csv_cells(header), lambda cell: F.btrim(_unquoted(cell), F.lit(" \t")))
    known = F.array(*[F.lit(name) for name in COLUMN_NAMES])
    is_known = F.size(F.array_except(names, known)) == 0
    return F.when(is_known & (F.size(F.array_distinct(names)) == F.size(names)), names)


def csv_request_json(cells: Column, names: Column) -> Column:
    """Write the cells of a CSV row as the JSON line that means the same; null if their number is not that of the names."""
    fields = F.zip_with(names, F.transform(cells, _unquoted), _json_field)
    line = F.concat(F.lit("{"), F.concat_ws(",", F.array_compact(fields)), F.lit("}"))
    return F.when(F.size(cells) == F.size(names), line)


def _json_field(name: Column, cell: Column) -> Column:
    """Write a cell with the type that its text has; what has none stays text, and the rules of the field refuse it."""
    is_number = (name.isin("delay_sec", "countdown") & matches(cell, NUMBER_PATTERN)) | (
        (name == "due") & matches(cell, EPOCH_MS_PATTERN)
    )
    is_object = (name == "headers") & is_one_value(parse_guarded_json(cell), cell)
    value = F.when(is_number | is_object, cell).otherwise(F.to_json(cell.cast("variant")))
    return F.when(cell != "", F.concat(F.lit('"'), name, F.lit('":'), value))


def _unquoted(cell: Column) -> Column:
    inner = F.substr(cell, F.lit(2), F.length(cell) - 2)
    return F.when(F.startswith(cell, F.lit('"')), F.replace(inner, F.lit('""'), F.lit('"'))).otherwise(cell)


def _starts(schema: Column, field: str) -> Column:
    return F.startswith(schema, F.lit(_LINE_SCHEMA + field))
