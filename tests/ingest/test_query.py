"""What surrounds the query: its checkpoint, its failures, the marks of files that are gone."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError, PipelineError, StoreUnavailable
from pipeline.ingest.loop import FenceSweeper
from pipeline.ingest.query import bind_checkpoint, query_failure

HOUR_MS = 3_600_000


def test_a_checkpoint_belongs_to_the_input_that_used_it_first(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    bind_checkpoint(checkpoint, "one", "/in/one")
    bind_checkpoint(checkpoint, "one", "/in/moved")
    with pytest.raises(ConfigError, match="belongs to another input \\(/in/one\\), not to /in/two"):
        bind_checkpoint(checkpoint, "two", "/in/two")


def test_a_checkpoint_that_can_not_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--checkpoint"):
        bind_checkpoint(str(tmp_path / "file" / "checkpoint"), "one", "/in")


def test_a_checkpoint_elsewhere_is_left_to_its_owner() -> None:
    bind_checkpoint("hdfs://host/checkpoint", "one", "/in")


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        (
            "[FOREACH] failed\nTraceback\npipeline.core.errors.ConfigError: Redis refuses the user.\n\tat java",
            ConfigError,
            "Redis refuses the user.",
        ),
        (
            "[FOREACH] failed\n  File x\njava.lang.Exception: outer\nCaused by: java.io.IOException: not a gzip file\n",
            PipelineError,
            "The streaming query ended: java.io.IOException: not a gzip file",
        ),
        ("Something else", PipelineError, "The streaming query ended: Something else"),
    ],
)
def test_why_a_query_ended_is_one_sentence(text: str, kind: type[Exception], sentence: str) -> None:
    failure = query_failure(Exception(text))
    assert (type(failure), str(failure)) == (kind, sentence)


class Fences:
    """A store that only knows fences, and may not answer."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = set(tokens)
        self.answers = True

    def fenced_tokens(self, source_id: str) -> list[str]:
        if not self.answers:
            raise StoreUnavailable("Redis does not answer.")
        return sorted(self.tokens)

    def forget_fences(self, source_id: str, file_tokens: Sequence[str]) -> None:
        self.tokens -= set(file_tokens)


class ManualClock:
    def __init__(self) -> None:
        self.now_ms = 0.0

    def wall_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> float:
        return self.now_ms


def test_a_fence_outlives_its_file_by_the_configured_time(tmp_path: Path) -> None:
    clock, fences = ManualClock(), Fences("gone", "here")
    (tmp_path / "here.1.json.a+json").write_text("")
    sweeper = FenceSweeper(fences, "source", tmp_path, HOUR_MS, clock)
    sweeper.sweep()
    clock.now_ms = HOUR_MS - 1
    sweeper.sweep()
    assert fences.tokens == {"gone", "here"}
    clock.now_ms = HOUR_MS + HOUR_MS / 6
    sweeper.sweep()
    assert fences.tokens == {"here"}


def test_a_file_that_comes_back_is_not_forgotten(tmp_path: Path) -> None:
    clock, fences = ManualClock(), Fences("token")
    sweeper = FenceSweeper(fences, "source", tmp_path, HOUR_MS, clock)
    sweeper.sweep()
    (tmp_path / "token.1.json.a+json").write_text("")
    clock.now_ms = HOUR_MS
    sweeper.sweep()
    (tmp_path / "token.1.json.a+json").unlink()
    clock.now_ms = 1.5 * HOUR_MS
    sweeper.sweep()
    assert fences.tokens == {"token"}


def test_a_server_that_does_not_answer_stops_no_sweep_for_good(tmp_path: Path) -> None:
    clock, fences = ManualClock(), Fences("gone")
    sweeper = FenceSweeper(fences, "source", tmp_path, HOUR_MS, clock)
    fences.answers = False
    sweeper.sweep()
    fences.answers = True
    for hours in (1, 2, 3):
        clock.now_ms = hours * HOUR_MS
        sweeper.sweep()
    assert fences.tokens == set()
