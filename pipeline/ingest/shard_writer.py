"""Storing what a task has for one shard: transactions from where the markers are, the file of cold messages before they count."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import partial

from pipeline.core.errors import PipelineError
from pipeline.core.messages import Change
from pipeline.ingest.cold_files import cold_file_of
from pipeline.ingest.stores import Retry, WriterSettings, open_cold_folder, retrying, wait_until_kept
from pipeline.ingest.transactions import ALL_STORED, PartQueue, Step
from pipeline.store.base import ChangingStore, Scheduled, SchedulingStore

TRANSACTION_BYTES = 4 * 1024 * 1024  # long messages: a transaction has no more than this, give or take one
WAITING_FILES = 500  # tiny files: this many are stored together


@dataclass(slots=True)
class Summary:
    """What became of the lines of a partition or batch.

    ``cancelled`` and ``replaced`` are lines that did that, ``late`` those whose message was in flight or delivered by then.
    ``first_reject`` says where a rejected line stood, if any was, and why. ``file_tokens`` are its files, of which all is stored
    unless ``lost`` says how many parts the server has lost again; a part that is in several shards counts in each.
    ``stored_again`` are those of ``stored`` that were stored before and undone by a failover, and ``histories`` what
    ``SchedulingStore.history`` said of the servers when all was stored.
    """

    lines: int = 0
    stored: int = 0
    duplicates: int = 0
    rejected: int = 0
    blank: int = 0
    lost: int = 0
    cancelled: int = 0
    replaced: int = 0
    late: int = 0
    stored_again: int = 0
    first_reject: str = ""
    file_tokens: list[str] = field(default_factory=list, compare=False)
    histories: list[str] = field(default_factory=list, compare=False)

    def add(self, other: "Summary") -> None:
        first = self.first_reject or other.first_reject
        for name in (f.name for f in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_reject = first


class ShardWriter:
    """Stores what a partition has for one shard."""

    def __init__(
        self,
        store: SchedulingStore,
        changing: ChangingStore,
        settings: WriterSettings,
        shard: int = 0,
        retry: Retry = retrying,
    ) -> None:
        self._store = store
        self._changing = changing
        self._settings = settings
        self._shard = shard
        self._retry = retry
        self._waiting: list[PartQueue] = []
        self._part_ids: list[str] = []
        self._was_away = False
        self.summary = Summary()

    def add(self, queue: PartQueue) -> None:
        """Store a part, now or together with others."""
        self._waiting.append(queue)
        self._part_ids.append(queue.part_id)
        messages = sum(waiting.left + len(waiting.changes) for waiting in self._waiting)
        if len(self._waiting) >= WAITING_FILES or messages >= self._settings.transaction_messages:
            self._store_waiting()

    def finish(self) -> Summary:
        """Store the rest, and look whether all of it is still there."""
        self._store_waiting()
        if self._part_ids:
            self.summary.histories = wait_until_kept(self._store, self._settings)
        # A server that came back without its last writes, as weak settings allow, has lost messages and markers together.
        markers = self._retry(lambda: self._store.markers(self._settings.source_id, self._part_ids))
        self.summary.lost = sum(marker != ALL_STORED for marker in markers)
        return self.summary

    def _store_waiting(self) -> None:
        queues, self._waiting = self._waiting, []
        self.store(queues)

    def store(self, queues: list[PartQueue]) -> None:
        """Store by transactions; one that finds a marker elsewhere goes on from there."""
        if any(queue.changes for queue in queues):
            self._resume(queues)
            self._make_changes(queues)
        while step := self._next_step(queues):
            if cold := step.opens_cold:
                self._write_cold_files(cold)
            done = self._retry(partial(self._store_step, step, queues))
            if done is not None:
                again = step.advance()
                self.summary.add(Summary(stored=done.stored, duplicates=len(done.duplicates), stored_again=again))
            else:
                self._resume(queues)

    def _next_step(self, queues: list[PartQueue]) -> Step:
        return Step(queues, self._settings.transaction_messages, TRANSACTION_BYTES)

    def _write_cold_files(self, queues: list[PartQueue]) -> None:
        """Write the cold messages of parts into their files. Whoever does so again, however late, writes the same."""
        if self._settings.cold is None:
            raise PipelineError(
                "Messages of a file were on their way into the cold folder when the job ended, and now cold.folder names none: set "
                "it again, and cold.horizon_hours = 8784 if no more messages shall go there."
            )
        folder = open_cold_folder(self._settings.cold)
        files = [cold_file_of(queue, self._settings.source_id, self._shard) for queue in queues]
        self._retry(lambda: folder.write(files))

    def _store_step(self, step: Step, queues: list[PartQueue]) -> Scheduled | None:
        """Try to store a transaction. A server that was away may have lost what was changed, so that is changed again before."""
        if self._was_away:
            self._changing.apply(_changes_left(queues))
        self._was_away = True  # unless it answers
        done = self._schedule(step)
        self._was_away = done is None
        return done

    def _schedule(self, step: Step) -> Scheduled | None:
        return self._store.schedule(self._settings.source_id, step.transaction)

    def _resume(self, queues: list[PartQueue]) -> None:
        """Go on from where the markers are; what is stored already, by another writer or before a lost reply, is known."""
        part_ids = [queue.part_id for queue in queues]
        markers = self._retry(lambda: self._store.markers(self._settings.source_id, part_ids))
        for queue, marker in zip(queues, markers, strict=True):
            before = queue.place
            self.summary.duplicates += queue.resume(marker) - before

    def _make_changes(self, queues: list[PartQueue]) -> None:
        """Cancel and replace what the parts say, and count it."""
        changes = _changes_left(queues)
        done = self._retry(lambda: self._changing.apply(changes))
        self.summary.add(Summary(**asdict(done)))
        self.summary.duplicates += sum(len(queue.changes) for queue in queues) - len(changes)


def _changes_left(queues: Iterable[PartQueue]) -> list[Change]:
    """Return what parts change of which nothing is stored: a marker moves only after that. To change it again changes nothing."""
    return [change for queue in queues if not queue.is_begun for change in queue.changes]
