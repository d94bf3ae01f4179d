"""Text of users: one line stays one line, and nothing drives the terminal."""

import pytest

from pipeline.core.text import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\r", r"two\nlines\r"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\x9b1m \x7f", r"\x9b1m \x7f"),
        ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
        ("a\u2028b\u2029c\x85", r"a\u2028b\u2029c\x85"),
        ("nul\0", r"nul\x00"),
        ("a\u200bb\ufeff", r"a\u200bb\ufeff"),
        ("tab\t", r"tab\t"),
        ("C:\\new", "C:\\new"),
        ("no\u00a0break\u3000wide", "no\u00a0break\u3000wide"),
        ("👩\u200d🚀", "👩\u200d🚀"),
    ],
)
def test_what_could_drive_a_terminal_is_made_visible(text: str, shown: str) -> None:
    assert visible(text) == shown
