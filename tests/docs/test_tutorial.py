"""The commands of README.md, then docs/tutorial.md from its first line to its last: typed, and compared with what they show."""

import signal
from pathlib import Path

import pytest

from pipeline.runtime.process import wait_until
from tests.docs.pages import Block, run_here
from tests.docs.terminal import WAIT_SEC, Terminals, looks_like

START_SEC = 300.0  # of Spark, on a machine that is busy with other tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def follow(terminals: Terminals, block: Block) -> None:
    """Type the commands of a block, and compare what they print with what is written, if anything is."""
    for command, written in block.commands():
        printed = terminals.type(command)
        assert not written or looks_like(printed, written), f"{block}: {command} printed {printed}"


def test_the_commands_of_the_readme_work_and_then_the_tutorial_to_a_retry(terminals: Terminals) -> None:
    tutorial = run_here("docs/tutorial.md", __file__)
    (
        everything,
        by_hand,
        dropping,
        rejects,
        routing,
        code,
        consuming,
        failing,
        retried,
        dying,
        dead,
        redriving,
        status,
    ) = tutorial
    first = terminals.start(everything.commands()[0][0])
    first.wait_for_line("That was the sample.", START_SEC)
    [readme] = run_here("README.md", __file__, "console")
    follow(terminals, readme)
    first.wait_for_line(": tea is ready")
    follow(terminals, by_hand)
    follow(terminals, dropping)
    first.wait_for_line("2 in, 1 stored, 0 duplicates, 1 rejected")
    follow(terminals, rejects)
    first.wait_for_line(": the rice is done")

    follow(terminals, routing)
    program = Path(terminals.root, "mail.py")
    program.write_text(code.text)
    third = terminals.start(consuming.commands()[0][0])
    follow(terminals, failing)
    third.wait_for_line("attempt 2: the invoice")
    assert looks_like(third.screen(), retried.text)
    follow(terminals, dying)
    third.wait_for_line("is a dead letter after 3 attempts")
    follow(terminals, dead)

    assert third.stop(signal.SIGINT) == 0
    *kept, condition, failure = code.text.partition("\n\n\nwith")[0].splitlines()
    assert ("no address" in condition, "raise" in failure) == (True, True)
    program.write_text("\n".join(kept) + code.text.partition("\n\n\n")[1] + code.text[code.text.index("with Due") :])
    third = terminals.start(consuming.commands()[0][0])
    follow(terminals, redriving)
    third.wait_for_line("attempt 1: no address")
    follow(terminals, status)
    assert first.stop(signal.SIGINT) == 0
    assert "Exception" not in first.screen()


def test_the_program_of_the_readme_schedules_a_table_and_can_be_run_again(terminals: Terminals) -> None:
    [code] = run_here("README.md", __file__, "python")
    terminals.start("./spark-submit.sh jobs/drain.py")
    assert wait_until(Path(terminals.root, ".duetime/server/redis.sock").exists, WAIT_SEC)
    Path(terminals.root, "my.py").write_text(code.text)
    assert terminals.type("./spark-submit.sh my.py") == "1000 0 0\n"
    assert terminals.type("./spark-submit.sh my.py") == "0 1000 0\n"
