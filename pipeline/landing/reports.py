"""What one pass over an input tells its caller."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Landed:
    """One landing file was published. ``file`` is the original name, ``landing_name`` the new one."""

    file: str
    landing_name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One input can't be read. ``reason`` is a code, ``detail`` one sentence, ``path`` where it is now."""

    file: str
    reason: str
    detail: str
    path: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """One entry of the input folder was left where it is; reported once for each name and time of change."""

    file: str
    reason: str
    detail: str


@dataclass(slots=True)
class LandingReport:
    """What one ``Gatekeeper.step`` did.

    ``waiting`` counts inputs that are still being written or have not been still for long enough. ``busy`` says that a
    large file is half landed.
    """

    landed: list[Landed] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)
    waiting: int = 0
    busy: bool = False

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do until the input folder changes."""
        return not self.busy and not self.waiting

    def wait_s(self, longest_s: float) -> float:
        """Return how long the caller may wait for the folder to change before the next step."""
        if self.busy:
            return 0.0
        # A writer's close can be seen a moment before the kernel stops counting it, and stillness sends no signal.
        return min(longest_s, 0.05) if self.waiting else longest_s


@dataclass(slots=True)
class ReceiverReport:
    """What one ``LineReceiver.step`` did. ``cut`` counts lines that were too long and lost their end."""

    landed: list[Landed] = field(default_factory=list)
    lines: int = 0
    cut: int = 0
    connected: bool = False
