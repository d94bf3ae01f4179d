"""What became of the lines of a batch: what workers tell the driver, and the driver everybody."""

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Summary:
    """What became of the lines of a partition or batch. Of a file that is read again only those count that were left to do.

    ``cancelled`` and ``replaced`` are lines that did that, ``late`` those whose message was in flight or delivered by then.
    ``first_reject`` says where a rejected line stood, if any was, and why. ``file_tokens`` are its files, of which all is stored
    unless ``lost`` says how many parts the server has lost again; a part that is in several shards counts in each.
    ``stored_again`` are those of ``stored`` that were stored before and undone by a failover, and ``histories`` what
    ``SchedulingStore.history`` said of the servers when all was stored. Of Kafka ``file_tokens`` are the part ids of partitions of
    which each shard has a marker. ``lacking`` says which files are not known to be whole in
    which shard, as that is away, each ``<token> <shard>``; ``waiting`` are the lines that may not be stored, and not in ``lines``.
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
    waiting: int = 0
    first_reject: str = ""
    file_tokens: list[str] = field(default_factory=list, compare=False)
    histories: list[str] = field(default_factory=list, compare=False)
    lacking: list[str] = field(default_factory=list, compare=False)

    @property
    def away(self) -> set[int]:
        """The shards that lack something."""
        return {int(each.rpartition(" ")[2]) for each in self.lacking}

    def add(self, other: "Summary") -> None:
        first = self.first_reject or other.first_reject
        for name in (f.name for f in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_reject = first

    def write_again(self, done: "Summary") -> None:
        """Count what another writing of the same batch has done."""
        new = max(0, self.waiting - done.waiting)  # lines that had waited for a shard
        again = max(0, done.stored - new)
        self.add(Summary(lines=new, stored=done.stored, stored_again=again))
        self.waiting, self.lacking = done.waiting, done.lacking
