"""What MkDocs can't do by itself: pages that are made from the code, and pages that are kept elsewhere in the checkout.

Nothing that is made here is committed. A link from any page to a file of the checkout that is no page of the site is an error.
"""

import json
import os
import posixpath
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.config import ENV_PREFIX, Settings  # noqa: E402
from pipeline.core.clock import SystemClock  # noqa: E402
from pipeline.drain.metrics import LoopCollector  # noqa: E402
from pipeline.drain.stats import Totals  # noqa: E402
from pipeline.ingest.hydration import HydrationTotals  # noqa: E402
from pipeline.ingest.metrics import HydratorCollector, IngestCollector  # noqa: E402
from pipeline.ingest.progress import BatchReporter  # noqa: E402
from pipeline.store.stats import Forecast  # noqa: E402
from pipeline.web.meters import Meters  # noqa: E402
from pipeline.web.openapi import contract  # noqa: E402
from pipeline.webhooks.metrics import WebhooksCollector  # noqa: E402
from pipeline.webhooks.service import Webhooks  # noqa: E402

# Files and sections of the checkout that are pages of the site.
PAGES = {
    "README.md": "index.md",
    "README.md#requests": "reference/requests.md",
    "README.md#commands": "reference/commands.md",
    "README.md#guarantee": "explanation/guarantee.md",
    "README.md#operations": "explanation/running.md",
    "README.md#limits": "reference/limits.md",
    "CHANGELOG.md": "reference/changes.md",
    "CONTRIBUTING.md": "explanation/contributing.md",
    "SECURITY.md": "explanation/security.md",
    "bench/README.md": "explanation/benchmarks.md",
    "examples/README.md": "how-to/examples.md",
    "conf/pipeline.toml": "reference/settings.md",
    "docs/adr": "adr/index.md",
}
# These links become text.
NOT_ON_THE_SITE = {
    "LICENSE",
    "tests/chaos/README.md",
    "examples/grafana/duetime.json",
    "examples/prometheus/alerts.yml",
    "examples/prometheus/alerts_test.yml",
}
HELP_COLUMNS = "100"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    made = {
        "reference/settings.md": _settings(),
        "reference/http.md": _http(),
        "reference/openapi.json": json.dumps(contract(is_read_only=False, takes_tokens=True), indent=1),
        "reference/metrics.md": _metrics(),
        "adr/index.md": _decisions(),
    }
    for source, page in PAGES.items():
        if page not in made and page != "index.md":
            made[page] = _taken_over(source)
    made["reference/commands.md"] += _helps()
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links within the checkout into links within the site."""
    uri = page.file.src_uri
    taken = [source.partition("#")[0] for source, made in PAGES.items() if made == uri and ".md" in source]
    source = taken[0] if taken and uri != "index.md" else f"docs/{uri}"

    def relink(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        if "://" in path or (not path and source == f"docs/{uri}"):
            return link[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
        if target in NOT_ON_THE_SITE:
            return text[1:-1]
        if f"{target}{anchor}" in PAGES:
            target, anchor = f"{target}{anchor}", ""
        if target not in PAGES and not target.startswith("docs/"):
            raise PluginError(f"{source} links to {target}, which is no page of the site: see PAGES in docs/hooks.py.")
        at = PAGES.get(target, target.removeprefix("docs/"))
        return f"{text}({posixpath.relpath(at, posixpath.dirname(uri) or '.')}{anchor})"

    return re.sub(r"(\[[^\]]*\])\(([^)#\s]*)(#[^)\s]*)?\)", relink, markdown)


def _taken_over(source: str) -> str:
    name, _, section = source.partition("#")
    text = (ROOT / name).read_text(encoding="utf-8")
    if not section:
        return text
    parts = [part for part in re.split(r"^## ", text, flags=re.M) if part.lower().startswith(f"{section}\n")]
    if len(parts) != 1:
        raise PluginError(f"{name} has no section {section}.")
    return re.sub(r"^#(#+ )", r"\1", f"# {parts[0]}", flags=re.M)


def _settings() -> str:
    """Return conf/pipeline.toml as tables: what stands before a setting, or before its group, is about it."""
    text = (ROOT / "conf" / "pipeline.toml").read_text(encoding="utf-8")
    defaults = tomllib.loads(text)
    page = ["# Settings", ""]
    about: list[str] = []
    is_group = False
    for line in text.splitlines():
        if line.startswith("#"):
            about = [*([] if is_group else about), line[1:].strip()]
            is_group = False
        elif section := re.fullmatch(r"\[(\w+)\]", line):
            page += ["", f"## {section[1]}", ""]
            if about:
                page += [_escaped(" ".join(about)), ""]
            if defaults[section[1]]:
                page += ["| setting | default | environment | |", "|---|---|---|---|"]
            about, name = [], section[1]
        elif setting := re.match(r"(\w+) = (.+)", line):
            key = setting[1]
            variable = f"{ENV_PREFIX}{name.upper()}_{key.upper()}"
            page.append(f"| `{key}` | `{setting[2]}` | `{variable}` | {_escaped(' '.join(about))} |")
            is_group = True
        else:
            if len(page) == 2:
                page += [_escaped(" ".join(about)), "", "This page is `conf/pipeline.toml` of the checkout."]
            about = []
    return "\n".join(page) + "\n"


def _escaped(text: str) -> str:
    return re.sub(r"([|*_\[\]])", r"\\\1", text).replace("<", "&lt;")


def _helps() -> str:
    """Return what each command says of itself."""
    jobs = sorted(path.name for path in (ROOT / "jobs").glob("*.py"))
    environ = os.environ | {"COLUMNS": HELP_COLUMNS, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}

    def ask(job: str) -> str:
        command = [sys.executable, "-P", f"jobs/{job}", "--help"]
        told = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
        if told.returncode:
            raise PluginError(f"jobs/{job} --help failed: {told.stderr}")
        return f"\n## jobs/{job}\n\n```text\n{told.stdout.rstrip()}\n```\n"

    with ThreadPoolExecutor(2) as pool:
        return "\n" + "".join(pool.map(ask, jobs))


def _http() -> str:
    document = contract(is_read_only=False, takes_tokens=True)
    page = [
        "# HTTP routes",
        "",
        "What a running API serves as [OpenAPI 3.1](openapi.json) at `/openapi.json`;",
        "[HTTP API](../api.md) explains it with examples.",
        "",
    ]
    for path, operations in document["paths"].items():
        for method, each in operations.items():
            if method != "parameters":
                page += _operation(f"{method.upper()} {path}", each, operations.get("parameters", []))
    page += ["## Schemas", ""]
    for name, schema in document["components"]["schemas"].items():
        page += [f"### {name}", "", "```json", json.dumps(schema, indent=2), "```", ""]
    return "\n".join(page)


def _operation(title: str, each: Mapping[str, Any], shared: list[Any]) -> Iterator[str]:
    yield from (f"## {title}", "", each["summary"], "")
    yield from ((f"Needs the right `{each['x-right']}`.", "") if "x-right" in each else ())
    parameters = [*shared, *each["parameters"]]
    if parameters:
        yield from ("| parameter | in | type | |", "|---|---|---|---|")
        for parameter in parameters:
            schema = parameter["schema"]
            form = schema.get("pattern") or ", ".join(schema.get("enum", ())) or schema.get("description", "")
            yield f"| `{parameter['name']}` | {parameter['in']} | {schema['type']} | {_escaped(form)} |"
        yield ""
    if body := each.get("requestBody"):
        for media_type, content in body["content"].items():
            example = content["example"]
            text = example if isinstance(example, str) else json.dumps(example)
            yield from (f"Body: `{media_type}`, {_named(content['schema'])}", "", "```json", text.rstrip(), "```", "")
    yield from ("| status | body | means |", "|---|---|---|")
    for status, response in each["responses"].items():
        bodies = ", ".join(_named(content["schema"]) for content in response["content"].values())
        yield f"| {status} | {bodies} | {_escaped(response['description'])} |"
    yield ""


def _named(schema: Mapping[str, Any]) -> str:
    name = schema.get("$ref", "").rpartition("/")[2]
    return f"[{name}](#{name.lower()})" if name else "text" if schema.get("type") == "string" else "an object"


def _metrics() -> str:
    """Return what the jobs and APIs export, as they themselves describe it."""
    forecast = Forecast(now_ms=0, buckets={}, overdue_ms=0, held=0, next_due_ms=0, outbox=0, outbox_ms=0, lags={})
    loop = LoopCollector("duetime", Totals(), lambda: forecast, SystemClock())
    reading, redis = SimpleNamespace(bytes=0), SimpleNamespace(namespace="duetime")
    api = SimpleNamespace(
        settings=SimpleNamespace(redis=redis), waiting_messages=0, reading=reading, count_connections=lambda: 0
    )
    page = ["# Metrics", "", "[Operations](../operations.md#metrics) says what to watch and when to page.", ""]
    page += ["## Drain loops", "", "`jobs/drain.py --metrics-port 9464`", "", *_table(loop.collect())]
    reporter = BatchReporter("", "", None, print, SystemClock())
    page += ["", "## Ingest", "", "`jobs/ingest.py --metrics-port 9471`", ""]
    page += _table(IngestCollector("duetime", reporter).collect())
    hydrator: Any = SimpleNamespace(is_well=True, last_success_ms=1, totals=HydrationTotals())
    page += ["", "## Cold messages", "", "`jobs/hydrate.py --metrics-port 9472`", ""]
    page += _table(HydratorCollector("duetime", hydrator).collect())
    webhooks = Webhooks(None, Settings(), [], {}, SystemClock(), "")
    posting = WebhooksCollector("duetime", webhooks)
    page += ["", "## Webhooks", "", "`jobs/webhooks.py --metrics-port 9473`", "", *_table(posting.collect())]
    page += [
        "",
        "## HTTP API",
        "",
        "`GET /metrics`",
        "",
        *_table(text_string_to_metric_families(Meters(api).text().decode())),
    ]
    return "\n".join(page) + "\n"


def _table(families: Any) -> Iterator[str]:
    yield from ("| metric | type | is |", "|---|---|---|")
    for family in families:
        if family.name.startswith("duetime") and not family.name.endswith("_created"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield f"| `{name}` | {family.type} | {_escaped(family.documentation)} |"


def _decisions() -> str:
    page = ["# Decisions", "", "What somebody might otherwise undo, and why it is so.", ""]
    for path in sorted((ROOT / "docs" / "adr").glob("*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        number, _, text = title.partition(". ")
        page.append(f"- [{number}: {text}]({path.name})")
    return "\n".join(page) + "\n"
