"""Posting the messages of topics to URLs; docs/webhooks.md says what a target sees."""

from typing import Final

GROUP: Final = "webhook"  # the consumer group that posts a topic
