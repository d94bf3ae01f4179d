"""Secrets and signatures as Standard Webhooks has them (https://www.standardwebhooks.com)."""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.config import ALL_TOPICS, NAME_PATTERN
from pipeline.core.errors import ConfigError

PREFIX = "whsec_"
BYTES_MIN, BYTES_MAX = 24, 64  # of a secret, as the standard has it

Secrets = Mapping[str, Sequence[bytes]]  # by topic or ALL_TOPICS; several at a time while they are exchanged


def read_secrets(path: Path) -> Secrets:
    """Read a file with a line ``TOPIC whsec_…`` for each secret, ``*`` being all topics without lines of their own.

    Raises:
        ConfigError: it can't be read, or a line is something else. The sentence does not show the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The secrets {path} can't be read ({exc}); name another file with --secrets.") from exc
    found: dict[str, list[bytes]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        topic, _, text = line.strip().partition(" ")
        secret = _decoded(text.strip())
        if secret is None or not (topic == ALL_TOPICS or re.match(NAME_PATTERN, topic)):
            raise ConfigError(
                f"{path}, line {number} must be a topic or *, a space, and {PREFIX} with the base64 of {BYTES_MIN} to {BYTES_MAX} "
                "random bytes."
            )
        found.setdefault(topic, []).append(secret)
    return found


def secrets_of(secrets: Secrets, topic: str) -> Sequence[bytes]:
    """Return the secrets that sign the messages of a topic: its own, else those of all topics."""
    return secrets.get(topic) or secrets.get(ALL_TOPICS, ())


def signature(secrets: Sequence[bytes], webhook_id: str, timestamp_sec: int, body: bytes) -> str:
    """Return the value of ``webhook-signature``: one signature for each secret."""
    content = f"{webhook_id}.{timestamp_sec}.".encode() + body
    digests = (hmac.digest(secret, content, hashlib.sha256) for secret in secrets)
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def _decoded(text: str) -> bytes | None:
    try:
        secret = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return None
    return secret if text.startswith(PREFIX) and BYTES_MIN <= len(secret) <= BYTES_MAX else None
