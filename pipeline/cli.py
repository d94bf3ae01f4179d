"""What the commands share: flags, signals, exit codes."""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pipeline import __version__
from pipeline.config import RedisSettings, Settings, Value, load_settings
from pipeline.core.errors import ConfigError, PipelineError, StoreError
from pipeline.runtime.server import private_server

OWN_LOGGERS = ("pipeline", "__main__")
EXIT_SUCCESS, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2


class StopRequested(BaseException):
    """Raised out of an interruptible wait by SIGINT or SIGTERM; no error."""


class Stop:
    """SIGINT and SIGTERM as a question that loops ask: ``requested``. Waits may be cut short by it, work is not."""

    def __init__(self) -> None:
        self.requested = False
        self._interruptible = False

    def install(self) -> None:
        """Take both signals over, for the main thread."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def __call__(self) -> bool:
        return self.requested

    def interrupting(self, wait: Callable[[], object]) -> None:
        """Call ``wait``, and leave it at once when a stop is, or was, requested."""
        try:
            try:
                self._interruptible = True
                if not self.requested:
                    wait()
            finally:
                self._interruptible = False
        except StopRequested:
            pass  # from anywhere above: the signal may come between two of these lines

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._interruptible:
            self._interruptible = False
            raise StopRequested


def new_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all jobs share."""
    parser = argparse.ArgumentParser(
        prog=f"./spark-submit.sh jobs/{name}.py", description=description, allow_abbrev=False
    )
    parser.add_argument(
        "--redis", metavar="URL", help="redis://, rediss:// or unix:// (default: REDIS_URL, else a private server)"
    )
    parser.add_argument("--namespace", metavar="NAME", help="keeps pipelines on one server apart (default: duetime)")
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings (default: conf/pipeline.toml)")
    parser.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], default="info", help="default: info"
    )
    parser.add_argument("--version", action="version", version=f"duetime {__version__}")
    return parser


def settings_from(arguments: argparse.Namespace, section: str, *names: str) -> Settings:
    """Merge the flags that were given with environment and file.

    Args:
        section: where the flags ``names`` belong; ``--redis`` and ``--namespace`` are known.
    """
    flags: dict[str, dict[str, Value]] = {"redis": {}, section: {}}
    given = vars(arguments)
    for name in names:
        if given[name] is not None:
            flags[section][name] = given[name]
    if arguments.redis is not None:
        flags["redis"]["url"] = arguments.redis
    if arguments.namespace is not None:
        flags["redis"]["namespace"] = arguments.namespace
    return load_settings(flags, os.environ, arguments.config)


@contextmanager
def reachable_redis(settings: Settings, stopping: Callable[[], bool]) -> Iterator[RedisSettings]:
    """Give the Redis settings with a URL: the configured one, else of the private server, which stays up meanwhile."""
    if settings.redis.url:
        yield settings.redis
        return
    with private_server(Path(settings.local.state), stopping) as url:
        yield replace(settings.redis, url=url)


def set_log_level(level: str) -> None:
    """Set how much our own code tells; libraries stay at warnings."""
    for logger in OWN_LOGGERS:
        logging.getLogger(logger).setLevel(level.upper())


def announce_ready() -> None:
    """Tell whoever started this process that it is up, if they asked by ``DUETIME_READY_FD``."""
    descriptor = os.environ.pop("DUETIME_READY_FD", "")
    if descriptor.isdigit():
        try:
            os.write(int(descriptor), b"1\n")
            os.close(int(descriptor))
        except OSError:
            pass  # they are gone; that is noticed elsewhere


def run_main(name: str, main: Callable[[list[str], Stop], int]) -> NoReturn:
    """Run a job and turn how it ends into an exit code; an error is one sentence, never a stack trace."""
    stop = Stop()
    stop.install()
    logging.Formatter.converter = time.gmtime  # as everything we show
    logging.basicConfig(
        level=logging.WARNING, format=f"%(asctime)s {name}: %(message)s", datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr
    )
    try:
        code = main(sys.argv[1:], stop)
    except ConfigError as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        code = EXIT_USAGE
    except PipelineError as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        # Whoever stops a job that waits for a server to start gets what they asked for.
        code = EXIT_SUCCESS if stop.requested and isinstance(exc, StoreError) else EXIT_FAILURE
    except BrokenPipeError:
        print(f"{name}: Nobody reads the output any more.", file=sys.stderr)
        code = EXIT_FAILURE
    except Exception as exc:
        logging.getLogger(__name__).debug("the whole trace", exc_info=True)
        said = next(iter(str(exc).splitlines()), "")
        print(f"{name}: {type(exc).__name__}: {said} (unexpected; --log-level debug shows where)", file=sys.stderr)
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
