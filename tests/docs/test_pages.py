"""Each code block of the documentation is run by a test, or says why not; and some that need only a server are run here."""

import re
import shlex
from itertools import pairwise

from pipeline.client import Duetime
from pipeline.config import ROOT
from tests.docs.pages import NO_CODE, PAGES, blocks_of, run_here
from tests.servers import RealServer

WIRE = "docs/wire-format.md"


def test_each_block_has_a_language_and_is_run_or_says_why_not() -> None:
    wrong = []
    for path in PAGES:
        for block in blocks_of(path):
            if not re.fullmatch(r"[a-z]+", block.language):
                wrong.append(f"{block}: name the language in one word, or say text")
            elif not (block.run_by or block.reason or block.language in NO_CODE):
                wrong.append(f"{block}: say before it <!-- run: FILE --> or <!-- not run: WHY -->")
            elif block.run_by and not (
                (ROOT / block.run_by).is_file()
                and block.page.removeprefix("docs/") in (ROOT / block.run_by).read_text(encoding="utf-8")
            ):
                wrong.append(f"{block}: {block.run_by} is not there, or does not name the page")
    assert wrong == []


def test_no_block_is_hidden_from_these_rules() -> None:
    """Code that is only indented has no language and no mark."""
    wrong = []
    for path in PAGES:
        lines = re.sub(r"(?ms)^ *```.*?^ *```$", "", path.read_text(encoding="utf-8")).splitlines()
        wrong += [
            f"{path.relative_to(ROOT)}: {line}"
            for before, line in pairwise(lines)
            if line.startswith("    ") and not before
        ]
        wrong += [f"{path.relative_to(ROOT)}: {line}" for line in lines if "```" in line or line.startswith("~~~")]
    assert wrong == []


def test_a_mark_stands_before_a_block() -> None:
    for path in PAGES:
        marks = re.findall(r"(?m)^ *<!-- (?:not )?run: ", path.read_text(encoding="utf-8"))
        assert len(marks) == sum(bool(block.run_by or block.reason) for block in blocks_of(path)), path


def test_any_client_can_consume_and_schedule_as_the_wire_format_says(server: RealServer) -> None:
    consume, schedule = run_here(WIRE, __file__)
    client = server.client()
    create, create_retries, read, acknowledge = [shlex.split(line) for line in consume.text.splitlines()]
    assert [client.execute_command(*create), client.execute_command(*create_retries)] == [b"OK", b"OK"]
    for line in schedule.text.splitlines():
        client.execute_command(*line.split())
    with Duetime(server.url) as duetime:
        [waiting] = duetime.upcoming()
        assert (waiting.message.body, waiting.message.due_ms) == ("hello", 1795176001987)
        assert duetime.cancel(waiting.id).state == "cancelled"
    client.xadd(create[2], {"message": "hello"}, id=acknowledge[-1])
    assert client.execute_command(*read)
    assert client.execute_command(*acknowledge) == 1
    client.flushall()


def test_jobs_are_started_by_the_command_that_finds_their_modules() -> None:
    """Also in blocks that are not run: Python alone knows no ``pipeline``."""
    jobs = [
        (str(block), line)
        for path in PAGES
        for block in blocks_of(path)
        if block.language in {"bash", "console"}
        for line in re.sub(r"\\\n +", " ", block.text).splitlines()
        if re.search(r"(?<![\w/])jobs/\w+\.py", line.partition("#")[0])
    ]
    assert len(jobs) > 20
    assert [each for each in jobs if "spark-submit.sh " not in each[1].partition("jobs/")[0]] == []
