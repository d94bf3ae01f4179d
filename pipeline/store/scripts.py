"""The Lua scripts, read from package resources so that they also load from a zip given to ``--py-files``."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from typing import Any

import redis

from pipeline.core.errors import StoreUnavailable
from pipeline.store.connection import translated_errors
from pipeline.store.topology import client_of_key

NAMES = (
    "check_ids",
    "schedule",
    "check_cold",
    "hydrate",
    "set_topics",
    "claim",
    "ack",
    "release",
    "forget_ids",
    "by_id",
    "replace",
    "resume",
    "trim",
    "forget_topic",
    "settle",
    "reclaim",
    "retry",
    "acquire_active",
    "read_active",
    "remove_consumer",
    "redrive",
    "purge",
    "register",
    "drop_group",
    "forward",
    "refuse",
)
Call = tuple[str, Sequence[str | bytes], Sequence[Any]]  # a script, its keys and its arguments

_INCLUDE = re.compile(r"^-- include (\w+)\n", re.MULTILINE)


def read_script(name: str) -> str:
    """Return the source of ``lua/<name>.lua``; each line ``-- include x`` is replaced by ``lua/include/x.lua``."""
    folder = files(f"{__package__}.lua")

    def included(line: re.Match[str]) -> str:
        return folder.joinpath("include", f"{line[1]}.lua").read_text(encoding="utf-8")

    return _INCLUDE.sub(included, folder.joinpath(f"{name}.lua").read_text(encoding="utf-8"))


class Scripts:
    """The scripts as one server knows them, called by their SHA-1 digest.

    Args:
        flags: keep the ``#!lua`` line. It needs Redis 7; fakeredis can't read it.
    """

    def __init__(self, flags: bool = True) -> None:
        self._sources = {name: read_script(name) if flags else _without_flags(read_script(name)) for name in NAMES}
        self._digests = {
            name: hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            for name, source in self._sources.items()
        }

    def load(self, client: Any) -> None:
        """Make every script known to the server; again after it was restarted or failed over."""
        for source in self._sources.values():
            client.execute_command("SCRIPT LOAD", source)

    def command(self, name: str, keys: Sequence[str | bytes], arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return the command that runs a script, to be sent alone or in a pipeline."""
        return ("EVALSHA", self._digests[name], len(keys), *keys, *arguments)

    def command_with_text(self, name: str, keys: Sequence[str | bytes], arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return a command that works whether or not the server knows the script."""
        return ("EVAL", self._sources[name], len(keys), *keys, *arguments)


def run_script(client: Any, scripts: Scripts, name: str, keys: Sequence[str | bytes], arguments: Sequence[Any]) -> Any:
    """Run a script; a server that does not know it, or no longer, is given all of them.

    Raises:
        StoreError: no answer, or an error.
    """
    command = scripts.command(name, keys, arguments)
    client = client_of_key(client, keys[0])
    with translated_errors():
        try:
            return client.execute_command(*command)
        except redis.exceptions.NoScriptError:
            scripts.load(client)
        try:
            return client.execute_command(*command)
        except redis.exceptions.NoScriptError as exc:
            raise StoreUnavailable("Redis forgets its scripts as soon as it has them.") from exc


def begin_scripts(client: Any, scripts: Scripts, calls: Sequence[Call]) -> Callable[[], list[Any]]:
    """Send scripts to be run one after the other; what is returned waits for their replies, and must be called.

    Raises:
        StoreUnavailable: they could not be sent, or there is no answer.
        StoreError: an error of one of them; the others may have run.
    """
    pool = client.connection_pool
    with translated_errors():
        connection = pool.get_connection()

    @contextmanager
    def lent() -> Iterator[None]:
        try:
            with translated_errors():
                yield
        except BaseException:
            connection.disconnect()
            pool.release(connection)
            raise

    def read() -> Any:
        try:
            return connection.read_response()
        except redis.exceptions.ResponseError as exc:
            return exc

    with lent():
        connection.send_packed_command(connection.pack_commands([scripts.command(*call) for call in calls]))

    def replies() -> list[Any]:
        with lent():
            found = [read() for _ in calls]  # all of them: what is left would be read by who has the connection next
        pool.release(connection)
        found = [
            run_script(client, scripts, *call) if _is_no_script(reply) else reply
            for call, reply in zip(calls, found, strict=True)
        ]
        with translated_errors():
            for reply in found:
                if isinstance(reply, Exception):
                    raise reply
        return found

    return replies


class SentAhead:
    """Scripts that are sent at once, and whose replies are read later, on a connection of their own. For one thread."""

    def __init__(self, client: Any, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts
        self._connections: dict[Any, Any] = {}  # by their pool, while replies are awaited
        self._sent: list[Any] = []  # the pool of each script
        self._found: list[Any] = []
        self._is_lost = False

    def send(self, name: str, keys: Sequence[str | bytes], arguments: Sequence[Any]) -> None:
        """Send a script; that it could not be sent is told by ``replies``."""
        pool = client_of_key(self._client, keys[0]).connection_pool
        self._sent.append(pool)
        if not self._is_lost:  # what follows a lost one is not sent
            with suppress(StoreUnavailable), self._kept():
                if pool not in self._connections:
                    self._connections[pool] = pool.get_connection()
                packed = self._connections[pool].pack_command(*self._scripts.command(name, keys, arguments))
                self._connections[pool].send_packed_command(packed)

    def replies(self) -> list[Any]:
        """Wait for the replies to all that was sent since the last time.

        Raises:
            StoreUnavailable: any of it may be done.
        """
        try:
            self.gather()
            return self._found
        finally:
            self._sent, self._found, self._is_lost = [], [], False

    def gather(self) -> None:
        """Wait for the replies, and keep them for ``replies``."""
        while len(self._found) < len(self._sent):
            if self._is_lost:
                raise StoreUnavailable("The connection to Redis was lost.")
            with self._kept():
                try:
                    self._found.append(self._connections[self._sent[len(self._found)]].read_response())
                except redis.exceptions.NoScriptError as exc:
                    raise redis.exceptions.ConnectionError("it has forgotten its scripts") from exc
        self._release()

    def _release(self) -> None:
        for pool, connection in self._connections.items():
            pool.release(connection)
        self._connections.clear()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            with translated_errors():
                yield
        except BaseException:  # whatever it was, replies are left that nobody may take for others
            self._is_lost = True
            for connection in self._connections.values():
                connection.disconnect()
            self._release()
            raise


def run_scripts(client: Any, scripts: Scripts, calls: Sequence[Call]) -> list[Any]:
    """Run scripts in one round trip, each for itself, and return their replies.

    Raises:
        StoreError: no answer, or an error of one of them; the others may have run.
    """
    return run_commands(client, scripts, [scripts.command(*call) for call in calls])


def run_commands(client: Any, scripts: Scripts, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Make calls in one round trip, of scripts by ``Scripts.command`` or others; see ``run_scripts``."""
    with translated_errors():
        replies = _in_one_round_trip(client, commands)
        unknown = [index for index, reply in enumerate(replies) if _is_no_script(reply)]
        if unknown:
            for each in dict.fromkeys(client_of_key(client, commands[index][3]) for index in unknown):
                scripts.load(each)
            again = _in_one_round_trip(client, [commands[index] for index in unknown])
            for index, reply in zip(unknown, again, strict=True):
                replies[index] = reply
        for reply in replies:
            if _is_no_script(reply):
                raise StoreUnavailable("Redis forgets its scripts as soon as it has them.")
            if isinstance(reply, Exception):
                raise reply
    return replies


def _in_one_round_trip(client: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    return list(pipeline.execute(raise_on_error=False))


def _is_no_script(reply: Any) -> bool:
    return isinstance(reply, redis.exceptions.NoScriptError)


def _without_flags(source: str) -> str:
    first, _, rest = source.partition("\n")
    return rest if first.startswith("#!") else source
