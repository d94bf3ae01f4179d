from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.due import DELAY_SEC_MAX, delay_ms_of_number, due_ms_of_text

_OFFSETS = st.integers(-18 * 60, 18 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
# Far enough from both ends of the years that we take for any offset.
_MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(9998, 1, 1), timezones=_OFFSETS)  # noqa: DTZ001
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@given(_MOMENTS)
def test_a_time_is_read_as_the_standard_library_reads_it(moment: datetime) -> None:
    micros = (moment - _EPOCH) // timedelta(microseconds=1)
    assert due_ms_of_text(moment.isoformat()) == -(-micros // 1000)


@given(st.decimals(0, DELAY_SEC_MAX, places=6))
def test_a_delay_is_never_shortened_nor_lengthened_by_a_millisecond(seconds: Decimal) -> None:
    delay_ms = delay_ms_of_number(f"{seconds:f}")
    assert delay_ms is not None
    assert 0 <= delay_ms - seconds * 1000 < 1


@given(st.floats(0, DELAY_SEC_MAX))
def test_a_delay_as_python_prints_it_is_read(seconds: float) -> None:
    delay_ms = delay_ms_of_number(repr(seconds))
    assert delay_ms is not None
    assert -0.001 <= delay_ms - seconds * 1000 < 1.001
