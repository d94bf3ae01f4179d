"""The keys that ``claim.lua`` may move messages to.

A script may touch only keys that it is given, and nobody knows which topics come next. So a call names the targets that the last
reply wanted, and those wanted not long ago. A message whose target is not named ends a claim, and the reply says what is wanted
from there on. With more topics than are remembered the script looks ahead, so that one call still moves a whole claim.
"""

from collections import OrderedDict
from collections.abc import Sequence

from pipeline.store.keys import Keys

TARGETS_KEPT = 256  # that a call names beyond those that its last reply wanted

Target = tuple[str, str]  # kind and name, as in the head of ``claim.lua``


class Targets:
    """The targets of one shard that the next call names."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._kept: OrderedDict[Target, str] = OrderedDict()  # and their keys, those that were wanted last at the end

    @property
    def are_many(self) -> bool:
        """Whether more are in use than can be kept, so that the script has to look ahead."""
        return len(self._kept) >= TARGETS_KEPT

    def keys(self) -> list[str]:
        """Return the keys, in the order of ``arguments``."""
        return list(self._kept.values())

    def arguments(self) -> list[str]:
        """Return kind and name of each."""
        return [text for target in self._kept for text in target]

    def want(self, wanted: Sequence[bytes]) -> None:
        """Name targets from now on.

        Args:
            wanted: kind, name, … of a reply.
        """
        for kind, name in zip(wanted[::2], wanted[1::2], strict=True):
            target = kind.decode(), name.decode()
            if target in self._kept:
                self._kept.move_to_end(target)
            else:
                self._kept[target] = self._keys.target(*target)
        for _ in range(len(self._kept) - max(TARGETS_KEPT, len(wanted) // 2)):
            self._kept.popitem(last=False)
