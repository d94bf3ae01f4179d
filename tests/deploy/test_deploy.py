"""What deploy/ starts does start, as its files say; .ci/check-deploy looks at their form, docs/how-to/deploy.md describes them."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.ingest import parse_arguments
from pipeline.command import EXTRAS, JOBS
from pipeline.config import ROOT
from pipeline.runtime.process import wait_until
from tests.e2e.commands import Checkout, Command
from tests.e2e.conftest import checkout as checkout
from tests.ports import free_port
from tests.servers import RealServer, real_server

DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
# A folder that can't be written, no further rights, no memory that is written and then run.
CONFINED = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
NO_EXECUTABLE_MEMORY = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(65, 1, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)

# For the ingest job it is much later, for the hydrator it is soon.
OWN = {"duetime-hydrate": {"DUETIME_COLD_HORIZON_HOURS": "100", "DUETIME_COLD_LEAD_HOURS": "48"}}

can_mount = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "true"], check=False).returncode != 0,
    reason="needs mount namespaces (unshare -rm)",
)


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[tuple[RealServer, Path]]:
    """A server, and a folder that has its URL in a file."""
    with real_server() as server:
        (tmp_path / "redis-url").write_text(server.url)
        (tmp_path / "tokens").write_text(f"shop {'0' * 64} schedule\n")
        yield server, tmp_path


def settings_of(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", unit.read_text(encoding="utf-8"), re.M):
        found.setdefault(name, []).append(value)
    return found


def start(
    stack: ExitStack, unit: Path, checkout: Checkout, credentials: Path, state: Path, port: int = 0, **more: str
) -> Command:
    """Start what a unit starts, as far as this can be done without systemd; its metrics are on ``port``."""

    def placed(text: str) -> str:
        text = text.replace("%d", str(credentials)).replace("946%i", str(port))
        return text.replace("/opt/duetime", str(checkout.root)).replace("/var/lib/duetime", str(state))

    settings = settings_of(unit)
    environ = dict(placed(word).split("=", 1) for word in settings["Environment"])
    environ |= {name: os.environ[name] for name in ("PATH", "JAVA_HOME", "SPARK_SUBMIT_OPTS") if name in os.environ}
    environ |= more | {"DUETIME_COLD_FOLDER": str(state / "cold")}  # as /etc/duetime/environment has them
    if unit.stem == "duetime-serve":
        environ["DUETIME_API_PORT"] = "0"
    words = shlex.split(placed(settings["ExecStart"][0]))
    if settings.get("MemoryDenyWriteExecute") == ["yes"]:
        words = ["python3", "-c", NO_EXECUTABLE_MEMORY, *words]
    words = ["unshare", "-rm", "sh", "-c", f"umask {settings['UMask'][0]} && {CONFINED}", str(checkout.root), *words]
    command = Command(words, environ, state)
    stack.callback(command.process.kill)
    return command


def test_no_example_has_the_metrics_port_of_a_drain_loop_of_systemd() -> None:
    """``duetime-drain@1`` to ``duetime-drain@9`` have 9461 to 9469."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "docs" / "hooks.py"]
    found = [
        port
        for page in pages
        for job, port in re.findall(
            r"(\S*) --metrics-port (\d+)", page.read_text(encoding="utf-8").replace("`--", " --")
        )
        if not job.endswith("jobs/drain.py")
    ]
    assert len(found) >= 6 and [port for port in found if port.startswith("946")] == []


@can_mount
@pytest.mark.process
def test_each_unit_works_on_a_checkout_that_it_can_not_write(
    checkout: Checkout, secret: tuple[RealServer, Path], tmp_path: Path
) -> None:
    server, credentials = secret
    state = tmp_path / "state"
    (state / "inbox").mkdir(parents=True)
    lines = '{"message": "tea", "delay_sec": 0}\n{"message": "later", "delay_sec": 90000}\n'
    (state / "inbox" / "1.jsonl").write_text(lines)
    up = {
        "duetime-ingest": "2 in, 2 stored",
        "duetime-drain@": "metrics are on",
        "duetime-hydrate": "hydrate is up",
        "duetime-serve": "the API is on",
        "duetime-webhooks": "",  # it has nothing to tell, and is up long before Spark is
    }
    assert {unit.stem for unit in UNITS} == {*up, "duetime-check"}
    units = {unit.stem: unit for unit in UNITS}
    port = free_port()
    with ExitStack() as stack:
        check = partial(start, stack, units["duetime-check"], checkout, credentials, state)
        first = check()
        assert first.end() == 1 and "nothing is known of namespace" in first.screen()
        started = {
            name: start(stack, units[name], checkout, credentials, state, port, **OWN.get(name, {})) for name in up
        }
        for name, line in up.items():
            if line:
                started[name].wait_for_line(line)
        assert f"metrics are on http://127.0.0.1:{port}/metrics" in started["duetime-drain@"].screen()
        assert wait_until(lambda: server.client().hget("{duetime:0}:counters", "delivered") == b"1", 30)
        started["duetime-hydrate"].wait_for_line("1 message due before")
        last = check()
        assert last.end() == 0 and last.lines()[0].startswith("OK: 1 ingest job and 1 drain loop"), last.screen()
        assert {name: command.stop(signal.SIGTERM) for name, command in started.items()} == dict.fromkeys(up, 0)
    made = [path for path in state.iterdir() if path.name != "inbox"]
    assert made and not [path for path in made if path.stat().st_mode & 0o077]


@pytest.mark.process
@pytest.mark.parametrize(("name", "beats"), [("drain", "drains"), ("hydrate", "hydrations")])
def test_a_deployment_works_and_its_probe_goes_by_the_verdict(
    checkout: Checkout, secret: tuple[RealServer, Path], name: str, beats: str
) -> None:
    server, folder = secret
    pod = _one(DEPLOY / "kubernetes" / f"{name}.yaml")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert sorted(places.values()) == sorted(volume["name"] for volume in pod["volumes"])
    assert {mount.get("readOnly", False) for mount in container["volumeMounts"] if mount["name"] == "redis"} == {True}
    environ = {each["name"]: each["value"] for each in container["env"]}
    assert [value for value in environ.values() if not value.startswith(tuple(f"{place}/" for place in places))] == []
    for place in places:
        environ = {variable: value.replace(place, str(folder)) for variable, value in environ.items()}
    probe = container["readinessProbe"]["exec"]["command"]

    def run(words: list[str]) -> Command:
        job, *options = (word.replace("0.0.0.0", "127.0.0.1").replace("9464", "0") for word in words)
        assert job in JOBS
        return checkout.run(f"jobs/{job}.py", *options, environ=environ)

    assert probe[0] == "duetime"
    assert run(probe[1:]).end() == 1, "nothing is known of the namespace"
    loop = run(container["args"])
    assert wait_until(lambda: server.client().exists(f"{{duetime:0}}:{beats}") == 1, 30), loop.screen()
    healthy = run(probe[1:])
    assert healthy.end() == 0 and healthy.lines()[0].startswith("OK: "), healthy.screen()
    assert loop.stop() == 0


def test_the_hydrator_is_the_user_of_the_executors_on_their_volume_and_has_the_packages() -> None:
    pod = _one(DEPLOY / "kubernetes" / "hydrate.yaml")["spec"]["template"]["spec"]
    spark = _one(DEPLOY / "kubernetes" / "ingest.yaml")["spec"]
    assert pod["securityContext"]["runAsUser"] == spark["executor"]["securityContext"]["runAsUser"]
    claims = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == [volume["persistentVolumeClaim"] for volume in spark["volumes"]]
    [extras] = re.findall(r"'\.\[([\w,]+)\]'", (DEPLOY / "Containerfile").read_text(encoding="utf-8"))
    assert {*EXTRAS.values()} <= {*extras.split(",")}


def test_the_application_of_spark_is_one_that_the_ingest_job_understands() -> None:
    spec = _one(DEPLOY / "kubernetes" / "ingest.yaml")["spec"]
    given, settings = parse_arguments([*spec["arguments"]])
    assert (settings.ingest.input, settings.ingest.rejects) == ("/shared/inbox", "/shared/rejects")
    assert not given.once
    image = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    script = Path(spec["mainApplicationFile"].removeprefix("local://"))
    assert f"COPY jobs {script.parent}" in image and f"PYTHONPATH={script.parents[1]}" in image
    places = {mount["mountPath"] for part in ("driver", "executor") for mount in spec[part]["volumeMounts"]}
    assert places == {"/shared"}


def test_the_page_names_each_file_and_no_other() -> None:
    page = (ROOT / "docs" / "how-to" / "deploy.md").read_text(encoding="utf-8")
    files = {path.name for path in DEPLOY.rglob("*") if path.is_file()} - {"Containerfile.dockerignore"}
    assert files == {*re.findall(r"[\w@-]+\.(?:service|timer|yaml)|Containerfile", page)}


def test_the_ports_and_images_of_the_files_fit_together() -> None:
    image = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    names = re.findall(r"-t (\S+) \.", image)
    deployments = [_one(DEPLOY / "kubernetes" / f"{name}.yaml")["spec"] for name in ("drain", "hydrate")]
    used = {each["template"]["spec"]["containers"][0]["image"] for each in deployments}
    assert sorted(used | {_one(DEPLOY / "kubernetes" / "ingest.yaml")["spec"]["image"]}) == sorted(names)
    context = (DEPLOY / "Containerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", image, re.M)
    assert {f"!{name}" for line in copied for name in line.split()} == {
        line for line in context if line.startswith("!")
    }


def _one(file: Path) -> Any:
    [document] = yaml.safe_load_all(file.read_text(encoding="utf-8"))
    return document
