"""Which topics of a namespace have a webhook now, and a poster for each."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline.config import ALL_TOPICS, Settings, TopicSettings, convert_topic_setting
from pipeline.consume.consumer import Consumer
from pipeline.consume.opening import new_consumer, new_store, place_from_now, shards_of_consumers, stoppable
from pipeline.core.clock import Clock
from pipeline.core.errors import ConfigError, StoreError
from pipeline.core.stop import Stop
from pipeline.core.text import command_text
from pipeline.store.keys import Keys
from pipeline.store.namespace import current_settings
from pipeline.store.topics import Topics
from pipeline.webhooks import GROUP as GROUP
from pipeline.webhooks.poster import Poster
from pipeline.webhooks.signing import Secrets, secrets_of
from pipeline.webhooks.totals import Totals

KEYS = ("webhook", "webhook_format", "webhook_timeout_sec", "webhook_concurrency")
STOP_MS = 5_000  # beside the time that a target has to answer

log = logging.getLogger(__name__)


class Webhooks:
    """Posts the messages of each topic of a namespace that has a webhook, as its settings are at the last look.

    Args:
        client: a ``redis.Redis``, which threads share.

        settings: as the job was given them.

        only: the topics to post; none means all.

        start: the entry after which the group of a topic begins, if it is new.
    """

    def __init__(
        self,
        client: Any,
        settings: Settings,
        shards: Sequence[Keys],
        secrets: Secrets,
        clock: Clock,
        start: str,
        only: Collection[str] = (),
    ) -> None:
        self.totals = Totals()
        self.is_up = False  # whether the last look had its answers
        self._client = client
        self._settings = settings
        self._topics = Topics(client, shards)
        self._secrets = secrets
        self._clock = clock
        self._start = start
        self._only = only
        self._posters: dict[str, Poster] = {}
        self._leaving: list[Poster] = []
        self._known: set[str] = set()  # topics that have something
        self._refused: dict[str, str] = {}  # topic -> why it can't be posted, told once

    def look(self) -> None:
        """Start posters for webhooks that are new, end those of webhooks that are gone, and renew those that are set otherwise.

        Raises:
            StoreError: no answer, or an error: what runs goes on, and the same call may be made again.
        """
        try:
            wanted = self._wanted()
        except StoreError:
            self.is_up = False
            raise
        self.is_up = True
        for topic, poster in list(self._posters.items()):
            settings = wanted.get(topic)
            is_over = not poster.runs() and not poster.is_wrong
            if settings != poster.settings or is_over:
                self._end(topic)
                if settings is None:
                    log.info(
                        "topic %s has no webhook any more; its group keeps what is not posted until it is dropped: %s",
                        *(topic, command_text("topics", f"drop-group {topic} {GROUP}")),
                    )
        self._leaving = [poster for poster in self._leaving if poster.runs()]
        for topic, settings in wanted.items():
            if topic not in self._posters:
                self._begin(topic, settings)

    def posting(self) -> list[str]:
        """Return the topics that are posted now, in order."""
        return sorted(topic for topic, poster in self._posters.items() if poster.runs())

    def targets_down(self) -> dict[str, bool]:
        """Return whether the target of each topic that is posted seems to be down."""
        return {topic: poster.is_target_down for topic, poster in list(self._posters.items())}

    def stop(self) -> None:
        """Let all that is in hand be finished, as long as their targets may take to answer."""
        for topic in list(self._posters):
            self._end(topic)
        answer_sec = max((poster.settings.webhook_timeout_sec for poster in self._leaving), default=0)
        until_ms = self._clock.monotonic_ms() + 2 * answer_sec * 1000 + STOP_MS
        for poster in self._leaving:
            if not poster.join(until_ms):
                log.warning(
                    "the target of topic %s does not end its answer: what is in flight comes again after its lease",
                    poster.topic,
                )

    def _wanted(self) -> dict[str, TopicSettings]:
        settings = current_settings(self._client, self._settings)
        if not self._only:
            there, are_all = self._topics.names_that_answer()
            self._known = there if are_all else self._known | there  # a topic of a shard that is away is still one
        names = {*(self._only or (*settings.topic, *self._known))}
        found = {topic: settings.of_topic(topic) for topic in sorted(names - {ALL_TOPICS})}
        checked = {topic: self._checked(topic, each) for topic, each in found.items() if each.webhook}
        return {topic: each for topic, each in checked.items() if each}

    def _checked(self, topic: str, settings: TopicSettings) -> TopicSettings | None:
        """Return settings that any program may have written; None if their webhook can't be posted to."""
        try:
            values: dict[str, Any] = {key: convert_topic_setting(key, str(getattr(settings, key))) for key in KEYS}
        except ConfigError as exc:
            if self._refused.get(topic) != str(exc):
                log.error("the messages of topic %s are not posted: %s", topic, exc)
            self._refused[topic] = str(exc)
            return None
        self._refused.pop(topic, None)
        return replace(settings, **values)

    def _begin(self, topic: str, settings: TopicSettings) -> None:
        secrets = secrets_of(self._secrets, topic)
        shares = shards_of_consumers(self._client, self._settings, settings.webhook_concurrency, ordered=False)
        place = place_from_now(new_store(self._client, self._settings, topic, GROUP, ""), self._start)
        open_consumer = partial(self._open_consumer, place)
        poster = Poster(topic, settings, secrets, open_consumer, shares, self.totals, self._clock)
        how = f"{settings.webhook_concurrency} at a time, {'signed' if secrets else 'not signed'}"
        log.info("posting the messages of topic %s to %s, %s", topic, settings.webhook.partition("?")[0], how)
        self._posters[topic] = poster
        poster.start()

    def _end(self, topic: str) -> None:
        poster = self._posters.pop(topic)
        poster.stop()
        self._leaving.append(poster)

    def _open_consumer(
        self, place: str, topic: str, settings: TopicSettings, stop: Stop, shards: Sequence[Keys]
    ) -> Consumer:
        store = new_store(self._client, self._settings, topic, GROUP, "", shards=shards)
        of_topic = replace(self._settings, topic={topic: settings})
        return new_consumer(store, of_topic, enter=partial(store.register, place), **stoppable(stop))
