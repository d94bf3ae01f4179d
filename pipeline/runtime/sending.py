"""What is sent along to a cluster: our package, the packages that it needs, the configuration."""

import hashlib
import io
import os
import platform
import re
import sys
import tarfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import IO

from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.files import SCRATCH_PREFIX, put_in_place
from pipeline.runtime.command_line import append_file, read_spark_setting, take_option

PACK = "--pack-executors"
# What the ingest job imports and a worker of Spark doesn't have; the rest is what these need themselves.
PACKED = (
    "numpy", "pandas", "pyarrow", "msgspec", "redis", "hiredis", "confluent-kafka", "inotify_simple", "tqdm",
)  # fmt: skip
PYTHON = "python{}.{}".format(*sys.version_info)  # what the packages are built for, by the name that systems give it
FOLDER = "duetime-packages"  # what Spark unpacks the archive as, in the working directory of each executor
COMPRESSION = 1  # of gzip: 14 % larger than its usual one, in a third of the time
LIST_NAME = "duetime-packages.txt"  # first in the archive: what is in it


def check_cluster(
    master: str, in_cluster: bool, uploads: bool, options: list[str], conf_dir: Path, environ: Mapping[str, str]
) -> None:
    """Refuse what Spark would answer with a Java trace.

    Args:
        uploads: whether files of this machine go to a driver in the cluster.

    Raises:
        ConfigError: ``master`` runs no Python driver in this mode, or Spark needs to know more of it.
    """
    if in_cluster and master.startswith("local"):
        raise ConfigError(
            f"--deploy-mode cluster needs a cluster, and {master} is this machine: name one with --master."
        )
    if in_cluster and master.startswith("spark://"):
        raise ConfigError(
            "A standalone cluster runs no Python drivers: leave --deploy-mode cluster out, so that it runs here."
        )
    if master == "yarn" and not (environ.get("HADOOP_CONF_DIR") or environ.get("YARN_CONF_DIR")):
        raise ConfigError("YARN is found by its configuration: let HADOOP_CONF_DIR or YARN_CONF_DIR name that folder.")
    if master.startswith("k8s://"):
        keys = ["spark.kubernetes.container.image", *(["spark.kubernetes.file.upload.path"] if uploads else [])]
        missing = [key for key in keys if not read_spark_setting(options, conf_dir, "", key)]
        if missing:
            raise ConfigError(
                f"On Kubernetes Spark needs {' and '.join(missing)}: name it with --conf; docs/how-to/spark-cluster.md has both."
            )


def check_sent(is_ingest: bool, arguments: list[str], environ: Mapping[str, str], file: Path) -> None:
    """Refuse to start a driver in the cluster that would not find there what it needs from here.

    Args:
        file: the configuration file that is sent along.

    Raises:
        ConfigError: it is wrong, lacks the server or folders that all can reach, or settings are in the environment of this shell.
    """
    from pipeline.config import ENV_PREFIX, NO_SETTINGS, load_settings

    sections = tomllib.loads(file.read_text(encoding="utf-8"))
    is_in_file = bool(sections.get("redis", {}).get("url_file"))  # one of the machine that the driver runs on
    load_settings({"redis": {"url": "redis://there"}} if is_in_file else {}, {}, file)

    def named(option: str, section: str, key: str) -> str:
        return str([sections.get(section, {}).get(key, ""), *take_option(arguments, option)[1]][-1])

    lost = [name for name in environ if name.startswith(ENV_PREFIX) and name not in NO_SETTINGS]
    if environ.get("REDIS_URL") and not take_option(arguments, "--redis")[1]:
        lost.append("REDIS_URL")
    if lost:
        raise ConfigError(
            f"A driver in the cluster does not see {', '.join(sorted(lost))} of this shell: write that into {file}, which is sent "
            "along."
        )
    if not is_in_file and not named("--redis", "redis", "url"):
        raise ConfigError(f"A driver in the cluster needs a server that it can reach: write redis.url into {file}.")
    if not is_ingest:
        return
    folders = ["rejects", *(["input"] if named("--source", "ingest", "source") in ("", "files") else [])]
    for name in folders:
        value = named(f"--{name}", "ingest", name)
        if "://" not in value and not value.startswith("/"):
            raise ConfigError(
                f"A driver in the cluster has no folder {value or name!r} of this machine: name with --{name}, from the root, one "
                "that is mounted for it and for all executors."
            )


def send_configuration(
    options: list[str], arguments: list[str], conf_dir: Path, file: Path
) -> tuple[list[str], list[str]]:
    """Send the configuration file along to a driver in the cluster, and let the job read it there, by name.

    Spark puts what ``--files`` names into the driver's working directory; if it were not there, the job would refuse to start.
    """
    arguments, _ = take_option(arguments, "--config")
    return append_file(options, conf_dir, "--files", "spark.files", file), [*arguments, "--config", file.name]


def find_configuration(arguments: list[str], default: str) -> Path:
    """Return the path of the configuration file: ``default``, unless ``--config`` names one.

    Raises:
        ConfigError: there is no such file.
    """
    file = Path([default, *take_option(arguments, "--config")[1]][-1]).resolve()
    if not file.is_file():
        raise ConfigError(f"There is no configuration file {file} to send along: name another with --config.")
    return file


def pack_package(root: Path, folder: Path) -> Path:
    """Zip the package, under both of its names, for executors and return its path.

    The name holds the content's hash: a running job's file never changes, and the same sources give the same file.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for name in ("duetime", "pipeline") for path in (root / name).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                info = zipfile.ZipInfo(path.relative_to(root).as_posix())  # dated 1980
                info.external_attr = 0o644 << 16
                archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    target = folder / f"pipeline-{hashlib.sha256(buffer.getvalue()).hexdigest()[:12]}.zip"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(buffer.getvalue())
        fresh.rename(target)
    return target


def pack_executors(file: Path) -> Path:
    """Put the packages that executors need into a gzipped tar, out of the environment that this runs in.

    One that has been made before of the same versions is left as it is.

    Returns:
        Its absolute path.

    Raises:
        ConfigError: the name is wrong, or of something else.
        PipelineError: it can't be written.
    """
    file = file.absolute()
    if not file.name.endswith((".tar.gz", ".tgz")):
        raise ConfigError(f"{PACK} makes a file that ends in .tar.gz, which {file.name} does not.")
    packed = _distributions(PACKED)
    versions = [f"{name} {found.version}" for name, found in sorted(packed.items())]
    listing = "\n".join([f"{PYTHON} on {sys.platform} {platform.machine()}", *versions, ""]).encode()
    if file.exists():
        there = _listing_of(file)
        if there is None:
            raise ConfigError(f"{file} is there, and nothing that {PACK} has made: name another file.")
        if there == listing:
            return file
    print(f"packing {', '.join(versions)} into {file}", file=sys.stderr, flush=True)
    scratch = file.with_name(f"{SCRATCH_PREFIX}{os.getpid()}-{file.name}")
    try:
        with open(scratch, "wb") as output:
            with tarfile.open(fileobj=output, mode="w:gz", compresslevel=COMPRESSION) as archive:
                _add(archive, LIST_NAME, io.BytesIO(listing), len(listing))
                for found in packed.values():
                    _add_files(archive, found)
            put_in_place(output, file)
    except OSError as exc:
        raise PipelineError(f"{file} can't be written ({exc.strerror or exc}): name another place.") from exc
    finally:
        scratch.unlink(missing_ok=True)
    return file


def _distributions(names: Iterable[str]) -> dict[str, Distribution]:
    """Return what is installed of the names, and of all that they need."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # needed on other systems only: requirements.lock would have it
        needs = [need for need in found[name].requires or () if "extra ==" not in need]
        waiting += [re.match(r"[\w.-]+", need)[0] for need in needs]  # type: ignore[index]
    return found


def _add_files(archive: tarfile.TarFile, found: Distribution) -> None:
    for path in found.files or ():
        if ".." in path.parts or "__pycache__" in path.parts:
            continue  # commands, which nobody runs there, and what depends on the place
        source = Path(str(path.locate()))
        if source.is_file():
            with source.open("rb") as content:
                _add(archive, path.as_posix(), content, source.stat().st_size)


def _add(archive: tarfile.TarFile, name: str, content: IO[bytes], size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o755 if ".so" in name else 0o644
    archive.addfile(member, content)


def _listing_of(file: Path) -> bytes | None:
    """Return what an archive says is in it; None if it is none of ours."""
    try:
        with tarfile.open(file, "r|gz") as archive:
            first = archive.next()
            content = archive.extractfile(first) if first and first.name == LIST_NAME else None
            return content.read() if content else None
    except (OSError, EOFError, zlib.error, tarfile.TarError):
        return None


def send_packages(options: list[str], conf_dir: Path, archive: Path) -> list[str]:
    """Have Spark unpack the archive beside each executor, and beside a driver in the cluster, and have Python look there."""
    options = append_file(options, conf_dir, "--archives", "spark.archives", Path(f"{archive}#{FOLDER}"))
    for key in ("spark.executorEnv", "spark.yarn.appMasterEnv", "spark.kubernetes.driverEnv"):
        theirs = read_spark_setting(options, conf_dir, "", f"{key}.PYTHONPATH")
        options += ["--conf", f"{key}.PYTHONPATH={os.pathsep.join(filter(None, (FOLDER, theirs)))}"]
    return options
