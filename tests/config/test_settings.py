"""Durations as text. Reference: values written by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinylm.config.settings import format_duration, format_duration_setting, parse_duration
from tinylm.errors import UsageError


def test_a_duration_is_parsed_and_shown_with_at_most_two_units() -> None:
    seconds = {"90": 90, "90s": 90, "5m": 300, "1h30m": 5400, "1.5H": 5400, " 0.5s ": 0.5}
    assert {text: parse_duration(text) for text in seconds} == seconds
    for text in ("", "soon", "1h2h", ".", "1.2.3s", "5 minutes", "-5", "h"):
        with pytest.raises(UsageError, match=r"is not a length of time; write it as 90s, 5m or 1h30m\.$"):
            parse_duration(text)
    settings = {0.5: "0.5s", 90: "90s", 60: "1m", 7200: "2h", 1.2: "2s"}
    assert {seconds: format_duration_setting(seconds) for seconds in settings} == settings
    shown = {0: "0s", 59.4: "59s", 59.9: "1m 00s", 60: "1m 00s", 3599.9: "1h 00m", 3725: "1h 02m", 90_000: "25h 00m"}
    assert {seconds: format_duration(seconds) for seconds in shown} == shown


@given(st.integers(1, 10**6))
def test_a_duration_setting_is_parsed_to_the_same_seconds(seconds: int) -> None:
    assert parse_duration(format_duration_setting(seconds)) == seconds
