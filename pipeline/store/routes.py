"""The keys that ``claim.lua`` may move messages to.

A script may touch only keys that it is given, and nobody knows which topics come next. So a call gives the targets that the last
reply wanted, and those wanted not long ago. A message whose target is not given ends a claim, and the reply says what is wanted
from there on. With more topics than are remembered the script looks ahead, so that one call still moves a whole claim.
"""

from collections.abc import Sequence
from itertools import chain, islice

TARGETS_KEPT = 256  # that a call gives beyond those that its last reply wanted


class Targets:
    """The targets of one shard that the next call gives."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []  # at least all that the last reply wanted; those that were wanted last come first

    @property
    def are_many(self) -> bool:
        """Whether more are in use than can be kept, so that the script has to look ahead."""
        return len(self.keys) >= TARGETS_KEPT

    def want(self, wanted: Sequence[bytes]) -> None:
        """Give these keys from now on."""
        if wanted:
            self.keys = list(islice(dict.fromkeys(chain(wanted, self.keys)), max(TARGETS_KEPT, len(wanted))))
