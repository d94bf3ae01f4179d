"""Post the messages of each topic that has a webhook to its URL; run as many as you like."""

import argparse
import logging
import select
from contextlib import ExitStack
from pathlib import Path

from pipeline.cli import EXIT_SUCCESS, Stop, announce_ready, new_parser, open_connection, parse_command, run_main
from pipeline.config import Settings, check_name
from pipeline.consume.opening import parse_start
from pipeline.core.clock import SystemClock
from pipeline.core.errors import StoreUnavailable
from pipeline.store.namespace import adopt_topic_settings, current_settings
from pipeline.webhooks.service import Webhooks
from pipeline.webhooks.signing import read_secrets

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
        help="post only this topic; may be repeated (default: every topic with a webhook, as jobs/topics.py set T webhook=URL "
        "gives it one)",
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
        help="where to begin in a topic that was never posted: beginning (of what its stream retains), new, after an entry ID, or "
        "a time in ISO 8601 (default: beginning)",
    )
    given, settings = parse_command(parser, arguments, "topics")
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


def tell_missing(topics: list[str], settings: Settings) -> None:
    """Tell of topics that were named and have no webhook yet."""
    for topic in topics:
        if not settings.of_topic(topic).webhook:
            log.warning(
                "topic %s has no webhook yet; ./spark-submit.sh jobs/topics.py set %s webhook=URL gives it one",
                topic,
                topic,
            )


if __name__ == "__main__":
    run_main("webhooks", main)
