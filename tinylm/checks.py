"""What a value must be, said by the command-line flag that it came from. Raises UsageError."""

import math

from tinylm.errors import UsageError

LARGEST = 1 << 20  # of any number in a model's shape
LONGEST_VALUE = 40  # characters of a value in a message


def flag(name: str) -> str:
    """The command-line spelling of a configuration field."""
    return "--" + name.replace("_", "-")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    require(value in allowed, f"{flag(name)} is {value!r}; it must be one of: {', '.join(allowed)}.")


def at_least(name: str, value: float | None, least: float) -> None:
    """`None` means that the option was not given, which is always allowed."""
    require(
        value is None or (math.isfinite(value) and value >= least),
        f"{flag(name)} is {value}; it must be {least} or more.",
    )


def count(name: str, value: int) -> None:
    require(1 <= value <= LARGEST, f"{flag(name)} is {value}; it must be from 1 to {LARGEST}.")


def above_zero(name: str, value: float | None) -> None:
    require(
        value is None or (math.isfinite(value) and value > 0),
        f"{flag(name)} is {value}; it must be a number greater than 0.",
    )


def fraction(name: str, value: float) -> None:
    require(0 <= value < 1, f"{flag(name)} is {value}; it must be at least 0 and below 1.")


class SettingError(UsageError):
    """A value that a setting cannot take: `problem` continues the setting's name, as in "is -1; it must be ...".

    The message names the setting by its flag. A caller that took the value from elsewhere names it by `name`.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{flag(name)} {problem}")
        self.name = name
        self.problem = problem


def within(name: str, value: float, least: float, most: float) -> None:
    """Raises SettingError for a number outside of [least, most], and for NaN."""
    if not least <= value <= most:
        raise SettingError(name, f"is {shown(value)}; it must be from {least} to {most}.")


def shown(value: object) -> str:
    """A value for a message, cut to a length that can be read."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
