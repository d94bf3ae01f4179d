"""Where the dashboard of the command without arguments is, and who may look at it."""

import contextlib
import hashlib
import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class Dashboard:
    """The address of the dashboard, which nobody knows but who has started us: anybody on this machine could open the port."""

    state_dir: Path
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    def open(self) -> dict[str, str]:
        """Write down who may ask, and return the settings to start with: the port of the settings, or any if that is taken.

        Raises:
            OSError: the file can't be written.
        """
        self.port = _free_port(self.port)
        digest = hashlib.sha256(self.token.encode()).hexdigest()
        self.state_dir.mkdir(parents=True, exist_ok=True)
        path = self.state_dir / "dashboard.tokens"
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # of the start before
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(f"# The token is in the address that was printed.\nyou {digest} schedule read operate\n")
        own = {"HOST": LOOPBACK, "PORT": str(self.port), "UNIX": "", "HOSTS": "", "TOKENS": str(path.resolve())}
        return {f"DUETIME_API_{name}": value for name, value in own.items()}

    def address(self) -> str:
        """Return where it is, and who may look."""
        return f"http://{LOOPBACK}:{self.port}/?token={self.token}"


def _free_port(wanted: int) -> int:
    """Return a port of this machine that is free now: the one that is wanted, if it is."""
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
            return int(probe.getsockname()[1])
    return wanted
