"""axe-core, which finds what shuts people out of a page: fetched once by npm into the checkout and compared with its checksum."""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pipeline.core.files import SCRATCH_PREFIX

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]
VERSION = "4.14.0"
CHECKSUM = "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878"  # of axe.min.js, SHA-256
FETCH_SEC = 60
GRAVE = ("serious", "critical")
# Asked of the page by the debugger, so that its content security policy need not allow it.
RUN = """async () => {
  const found = await axe.run(document, {resultTypes: ["violations"], preload: false});
  return found.violations.map((each) => [each.impact, each.id, each.help, each.nodes.map((node) => node.html)]);
}"""


class Unavailable(Exception):
    """It is not there and can't be fetched; the text is a sentence that says why."""


@cache
def source() -> str:
    """Return the program, after fetching it if need be.

    Raises:
        Unavailable: it is not there and can't be fetched.
    """
    path = ROOT / ".duetime" / "axe" / f"axe-{VERSION}.min.js"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=path.parent) as scratch:
            _fetch(Path(scratch)).rename(path)
    found = path.read_bytes()
    # No reason to skip a test: what was fetched is not what somebody once looked at.
    checksum = hashlib.sha256(found).hexdigest()
    assert checksum == CHECKSUM, f"{path} has the checksum {checksum}, not {CHECKSUM}"
    return found.decode()


@cache
def why_unavailable() -> str | None:
    """Return why it is not here, or None if it is; asked once, as a fetch may take long to fail."""
    try:
        source()
    except Unavailable as error:
        return str(error)
    return None


def find_barriers(page: "Page") -> list[str]:
    """Return a sentence for each serious or critical barrier of a page."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(source())
    found = page.evaluate(RUN)
    return [f"{impact} {rule}: {help_}: {nodes[:3]}" for impact, rule, help_, nodes in found if impact in GRAVE]


def _fetch(scratch: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable("there is no npm to fetch axe-core with")
    command = [npm, "pack", "--json", "--cache", str(scratch / "cache"), "--pack-destination", str(scratch)]
    try:
        done = subprocess.run(
            [*command, f"axe-core@{VERSION}"], cwd=scratch, env=os.environ | {"npm_config_update_notifier": "false"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FETCH_SEC, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"npm did not fetch axe-core within {FETCH_SEC} s") from error
    if done.returncode != 0:
        raise Unavailable(f"npm could not fetch axe-core: {done.stderr.strip()[:400]}")
    [packed] = scratch.glob("*.tgz")
    with tarfile.open(packed) as archive:
        content = archive.extractfile("package/axe.min.js")
        assert content is not None, json.loads(done.stdout)
        (scratch / "axe.min.js").write_bytes(content.read())
    return scratch / "axe.min.js"
