"""Scheduling from a program: what it needs is here, and of the standard library, redis and msgspec alone."""

from pipeline.client.aio import AsyncDuetime as AsyncDuetime
from pipeline.client.memory import MemoryDuetime as MemoryDuetime
from pipeline.client.requests import Receipt as Receipt
from pipeline.client.requests import Request as Request
from pipeline.client.sync import Duetime as Duetime
from pipeline.consume.consumer import Consumer as Consumer
from pipeline.consume.handling import Refused as Refused
from pipeline.consume.handling import RetryLater as RetryLater
from pipeline.consume.handling import TargetDown as TargetDown
from pipeline.core.errors import ColdUnavailable as ColdUnavailable
from pipeline.core.errors import ConfigError as ConfigError
from pipeline.core.errors import PipelineError as DuetimeError
from pipeline.core.errors import RequestRefused as RequestRefused
from pipeline.core.errors import StoreFull as StoreFull
from pipeline.core.errors import StoreUnavailable as StoreUnavailable
from pipeline.core.errors import VersionDiffers as VersionDiffers
from pipeline.core.messages import Message as Message
from pipeline.store.base import Found as Found
from pipeline.store.base import State as State
from pipeline.store.listing import ScheduledMessage as ScheduledMessage

__all__ = [
    "AsyncDuetime",
    "ColdUnavailable",
    "ConfigError",
    "Consumer",
    "Duetime",
    "DuetimeError",
    "Found",
    "MemoryDuetime",
    "Message",
    "Receipt",
    "Refused",
    "Request",
    "RequestRefused",
    "RetryLater",
    "ScheduledMessage",
    "State",
    "StoreFull",
    "StoreUnavailable",
    "TargetDown",
    "VersionDiffers",
]
