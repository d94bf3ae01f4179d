"""Where the messages of each topic go, as ``claim.lua`` is told.

The script can't know which topics it will meet, and must not touch a key that it was not given. So it names what it misses, and is
asked again with that: a topic costs one more call when it is met first.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.config import TopicSettings
from pipeline.store.keys import Keys

ROUTES_MAX = 256  # that a call names; of more topics, those that were new last
LATER_MAX = 64  # buckets that a call names, for messages that have to wait because of a max_rate


@dataclass(frozen=True, slots=True)
class TopicRules:
    """What the store has to know of topics.

    Args:
        of_topic: the settings of a topic, its ``sink`` given.

        all_to_screen: no topic has settings of its own, so that it need not be looked for in each message.

        shards: how many share the ``max_rate`` of a topic.
    """

    of_topic: Callable[[str], TopicSettings]
    all_to_screen: bool
    shards: int = 1


ALL_TO_SCREEN = TopicRules(lambda topic: TopicSettings(sink="screen"), all_to_screen=True)


class Routes:
    """The routes and later buckets of one shard that were met so far."""

    def __init__(self, keys: Keys, rules: TopicRules) -> None:
        self.all_to_screen = rules.all_to_screen
        self._keys = keys
        self._of_topic = rules.of_topic
        self._shards = rules.shards
        self._routes: OrderedDict[str, TopicSettings] = OrderedDict()
        self._later: OrderedDict[str, None] = OrderedDict()

    def learn_route(self, name: str) -> None:
        """Name a route from now on: ``<topic>``, or ``<topic>:<group>``."""
        self._routes[name] = self._of_topic(name.partition(":")[0])
        if len(self._routes) > ROUTES_MAX:
            self._routes.popitem(last=False)

    def learn_later(self, bucket_start_ms: str) -> None:
        """Name a later bucket from now on."""
        self._later[bucket_start_ms] = None
        if len(self._later) > LATER_MAX:
            self._later.popitem(last=False)

    def keys(self) -> list[str]:
        """Return the keys, in the order of the script."""
        topics = [name.partition(":")[0] for name in self._routes]
        return [
            *(self._stream(name) for name in self._routes),
            *(self._keys.dead(topic) for topic in topics),
            *(self._keys.held(topic) for topic in topics),
            *(self._keys.bucket(int(start)) for start in self._later),
        ]

    def arguments(self) -> list[Any]:
        """Return the arguments, in the order of the script."""
        words: list[Any] = [int(self.all_to_screen), len(self._routes)]
        for name, settings in self._routes.items():
            streams = settings.sink == "stream" or ":" in name
            interval_ms = 1000 * self._shards / settings.max_rate if settings.max_rate else 0
            words += [name, int(streams), settings.expire_after_sec * 1000, interval_ms]
        return [*words, *self._later]

    def _stream(self, name: str) -> str:
        topic, _, group = name.partition(":")
        return self._keys.again(topic, group) if group else self._keys.stream(topic)
