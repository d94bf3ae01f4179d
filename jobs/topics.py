"""List topics and their consumer groups, pause and resume topics, drop groups, and change the settings of topics."""

import argparse
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace

from pipeline.cli import EXIT_SUCCESS, Connection, Stop, new_parser, open_connection, parse_command, run_main
from pipeline.config import ALL_TOPICS, Settings, TopicSettings, Value, check_name, convert_topic_setting
from pipeline.consume.opening import new_store, parse_start
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.text import command_text, count_text, span_text, visible
from pipeline.store.namespace import change_topic_settings, read_topic_settings
from pipeline.store.topics import GroupInfo, TopicInfo, Topics
from pipeline.webhooks import GROUP

log = logging.getLogger(__name__)


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line and the settings.

    Raises:
        ConfigError: wrong use, or a wrong setting.
    """
    parser = new_parser("topics", __doc__ or "")
    parser.add_argument(
        "what",
        choices=["list", "pause", "resume", "groups", "drop-group", "settings", "set", "unset"],
        help="list: what each topic holds; pause: hold messages that are due; resume: release the held messages, in order; "
        "groups: how far each consumer group is; drop-group TOPIC GROUP: forget a group and all that it has not handled; "
        "settings: show the settings of topics; set, unset: change them for all jobs, running loops included",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="TOPIC",
        help="topics (list, groups, settings: default all); set, unset: one topic, or none for all, then KEY=VALUE or KEY, "
        "with the keys of [topics] in conf/pipeline.toml",
    )
    parser.add_argument(
        "--from",
        dest="start",
        metavar="PLACE",
        help="set webhook=URL: where a webhook that is new begins in the topic's stream: new, beginning (of what it retains), "
        "after an entry ID, or a time in ISO 8601 (default: new, with what comes due from now on)",
    )
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="output for people or for programs (default: text)"
    )
    given, settings = parse_command(parser, arguments, "redis")
    given.topic, given.changes = ALL_TOPICS, {}
    if given.what in ("set", "unset"):
        given.topic, given.changes = read_changes(given.what, given.names)
        given.names = []
    if given.start is not None and not given.changes.get("webhook"):
        raise ConfigError("--from says where a webhook begins: it belongs to set webhook=URL.")
    given.start = parse_start(given.start or "new")
    if given.what == "drop-group" and len(given.names) != 2:
        raise ConfigError("Name a topic and a group: drop-group TOPIC GROUP.")
    for index, name in enumerate(given.names):
        check_name("group" if given.what == "drop-group" and index else "topic", name)
    if given.what in ("pause", "resume") and not given.names:
        raise ConfigError(f"Say which topics to {given.what}.")
    return given, settings


def read_changes(what: str, names: list[str]) -> tuple[str, dict[str, Value | None]]:
    """Return the topic, or ALL_TOPICS, and the new value of each setting, None for one that is taken back.

    Raises:
        ConfigError: no setting, one that does not exist, or a value out of its range.
    """
    keys = [field.name for field in fields(TopicSettings)]
    is_topic = bool(names) and ("=" not in names[0] if what == "set" else names[0] not in keys)
    topic = check_name("topic", names[0]) if is_topic else ALL_TOPICS
    changes: dict[str, Value | None] = {}
    for text in names[is_topic:]:
        key, equals, value = text.partition("=")
        if key not in keys:
            raise ConfigError(f"There is no setting {key!r} of topics; they are {', '.join(keys)}.")
        if bool(equals) != (what == "set"):
            raise ConfigError("Write set KEY=VALUE, or unset KEY.")
        changes[key] = convert_topic_setting(key, value) if equals else None
        if changes[key] == "" and key != "webhook":  # a topic may have none though all others have one
            raise ConfigError(f"Say which {key}, or take it back with unset {key}.")
    if not changes:
        raise ConfigError(
            f"Say what to {what}: {'KEY=VALUE' if what == 'set' else 'KEY'}, with a key of {', '.join(keys)}."
        )
    return topic, changes


def main(arguments: list[str], stop: Stop) -> int:
    """List, pause or resume topics, list or drop their groups, or show or change their settings."""
    given, settings = parse_arguments(arguments)
    with open_connection(settings, stop, may_create=given.what == "set") as connection:
        if given.what in ("settings", "set", "unset"):
            if given.changes.get("webhook"):
                begin_webhook(connection, settings, given.topic, given.start)
            if given.changes:
                change_topic_settings(connection.client, connection.settings, given.topic, given.changes)
            found = read_topic_settings(connection.client, connection.settings)
            print(settings_text(found, given.names, given.format))
            return EXIT_SUCCESS
        topics = Topics(connection.client, connection.shards)
        if given.what == "drop-group":
            return drop_group(topics, *given.names)
        now_ms = topics.now_ms()
        known = topics.names()
        names: Sequence[str] = given.names or known
        for name in names:
            if given.what == "pause":
                topics.pause(name, now_ms)
            elif given.what == "resume":
                held = topics.resume(name)
                if given.format == "text":
                    print(f"{name} resumed; {count_text(held, 'held message')} released")
        if given.what == "groups":
            for name in names:
                print(groups_text(name, topics.groups(name), given.format, now_ms))
        elif given.what != "resume" or given.format == "json":
            for name in names:
                print(topic_text(topics.look(name), given.format, now_ms))
                if given.what == "pause" and name not in known and given.format == "text":
                    print(f"{name} has had no stream, held message or dead letter so far: check that this is its name")
        if not names and given.format == "text":
            print("no topic has a stream yet")
    return EXIT_SUCCESS


def begin_webhook(connection: Connection, settings: Settings, topic: str, start: str) -> None:
    """Register the group that posts, so that a webhook which is new begins now, whenever its job is started.

    A topic that has no stream yet needs nothing: all that will be in it comes later.
    """
    settings = replace(settings, redis=connection.settings)
    names: Collection[str] = [topic]
    if topic == ALL_TOPICS:
        found = read_topic_settings(connection.client, connection.settings)
        own = {name for name, values in found.items() if name != ALL_TOPICS and "webhook" in values}
        names = sorted({*Topics(connection.client, connection.shards).names()} - own)
    for name in names:
        if not new_store(connection.client, settings, name, GROUP, "").register(start):
            log.info("the webhook of topic %s goes on where it was; drop its group to have it begin anew", name)


def drop_group(topics: Topics, topic: str, group: str) -> int:
    """Drop a group, and say what was done."""
    if not topics.drop_group(topic, group):
        raise PipelineError(
            f"The topic {topic} has no group {group}; {command_text('topics', f'groups {topic}')} lists those that it has."
        )
    print(f"{topic}: dropped the group {group}; what is still scheduled for it becomes a dead letter when it is due")
    return EXIT_SUCCESS


def settings_text(found: Mapping[str, Mapping[str, Value]], names: Sequence[str], format: str) -> str:
    """Return what is said of all topics, and of single ones, or of those with a name in ``names``."""
    shown = {topic: found.get(topic, {}) for topic in [ALL_TOPICS, *(names or sorted(found.keys() - {ALL_TOPICS}))]}
    if format == "json":
        return json.dumps(shown)
    lines = []
    for topic, values in shown.items():
        said = " ".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in sorted(values.items()))
        name = "all topics" if topic == ALL_TOPICS else visible(topic)
        lines.append(f"{name}: {said or ('the defaults' if topic == ALL_TOPICS else 'as all topics')}")
    return "\n".join(lines)


def topic_text(topic: TopicInfo, format: str, now_ms: int) -> str:
    """Return a line about a topic."""
    if format == "json":
        return json.dumps(asdict(topic))
    paused = ""
    if topic.paused_ms is not None:
        paused_for_ms = now_ms - topic.paused_ms
        paused = f", paused for {span_text(paused_for_ms)}" if paused_for_ms >= 1_000 else ", paused"
    return f"{visible(topic.name)}: {topic.in_stream:,} in its stream, {topic.held:,} held, {topic.dead:,} dead{paused}"


def groups_text(topic: str, groups: Sequence[GroupInfo], format: str, now_ms: int) -> str:
    """Return a line about each group of a topic, and about each of its consumers: whether one runs, the server may not know."""
    if format == "json":
        return json.dumps({"topic": topic, "groups": [asdict(group) for group in groups]})
    topic = visible(topic)
    lines = []
    for group in groups:
        oldest_ms = group.oldest_pending_ms
        oldest = "" if oldest_ms is None else f", the oldest of {span_text(max(0, now_ms - oldest_ms))} ago"
        kind = " (ordered)" if group.ordered else ""
        lag = "unknown" if group.lag is None else f"{group.lag:,}"
        name = visible(group.name)
        lines.append(
            f"{topic} {name}{kind}: lag {lag}, pending {group.pending:,}{oldest}; {count_text(len(group.consumers), 'consumer')}"
        )
        for each in group.consumers:
            lines.append(f"  {visible(each.name)}: pending {each.pending:,}, seen {span_text(each.idle_ms)} ago")
    return "\n".join(lines) or f"{topic}: no groups"


if __name__ == "__main__":
    run_main("topics", main)
