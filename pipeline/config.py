"""One frozen tree of settings: flags over environment over ``conf/pipeline.toml`` over the defaults below.

The defaults here are their one home; ``conf/pipeline.toml`` repeats each with its unit for the reader, and a test holds the two
together. Unknown keys are refused. A name that ends in ``_ms``, ``_sec`` or ``_bytes`` carries that unit.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from pipeline.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
ENV_PREFIX = "DUETIME_"
NAMESPACE_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
SINKS = ("screen", "stream")

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Where the messages are kept and how long to wait for an answer."""

    url: str = field(default="", repr=False)
    namespace: str = "duetime"
    shards: int = 1
    connect_timeout_ms: int = 2_000
    reply_timeout_ms: int = 10_000
    clock_skew_ms_max: int = 1_000

    def __post_init__(self) -> None:
        if not self.namespace or not NAMESPACE_CHARACTERS.issuperset(self.namespace) or len(self.namespace) > 64:
            raise ConfigError(f"redis.namespace must be 1 to 64 of A-Z a-z 0-9 . _ -, but is {self.namespace!r}.")
        if not 1 <= self.shards <= 64:
            raise ConfigError(f"redis.shards must be 1 to 64, but is {self.shards}.")
        _require_positive("redis", self, "connect_timeout_ms", "reply_timeout_ms", "clock_skew_ms_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestSettings:
    """What is read, where its traces go, and in which portions."""

    source: str = "files"
    input: str = "inbox"
    host: str = "127.0.0.1"
    port: int = 9999
    checkpoint: str = ""
    rejects: str = "rejects"
    trigger: str = "100 milliseconds"
    max_bytes_per_trigger: int = 256 * 1024 * 1024
    segment_bytes: int = 8 * 1024 * 1024
    transaction_messages: int = 5_000
    wait_for_disk: bool = False
    settle_ms: int = 1_000
    socket_roll_ms: int = 100
    fence_keep_sec: int = 3_600
    checkpoint_files_max: int = 10_000

    def __post_init__(self) -> None:
        if self.source not in ("files", "socket"):
            raise ConfigError(f"ingest.source must be files or socket, but is {self.source!r}.")
        if not 1 <= self.port <= 65_535:
            raise ConfigError(f"ingest.port must be 1 to 65535, but is {self.port}.")
        if not self.input or not self.rejects:
            raise ConfigError("ingest.input and ingest.rejects must name a folder.")
        if "://" in self.rejects:
            raise ConfigError(f"ingest.rejects must be a local or mounted folder, but is {self.rejects!r}.")
        _require_positive("ingest", self, "max_bytes_per_trigger", "segment_bytes", "transaction_messages", "settle_ms")
        _require_positive("ingest", self, "socket_roll_ms", "fence_keep_sec", "checkpoint_files_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSettings:
    """How messages are claimed and shown."""

    sink: str = "screen"
    format: str = "text"
    lease_sec: float = 30.0
    claim_limit: int = 500
    claim_bytes_max: int = 4 * 1024 * 1024
    wait_ms_max: int = 1_000
    id_memory_sec: int = 86_400
    max_rate: int = 0
    topics_max: int = 100
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0

    def __post_init__(self) -> None:
        _require_sink("drain", self.sink)
        if self.format not in ("text", "json"):
            raise ConfigError(f"drain.format must be text or json, but is {self.format!r}.")
        if not 0.1 <= self.lease_sec <= 86_400:
            raise ConfigError(f"drain.lease_sec must be 0.1 to 86400, but is {self.lease_sec}.")
        if not 1 <= self.claim_limit <= 5_000:
            raise ConfigError(f"drain.claim_limit must be 1 to 5000, but is {self.claim_limit}.")
        if self.max_rate < 0:
            raise ConfigError(f"drain.max_rate must be 0 (no limit) or more, but is {self.max_rate}.")
        if not self.metrics_host:
            raise ConfigError("drain.metrics_host must name an address of this machine.")
        if not 0 <= self.metrics_port <= 65_535:
            raise ConfigError(f"drain.metrics_port must be 0 (off) to 65535, but is {self.metrics_port}.")
        if not 1 <= self.topics_max <= 1_000:
            raise ConfigError(f"drain.topics_max must be 1 to 1000, but is {self.topics_max}.")
        _require_positive("drain", self, "claim_bytes_max", "wait_ms_max", "id_memory_sec")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """What happens to the messages of a topic when they are due, and to those that a consumer could not handle."""

    sink: str = ""
    max_rate: int = 0
    expire_after_sec: int = 0
    retain_messages: int = 1_000_000
    retain_sec: int = 604_800
    trim_unread: bool = False
    lease_sec: float = 30.0
    attempts_max: int = 5
    backoff_ms: int = 1_000
    backoff_ms_max: int = 600_000

    def __post_init__(self) -> None:
        if self.sink:
            _require_sink("topics", self.sink)
        for key in ("max_rate", "expire_after_sec", "retain_messages", "retain_sec"):
            if getattr(self, key) < 0:
                raise ConfigError(f"topics.{key} must be 0 (off) or more, but is {getattr(self, key)}.")
        if not 0.1 <= self.lease_sec <= 86_400:
            raise ConfigError(f"topics.lease_sec must be 0.1 to 86400, but is {self.lease_sec}.")
        _require_positive("topics", self, "attempts_max", "backoff_ms", "backoff_ms_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """What this checkout keeps on the machine it runs on."""

    state: str = ".duetime"

    def __post_init__(self) -> None:
        if not self.state or "://" in self.state:
            raise ConfigError(f"local.state must name a local folder, but is {self.state!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The whole tree; a module is handed the part it needs."""

    redis: RedisSettings = field(default_factory=RedisSettings)
    ingest: IngestSettings = field(default_factory=IngestSettings)
    drain: DrainSettings = field(default_factory=DrainSettings)
    topics: TopicSettings = field(default_factory=TopicSettings)
    topic: Mapping[str, TopicSettings] = field(default_factory=dict)
    local: LocalSettings = field(default_factory=LocalSettings)

    def of_topic(self, topic: str) -> TopicSettings:
        """Return the settings of a topic: its own, else those of all topics."""
        settings = self.topic.get(topic, self.topics)
        return settings if settings.sink else replace(settings, sink=self.drain.sink)


SECTIONS: dict[str, type] = {
    "redis": RedisSettings,
    "ingest": IngestSettings,
    "drain": DrainSettings,
    "topics": TopicSettings,
    "local": LocalSettings,
}
TOPIC = "topic"  # the section that holds a table for each topic that has settings of its own
PATHS = {("ingest", "checkpoint"), ("ingest", "rejects"), ("ingest", "input"), ("local", "state")}


def load_settings(
    flags: Mapping[str, Mapping[str, Value]], environ: Mapping[str, str], file: Path | None = None
) -> Settings:
    """Merge the three sources into one checked tree.

    Args:
        flags: section -> key -> value, only what the user gave on the command line.

        environ: the process environment; ``REDIS_URL`` and ``DUETIME_<SECTION>_<KEY>`` count.

        file: a TOML file; None means ``conf/pipeline.toml`` of this checkout, if there is one.

    Raises:
        ConfigError: a file that can't be read, an unknown key, or a value out of its range.
    """
    merged: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    from_file, topics = _read_file(file)
    for layer, base in ((from_file, ROOT), (_read_environ(environ), ROOT), (flags, Path.cwd())):
        for section, values in layer.items():
            for key, value in values.items():
                checked = _check_type(section, key, value)
                if (section, key) in PATHS:
                    checked = _resolve_path(str(checked), base)
                merged[section][key] = checked
    for section, key in PATHS:
        default = next(f.default for f in fields(SECTIONS[section]) if f.name == key)
        merged[section].setdefault(key, _resolve_path(str(default), ROOT))
    sections = {section: SECTIONS[section](**values) for section, values in merged.items()}
    return Settings(**sections, topic={name: _topic_settings(name, own, merged) for name, own in topics.items()})


def check_name(kind: str, name: str) -> str:
    """Return the name of a topic, group or consumer, which becomes a part of keys.

    Raises:
        ConfigError: it has other characters, or too many.
    """
    if not name or not NAMESPACE_CHARACTERS.issuperset(name) or len(name) > 64:
        raise ConfigError(f"A {kind} has 1 to 64 of A-Z a-z 0-9 . _ - as its name, so it can't be {name!r}.")
    return name


def _topic_settings(topic: str, own: object, merged: Mapping[str, Mapping[str, Any]]) -> TopicSettings:
    check_name("topic", topic)
    if not isinstance(own, dict):
        raise ConfigError(f"topic.{topic} must be a table of settings: [topic.{topic}].")
    checked = {key: _check_type("topics", key, value) for key, value in own.items()}
    return TopicSettings(**{**merged["topics"], **checked})


def redact_url(url: str) -> str:
    """Return ``url`` without its password, fit for a screen or a log."""
    scheme, _, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    shown = f"{scheme}://{user.partition(':')[0]}:***@{host}" if at else url
    return re.sub(r"(?<=[?&]password=)[^&]*", "***", shown)


def _read_file(file: Path | None) -> tuple[Mapping[str, Mapping[str, Value]], Mapping[str, object]]:
    """Return the sections, and the tables of single topics."""
    path = file or ROOT / "conf" / "pipeline.toml"
    if file is None and not path.exists():
        return {}, {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The configuration file {path} can't be read ({exc}); name another with --config.") from exc
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"The configuration file {path} is not valid TOML: {exc}.") from exc
    for section, values in content.items():
        if section not in (*SECTIONS, TOPIC) or not isinstance(values, dict):
            raise ConfigError(f"{path} has an unknown section [{section}]; known are {', '.join((*SECTIONS, TOPIC))}.")
    return {section: values for section, values in content.items() if section != TOPIC}, content.get(TOPIC, {})


def _read_environ(environ: Mapping[str, str]) -> dict[str, dict[str, Value]]:
    layer: dict[str, dict[str, Value]] = {section: {} for section in SECTIONS}
    if environ.get("REDIS_URL"):
        layer["redis"]["url"] = environ["REDIS_URL"]
    for name, text in environ.items():
        for section in SECTIONS:
            prefix = f"{ENV_PREFIX}{section.upper()}_"
            if name.startswith(prefix):
                layer[section][name.removeprefix(prefix).lower()] = text
    return layer


def _check_type(section: str, key: str, value: Value) -> Value:
    """Return ``value`` as the type of the setting; text is parsed, since flags and environment are text."""
    expected = next((f.type for f in fields(SECTIONS[section]) if f.name == key), None)
    if expected is None:
        known = ", ".join(f.name for f in fields(SECTIONS[section]))
        raise ConfigError(f"There is no setting {section}.{key}; [{section}] knows {known}.")
    wanted = expected if isinstance(expected, type) else get_args(expected)[0]
    if wanted is str and isinstance(value, str):
        return value
    if wanted is bool and (isinstance(value, bool) or value in ("true", "false")):
        return value in (True, "true")
    if wanted in (int, float) and not isinstance(value, bool) and not (wanted is int and isinstance(value, float)):
        try:
            return int(value) if wanted is int else float(value)
        except ValueError:
            pass
    raise ConfigError(f"{section}.{key} must be of type {wanted.__name__}, but is {value!r}.")


def _resolve_path(text: str, base: Path) -> str:
    """Make a local path absolute; "" stays "not given" and a URL such as hdfs://… stays as it is."""
    if not text or "://" in text:
        return text
    return os.path.normpath(base / Path(text).expanduser())


def _require_sink(section: str, sink: str) -> None:
    if sink not in SINKS:
        raise ConfigError(f"{section}.sink must be {' or '.join(SINKS)}, but is {sink!r}.")


def _require_positive(section: str, settings: Any, *keys: str) -> None:
    for key in keys:
        if not getattr(settings, key) > 0:
            raise ConfigError(f"{section}.{key} must be greater than 0, but is {getattr(settings, key)}.")
