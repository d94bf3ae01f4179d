from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.runtime.command_line import parse_command_line, read_spark_setting


@pytest.mark.parametrize(
    ("words", "options", "script", "arguments"),
    [
        pytest.param("", (), None, "", id="nothing"),
        pytest.param("a.py", (), "a.py", "", id="script only"),
        pytest.param(
            "a.py --master x --help", (), "a.py", "--master x --help", id="what follows the script is its own"
        ),
        pytest.param("--master x a.py", (("--master", "x"),), "a.py", "", id="a value is not the script"),
        pytest.param("--master=x a.py", (("--master", "x"),), "a.py", "", id="equals sign"),
        pytest.param("--conf a=b=c a.py", (("--conf", "a=b=c"),), "a.py", "", id="equals signs in a value"),
        pytest.param("-c a=b a.py", (("-c", "a=b"),), "a.py", "", id="short option"),
        pytest.param("-v --supervise a.py b", (("-v", None), ("--supervise", None)), "a.py", "b", id="switches"),
        pytest.param(
            "--name --verbose a.py", (("--name", "--verbose"),), "a.py", "", id="a value may look like an option"
        ),
        pytest.param("--status 7", (("--status", "7"),), None, "", id="no script"),
    ],
)
def test_options_end_at_the_first_word_that_belongs_to_none(
    words: str, options: tuple[tuple[str, str | None], ...], script: str | None, arguments: str
) -> None:
    line = parse_command_line(words.split())
    assert (line.options, line.script, line.arguments) == (options, script, tuple(arguments.split()))


@pytest.mark.parametrize("words", ["--mastre local a.py", "--frobnicate=1 a.py", "-x", "--master", "--verbose=1 a.py"])
def test_an_unknown_or_unfinished_option_is_refused_by_name(words: str) -> None:
    with pytest.raises(ConfigError, match=words.split(maxsplit=1)[0]):
        parse_command_line(words.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param("a.py", "spark://defaults", id="defaults file"),
        pytest.param("--conf spark.master=spark://conf a.py", "spark://conf", id="conf beats the file"),
        pytest.param("--conf spark.master=spark://conf --master m a.py", "m", id="option beats conf"),
        pytest.param("--master m --master n a.py", "n", id="the last one counts"),
        pytest.param("--properties-file {tmp}/mine a.py", "spark://mine", id="named file replaces the defaults"),
        pytest.param("--properties-file {tmp}/empty a.py", None, id="also if it says nothing"),
        pytest.param(
            "--properties-file {tmp}/empty --load-spark-defaults a.py", "spark://defaults", id="or adds to them"
        ),
    ],
)
def test_a_setting_is_found_where_spark_finds_it(tmp_path: Path, words: str, expected: str | None) -> None:
    (tmp_path / "spark-defaults.conf").write_text("# spark.master no\n\nspark.master   spark://defaults\n")
    (tmp_path / "mine").write_text("spark.other x\nspark.master=spark://mine\n")
    (tmp_path / "empty").write_text("")
    line = parse_command_line(words.format(tmp=tmp_path).split())
    assert read_spark_setting(line, tmp_path, "--master", "spark.master") == expected
