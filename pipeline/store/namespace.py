"""What a namespace says about itself: the version of its wire format, how many shards it has, and the settings of its topics."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import redis

from pipeline.config import ALL_TOPICS, DrainSettings, RedisSettings, Settings, TopicSettings, Value
from pipeline.core.errors import ConfigError, StoreUnavailable
from pipeline.core.text import command_text
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys, keys_of
from pipeline.store.layout import FORMAT_VERSION, read_layout, tags_of
from pipeline.store.scripts import Scripts, run_script
from pipeline.store.shards import first_that_answers, those_that_answer

log = logging.getLogger(__name__)

_SETTINGS = tuple(field.name for field in fields(TopicSettings))


def open_namespace(client: Any, settings: RedisSettings, may_create: bool) -> bool:
    """Check that this program and the namespace agree; with ``may_create``, make a namespace that is new.

    The first shard says what the namespace is. Each other has a copy, for jobs that start while the first is away. A namespace that
    is there is written to only where a copy is missing, and not if that fails: a server without memory still lets a job start.

    Returns:
        Whether the namespace exists now.

    Raises:
        ConfigError: the namespace has another version of the format, or another number of shards, or with ``may_create``, the user
            may not rename keys.
        StoreUnavailable: no answer, or none that says what the namespace is.
    """
    first, *found, found_tags = read_layout(client, settings, may_create)
    tags = tags_of(settings)
    if may_create:
        _check_rename(client, settings)
    if None in found:
        return False
    version, shards = (int(value) for value in found)
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"The namespace {settings.namespace} has version {version} of the wire format, and this program version "
            f"{FORMAT_VERSION}; use a release of Duetime that has version {version}, or another namespace."
        )
    if shards != settings.shards:
        raise ConfigError(
            f"The namespace {settings.namespace} has {shards} shards, not {settings.shards}; set redis.shards = {shards}, "
            f"use another namespace, or, if nothing was ever stored in this one, delete its key {first.meta()}."
        )
    if shards > 1 and (found_tags or b"").decode() != tags:
        raise ConfigError(
            f"The shards of the namespace {settings.namespace} have other keys than this version gives them: they are of a version "
            "before 1.0; let that one deliver what waits there, and use another namespace."
        )
    return True


def _check_rename(client: Any, settings: RedisSettings) -> None:
    """See that the user may rename: without, a transaction that finds an idempotency key known could not be held back."""

    def rename(keys: Keys) -> None:
        nothing = keys.aside(keys.places())
        try:
            client.rename(nothing, nothing)
        except redis.exceptions.NoPermissionError:
            raise
        except redis.exceptions.ResponseError:
            pass  # there is no such key

    first_that_answers(keys_of(settings), rename)


def adopt_topic_settings(
    client: Any, settings: Settings, complete: bool = False, scripts: Scripts | None = None
) -> Settings:
    """Return ``settings`` with what the namespace says of topics. What it does not say yet, it takes from what was given.

    All loops and consumers of a namespace go by the same settings, whatever the configuration of their machine
    (docs/adr/0013-topic-settings.md).

    Args:
        complete: the namespace also takes the defaults for what it does not say, as messages are delivered by them now.

    Raises:
        ConfigError: settings were given, and the namespace has others.
        StoreError: no answer, or an error.
    """
    wanted: dict[str, dict[str, Any]] = {topic: dict(values) for topic, values in settings.given.items()}
    if complete:
        wanted[ALL_TOPICS] = asdict(TopicSettings(sink=DrainSettings().sink)) | wanted.get(ALL_TOPICS, {})
    loaded = scripts or Scripts()
    shard, said = first_that_answers(keys_of(settings.redis), lambda keys: (keys.shard, _read(client, keys)))
    found = said.topics()
    if any(values.keys() - found.get(topic, {}).keys() for topic, values in wanted.items()):
        said = _change(client, settings.redis, lambda topic, values: wanted.get(topic, {}) | values, [*wanted], loaded)
        shard = 0
    # What another shard says may be older.
    if shard == 0 and not _write_to_all(client, settings.redis, said, loaded, passes_over=True):
        # The first has changed meanwhile, or was set back: what it says now counts.
        said = _change(client, settings.redis, lambda topic, values: values, [], loaded)
        _write_to_all(client, settings.redis, said, loaded, passes_over=True)
    adopted = _with(settings, said.topics())
    _refuse_others(settings, adopted)
    return adopted


def current_topic_settings(client: Any, settings: Settings, topic: str) -> TopicSettings:
    """Return what counts for a topic now; the namespace may have settings of many others, which are not read.

    Raises:
        StoreError: no answer, or an error.
    """
    names = (ALL_TOPICS, topic)
    texts = first_that_answers(keys_of(settings.redis), lambda keys: client.hmget(keys.topic_settings(), names))
    found = {name: _known(json.loads(text)) for name, text in zip(names, texts, strict=True) if text is not None}
    return _with(settings, found).of_topic(topic)


def current_settings(client: Any, settings: Settings) -> Settings:
    """Return ``settings`` with what the namespace says of topics now.

    Raises:
        StoreError: no answer, or an error.
    """
    return _with(settings, read_topic_settings(client, settings.redis))


def read_topic_settings(client: Any, settings: RedisSettings) -> dict[str, dict[str, Any]]:
    """Return what the namespace says of topics: what is said of a single one counts for it, else what is said of ``ALL_TOPICS``.

    Raises:
        StoreError: no answer, or an error.
    """
    return _of_topics(first_that_answers(keys_of(settings), lambda keys: client.hgetall(keys.topic_settings())))


@dataclass(frozen=True, slots=True)
class _Said:
    """What a shard says of topics. The revision counts the changes, so that of two writers the later one stays."""

    texts: Mapping[bytes, bytes]
    revision: int

    def topics(self) -> dict[str, dict[str, Any]]:
        return _of_topics(self.texts)


def _read(client: Any, keys: Keys) -> _Said:
    # Not in a transaction, as Redis refuses one when it is full, even to read. The revision is read first: if the settings change
    # in between, it is too old to write with.
    pipeline = client.pipeline(transaction=False)
    pipeline.hget(keys.meta(), "topics_revision")
    pipeline.hgetall(keys.topic_settings())
    revision, texts = pipeline.execute()
    return _Said(texts, int(revision or 0))


def _write(client: Any, keys: Keys, said: _Said, known: int, scripts: Scripts) -> bool:
    """Write what is said into a shard, unless it has a later revision than ``known``; says whether that was done."""
    flat = [text for pair in said.texts.items() for text in pair]
    names = [keys.topic_settings(), keys.meta()]
    return bool(run_script(client, scripts, "set_topics", names, [known, said.revision, *flat]) == 1)


def _of_topics(found: Mapping[bytes, bytes]) -> dict[str, dict[str, Any]]:
    return {topic.decode(): _known(json.loads(values)) for topic, values in found.items()}


def change_topic_settings(
    client: Any,
    settings: RedisSettings,
    topic: str,
    changes: Mapping[str, Value | None],
    scripts: Scripts | None = None,
) -> None:
    """Change settings of one topic or of ``ALL_TOPICS``; running loops go by it from their next claim on.

    Args:
        changes: None takes a setting away, so that what is said of all topics counts, or the default.

    Raises:
        StoreError: no answer, or an error: some shards may have it; the same call again finishes it.
    """

    def changed(topic: str, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in {**values, **changes}.items() if value is not None}

    loaded = scripts or Scripts()
    _write_to_all(client, settings, _change(client, settings, changed, [topic], loaded), loaded)
    _look_again(client, settings, topic)


def _look_again(client: Any, settings: RedisSettings, topic: str) -> None:
    """Have loops look at once at what is held: it may go sooner by another rate limit."""
    with translated_errors():
        for keys in keys_of(settings):
            topics = client.zrange(keys.held_topics(), 0, -1) if topic == ALL_TOPICS else [topic]
            if topics and client.zadd(keys.held_topics(), dict.fromkeys(topics, 0), xx=True, ch=True):
                client.publish(keys.wake(), 0)


def _change(
    client: Any,
    settings: RedisSettings,
    changed: Callable[[str, dict[str, Any]], dict[str, Any]],
    topics: Sequence[str],
    scripts: Scripts,
) -> _Said:
    """Change the settings of some topics in the first shard, if nobody else does meanwhile; then once more."""
    shards = keys_of(settings)
    first = shards[0]
    while True:
        with translated_errors():
            found = _read(client, first)
        texts = dict(found.texts)
        for topic in topics:
            if new := changed(topic, json.loads(texts.pop(topic.encode(), b"{}"))):
                texts[topic.encode()] = json.dumps(new).encode()
        # The first shard may have been set back, to a backup or by a failover; the others take nothing older than what they have.
        revisions = those_that_answer(shards, lambda keys: int(client.hget(keys.meta(), "topics_revision") or 0))
        said = _Said(texts, max(found.revision, *revisions) + 1)
        if _write(client, first, said, found.revision, scripts):
            return said


def _with(settings: Settings, found: Mapping[str, dict[str, Any]]) -> Settings:
    of_all = found.get(ALL_TOPICS, {})
    own = {topic: TopicSettings(**of_all | values) for topic, values in found.items() if topic != ALL_TOPICS}
    return replace(settings, topics=TopicSettings(**of_all), topic=own)


def _refuse_others(settings: Settings, adopted: Settings) -> None:
    """Compare what was given with what the namespace has."""
    different = []
    for topic, values in settings.given.items():
        has = asdict(adopted.of_topic(topic))
        if has["webhook"]:
            has["sink"] = values.get("sink")  # the messages go into the stream, whatever it is
        of_topic = "" if topic == ALL_TOPICS else f" of the topic {topic}"
        name = "" if topic == ALL_TOPICS else f"{topic} "
        for key, value in values.items():
            if has[key] != value:
                command = command_text("topics", f"set {name}{key}={_text(value)}")
                different.append(
                    f"{key}{of_topic} is {_text(has[key])} there, not {_text(value)} ({command} changes it)"
                )
    if different:
        raise ConfigError(
            f"The namespace {settings.redis.namespace} has other settings of topics than this job was given: "
            f"{'; '.join(different)}."
        )


def _text(value: Value) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _write_to_all(
    client: Any, settings: RedisSettings, said: _Said, scripts: Scripts, passes_over: bool = False
) -> bool:
    """Make the other shards say what the first one says; a server is written to only where they do not.

    Args:
        passes_over: a shard that does not answer, which keeps what it has until another job starts.
    Returns:
        False if one says something later, which stays.
    """
    is_latest = True
    for keys in keys_of(settings)[1:]:
        try:
            with translated_errors():
                there = client.hgetall(keys.topic_settings())
            if there != said.texts:
                is_latest = _write(client, keys, said, said.revision, scripts) and is_latest
        except StoreUnavailable as exc:
            if not passes_over:
                raise
            log.warning("shard %d goes by the settings of topics that it has: %s", keys.shard, exc)
    return is_latest


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what only a newer release knows."""
    return {name: values[name] for name in _SETTINGS if name in values}
