"""How a fault is planted into a source text, so that a test can show that it would notice."""

import sys
from pathlib import Path
from types import ModuleType


def replace_once(source: str, old: str, new: str, fault: str) -> str:
    """Put ``new`` in the place of ``old``, which must be there exactly once, lest a fault is no longer planted."""
    assert source.count(old) == 1, f"the source has changed, so {fault!r} needs a new text"
    return source.replace(old, new)


def read_module(module: ModuleType) -> str:
    """Return the source of a module."""
    return Path(str(module.__file__)).read_text(encoding="utf-8")


def load_again(module: ModuleType, source: str) -> ModuleType:
    """Load a module a second time, from another source; the first stays as it is."""
    loaded = ModuleType(f"planted.{module.__name__}")
    sys.modules[loaded.__name__] = loaded  # dataclasses look their module up there
    try:
        exec(compile(source, str(module.__file__), "exec"), loaded.__dict__)
    finally:
        del sys.modules[loaded.__name__]
    return loaded
