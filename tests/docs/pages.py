"""The code blocks of the documentation. Each says in the comment before it which file runs it, or why none does:

    <!-- run: tests/web/test_docs.py -->
    <!-- not run: it runs until it is stopped -->

A block of ``text`` is no code and needs neither: what a program prints, a file, a drawing. So does ``mermaid``, a drawing too.
"""

import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from pipeline.config import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NO_CODE = {"text", "mermaid"}
_FENCE = re.compile(r"( *)(?:```)(.*)")
_MARK = re.compile(r" *<!-- (run|not run): (.+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, without its indentation."""

    page: str
    line: int
    language: str
    text: str
    run_by: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[tuple[str, str]]:
        """Return the commands after the prompts of a terminal, each with what is printed below it."""
        found: list[tuple[str, str]] = []
        for line in re.sub(r"\\\n +", "", self.text).splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), ""))
            else:
                command, printed = found.pop()
                found.append((command, f"{printed}{line}\n"))
        return found


def blocks_of(path: Path) -> list[Block]:
    """Return the fenced blocks of a file."""
    found, lines, mark = [], enumerate(path.read_text(encoding="utf-8").splitlines(), start=1), None
    page = str(path.relative_to(ROOT))
    for number, line in lines:
        if fence := _FENCE.fullmatch(line):
            indent = fence[1]
            inside = takewhile(lambda each, indent=indent: each[1] != f"{indent}```", lines)  # type: ignore[misc]
            text = "".join(each.removeprefix(indent) + "\n" for _, each in inside)
            kind, said = (mark[1], mark[2]) if mark else ("", "")
            run_by, reason = (said if kind == "run" else ""), (said if kind == "not run" else "")
            found.append(Block(page, number, fence[2], text, run_by, reason))
        mark = _MARK.fullmatch(line)
    return found


def run_here(page: str, test_file: str, language: str = "") -> list[Block]:
    """Return the blocks of a page that say that they are run by a file.

    Args:
        page: from the root of the checkout, such as docs/api.md.

        test_file: ``__file__`` of the test.
    """
    ours = str(Path(test_file).resolve().relative_to(ROOT))
    found = [
        block
        for block in blocks_of(ROOT / page)
        if block.run_by == ours and block.language in (language or block.language,)
    ]
    assert found, f"{page} has no block that {ours} runs"
    return found
