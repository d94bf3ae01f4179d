"""What one pass over the input folder reports to its caller."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RefusedFile:
    """An entry of the input folder that is not ingested.

    ``reason`` is a code, ``detail`` one sentence, ``path`` where it is now if it was moved to quarantine.
    """

    file: str
    reason: str
    detail: str
    path: str = ""


@dataclass(slots=True)
class LandingReport:
    """What one ``Gatekeeper.step`` found.

    ``ignored`` are left where they are and reported once for each name and time of change. ``waiting`` counts inputs that
    may still be written. ``busy`` says that a large file has landed in part.
    """

    quarantined: list[RefusedFile] = field(default_factory=list)
    ignored: list[RefusedFile] = field(default_factory=list)
    waiting: int = 0
    busy: bool = False

    def wait_s(self, longest_s: float) -> float:
        """Return how long the caller may wait for the folder to change before the next step."""
        if self.busy:
            return 0.0
        # The kernel may count a writer for a moment after its close was reported, and no event says that a file is stable.
        return min(longest_s, 0.05) if self.waiting else longest_s
