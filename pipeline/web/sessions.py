"""Sessions of browsers, kept in Redis for all processes of the API, and the proof in each form that it comes from our own page."""

import hashlib
import hmac
import re
import secrets
from typing import Any, Final

from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys

SESSION_SEC: Final = 12 * 3_600
_COOKIE: Final = re.compile(r"[A-Za-z0-9_-]{43}")


def new_cookie() -> str:
    """Return a name that nobody can guess: 256 bits."""
    return secrets.token_urlsafe(32)


def is_cookie(text: str) -> bool:
    """Say whether a text has the form of such a name."""
    return _COOKIE.fullmatch(text) is not None


def proof_of(cookie: str) -> str:
    """Return what the forms of a browser carry along; it does not give the cookie away."""
    return hashlib.sha256(f"form:{cookie}".encode()).hexdigest()


def has_proof(cookie: str, proof: str) -> bool:
    """Say whether a form was made for the browser that has this cookie."""
    return hmac.compare_digest(proof_of(cookie).encode(), proof.encode())


class Sessions:
    """The sessions of a namespace, each a key that expires; Redis has a digest of the cookie, not the cookie.

    The methods raise ``StoreError``: no answer, or an error.
    """

    def __init__(self, client: Any, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    def begin(self, mark: str) -> str:
        """Begin a session of the token that has this mark (``Access.mark_of``), and return its cookie."""
        cookie = new_cookie()
        with translated_errors():
            self._client.set(self._key(cookie), mark, ex=SESSION_SEC)
        return cookie

    def read(self, cookie: str) -> str:
        """Return the mark of the token that a session was begun with, "" if there is no such session."""
        with translated_errors():
            return (self._client.get(self._key(cookie)) or b"").decode()

    def end(self, cookie: str) -> None:
        """End a session, if there is one."""
        with translated_errors():
            self._client.delete(self._key(cookie))

    def _key(self, cookie: str) -> str:
        return self._keys.session(hashlib.sha256(cookie.encode()).hexdigest())
