"""Serve the HTTP API: schedule, find, move and cancel messages, and look after topics and dead letters."""

import argparse
import asyncio
import logging
from dataclasses import replace

from pipeline.cli import EXIT_SUCCESS, Stop, announce_ready, new_parser, open_connection, parse_command, run_main
from pipeline.config import Settings
from pipeline.core.clock import SystemClock
from pipeline.store.checks import meaning_of_stored
from pipeline.web.access import Access, read_tokens
from pipeline.web.server import listen, serve

log = logging.getLogger(__name__)


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line and the settings.

    Raises:
        ConfigError: wrong use, or a wrong setting.
    """
    parser = new_parser("serve", __doc__ or "")
    parser.add_argument("--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", metavar="N", help="port to listen on; 0: any that is free (default: 8600)")
    parser.add_argument("--unix", metavar="PATH", help="listen on a unix socket that only this user can open, instead")
    parser.add_argument(
        "--tokens",
        metavar="FILE",
        help="who may ask: lines of a name, the SHA-256 of a token, and rights (default: everybody)",
    )
    parser.add_argument("--read-only", action="store_const", const=True, help="answer nothing that changes something")
    return parse_command(parser, arguments, "api", "host", "port", "unix", "tokens", "read_only")


def main(arguments: list[str], stop: Stop) -> int:
    """Serve until a stop is requested."""
    _, settings = parse_arguments(arguments)
    clock = SystemClock()
    Access(settings.api, read_tokens(settings.api.tokens), lambda: 0.0)  # what is wrong is said before anything starts
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are about what clients send
    with (
        listen(settings.api) as (listener, address),
        open_connection(settings, stop, may_create=True, writes=True) as connection,
    ):
        settings = replace(settings, redis=connection.settings)
        how = (settings.api.wait_for_disk, "message", "api.wait_for_disk")
        log.info("%s", meaning_of_stored(connection.client, connection.shards, *how))

        def on_ready() -> None:
            log.info("the API is on %s", address)
            announce_ready()

        asyncio.run(serve(settings, connection.client, clock, listener, stop, on_ready))
    return EXIT_SUCCESS


if __name__ == "__main__":
    run_main("serve", main)
