"""Every error this project raises on purpose. The class tells the caller what to do.

    PipelineError
    ├── ConfigError             wrong use or configuration: tell the user, exit 2
    ├── StoreError
    │   ├── StoreUnavailable    the server did not answer, or not yet: wait and try the same call again
    │   │   └── StoreFull       its memory is full: nothing of the call was done
    │   └── StoreProtocolError  the server answered something we don't know: stop, the state may be another program's
    ├── ColdUnavailable         the folder of cold messages can't be used now: wait and try the same again
    ├── DiskFull                the disk of a folder is full: wait and try the same again
    ├── RequestRefused          a program's request breaks a rule: correct it
    ├── VersionDiffers          a message was changed meanwhile: look at it again
    ├── SinkClosed              the reader is gone: give the claims back, exit 1
    └── SourceError             the input can't be read now: say so, try again or exit 1

A line of bad data is a ``Rejection`` value and a lost lease is a result; neither is an error. The text of each error is one
sentence that says what to do.
"""


class PipelineError(Exception):
    """Base of the project's errors; a job that meets one prints its text and exits 1."""


class ConfigError(PipelineError):
    """The command line, environment or configuration file is wrong; a job exits 2."""


class StoreError(PipelineError):
    """Something about the Redis server or what it holds."""


class StoreUnavailable(StoreError):
    """The server did not answer; whether it executed the call is unknown."""


class StoreFull(StoreUnavailable):
    """The server's memory is full: it refused the call, and delivers until there is room again."""


class StoreProtocolError(StoreError):
    """The server gave an answer that this version doesn't know."""


class ColdUnavailable(PipelineError):
    """The folder of cold messages is away or full; a part of what was asked may be done, and may be asked for again."""


class DiskFull(PipelineError):
    """The disk of a folder is full, or the user's share of it; nothing of the call was done."""


class RequestRefused(PipelineError, ValueError):
    """A request breaks a rule; nothing of it is stored. ``reason`` is the code that rejects have, ``detail`` one sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class VersionDiffers(PipelineError):
    """A message that was to be changed is not the version that its caller named; nothing was done."""


class SinkClosed(PipelineError):
    """Nobody takes messages any more.

    Args:
        started: how many of the messages in hand may have been seen, at most.
    """

    def __init__(self, text: str, started: int) -> None:
        super().__init__(text)
        self.started = started


class SourceError(PipelineError):
    """The input can't be read."""
