"""How a page is made: its templates, its headers, its addresses, and the files beside it."""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.core.text import age_text, command_text, count_text, span_text, utc_text, visible
from pipeline.web.call import ALWAYS

HERE: Final = Path(__file__).parent
# Referrer-Policy is not no-referrer: with it a browser says of a form of ours that its origin is null.
HEADERS: Final = {
    **ALWAYS,
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
TYPES: Final = {"style.css": "text/css", "live.js": "text/javascript", "icon.svg": "image/svg+xml"}


def path_of(*parts: str, **query: object) -> str:
    """Return an address of ours, everything in it quoted."""
    pairs = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query.items() if value not in ("", None))
    return "/" + "/".join(quote(part, safe="~") for part in parts) + (f"?{pairs}" if pairs else "")


def relative(ms: float) -> str:
    """Return ``in 3 min 2 s`` or ``4 h 1 min ago`` for a time so many milliseconds ahead."""
    if abs(ms) < 1_000:
        return "now"
    return f"in {span_text(ms)}" if ms > 0 else f"{span_text(-ms)} ago"


def day_text(epoch_ms: int) -> str:
    """Return a time as the field of a form takes it, UTC to the second."""
    return utc_text(epoch_ms).replace(" ", "T").removesuffix("Z")


@cache
def static_files() -> Mapping[str, tuple[bytes, str]]:
    """Return the files beside the pages by name, each with its version."""
    found = {name: (HERE / "static" / name).read_bytes() for name in TYPES}
    return {name: (content, hashlib.sha256(content).hexdigest()[:12]) for name, content in found.items()}


def static_path(name: str) -> str:
    """Return the address of a file: another one when its content is another."""
    return f"/static/{name}?v={static_files()[name][1]}"


def templates() -> Environment:
    """Return the templates, with what they call."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "shown": visible,
        "utc": utc_text,
        "field": day_text,
        "span": span_text,
        "age": age_text,
        "number": lambda number: f"{number:,}",
        "counted": count_text,
        "relative": relative,
    }
    environment.globals |= {"static": static_path, "path": path_of, "command": command_text}
    return environment
