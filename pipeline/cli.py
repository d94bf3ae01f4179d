"""What the commands share: flags, the way to a namespace, logging, signals, exit codes."""

import argparse
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from pipeline import __version__
from pipeline.config import RedisSettings, Settings, Value, load_settings
from pipeline.core.clock import SystemClock
from pipeline.core.due import DELAY_SEC_MAX, due_ms_of_text, has_no_zone, is_due_in_range
from pipeline.core.errors import ConfigError, PipelineError, StoreError
from pipeline.core.stop import Stop as Stop
from pipeline.core.text import command_text, has_password, install_text, span_ms, visible
from pipeline.runtime.server import private_server
from pipeline.store.checks import check_server, find_cluster
from pipeline.store.connection import connect
from pipeline.store.keys import Keys, keys_of
from pipeline.store.namespace import open_namespace

OWN_LOGGERS = (__name__.partition(".")[0], "__main__")
_SPAN_IN_WORDS = re.compile(r"unrecognized arguments: (?:s|sec|second|min|minute|h|hour|d|day)s?\b.*")
_ZONE_NAME = re.compile(r"[0-9][ \[]*[A-Z][A-Za-z]+(?:/[A-Za-z_]+)?\]?$")
EXIT_SUCCESS, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2
EXIT_CLOSED_PIPE = 128 + signal.SIGPIPE  # as a shell reports the end of any program in `… | head -1`

log = logging.getLogger(__name__)


class _Parser(argparse.ArgumentParser):
    """Wrong use is one sentence, as every other error."""

    def error(self, message: str) -> NoReturn:
        hint = " (write a time as one word, such as 3m)" if _SPAN_IN_WORDS.fullmatch(message) else ""
        if message == "argument --in: expected one argument":
            hint = " (a time from now on, such as 3m, and none that is over)"
        raise ConfigError(f"{message}{hint}; see --help.")


def new_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all jobs share."""
    parser = _Parser(prog=command_text(name), description=description, allow_abbrev=False)
    parser.add_argument(
        "--redis",
        metavar="URL",
        help="redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://, without a password (default: REDIS_URL, else "
        "redis.url or redis.url_file of the "
        "configuration, "
        "else the private server of this checkout)",
    )
    parser.add_argument("--namespace", metavar="NAME", help="keeps pipelines on one server apart (default: duetime)")
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="configuration file (default: DUETIME_CONFIG, else conf/pipeline.toml)",
    )
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="lowest level to log (default: info)",
    )
    parser.add_argument(
        "--log-format", choices=["text", "json"], default="text", help="form of the lines on stderr (default: text)"
    )
    parser.add_argument("--version", action="version", version=f"duetime {__version__}")
    return parser


def parse_command(
    parser: argparse.ArgumentParser, arguments: list[str], section: str, *names: str, **others: tuple[str, str]
) -> tuple[argparse.Namespace, Settings]:
    """Read the command line, set level and form of the log, and merge the flags with environment and file.

    Args:
        section: where the flags ``names`` belong; ``--redis`` and ``--namespace`` are known.

        others: the section and the key of each flag that belongs elsewhere.

    Raises:
        ConfigError: see ``load_settings``.
    """
    given = parser.parse_args(arguments)
    for logger in OWN_LOGGERS:  # libraries stay at warnings
        logging.getLogger(logger).setLevel(given.log_level.upper())
    for handler in logging.getLogger().handlers if given.log_format == "json" else ():
        if isinstance(handler.formatter, _LineFormatter):
            handler.setFormatter(_JsonFormatter(handler.formatter.job))
    flags: dict[str, dict[str, Value]] = {"redis": {}}
    for name, (place, key) in {**{name: (section, name) for name in names}, **others}.items():
        if getattr(given, name) is not None:
            flags.setdefault(place, {})[key] = getattr(given, name)
    if given.redis is not None:
        flags["redis"]["url"] = given.redis
        if has_password(given.redis):
            log.warning(
                "every user of this machine can see the password of --redis; put the URL into REDIS_URL, or into a file that "
                "redis.url_file names"
            )
    if given.namespace is not None:
        flags["redis"]["namespace"] = given.namespace
    return given, load_settings(flags, os.environ, given.config)


def add_metrics_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where a job serves its metrics."""
    parser.add_argument("--metrics-port", metavar="N", help="port for Prometheus metrics (default: 0, not served)")
    parser.add_argument("--metrics-host", metavar="ADDRESS", help="address for Prometheus metrics (default: 127.0.0.1)")


def serve_metrics(host: str, port: int, new_collector: Callable[[], Any]) -> None:
    """Serve what a collector of ``pipeline.metrics`` gives until the process ends, if a port is given.

    Args:
        new_collector: makes it; only then the library is loaded, which takes time.
    Raises:
        ConfigError: the library is not installed, or the address can't be had.
    """
    if not port:
        return
    try:
        from pipeline import metrics
    except ImportError as exc:
        raise ConfigError(f"--metrics-port needs {exc.name}: {install_text('metrics')}.") from exc
    metrics.serve_metrics(host, port, new_collector())
    log.info("metrics are on http://%s:%d/metrics", host, port)


def add_when(parser: argparse.ArgumentParser, verb: str, is_required: bool = False) -> None:
    """Add the options that say when a message is due; ``due_ms_given`` reads them."""
    when = parser.add_mutually_exclusive_group(required=is_required)
    when.add_argument(
        "--in", dest="delay", metavar="TIME", help=f"{verb} so long from now, such as 90s, 15m, 2h or 7d; 0s is now"
    )
    when.add_argument("--at", metavar="TIME", help=f"{verb} at this time in ISO 8601 with Z or an offset")


def no_time(option: str, text: str) -> ConfigError:
    """Return the error about an option whose value is no time with its zone."""
    zoned = f"{option} takes a time with its zone, such as 2026-01-31T12:00:00Z or 2026-01-31T12:00:00+01:00"
    if has_no_zone(text):
        return ConfigError(f"{zoned}; {text!r} has none.")
    if _ZONE_NAME.search(text):
        return ConfigError(f"{zoned}; a zone is Z or an offset, not a name as in {text!r}.")
    return ConfigError(f"{option} takes a time such as 2026-01-31T12:00:00Z, not {text!r}.")


def due_ms_given(given: argparse.Namespace) -> Callable[[int], int] | None:
    """Return from the present time (epoch ms) the one that ``add_when``'s options say, or None if none is given.

    Raises:
        ConfigError: it is no time, or too far away.
    """
    if given.at is not None:
        due_ms = due_ms_of_text(given.at)
        if due_ms is None or not is_due_in_range(due_ms):
            raise no_time("--at", given.at)
        return lambda now_ms: due_ms
    if given.delay is not None:
        delay_ms = span_ms(given.delay)
        if delay_ms is not None and delay_ms > DELAY_SEC_MAX * 1_000:
            raise ConfigError(f"--in takes at most 366d, not {given.delay!r}; --at takes any time to the year 9999.")
        if delay_ms is None:
            raise ConfigError(f"--in takes a number and s, m, h or d, at most 366d, not {given.delay!r}.")
        return lambda now_ms: now_ms + delay_ms
    return None


@dataclass(frozen=True, slots=True)
class Connection:
    """A namespace on a server that passed the checks."""

    client: Any
    settings: RedisSettings  # with the URL of the private server, if none is configured
    shards: list[Keys]
    exists: bool  # whether anything was ever stored in the namespace


@contextmanager
def open_connection(
    settings: Settings, stopping: Callable[[], bool], *, may_create: bool, writes: bool = False
) -> Iterator[Connection]:
    """Give a connection to the configured server, else to the private one, which stays up meanwhile.

    Args:
        may_create: make the namespace if it is new.

        writes: for jobs that store or deliver: refuse a replica, and log what is weaker about the server than it should be.

    Raises:
        ConfigError: the server or the namespace is not fit.
        StoreError: no answer, or a stop was requested before the private server was up.
    """
    with ExitStack() as stack:
        redis_settings = settings.redis
        if not redis_settings.url:
            url = stack.enter_context(private_server(Path(settings.local.state), stopping))
            redis_settings = replace(redis_settings, url=url)
        redis_settings = find_cluster(redis_settings)
        client = connect(redis_settings)
        stack.callback(client.close)
        for warning in check_server(client, redis_settings, SystemClock(), writes):
            if writes:
                log.warning("%s", warning)
        exists = open_namespace(client, redis_settings, may_create)
        yield Connection(client, redis_settings, keys_of(redis_settings), exists)


def announce_ready(stage: str = "up") -> None:
    """Report to the supervisor, if one asks by ``DUETIME_READY_FD``, that this job is ``open`` (its input is its own) or ``up``."""
    descriptor = os.environ.get("DUETIME_READY_FD", "")
    if descriptor.isdigit():
        try:
            os.write(int(descriptor), f"{stage}\n".encode())
        except OSError:
            pass  # it is gone; that is noticed elsewhere


class _LineFormatter(logging.Formatter):
    """One line a record: no name of a file can forge a second one, or drive the terminal."""

    def __init__(self, job: str) -> None:
        super().__init__(f"%(asctime)s {job}: %(message)s", "%Y-%m-%d %H:%M:%SZ")
        self.converter = time.gmtime
        self.job = job

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message}"
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(map(visible, super().formatException(ei).split("\n")))


class _JsonFormatter(_LineFormatter):
    """One object a line, for programs that collect logs."""

    def format(self, record: logging.LogRecord) -> str:
        time_text = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z"
        fields = {"time": time_text, "level": record.levelname.lower(), "job": self.job, "logger": record.name}
        trace = {"trace": logging.Formatter.formatException(self, record.exc_info)} if record.exc_info else {}
        return json.dumps({**fields, "message": record.getMessage(), **trace})


def run_main(name: str, main: Callable[[list[str], Stop], int]) -> NoReturn:
    """Run a job and turn how it ends into an exit code; an error is one sentence, never a stack trace."""
    stop = Stop()
    stop.install()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(name))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])

    def complain(sentence: str) -> None:
        if isinstance(handler.formatter, _JsonFormatter):
            log.error("%s", sentence)
        else:
            print(f"{name}: {visible(sentence)}", file=sys.stderr)

    try:
        code = main(sys.argv[1:], stop)
    except ConfigError as exc:
        complain(str(exc))
        code = EXIT_USAGE
    except PipelineError as exc:
        complain(str(exc))
        # Whoever stops a job that waits for a server to start gets what they asked for.
        code = EXIT_SUCCESS if stop.requested and isinstance(exc, StoreError) else EXIT_FAILURE
    except BrokenPipeError:
        code = EXIT_CLOSED_PIPE
    except Exception as exc:
        log.debug("the whole trace", exc_info=True)
        first_line = next(iter(str(exc).splitlines()), "")
        complain(f"{type(exc).__name__}: {first_line} (unexpected; --log-level debug shows where)")
        code = EXIT_FAILURE
    except KeyboardInterrupt:  # Spark takes SIGINT over while it starts
        code = EXIT_SUCCESS
    _close_quietly()
    sys.exit(code)


def _close_quietly() -> None:
    """Keep Python from complaining at exit that standard output is closed."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
