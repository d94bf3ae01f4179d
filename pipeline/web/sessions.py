"""Sessions of browsers: a cookie that nobody else can make, and the proof in each form that it comes from our own page."""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import Final

SESSION_SEC: Final = 12 * 3_600
NOBODY: Final = -1  # whose place is it: nobody's who has shown a token


class Sessions:
    """The sessions of this process: another one, or the next, does not know them.

    Args:
        now_sec: a clock that only runs forward.
    """

    def __init__(self, now_sec: Callable[[], float]) -> None:
        self._key = secrets.token_bytes(32)
        self._now_sec = now_sec

    def begin(self, place: int) -> str:
        """Return the cookie of a new session, of who has the token at this place of the file, or of ``NOBODY``."""
        text = f"{place}~{int(self._now_sec()) + SESSION_SEC}~{secrets.token_urlsafe(12)}"
        return f"{text}~{self._sign('session', text)}"

    def read(self, cookie: str) -> tuple[int, float] | None:
        """Return whose session it is and for how many seconds more; None if we did not begin it, or it is over."""
        text, _, signature = cookie.rpartition("~")
        if not hmac.compare_digest(signature.encode(), self._sign("session", text).encode()):
            return None
        place, until, _ = text.split("~")
        left_sec = int(until) - self._now_sec()
        return (int(place), left_sec) if left_sec > 0 else None

    def proof(self, cookie: str) -> str:
        """Return what a form of this session carries along."""
        return self._sign("form", cookie)

    def has_proof(self, cookie: str, proof: str) -> bool:
        """Say whether a form was made for this session."""
        return hmac.compare_digest(self.proof(cookie).encode(), proof.encode())

    def _sign(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()[:40]
