"""Settings: what beats what, and what is refused."""

import tomllib
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline import config
from pipeline.config import ALL_TOPICS, ROOT, RedisSettings, Settings, convert_topic_setting, load_settings
from pipeline.core.errors import ConfigError
from pipeline.core.text import has_password, redact_url


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.toml"
    path.write_text('[redis]\nnamespace = "from-file"\n[drain]\nlease_sec = 5\n')
    return path


def test_the_committed_file_says_the_defaults() -> None:
    written = tomllib.loads((ROOT / "conf" / "pipeline.toml").read_text())
    assert written == {name: value for name, value in asdict(Settings()).items() if name != "given"}


def test_every_key_of_the_committed_file_has_a_comment_above_it() -> None:
    lines = (ROOT / "conf" / "pipeline.toml").read_text().splitlines()
    bare = [line for before, line in pairwise(lines) if " = " in line and line[0] != "#" and not before.startswith("#")]
    assert bare == ["port = 9999"]  # told together with the host


def test_a_flag_beats_the_environment_which_beats_the_file(file: Path) -> None:
    assert load_settings({}, {}, file).redis.namespace == "from-file"
    environ = {"DUETIME_REDIS_NAMESPACE": "from-env"}
    assert load_settings({}, environ, file).redis.namespace == "from-env"
    assert load_settings({"redis": {"namespace": "from-flag"}}, environ, file).redis.namespace == "from-flag"


def test_a_webhook_is_a_url_of_the_web_and_shows_no_password(file: Path) -> None:
    fit = ("http://h", "https://example.org:8443/a/b?c=%20&d=e", "http://[::1]:80/", "http://a_b/", "")
    for url in fit:
        assert convert_topic_setting("webhook", url) == url
    odd = (
        "h",
        "ftp://h/",
        "file:///etc/passwd",
        "http://",
        "http:///a",
        "http://u:hidden@h/",
        "http://u@h",
        "http://h/ a",
    )
    odd += (
        "http://h/\r\nx: y",
        "http://h/\n",
        "http://h/#a",
        "http://é.org/",
        "http://h:port/",
        "http://h\\@g/",
        "HTTP://h",
    )
    for url in odd:
        with pytest.raises(ConfigError, match=r"topics\.webhook must be an http:// or https:// URL") as refused:
            convert_topic_setting("webhook", url)
        assert "hidden" not in str(refused.value)


def test_a_topic_with_a_webhook_goes_into_its_stream_whatever_its_sink(file: Path) -> None:
    text = "[drain]\nsink='screen'\n[topics]\nwebhook='http://h/'\n[topic.a]\nsink='screen'\n[topic.b]\nwebhook=''\n"
    file.write_text(text)
    settings = load_settings({}, {}, file)
    assert [settings.of_topic(topic).sink for topic in ("a", "b", "c")] == ["stream", "screen", "stream"]
    assert settings.given == {"*": {"webhook": "http://h/"}, "a": {"sink": "screen"}, "b": {"webhook": ""}}


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


def test_the_url_may_be_in_a_file_and_of_two_places_the_nearer_one_counts(file: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(" redis://user:hidden@a\n")
    by_file, by_url = {"DUETIME_REDIS_URL_FILE": str(secret)}, {"REDIS_URL": "redis://b"}
    assert load_settings({}, by_file, file).redis.url == "redis://user:hidden@a"
    file.write_text('[redis]\nurl = "redis://c"\n')
    assert load_settings({}, by_file, file).redis.url == "redis://user:hidden@a"
    assert load_settings({"redis": {"url": "redis://d"}}, by_file, file).redis.url == "redis://d"
    file.write_text(f'[redis]\nurl_file = "{secret}"\n')
    assert load_settings({}, {}, file).redis.url == "redis://user:hidden@a"
    assert load_settings({}, by_url, file).redis.url == "redis://b"
    with pytest.raises(ConfigError, match=r"both given \(from DUETIME_REDIS_URL_FILE\); leave one out"):
        load_settings({}, by_file | by_url, file)


@pytest.mark.parametrize(
    ("content", "told"), [(None, "No such file"), (b"\xff:hidden@a", "no text"), (b"\n", "is empty")]
)
def test_a_file_of_the_url_that_is_wrong_is_told_without_what_is_in_it(
    file: Path, tmp_path: Path, content: bytes | None, told: str
) -> None:
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ConfigError, match=told) as caught:
        load_settings({}, {"DUETIME_REDIS_URL_FILE": str(tmp_path / "secret")}, file)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "[redis]\nspeed = 1\n",
            r"no setting redis\.speed .*line 2\); those of \[redis\] are url, url_file, namespace, shards, ",
        ),
        ("[readis]\n", "unknown section"),
        ("[topical]\n", "unknown section"),
        ('["redis.x"]\n', "unknown section"),
        ("url = 1\n", "unknown section"),
        ("[redis\n", "not valid TOML"),
        ("[drain]\nlease_sec = 0.09\n", "0.1 to 86400"),
        ("[drain]\nlease_sec = nan\n", "0.1 to 86400"),
        ("[drain]\nlease_sec = inf\n", "0.1 to 86400"),
        ("[drain]\nwait_ms_max = 0\n", "greater than 0"),
        ('[ingest]\nrejects = "s3a://b/r"\n', "local or mounted folder"),
        ('[local]\nstate = "hdfs://h/s"\n', "a local or mounted folder"),
        (
            '[drain]\nlease_sec = "soon"\n',
            "drain.lease_sec must be a number of seconds, but is .soon. .*pipeline.toml, line 2",
        ),
        ("[drain]\nclaim_limit = 1.5\n", "must be a whole number, but is 1.5"),
        ("[drain]\nclaim_limit = 5001\n", "1 to 5000"),
        ("[drain]\ntopics_max = 0\n", "1 to 1000"),
        ("[drain]\nmetrics_port = 65536\n", "0 .off. to 65535"),
        ('[drain]\nmetrics_host = ""\n', "drain.metrics_host"),
        ("[drain]\nmax_rate = -1\n", "drain.max_rate"),
        ("[drain]\nclaim_limit = true\n", "must be a whole number, but is True"),
        ('[drain]\nformat = "xml"\n', "text or json"),
        ('[drain]\nsink = "mail"\n', "must be screen or stream or kafka"),
        ('[topics]\nsink = "mail"\n', "must be screen or stream or kafka"),
        ('[topics]\nkafka_topic = "a b"\n', "at most 249 of"),
        ("[topics]\nattempts_max = 0\n", "greater than 0"),
        ("[topics]\nmax_rate = -1\n", "0 .off. or more"),
        ("[topics]\nlease_sec = 0\n", "0.1 to 86400"),
        (
            "[topic.mail]\nspeed = 1\n",
            r"no setting topic\.mail\.speed .*line 2\); those of \[topic.mail\] are sink, kafka_topic, ",
        ),
        ("[topic]\nmail = 1\n", "must be a table"),
        ('[topic."a:b"]\n', "A topic has 1 to 64"),
        ('[ingest]\nsource = "amqp"\n', "files or socket or kafka"),
        ("[ingest]\nport = 65536\n", "1 to 65535"),
        ('[redis]\nnamespace = "a{b}"\n', "redis.namespace"),
        ('[redis]\nnamespace = ""\n', "redis.namespace"),
        ('[local]\nstate = ""\n', "local.state"),
        ("[redis]\nshards = 65\n", r"redis\.shards must be 1 to 64, but is 65 \(/.*/pipeline.toml, line 2\)\."),
        ("[redis]\nurl = 1\n", "redis.url must be a string, but is 1"),
        ("redis = 1\n", "redis must be a table"),
        ("[ingest]\ntransaction_messages = 0\n", "greater than 0"),
        ("[ingest]\nsegment_bytes = '8 MB'\n", "a whole number of bytes, but"),
        ('# x\n[topics]\nlease_sec = 1\n\n[topic."a.b"]\nlease_sec = 0\n', r"topic\.a\.b\.lease_sec must be .*line 6"),
        ("topic = 1\n", "topic must be a table"),
        ("[redis]\nshards = 0\n", "1 to 64"),
        ("[ingest]\nwait_for_disk = 1\n", "must be true or false, but is 1"),
        ('[ingest]\nwait_for_disk = "yes"\n', "must be true or false, but is .yes."),
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


@pytest.mark.parametrize("drain_first", [True, False])
def test_the_sink_of_topics_beats_that_of_the_drain_job_wherever_it_stands(tmp_path: Path, drain_first: bool) -> None:
    tables = ['[topics]\nsink = "screen"\n', '[drain]\nsink = "stream"\n']
    path = tmp_path / "pipeline.toml"
    path.write_text("".join(reversed(tables) if drain_first else tables))
    settings = load_settings({}, {}, path)
    assert settings.given == {ALL_TOPICS: {"sink": "screen"}}
    assert settings.of_topic("mail").sink == "screen"
    assert load_settings({"drain": {"sink": "stream"}}, {}, path).given == {ALL_TOPICS: {"sink": "stream"}}, "as a flag"


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
    assert redact_url("rediss://host?ssl_password=hidden&db=1") == "rediss://host?ssl_password=***&db=1"
    assert redact_url("unix:///run/redis.sock") == "unix:///run/redis.sock"
    shown = (
        "redis://:x@h",
        "redis://u:x@h/0?a=b@c",
        "redis+cluster://u:x@h,i",
        "rediss://u@h?ssl_password=x",
        "redis://:a/b@h",
    )
    assert [*map(has_password, shown)] == [True] * len(shown)
    hidden = (
        "redis://h",
        "redis://u@h/0",
        "rediss+sentinel://u@h,i/m?ssl_ca_certs=ca",
        "unix://u@/s?db=1",
        "unix:///s",
        "",
    )
    assert [*map(has_password, hidden)] == [False] * len(hidden)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("DUETIME_DRIAN_LEASE_SEC", "names no setting; write DUETIME_<SECTION>_<KEY>, with a section of redis, ingest"),
        ("DUETIME_", "names no setting"),
        ("DUETIME_TOPIC_MAIL_SINK", "settings of one topic into the configuration file"),
        ("DUETIME_TOPIC", "settings of one topic into the configuration file"),
        ("DUETIME_DRAIN", "There is no setting drain"),
    ],
)
def test_a_variable_that_names_no_setting_is_refused(file: Path, name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_settings({}, {name: "5"}, file)
    assert name in str(caught.value)


def test_variables_that_mean_something_else_are_no_settings(file: Path) -> None:
    environ = {
        "DUETIME_SAMPLE": "0",
        "DUETIME_READY_FD": "3",
        "DUETIME_CONFIG": "none.toml",
        "DUETIME_TEST_SERVER": "x",
        "PATH": "/bin",
    }
    assert load_settings({}, environ, file).redis.namespace == "from-file"


def test_a_wrong_value_is_refused_with_the_variable_it_came_from(file: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"must be a number of seconds, but is 'abc' \(from DUETIME_DRAIN_LEASE_SEC\)"
    ):
        load_settings({}, {"DUETIME_DRAIN_LEASE_SEC": "abc"}, file)
    with pytest.raises(ConfigError, match=r"redis\.shards must be 1 to 64, but is '65'\."):
        load_settings({"redis": {"shards": "65"}}, {}, file)


def test_without_a_checkout_the_file_is_named_or_in_the_working_directory(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the container of a cluster's driver: there, the program is an archive."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(config, "ROOT", tmp_path / "pipeline.zip")
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(
        ConfigError, match=r"no configuration file at .*pipeline\.zip/conf/pipeline\.toml or .*--config"
    ):
        load_settings({}, {})
    assert load_settings({}, {"DUETIME_CONFIG": str(file)}).redis.namespace == "from-file"
    monkeypatch.chdir(tmp_path)
    settings = load_settings({}, {})
    assert (settings.redis.namespace, settings.ingest.input) == ("from-file", str(tmp_path / "inbox"))


def test_a_file_that_is_named_beats_the_one_of_the_checkout(file: Path) -> None:
    assert load_settings({}, {}).redis.namespace == "duetime"
    assert load_settings({}, {"DUETIME_CONFIG": str(file)}).redis.namespace == "from-file"
