"""Posting the messages of topics to URLs; docs/webhooks.md says what a target sees."""
