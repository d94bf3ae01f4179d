"""The archive of what executors need."""

import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError, PipelineError
from pipeline.runtime import sending
from pipeline.runtime.sending import LIST_NAME, PACKED, pack_executors
from tests.docs.pages import run_here

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    "numpy", "pandas", "pyarrow", "msgspec", "redis", "hiredis", "confluent_kafka", "inotify_simple", "tqdm",
)  # fmt: skip


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "PACKED", ("msgspec", "redis", "not-installed-here"))


@pytest.mark.usefixtures("little")
def test_the_archive_has_each_package_once_with_what_it_needs_and_is_made_anew_for_other_versions_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = pack_executors(tmp_path / "p.tar.gz")
    with tarfile.open(file) as archive:
        names = archive.getnames()
        listing = archive.extractfile(LIST_NAME)
        assert listing is not None
        packed = [line.split()[0] for line in listing.read().decode().splitlines()]
        # Until Python 3.11.3 redis needs this, too.
        assert [name for name in packed if name != "async-timeout"] == [sending.PYTHON, "msgspec", "redis"]
    assert names[0] == LIST_NAME
    assert len(names) == len(set(names))
    assert {"msgspec/__init__.py", "redis/client.py"} < set(names)
    assert not [name for name in names if ".." in name or "__pycache__" in name or name.startswith("/")]
    assert os.listdir(tmp_path) == ["p.tar.gz"]

    made = file.stat().st_ino
    assert pack_executors(file).stat().st_ino == made
    monkeypatch.setattr(sending, "PACKED", ("msgspec",))
    assert pack_executors(file).stat().st_ino != made


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("content", [b"", b"notes", b"\x1f\x8b\x08 cut off"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "p.tar.gz"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"p\.tar\.gz is there, and nothing that --pack-executors has made"):
        pack_executors(file)
    assert file.read_bytes() == content


@pytest.mark.usefixtures("little")
def test_a_place_that_is_not_there_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"/no/p\.tar\.gz can't be written \(No such file or directory\)"):
        pack_executors(tmp_path / "no" / "p.tar.gz")


@pytest.mark.slow
def test_one_command_packs_all_that_a_bare_python_lacks(tmp_path: Path) -> None:
    [block] = run_here("docs/how-to/spark-cluster.md", __file__)
    [(command, _)] = block.commands()
    there = command.replace("./", f"{ROOT}/")
    packed = subprocess.run(shlex.split(there), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert packed.stdout == f"{tmp_path}/packages.tar.gz\n"
    with tarfile.open(tmp_path / "packages.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked")
    places = f"import sys; sys.path.insert(0, {str(tmp_path / 'unpacked')!r}); import {', '.join(IMPORTED)}; print(redis.__file__)"
    bare = subprocess.run([sys.executable, "-ISc", places], capture_output=True, text=True, check=True)
    assert bare.stdout.startswith(str(tmp_path))
    assert len(IMPORTED) == len(PACKED)
