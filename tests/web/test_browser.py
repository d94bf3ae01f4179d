"""A page of another origin, in a real browser: it can't schedule, cancel or read anything."""

import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.web.running import Api

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
BODY = json.dumps({"message": "stolen", "delay_sec": 3600})
PAGE = """<!doctype html><title>foreign</title>
<iframe name="sink"></iframe>
<form id="form" method="post" enctype="text/plain" target="sink" action="API/v1/messages">
  <input name='{"message": "stolen", "delay_sec": 3600, "id": "' value='"}'>
</form>
<script>
const body = BODY;
const tries = {
  simple: () => fetch("API/v1/messages", {method: "POST", body, mode: "no-cors"}),
  json: () => fetch("API/v1/messages", {method: "POST", body, headers: {"Content-Type": "application/json"}}),
  opaque: () => fetch("API/v1/messages", {method: "POST", body: new Blob([body], {type: "application/json"}), mode: "no-cors"}),
  beacon: async () => navigator.sendBeacon("API/v1/messages", body),
  cancel: () => fetch("API/v1/messages/kept", {method: "DELETE"}),
  read: async () => (await fetch("API/v1/messages")).text(),
  form: async () => document.getElementById("form").submit(),
};
(async () => {
  const seen = {};
  for (const [name, run] of Object.entries(tries)) {
    try { const got = await run(); seen[name] = typeof got === "string" ? got : String(got && got.type); }
    catch (error) { seen[name] = "refused"; }
  }
  await fetch("/done", {method: "POST", body: JSON.stringify(seen)});
})();
</script>"""

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)"),
]


@contextmanager
def foreign_page(text: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Serve a page of another origin, which reports what it could do."""
    reports: list[dict[str, str]] = []
    arrived = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            reports.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            arrived.set()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        try:
            yield f"http://localhost:{page.server_port}/", reports
            assert arrived.wait(60), "the page never ran"
        finally:
            page.shutdown()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_foreign_page_can_neither_schedule_nor_cancel_nor_read(api: Api, tmp_path: Path, host: str) -> None:
    api.schedule("kept", id="kept").raise_for_status()
    text = PAGE.replace("API", f"http://{host}:{api.port}").replace("BODY", json.dumps(BODY))
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with foreign_page(text) as (url, reports):
        browser = subprocess.Popen(
            [*command, f"--user-data-dir={tmp_path}", url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            waited = threading.Event()
            for _ in range(600):
                if reports or waited.wait(0.1):
                    break
        finally:
            browser.terminate()
            browser.wait(30)
    [seen] = reports
    assert (seen["json"], seen["cancel"], seen["read"]) == ("refused", "refused", "refused")
    assert seen.keys() == {"simple", "json", "opaque", "beacon", "cancel", "read", "form"}
    assert [message["message"] for message in api.listed()] == ["kept"]
    assert api.get("/v1/messages/kept").json()["state"] == "scheduled"
