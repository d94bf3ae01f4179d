"""Settings: what beats what, and what is refused."""

import tomllib
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.config import ROOT, DrainSettings, IngestSettings, RedisSettings, Settings, load_settings, redact_url
from pipeline.core.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.toml"
    path.write_text('[redis]\nnamespace = "from-file"\n[drain]\nlease_sec = 5\n')
    return path


def test_the_committed_file_says_the_defaults() -> None:
    written = tomllib.loads((ROOT / "conf" / "pipeline.toml").read_text())
    assert written == asdict(Settings())


def test_every_key_of_the_committed_file_has_a_comment_above_it() -> None:
    lines = (ROOT / "conf" / "pipeline.toml").read_text().splitlines()
    bare = [line for before, line in pairwise(lines) if " = " in line and line[0] != "#" and not before.startswith("#")]
    assert bare == ["port = 9999"]  # told together with the host


def test_a_flag_beats_the_environment_which_beats_the_file(file: Path) -> None:
    assert load_settings({}, {}, file).redis.namespace == "from-file"
    environ = {"DUETIME_REDIS_NAMESPACE": "from-env"}
    assert load_settings({}, environ, file).redis.namespace == "from-env"
    assert load_settings({"redis": {"namespace": "from-flag"}}, environ, file).redis.namespace == "from-flag"


def test_redis_url_counts_and_the_longer_name_beats_it(file: Path) -> None:
    environ = {"REDIS_URL": "redis://a"}
    assert load_settings({}, environ, file).redis.url == "redis://a"
    assert load_settings({}, {**environ, "DUETIME_REDIS_URL": "redis://b"}, file).redis.url == "redis://b"


def test_numbers_come_as_text_from_environment_and_flags(file: Path) -> None:
    settings = load_settings({"ingest": {"port": "1234"}}, {"DUETIME_DRAIN_LEASE_SEC": "0.5"}, file)
    assert (settings.ingest.port, settings.drain.lease_sec) == (1234, 0.5)


def test_default_folders_belong_to_the_checkout_and_given_ones_to_the_current_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"ingest": {"input": "mine"}}, {}, file)
    assert settings.ingest.input == str(tmp_path / "mine")
    assert settings.ingest.rejects == str(ROOT / "rejects")
    assert settings.local.state == str(ROOT / ".duetime")
    assert settings.ingest.checkpoint == ""


def test_a_url_is_no_path(file: Path) -> None:
    assert load_settings({"ingest": {"input": "hdfs://host/in"}}, {}, file).ingest.input == "hdfs://host/in"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[redis]\nspeed = 1\n", "no setting redis.speed"),
        ("[readis]\n", "unknown section"),
        ("url = 1\n", "unknown section"),
        ("[redis\n", "not valid TOML"),
        ("[drain]\nlease_sec = 0.09\n", "0.1 to 86400"),
        ("[drain]\nlease_sec = nan\n", "0.1 to 86400"),
        ("[drain]\nlease_sec = inf\n", "0.1 to 86400"),
        ("[drain]\nwait_ms_max = 0\n", "greater than 0"),
        ('[ingest]\nrejects = "s3a://b/r"\n', "local or mounted folder"),
        ('[local]\nstate = "hdfs://h/s"\n', "local folder"),
        ('[drain]\nlease_sec = "soon"\n', "must be of type float"),
        ("[drain]\nclaim_limit = 1.5\n", "must be of type int"),
        ("[drain]\nclaim_limit = 5001\n", "1 to 5000"),
        ("[drain]\ntopics_max = 0\n", "1 to 1000"),
        ("[drain]\nmetrics_port = 65536\n", "0 .off. to 65535"),
        ('[drain]\nmetrics_host = ""\n', "drain.metrics_host"),
        ("[drain]\nmax_rate = -1\n", "drain.max_rate"),
        ("[drain]\nclaim_limit = true\n", "must be of type int"),
        ('[drain]\nformat = "xml"\n', "text or json"),
        ('[drain]\nsink = "kafka"\n', "must be screen or stream"),
        ('[topics]\nsink = "kafka"\n', "must be screen or stream"),
        ("[topics]\nattempts_max = 0\n", "greater than 0"),
        ("[topics]\nmax_rate = -1\n", "0 .off. or more"),
        ("[topics]\nlease_sec = 0\n", "0.1 to 86400"),
        ("[topic.mail]\nspeed = 1\n", "no setting topics.speed"),
        ("[topic]\nmail = 1\n", "must be a table"),
        ('[topic."a:b"]\n', "A topic has 1 to 64"),
        ('[ingest]\nsource = "kafka"\n', "files or socket"),
        ("[ingest]\nport = 65536\n", "1 to 65535"),
        ('[redis]\nnamespace = "a{b}"\n', "redis.namespace"),
        ('[redis]\nnamespace = ""\n', "redis.namespace"),
        ('[local]\nstate = ""\n', "local.state"),
        ("[redis]\nshards = 65\n", "1 to 64"),
        ("[redis]\nshards = 0\n", "1 to 64"),
        ("[ingest]\nwait_for_disk = 1\n", "must be of type bool"),
        ('[ingest]\nwait_for_disk = "yes"\n', "must be of type bool"),
    ],
)
def test_what_is_wrong_is_refused_with_its_name(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_settings({}, {}, path)


@pytest.mark.parametrize(("text", "wanted"), [("true", True), ("false", False)])
def test_yes_and_no_are_true_and_false(file: Path, text: str, wanted: bool) -> None:
    assert load_settings({}, {"DUETIME_INGEST_WAIT_FOR_DISK": text}, file).ingest.wait_for_disk is wanted


def test_a_topic_has_its_own_settings_and_else_those_of_all(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text('[topics]\nmax_rate = 5\n[topic."orders.new"]\nsink = "stream"\nattempts_max = 9\n')
    settings = load_settings({}, {"DUETIME_TOPICS_LEASE_SEC": "7"}, path)
    own, other = settings.of_topic("orders.new"), settings.of_topic("mail")
    assert (own.sink, own.attempts_max, own.max_rate, own.lease_sec) == ("stream", 9, 5, 7.0)
    assert (other.sink, other.attempts_max, other.max_rate) == ("screen", 5, 5)
    assert load_settings({"drain": {"sink": "stream"}}, {}, path).of_topic("mail").sink == "stream"


def test_an_unknown_key_in_the_environment_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"no setting drain\.leese_sec"):
        load_settings({}, {"DUETIME_DRAIN_LEESE_SEC": "1"}, file)


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load_settings({}, {}, tmp_path / "none.toml")


def test_secrets_are_not_shown() -> None:
    assert "hidden" not in repr(RedisSettings(url="redis://user:hidden@host"))
    assert redact_url("redis://user:hidden@host:6379/0") == "redis://user:***@host:6379/0"
    assert redact_url("redis://:hidden@host:abc/0") == "redis://:***@host:abc/0"
    assert redact_url("redis://:hid@den@[::1") == "redis://:***@[::1"
    assert redact_url("unix:///run/redis.sock?db=0&password=hidden") == "unix:///run/redis.sock?db=0&password=***"
    assert redact_url("unix:///run/redis.sock") == "unix:///run/redis.sock"


def test_sections_check_themselves() -> None:
    with pytest.raises(ConfigError):
        IngestSettings(transaction_messages=0)
    with pytest.raises(ConfigError):
        DrainSettings(wait_ms_max=-1)
