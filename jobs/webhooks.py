"""Post the messages of each topic that has a webhook to its URL; run as many as you like."""

import argparse
import logging
import select
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli import (
    EXIT_SUCCESS,
    Stop,
    add_metrics_options,
    announce_ready,
    new_parser,
    open_connection,
    parse_command,
    run_main,
    serve_metrics,
)
from pipeline.config import Settings, check_name
from pipeline.consume.opening import parse_start
from pipeline.core.clock import SystemClock
from pipeline.core.errors import StoreUnavailable
from pipeline.core.text import command_text
from pipeline.store.namespace import adopt_topic_settings, current_settings
from pipeline.webhooks.service import Webhooks
from pipeline.webhooks.signing import read_secrets

if TYPE_CHECKING:
    from pipeline.webhooks.metrics import WebhooksCollector

LOOK_SEC = 2.0  # between two looks at the settings of topics

log = logging.getLogger(__name__)


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line and the settings.

    Raises:
        ConfigError: wrong use, or a wrong setting.
    """
    parser = new_parser("webhooks", __doc__ or "")
    parser.add_argument(
        "--topic",
        dest="topics",
        action="append",
        default=[],
        metavar="T",
        help=f"post only this topic; may be repeated (default: every topic with a webhook, as {command_text('topics')} set T "
        "webhook=URL gives it one)",
    )
    parser.add_argument(
        "--secrets",
        type=Path,
        metavar="FILE",
        help="file of the secrets that sign what is posted, a line 'TOPIC whsec_...' each, * for all topics (default: not signed)",
    )
    parser.add_argument(
        "--from",
        dest="start",
        default="beginning",
        metavar="PLACE",
        help="where to begin in a topic whose group nobody has registered; set webhook=URL has, where the topic had a stream: "
        "beginning (of what its stream retains), new, after an entry ID, or a time in ISO 8601 (default: beginning)",
    )
    add_metrics_options(parser)
    given, settings = parse_command(parser, arguments, "webhooks", "metrics_host", "metrics_port")
    for topic in given.topics:
        check_name("topic", topic)
    return given, settings


def main(arguments: list[str], stop: Stop) -> int:
    """Post until stopped."""
    given, settings = parse_arguments(arguments)
    start, secrets = parse_start(given.start), read_secrets(given.secrets) if given.secrets else {}
    with ExitStack() as stack:
        connection = stack.enter_context(open_connection(settings, stop, may_create=True))
        settings = adopt_topic_settings(connection.client, settings)
        webhooks = Webhooks(
            connection.client, settings, connection.shards, secrets, SystemClock(), start, {*given.topics}
        )
        stack.callback(lambda: log.info("%s", webhooks.totals))
        stack.callback(webhooks.stop)
        collector = partial(new_collector, settings.redis.namespace, webhooks)
        serve_metrics(settings.webhooks.metrics_host, settings.webhooks.metrics_port, collector)
        tell_missing(given.topics, current_settings(connection.client, settings))
        webhooks.look()
        announce_ready()
        is_away = False
        while not stop():
            stop.interrupting(lambda: select.select([], [], [], LOOK_SEC))
            try:
                if not stop():
                    webhooks.look()
                is_away = False
            except StoreUnavailable as exc:
                if not is_away:
                    log.warning("waiting for Redis: %s", exc)
                is_away = True
    return EXIT_SUCCESS


def new_collector(namespace: str, webhooks: Webhooks) -> "WebhooksCollector":
    """Return what serves the metrics of the job; only who has them served loads their library."""
    from pipeline.webhooks.metrics import WebhooksCollector

    return WebhooksCollector(namespace, webhooks)


def tell_missing(topics: list[str], settings: Settings) -> None:
    """Tell of topics that were named and have no webhook yet."""
    for topic in topics:
        if not settings.of_topic(topic).webhook:
            log.warning(
                "topic %s has no webhook yet; %s gives it one",
                *(topic, command_text("topics", f"set {topic} webhook=URL")),
            )


if __name__ == "__main__":
    run_main("webhooks", main)
