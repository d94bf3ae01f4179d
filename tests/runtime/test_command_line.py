from pathlib import Path

import pytest

from pipeline.runtime.command_line import append_file, read_spark_setting, split_command_line, take_option


@pytest.mark.parametrize(
    ("options", "script", "arguments"),
    [
        pytest.param("", "", "", id="nothing"),
        pytest.param("", "a.py", "", id="script only"),
        pytest.param("", "a.py", "--master x --help b.py", id="what follows the script is its own"),
        pytest.param("--master x", "a.py", "", id="a value is not the script"),
        pytest.param("--master=x -v --supervise", "a.py", "b", id="equals sign and switches"),
        pytest.param("--py-files x.py", "a.py", "", id="a value may look like a script"),
        pytest.param("--py-files=x.py --files y.py --conf spark.a=b.py", "a.py", "", id="several may"),
        pytest.param("--an-option-of-a-later-spark 1", "a.py", "", id="what we do not know is passed on"),
        pytest.param("--status 7", "", "", id="no script"),
        pytest.param("--class a.B app.jar x", "", "", id="a jar"),
    ],
)
def test_the_script_is_the_first_argument_that_ends_in_py_and_is_no_options_value(
    options: str, script: str, arguments: str
) -> None:
    argv = f"{options} {script} {arguments}".split()
    assert split_command_line(argv) == (options.split(), script or None, arguments.split())


def test_an_option_is_taken_in_both_its_forms() -> None:
    argv = ["--a", "1", "--b=2", "--a=3", "--c", "--d"]
    assert take_option(argv, "--a") == (["--b=2", "--c", "--d"], ["1", "3"])
    assert take_option(argv, "--d") == (["--a", "1", "--b=2", "--a=3", "--c"], [""])
    assert take_option(argv, "--e") == (argv, [])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param("", "spark://defaults", id="defaults file"),
        pytest.param("--conf spark.master=spark://conf", "spark://conf", id="conf beats the file"),
        pytest.param("-c spark.other=o -c spark.master=a=b", "a=b", id="short, with an equals sign in the value"),
        pytest.param("--conf spark.master=spark://conf --master m", "m", id="option beats conf"),
        pytest.param("--master m --master n", "n", id="the last one counts"),
        pytest.param("--properties-file {tmp}/mine", "spark://mine", id="named file replaces the defaults"),
        pytest.param("--properties-file {tmp}/empty", None, id="also if it says nothing"),
    ],
)
def test_a_setting_is_found_where_spark_finds_it(tmp_path: Path, options: str, expected: str | None) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "# spark.master no\n\nspark.master   spark://defaults\nspark.masters x\n"
    )
    (tmp_path / "mine").write_text("spark.other x\nspark.master=spark://mine\n")
    (tmp_path / "empty").write_text("")
    assert read_spark_setting(options.format(tmp=tmp_path).split(), tmp_path, "--master", "spark.master") == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--master m", "--master m --files new"),
        ("--files a,b --master m", "--master m --files a,b,new"),
        ("--conf spark.files=a", "--conf spark.files=a --files a,new"),
    ],
)
def test_a_file_is_added_to_those_of_the_user(tmp_path: Path, options: str, expected: str) -> None:
    assert append_file(options.split(), tmp_path, "--files", "spark.files", Path("new")) == expected.split()
