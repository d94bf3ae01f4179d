"""The Grafana dashboard and the alerts of ``examples/``, held against what a loop and the API serve, and run by promtool."""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pipeline.core.clock import SystemClock
from pipeline.ingest.metrics import IngestCollector
from pipeline.ingest.progress import BatchReporter
from tests.e2e.commands import ROOT, Command
from tests.ports import free_port
from tests.servers import RealServer
from tests.waiting import wait_until
from tests.web.running import running, settings_of

ALERTS = ROOT / "examples" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "examples" / "grafana" / "duetime.json"
PROMTOOL = shutil.which("promtool")
# What Grafana puts in before it asks.
PUT_IN = {"$__rate_interval": "1m", "$namespace": "duetime", "$topic": ".*"}
COLUMNS = 24

pytestmark = pytest.mark.process
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool (of Debian's package prometheus)")


@pytest.fixture
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def served(text: str) -> set[str]:
    """Return the names of all samples; a family that has none at present counts as its own."""
    return set(re.findall(r"^(\w+)[{ ]", text, re.M)) | set(re.findall(r"^# TYPE (\w+) ", text, re.M))


def scrape_a_loop(server: RealServer) -> str:
    """Return what a loop serves that has moved a message into a stream; whether it writes to Kafka makes no difference."""
    port = str(free_port())
    flags = ["--redis", server.url, "--sink", "stream", "--metrics-port", port]
    loop = Command([sys.executable, "-P", "jobs/drain.py", *flags], {"PYTHONPATH": str(ROOT)}, ROOT)
    try:
        loop.wait_for_line("metrics are on ")
        texts: list[str] = []

        def has_delivered() -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
                texts.append(reply.read().decode())
            return 'duetime_delivered_total{namespace="duetime",topic="mail"} 1.0' in texts[-1]

        wait_until(has_delivered)
        return texts[-1]
    finally:
        assert loop.stop() == 0


def of_an_ingest_job() -> str:
    registry = CollectorRegistry()
    registry.register(IngestCollector("duetime", BatchReporter("s", "/in", None, lambda _: None, SystemClock())))
    return generate_latest(registry).decode()


def test_everything_that_is_shown_or_watched_is_served(server: RealServer, dashboard: dict[str, Any]) -> None:
    with running(settings_of(server.url)) as api:
        api.schedule(delay_sec=0, topic="mail").raise_for_status()
        api.schedule(delay_sec=3_600).raise_for_status()
        there = served(api.get("/metrics").text) | served(scrape_a_loop(server)) | served(of_an_ingest_job())
    queries = [variable.get("definition", "") for variable in dashboard["templating"]["list"]]
    for text in ("\n".join([*expressions(dashboard), *queries]), ALERTS.read_text(encoding="utf-8")):
        wanted = set(re.findall(r"\b(?:duetime|process)_\w+", text))
        assert len(wanted) >= 12, "they are not found any more"
        assert wanted - there == set()


def test_every_rate_is_over_the_interval_that_grafana_finds_right(dashboard: dict[str, Any]) -> None:
    windows = {window for text in expressions(dashboard) for window in re.findall(r"rate\([^\[]*\[([^\]]+)\]", text)}
    assert windows == {"$__rate_interval"}


def test_grafana_finds_what_it_needs(dashboard: dict[str, Any]) -> None:
    assert dashboard["id"] is None and re.fullmatch(r"[\w-]{1,40}", dashboard["uid"]) and dashboard["title"]
    assert dashboard["schemaVersion"] >= 39
    variables = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource": "datasource", "namespace": "query", "topic": "query"}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 30
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        at, title = panel["gridPos"], panel["title"]
        assert title and (panel["type"] == "row" or panel["description"]), panel["id"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= COLUMNS and at["h"] > 0, title
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken.keys(), (
            f"{title} lies over {', '.join({taken[cell] for cell in cells & taken.keys()})}"
        )
        taken |= dict.fromkeys(cells, title)
        for target in panel.get("targets", ()):
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, title
            names = {name for name in re.findall(r"\$(\w+)", target["expr"]) if not name.startswith("__")}
            assert names <= variables.keys(), title
        references = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(references)) == len(references) and (references or panel["type"] == "row"), title


def test_the_docs_say_what_each_alert_means() -> None:
    documented = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").partition("\n### Alerts\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", documented.partition("\n## ")[0], re.M)
    text = ALERTS.read_text(encoding="utf-8")
    assert rows == re.findall(r"- alert: (\w+)$.*?severity: (\w+)", text, re.M | re.S)
    assert len(rows) > 10


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [str(PROMTOOL), *arguments], cwd=ALERTS.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_the_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint-fatal", ALERTS.name)
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")
    tested = set(re.findall(r"\bDuetime\w+", ALERTS.with_name("alerts_test.yml").read_text(encoding="utf-8")))
    assert tested == set(re.findall(r"- alert: (\w+)", ALERTS.read_text(encoding="utf-8")))


@needs_promtool
def test_prometheus_understands_every_query_of_the_dashboard(dashboard: dict[str, Any], tmp_path: Path) -> None:
    rules = []
    for number, expression in enumerate(expressions(dashboard)):
        for name, value in PUT_IN.items():
            expression = expression.replace(name, value)
        rules.append({"record": f"q{number}", "expr": expression})
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML, too
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", str(path))
