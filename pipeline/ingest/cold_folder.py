"""The folder of cold files, where messages wait that are due long after they came in (docs/adr/0031-cold-messages.md).

Each part of a landing file has one file for each shard, with its cold messages in order of due time, and of lines. Its name is
``<part id>+<shard>+<first due_ms>+<last due_ms>.parquet``, so that a listing of the folder tells what is needed of it. Who writes
it again writes the same file under the same name. A file is there whole and durable, or not at all.

The folder has an ID, which Redis knows, too. So a folder that is away, or another one in its place, is an error and never an empty
folder. Any local or mounted folder will do, and a bucket of S3, with endpoint and credentials from the usual variables of AWS.
"""

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.fs as pafs

from pipeline.core.errors import ColdUnavailable, PipelineError
from pipeline.core.files import SCRATCH_PREFIX, put_in_place
from pipeline.core.ids import TOKEN_LENGTH

IDENTITY_NAME: Final = "duetime-cold.json"
SOURCE_ID: Final = "cold"  # of the progress markers of cold files
DONE_NAME: Final = "done"  # in it a folder for each minute in which files came there, of what is stored in Redis
SUFFIX: Final = ".parquet"
MERGED_PREFIX: Final = "="  # in the place of a part id; in no token


@dataclass(frozen=True, slots=True)
class ColdName:
    """The name of a cold file, and what it says; due times are epoch ms UTC."""

    part_id: str
    shard: int
    first_due_ms: int
    last_due_ms: int

    @property
    def marker_id(self) -> str:
        """What its progress marker is about while it is brought into Redis."""
        return f"{self.part_id}+{self.shard}"

    @property
    def token(self) -> str:
        """The beginning of the message ids of its messages, unless it was merged."""
        return self.part_id[:TOKEN_LENGTH]

    @property
    def is_merged(self) -> bool:
        """Whether it was made of other cold files (``cold_merging.py``)."""
        return self.part_id.startswith(MERGED_PREFIX)

    @classmethod
    def of_merged(cls, shard: int, first_due_ms: int, last_due_ms: int) -> Self:
        """Name a new file that is made of others."""
        return cls(f"{MERGED_PREFIX}{secrets.token_hex(8)}", shard, first_due_ms, last_due_ms)

    def __str__(self) -> str:
        return f"{self.marker_id}+{self.first_due_ms}+{self.last_due_ms}{SUFFIX}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Read a name; None if it is not of a cold file."""
        part_id, *numbers = name.removesuffix(SUFFIX).split("+")
        if name.endswith(SUFFIX) and len(numbers) == 3 and part_id and all(number.isdecimal() for number in numbers):
            return cls(part_id, *map(int, numbers))
        return None


@dataclass(frozen=True, slots=True)
class ColdPlace:
    """Where cold messages go, and which they are; values only, to travel to executors."""

    folder: str
    folder_id: str
    horizon_ms: int

    def cold_from_ms(self, arrival_ms: int) -> int:
        """Return from which due time on the messages of a file are cold that came in at ``arrival_ms``, epoch ms UTC both."""
        return arrival_ms + self.horizon_ms


class ColdFolder:
    """A folder of cold files.

    Each verb raises ``ColdUnavailable`` if the folder is away, or the disk full: then it may be called again.
    """

    def __init__(self, url: str, folder_id: str = "") -> None:
        """Make one; nothing is looked at.

        Raises:
            ColdUnavailable: there is no such kind of folder.
        """
        self.url = url
        self.folder_id = folder_id
        self.is_local = "://" not in url
        with self._used():
            try:
                self.files, base = pafs.FileSystem.from_uri(
                    url.replace("s3a://", "s3://", 1) if not self.is_local else url
                )
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
                raise ColdUnavailable(f"cold.folder can't be {url}: {exc}.") from exc
        self._base = base.rstrip("/")

    def path(self, *names: object) -> str:
        """Return the path of a file in it, for its file system."""
        return "/".join([self._base, *map(str, names)])

    def read_identity(self) -> dict[str, Any] | None:
        """Return what the folder says of itself, None if it does not."""
        with self._used():
            try:
                with self.files.open_input_stream(self.path(IDENTITY_NAME)) as stream:
                    found = json.loads(stream.read())
            except FileNotFoundError:
                return None
            except ValueError as exc:
                raise PipelineError(f"{self.url}/{IDENTITY_NAME} is no JSON object: put it right.") from exc
        return dict(found)

    def write_identity(self, identity: dict[str, Any]) -> None:
        """Make the folder, and have it say something of itself."""
        with self._used():
            self.files.create_dir(self._base, recursive=True)
        self._put(IDENTITY_NAME, lambda file: file.write(json.dumps(identity).encode()))
        self._sync()

    def check(self) -> None:
        """See that it is there, and no other one."""
        identity = self.read_identity()
        if identity is None or identity.get("id") != self.folder_id:
            what = f"has no {IDENTITY_NAME}" if identity is None else "is another one than Redis knows"
            raise ColdUnavailable(
                f"The cold folder {self.url} {what}: mount the right one, or bring it back from a backup."
            )

    def names(self, *below: object) -> list[ColdName]:
        """Return the files that are in it, or in a folder below it, in no order."""
        self.check()
        return [name for text in self._list(*below) if (name := ColdName.parse(text))]

    def sizes(self) -> dict[ColdName, tuple[int, int]]:
        """Return bytes, and the time of writing in epoch ms on the clock of the file system, of each file."""
        self.check()
        with self._used():
            found = self.files.get_file_info(pafs.FileSelector(self._base))
        named = ((ColdName.parse(info.base_name), info) for info in found)
        return {name: (info.size, info.mtime_ns // 1_000_000) for name, info in named if name}

    def done_minutes(self) -> list[int]:
        """Return the minutes, since the epoch, in which files went to those that are done."""
        return [int(name) for name in self._list(DONE_NAME) if name.isdecimal()]

    def write(self, files: Iterable[tuple[ColdName, Callable[[Any], object]]]) -> None:
        """Write files, each by what writes it into an open one; one that is there already is the same."""
        self.check()
        for name, write in files:
            self._put(str(name), lambda file, write=write: write(file))
        self._sync()

    def open(self, name: ColdName) -> Any:
        """Open a file for reading at any place; see ``used``."""
        return self.files.open_input_file(self.path(name))

    @contextmanager
    def used(self, name: ColdName) -> Iterator[None]:
        """Translate what goes wrong with a file while the block lasts.

        Raises:
            FileNotFoundError: it is not there.
            PipelineError: it is damaged.
        """
        with self._used():
            try:
                yield
            except pa.ArrowInvalid as exc:
                raise PipelineError(f"The cold file {self.path(name)} is damaged: {exc}") from exc

    def written_ms(self, name: ColdName) -> int | None:
        """Return when a file was written, epoch ms UTC on the clock of the file system; None if it is gone."""
        with self._used():
            info = self.files.get_file_info(self.path(name))
        return info.mtime_ns // 1_000_000 if info.type == pafs.FileType.File else None

    def move(self, name: ColdName, source: Sequence[object], target: Sequence[object]) -> None:
        """Move a file from one folder below to another; one that is gone was moved before."""
        with self._used():
            if target:
                self.files.create_dir(self.path(*target), recursive=True)
            with suppress(FileNotFoundError):
                self.files.move(self.path(*source, name), self.path(*target, name))

    def delete(self, name: ColdName, *below: object) -> None:
        """Delete a file; one that is gone was deleted before."""
        with self._used(), suppress(FileNotFoundError):
            self.files.delete_file(self.path(*below, name))

    def delete_done(self, minute: int) -> None:
        """Delete what was done in a minute."""
        with self._used(), suppress(FileNotFoundError):
            self.files.delete_dir(self.path(DONE_NAME, minute))

    def _list(self, *below: object) -> list[str]:
        with self._used():
            if self.is_local:
                try:
                    return os.listdir(self.path(*below))
                except FileNotFoundError:
                    return []
            selector = pafs.FileSelector(self.path(*below), allow_not_found=True)
            return [info.base_name for info in self.files.get_file_info(selector)]

    def _put(self, name: str, write: Any) -> None:
        """Write a file that is there whole or not at all: an object store has it when its stream is closed."""
        with self._used():
            if not self.is_local:
                with self.files.open_output_stream(self.path(name)) as stream:
                    write(stream)
                return
            scratch = self.path(
                f"{SCRATCH_PREFIX}{name}.{secrets.token_hex(4)}"
            )  # of several writers none disturbs another
            try:
                with open(scratch, "xb") as file:
                    write(file)
                    put_in_place(file, self.path(name))
            except BaseException:
                with suppress(OSError):
                    os.unlink(scratch)
                raise

    def _sync(self) -> None:
        """See to it that the names of files are on the disk."""
        if self.is_local:
            with self._used():
                descriptor = os.open(self._base, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    @contextmanager
    def _used(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise ColdUnavailable(f"The cold folder {self.url} can't be used ({exc.strerror or exc}).") from exc
