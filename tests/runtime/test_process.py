import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os; from pipeline.runtime.process import open_standard_fds
open_standard_fds()
null = os.stat(os.devnull)
print([fd for fd in range(3) if os.path.samestat(os.fstat(fd), null) and os.get_inheritable(fd)], os.open(".", 0) > 2)
"""


@pytest.mark.parametrize(("closed", "opened"), [("", "[]"), ("<&-", "[0]"), ("2>&-", "[2]"), ("<&- 2>&-", "[0, 2]")])
def test_closed_standard_files_are_opened_so_that_nothing_else_gets_their_numbers(closed: str, opened: str) -> None:
    result = subprocess.run(
        ["bash", "-c", f'exec "$@" {closed}', "-", sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"{opened} True\n"
