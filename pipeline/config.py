"""One frozen tree of settings: flags over environment over a configuration file over the defaults below.

The defaults here are their one home; ``conf/pipeline.toml`` repeats each with its unit for the reader, and a test holds the two
together. ``load_settings`` checks each value against its type here, and refuses unknown keys. A name that ends in ``_ms``,
``_sec``, ``_hours`` or ``_bytes`` carries that unit.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from pipeline import IS_INSTALLED
from pipeline.core.errors import ConfigError
from pipeline.core.records import RecordFormat
from pipeline.core.text import redact_url
from pipeline.sinks import SinkName

ROOT = Path(__file__).resolve().parents[1]
ENV_PREFIX = "DUETIME_"
# Variables with a meaning of their own; the last one only for the tests.
_OTHERS = ("CLASS_ARCHIVE", "CONFIG", "MAKE_CLASS_ARCHIVE", "READY_FD", "SAMPLE", "TEST_SERVER")
NO_SETTINGS = frozenset(ENV_PREFIX + name for name in _OTHERS)
NAME_PATTERN = r"\A[A-Za-z0-9._-]{1,64}\Z"
NAME_RULE = "1 to 64 of A-Z a-z 0-9 . _ -"
URL_PATTERN = r"\A(?:https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:[/?][!\"$-~]*)?)?\Z"
URL_RULE = "an http:// or https:// URL in ASCII, with a host and without user, password and fragment"

Value = str | int | float | bool
# The description is the end of "… must be", when a value of the right type is out of its range.
Name = Annotated[str, Meta(pattern=NAME_PATTERN, description=NAME_RULE)]
LocalFolder = Annotated[str, Meta(pattern=r"(?s)\A(?!.*://).", description="a local or mounted folder")]
Positive = Annotated[int, Meta(gt=0, description="greater than 0")]
ZeroIsOff = Annotated[int, Meta(ge=0, description="0 (off) or more")]
PositiveHours = Annotated[float, Meta(gt=0, le=8_784, description="greater than 0, and at most 8784")]
PositiveSec = Annotated[float, Meta(gt=0, le=86_400, description="greater than 0, and at most 86400")]
LeaseSec = Annotated[float, Meta(ge=0.1, le=86_400, description="0.1 to 86400")]
KafkaTopic = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{0,249}\Z", description="at most 249 of A-Z a-z 0-9 . _ -")]
WebUrl = Annotated[str, Meta(pattern=URL_PATTERN, description=URL_RULE)]
SINKS = get_args(SinkName)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Where the messages are kept and how long to wait for an answer."""

    url: str = field(default="", repr=False)
    url_file: str = ""
    namespace: Name = "duetime"
    shards: Annotated[int, Meta(ge=1, le=64, description="1 to 64")] = 1
    connect_timeout_ms: Positive = 2_000
    reply_timeout_ms: Positive = 10_000
    clock_skew_ms_max: Positive = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """Where a job serves its metrics."""

    metrics_host: Annotated[str, Meta(min_length=1, description="an address of this machine")] = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=0, le=65_535, description="0 (off) to 65535")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestSettings(MetricsSettings):
    """What is read, where its traces go, and in which portions."""

    source: Literal["files", "socket", "kafka"] = "files"
    input: Annotated[str, Meta(min_length=1, description="a folder or its URL")] = "inbox"
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65_535, description="1 to 65535")] = 9999
    checkpoint: str = ""
    rejects: LocalFolder = "rejects"
    trigger: str = "100 milliseconds"
    max_bytes_per_trigger: Positive = 256 * 1024 * 1024
    segment_bytes: Positive = 8 * 1024 * 1024
    transaction_messages: Positive = 5_000
    wait_for_disk: bool = False
    wait_for_replicas: ZeroIsOff = 0
    archive_sec: ZeroIsOff = 600
    shard_patience_sec: ZeroIsOff = 5
    quiet_period_ms: Positive = 1_000
    socket_roll_ms: Positive = 100
    marker_keep_sec: Positive = 3_600
    checkpoint_files_max: Positive = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """Which cluster, what is read of it and how, and how messages get there."""

    servers: str = ""
    topics: str = ""
    format: RecordFormat = "json"
    start: Literal["earliest", "latest"] = "earliest"
    offsets_per_trigger: Positive = 1_000_000
    accept_loss: bool = False
    client_config: str = ""
    exactly_once: bool = True
    batch_messages: Annotated[int, Meta(ge=1, le=5_000, description="1 to 5000")] = 4_000
    takeover_sec: Annotated[float, Meta(ge=0.5, le=600, description="0.5 to 600")] = 5.0
    transaction_timeout_ms: Annotated[int, Meta(ge=1_000, le=900_000, description="1000 to 900000")] = 10_000
    position_topic: KafkaTopic = "duetime-positions"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdSettings(MetricsSettings):
    """Where messages wait that are due long after they came in, and when they come back."""

    folder: str = ""
    horizon_hours: PositiveHours = 24.0
    lead_hours: PositiveHours = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSettings(MetricsSettings):
    """How messages are claimed and shown."""

    sink: SinkName = "screen"
    format: Literal["text", "json"] = "text"
    lease_sec: LeaseSec = 30.0
    claim_limit: Annotated[int, Meta(ge=1, le=5_000, description="1 to 5000")] = 500
    claim_bytes_max: Positive = 4 * 1024 * 1024
    wait_ms_max: Positive = 1_000
    id_retention_sec: Positive = 86_400
    max_rate: ZeroIsOff = 0
    topics_max: Annotated[int, Meta(ge=1, le=1_000, description="1 to 1000")] = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """What happens to the messages of a topic when they are due, and to those that a consumer could not handle."""

    sink: Literal["", SinkName] = ""
    kafka_topic: KafkaTopic = ""
    max_rate: ZeroIsOff = 0
    expire_after_sec: ZeroIsOff = 0
    retain_messages: ZeroIsOff = 1_000_000
    retain_sec: ZeroIsOff = 604_800
    trim_unread: bool = False
    lease_sec: LeaseSec = 30.0
    handler_timeout_sec: ZeroIsOff = 3_600
    attempts_max: Positive = 5
    backoff_ms: Positive = 1_000
    backoff_ms_max: Positive = 600_000
    webhook: WebUrl = ""
    webhook_format: Literal["raw", "json"] = "raw"
    webhook_timeout_sec: Annotated[float, Meta(ge=0.1, le=3_600, description="0.1 to 3600")] = 10.0
    webhook_concurrency: Annotated[int, Meta(ge=1, le=256, description="1 to 256")] = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings(MetricsSettings):
    """Where the job that posts webhooks serves its metrics; what it posts are settings of topics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Where the HTTP API listens, who may ask, and how much it takes in."""

    host: Annotated[str, Meta(min_length=1, description="an address of this machine")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="0 (any) to 65535")] = 8600
    unix: str = ""
    tokens: str = ""
    hosts: str = ""
    public_url: str = ""
    trusted_proxies: str = ""
    failed_tokens_max: ZeroIsOff = 20
    read_only: bool = False
    show_messages: bool = True
    viewers_max: Positive = 100
    patience_sec: PositiveSec = 5.0
    wait_for_disk: bool = False
    rate_per_token: ZeroIsOff = 0
    batch_lines_max: Annotated[int, Meta(ge=1, le=5_000, description="1 to 5000")] = 5_000
    batch_bytes_max: Positive = 4 * 1024 * 1024
    batches_max: Positive = 4
    waiting_messages_max: Positive = 10_000
    waiting_bytes_max: Positive = 64 * 1024 * 1024
    connections_max: Positive = 1_000
    head_bytes_max: Positive = 16 * 1024
    head_timeout_sec: PositiveSec = 10.0
    body_timeout_sec: PositiveSec = 30.0
    keep_alive_sec: Positive = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """What this checkout keeps on the machine it runs on."""

    state: LocalFolder = ".duetime"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The whole tree; a module is handed the part it needs."""

    redis: RedisSettings = field(default_factory=RedisSettings)
    ingest: IngestSettings = field(default_factory=IngestSettings)
    kafka: KafkaSettings = field(default_factory=KafkaSettings)
    cold: ColdSettings = field(default_factory=ColdSettings)
    drain: DrainSettings = field(default_factory=DrainSettings)
    topics: TopicSettings = field(default_factory=TopicSettings)
    topic: Mapping[str, TopicSettings] = field(default_factory=dict)
    # What the user said of topics, by topic or ALL_TOPICS; the namespace may say something else, and then this is refused.
    given: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    webhooks: WebhookSettings = field(default_factory=WebhookSettings)
    api: ApiSettings = field(default_factory=ApiSettings)
    local: LocalSettings = field(default_factory=LocalSettings)

    def of_topic(self, topic: str) -> TopicSettings:
        """Return the settings of a topic: its own, else those of all. A topic with a webhook goes into its stream in any case."""
        settings = self.topic.get(topic, self.topics)
        return replace(settings, sink="stream" if settings.webhook else settings.sink or self.drain.sink)


ALL_TOPICS = "*"  # in the place of a topic's name
TOPIC = "topic"  # the section that holds a table for each topic that has settings of its own
SECTIONS = {name: type_ for name, type_ in get_type_hints(Settings).items() if name not in (TOPIC, "given")}
PATHS = {
    *(("ingest", name) for name in ("checkpoint", "rejects", "input")),
    *(("api", name) for name in ("unix", "tokens")),
    *(("kafka", "client_config"), ("cold", "folder"), ("local", "state"), ("redis", "url_file")),
}
URLS = ("url", "url_file")  # of [redis]: where one is given, the other does not count of what it beats
_HINTS = {section: get_type_hints(type_, include_extras=True) for section, type_ in SECTIONS.items()}
_NOUNS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
_UNITS = {"ms": " of milliseconds", "sec": " of seconds", "hours": " of hours", "bytes": " of bytes"}


def load_settings(
    flags: Mapping[str, Mapping[str, Value]], environ: Mapping[str, str], file: Path | None = None
) -> Settings:
    """Merge the three sources into one checked tree.

    Args:
        flags: section -> key -> value, only what the user gave on the command line.

        environ: the process environment; ``REDIS_URL`` and ``DUETIME_<SECTION>_<KEY>`` count.

        file: a TOML file; None means that of ``DUETIME_CONFIG``, else ``conf/pipeline.toml`` of this checkout, else
            ``pipeline.toml`` in the working directory, else, for what the wheel has installed, the defaults.

    Raises:
        ConfigError: no file, one that can't be read, an unknown key or variable, or a value out of its range.
    """
    home = Path.home() if IS_INSTALLED else ROOT if ROOT.is_dir() else Path.cwd()  # it may be in an archive
    path = _find_file(file, environ)
    text, from_file = _read_file(path) if path else ("", {})
    merged: dict[str, dict[str, Any]] = {section: {} for section in (*SECTIONS, *from_file)}
    for section, key in PATHS:
        merged[section][key] = _resolve_path(getattr(SECTIONS[section](), key), home)
    layers: tuple[tuple[Mapping[str, Mapping[str, Any]], Path, bool, Callable[[str, str], str]], ...] = (
        (from_file, home, False, lambda section, key: f" ({path}{_line_of(text, section, key)})"),
        (_read_environ(environ), home, True, lambda part, key: f" (from {ENV_PREFIX}{part.upper()}_{key.upper()})"),
        (flags, Path.cwd(), True, lambda section, key: ""),
    )
    given: dict[str, dict[str, Value]] = {}
    for layer, base, is_text, origin in layers:
        # Topics last: their own sink beats that of the drain job, which stands in for it, whatever the order of the tables.
        for section, values in sorted(layer.items(), key=lambda table: table[0] == "topics"):
            for key, value in values.items():
                checked = _convert(section, key, value, is_text, origin)
                merged[section][key] = _resolve_path(checked, base) if (section, key) in PATHS else checked
                topic = _topic_of(section, key)
                is_given = is_text or topic != ALL_TOPICS or checked != _default(section, key)
                if topic and is_given and (checked or key != "sink"):
                    given.setdefault(topic, {})[key] = checked
        named = [key for key in URLS if layer.get("redis", {}).get(key)]
        if len(named) > 1:
            raise ConfigError(
                f"redis.url and redis.url_file are both given{origin('redis', 'url_file')}; leave one out."
            )
        merged["redis"] |= {key: "" for key in URLS if named and key not in named}
    if file_of_url := merged["redis"]["url_file"]:
        merged["redis"]["url"] = _read_url(file_of_url)
    sections = {section: type_(**merged[section]) for section, type_ in SECTIONS.items()}
    own = {name: values for section, values in merged.items() if (name := section.removeprefix(f"{TOPIC}.")) != section}
    topics = {name: TopicSettings(**merged["topics"] | values) for name, values in own.items()}
    return Settings(**sections, topic=topics, given=given)


def convert_topic_setting(key: str, text: str) -> Value:
    """Return the value of a setting of topics that is given as text.

    Raises:
        ConfigError: there is no such setting, or the value is out of its range.
    """
    value: Value = _convert("topics", key, text, True, lambda section, key: "")
    return value


def check_name(kind: str, name: str) -> str:
    """Return the name of a topic, group or consumer, which becomes a part of keys.

    Raises:
        ConfigError: it has other characters, or too many.
    """
    if not re.match(NAME_PATTERN, name):
        raise ConfigError(f"A {kind} has {NAME_RULE} as its name, so it can't be {name!r}.")
    return name


def _topic_of(section: str, key: str) -> str:
    """Return whose topic's setting this is, ALL_TOPICS, or "" if it is about something else."""
    if section == "topics" or (section, key) == ("drain", "sink"):
        return ALL_TOPICS
    return section.removeprefix(f"{TOPIC}.") if section.startswith(f"{TOPIC}.") else ""


def _default(section: str, key: str) -> Any:
    return getattr(SECTIONS[section](), key)


def _find_file(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    if file or environ.get("DUETIME_CONFIG"):
        return file or Path(environ["DUETIME_CONFIG"])
    places = (ROOT / "conf" / "pipeline.toml", Path.cwd() / "pipeline.toml")  # the second: spark-submit --files
    for place in places:
        if place.exists():
            return place
    if IS_INSTALLED:
        return None
    known = " or ".join(map(str, places))
    raise ConfigError(f"There is no configuration file at {known}; name one with --config or DUETIME_CONFIG.")


def _read_file(path: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the text, and its tables by section, with ``topic.<name>`` for each topic."""
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"The configuration file {path} is not valid TOML: {exc}.") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The configuration file {path} can't be read ({exc}); name another with --config.") from exc
    for section in content.keys() - {*SECTIONS, TOPIC}:
        raise ConfigError(f"{path} has an unknown section [{section}]; known are {', '.join((*SECTIONS, TOPIC))}.")
    topics = content.get(TOPIC)
    if isinstance(topics, dict):
        del content[TOPIC]
        content |= {f"{TOPIC}.{check_name('topic', name)}": own for name, own in topics.items()}
    for section, table in content.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{section} must be a table of settings in {path}: [{section}].")
    return text, content


def _read_url(path: str) -> str:
    """Return the URL in a file; nothing of it is in an error."""
    try:
        url = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "no text"
        raise ConfigError(
            f"The file {path} of redis.url_file can't be read ({why}); correct it, or name another."
        ) from exc
    if not url:
        raise ConfigError(f"The file {path} of redis.url_file is empty; write the URL of Redis into it.")
    return url


def _line_of(text: str, section: str, key: str) -> str:
    """Return ``, line N`` where a key stands in a file; "" where it is written in an unusual way."""
    header = r"\.[\"']?".join(map(re.escape, section.split(".", 1)))
    found = re.search(rf"(?ms)^\[{header}[\"']?\](?:(?!^\[).)*?^{re.escape(key)}\s*=", text)
    return f", line {text.count(chr(10), 0, found.end()) + 1}" if found else ""


def _read_environ(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    layer: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    if environ.get("REDIS_URL"):
        layer["redis"]["url"] = environ["REDIS_URL"]
    for name in sorted(name for name in environ.keys() - NO_SETTINGS if name.startswith(ENV_PREFIX)):
        section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("_")
        if section == TOPIC:
            raise ConfigError(f"{name} is not supported; write the settings of one topic into the configuration file.")
        if section not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise ConfigError(f"{name} names no setting; write {ENV_PREFIX}<SECTION>_<KEY>, with a section of {known}.")
        layer[section][key] = environ[name]
    return layer


def _convert(section: str, key: str, value: object, is_text: bool, origin: Callable[[str, str], str]) -> Any:
    """Return the value as the type of its setting; text is parsed, since flags and environment are text."""
    hints = _HINTS["topics" if section.startswith(f"{TOPIC}.") else section]
    if key not in hints:
        known = ", ".join(hints)
        raise ConfigError(
            f"There is no setting {section}.{key}{origin(section, key)}; those of [{section}] are {known}."
        )
    try:
        return msgspec.convert(value, hints[key], strict=not is_text)
    except msgspec.ValidationError as exc:
        kind = getattr(hints[key], "__origin__", hints[key])
        if kind is Literal:
            wanted = " or ".join(filter(None, get_args(hints[key])))
        elif "`, got `" in str(exc):
            unit = re.search(r"_(ms|sec|hours|bytes)(_max)?$", key)
            wanted = _NOUNS[kind] + (_UNITS[unit[1]] if unit else "")
        else:
            wanted = hints[key].__metadata__[0].description
        shown = redact_url(value) if isinstance(value, str) else value
        raise ConfigError(f"{section}.{key} must be {wanted}, but is {shown!r}{origin(section, key)}.") from exc


def _resolve_path(text: str, base: Path) -> str:
    """Make a local path absolute; "" stays "not given" and a URL such as hdfs://… stays as it is."""
    return text if not text or "://" in text else os.path.normpath(base / Path(text).expanduser())
