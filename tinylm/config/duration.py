"""Durations as text: parsed from a setting, written as a setting, and written for people to read."""

import math
import re

from tinylm.config.validation import describe_value
from tinylm.errors import UsageError


def parse_duration(text: str) -> float:
    """The seconds of a duration such as 90, 90s, 5m, 1.5h or 1h30m. Raises UsageError for other text."""
    match = re.fullmatch(r"(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s?)?", text.strip().lower())
    try:
        if match and any(match.groups()):
            hours, minutes, seconds = (float(part or 0) for part in match.groups())
            return hours * 3600 + minutes * 60 + seconds
    except ValueError:  # such as 1.2.3 or a single point
        pass
    raise UsageError(f"{describe_value(text)} is not a length of time; write it as 90s, 5m or 1h30m.")


def format_duration_setting(seconds: float) -> str:
    """The duration as text that `parse_duration` reads: 90s, 5m or 2h.

    It is rounded up to whole seconds from 1 s on, and below 1 s to the nearest nanosecond.
    """
    if seconds < 1:
        return f"{seconds:.9f}".rstrip("0") + "s"
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size:.0f}{unit}"
    return f"{math.ceil(seconds)}s"


def format_duration(seconds: float) -> str:
    """The duration for people to read: 3725 seconds as 1h 02m."""
    minutes, seconds = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"
