"""Why messages become dead letters."""

from enum import StrEnum


class DeadReason(StrEnum):
    """Why a message was given up; the value is what its dead letter records. Another program may write other texts."""

    FAILED = "failed"  # at its last attempt
    REFUSED = "refused"  # by its handler or its webhook
    ABANDONED = "abandoned"  # by consumers that ended with it, at its last attempt
    EXPIRED = "expired"  # later than ``expire_after_sec``; claim.lua writes it
    DROPPED = "dropped"  # with its group, which was to have it again; claim.lua writes it
    # What Kafka has against it:
    UNKNOWN_TOPIC = "unknown_topic"
    TOO_LARGE = "too_large"
    NOT_ALLOWED = "not_allowed"
    INVALID = "invalid"
