"""The examples of docs/api.md, run as they stand there."""

import hashlib
import json
import re
import shutil
import subprocess

import pytest

from pipeline.config import ROOT, ApiSettings
from pipeline.web.app import OPERATIONS
from tests.docs.pages import run_here
from tests.web.running import Api

DOCUMENT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
TIMES = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z|\d{10,}(?:\.\d+)?|~[\w-]{22}~\d+")


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
def test_each_example_answers_what_is_written(api: Api) -> None:
    examples = [example for block in run_here("docs/api.md", __file__) for example in block.commands()]
    assert len(examples) == 8
    for command, written in examples:
        here = command.replace("localhost:8600", f"127.0.0.1:{api.port}")
        done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=120, check=True)
        assert TIMES.sub("T", done.stdout.strip()) == TIMES.sub("T", written.strip()), command


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
def test_the_examples_of_the_readme_work(api: Api) -> None:
    [block] = run_here("README.md", __file__)
    states = []
    for command, _ in block.commands():
        here = command.replace("localhost:8601", f"127.0.0.1:{api.port}").replace("curl ", "curl -sf ", 1)
        done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=120, check=True)
        states.append(json.loads(done.stdout)["state"])
    assert states == ["scheduled", "scheduled", "cancelled"]


def test_every_route_and_setting_is_described() -> None:
    table = DOCUMENT.partition("| route | does |")[2].partition("\n\n")[0]
    for path, operations in OPERATIONS.items():
        if path != "/openapi.json":
            lines = [line for line in table.splitlines() if re.search(rf" {re.escape(path)}[`?]", line)]
            assert all(method in "".join(lines) for method in operations), path
    named = {"host", "port", "unix", "tokens", "hosts", "read_only", "patience_sec", "wait_for_disk"}
    for setting in ApiSettings.__dataclass_fields__.keys() - named:
        assert f"`{setting}`" in DOCUMENT, setting


def test_the_digest_of_the_example_is_that_of_its_token() -> None:
    assert f"shop {hashlib.sha256(b'secret').hexdigest()} schedule" in DOCUMENT
