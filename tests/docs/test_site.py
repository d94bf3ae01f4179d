"""The site of docs/: built strictly, so that a dead link, a dead anchor or a page that nobody can find fails."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pipeline.command import JOBS
from pipeline.config import ENV_PREFIX, ROOT, SECTIONS
from pipeline.web.openapi import PATHS

OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("site")]


def build(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder), *options]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """The folder of the built site."""
    with TemporaryDirectory() as folder:
        done = build(Path(folder))
        assert done.returncode == 0, done.stderr
        yield Path(folder)


def test_a_page_asks_no_other_host_for_anything(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    asking = (
        r"<(?:script|img|iframe|source)[^>]* src=\"(?:https?:)?//|<link[^>]* href=\"(?:https?:)?//|url\((?:https?:)?//"
    )
    files = [*pages, *site.rglob("*.css")]
    assert [path for path in files if re.search(asking, path.read_text(encoding="utf-8"))] == []
    # Scripts of the theme fetch Mermaid from elsewhere for a page that has such a diagram.
    assert [path for path in pages if 'class="mermaid"' in path.read_text(encoding="utf-8")] == []


def test_each_setting_command_route_and_metric_has_its_place(site: Path) -> None:
    settings = (site / "reference" / "settings.html").read_text(encoding="utf-8")
    for section, type_ in SECTIONS.items():
        for key in type_.__dataclass_fields__:
            assert f"<td><code>{ENV_PREFIX}{section.upper()}_{key.upper()}</code></td>" in settings, key
    assert "<td></td>" not in settings, "a setting without a word"
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for job in (*JOBS, "ingest"):
        assert f"usage: ./spark-submit.sh jobs/{job}.py" in re.sub("<[^>]+>", "", commands), job
    routes = (site / "reference" / "http.html").read_text(encoding="utf-8")
    for path, operations in PATHS.items():
        for method in operations:
            assert f">{method.upper()} {path}<" in routes
    metrics = re.findall(r"<td><code>(duetime_\w+)</code>", (site / "reference" / "metrics.html").read_text("utf-8"))
    assert len(metrics) > 20
    for name in metrics:
        assert f"`{name}" in OPERATIONS + API, name


@pytest.mark.slow
def test_a_dead_link_and_a_dead_anchor_stop_the_build(tmp_path: Path) -> None:
    """With the settings of mkdocs.yml alone, on a page of their own."""
    docs = tmp_path / "docs"
    docs.mkdir()
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(re.sub(r"(?m)^(hooks|exclude_docs):.*$", "", settings))
    broken = {"no-page.md": "[a](nowhere.md)", "no-anchor.md": "[a](index.md#nowhere)", "absolute.md": "[a](/index.md)"}
    (docs / "index.md").write_text("# Index\n")
    options = ("-f", str(tmp_path / "mkdocs.yml"))
    assert build(tmp_path / "whole", *options).returncode == 0
    for name, text in broken.items():
        (docs / name).write_text(text)
        done = build(tmp_path / "broken", *options)
        assert done.returncode == 1, name
        assert name in done.stderr
        (docs / name).unlink()
