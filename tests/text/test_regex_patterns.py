"""The regular expressions of published tokenizers are accepted; those that may backtrack are not."""

import pytest

from tests.published import PATTERNS
from tinylm.text.regex_patterns import is_linear


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_the_patterns_of_published_tokenizers_are_linear(pattern: str) -> None:
    assert is_linear(pattern)


@pytest.mark.parametrize(
    "pattern", [r"\s+", r"\d", "[0-9]+", "-", r"\p{P}", r" ?\w+|\n", "a{2,3}b+", r"[^\]\s]+", "x+y*z?", ".", "漢"]
)
def test_a_simple_pattern_is_linear(pattern: str) -> None:
    assert is_linear(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "|", "a|", "|a", "(a+)+$", "(a|a)*b", "a*a*b", "a+b", ".*x", r"\s*x", r"\s+$", r"\s*[\r\n]+", "a?a?a?b"),
        *(r"(\w)\1", "(?<=a+)b", "(?=a)", r"\b\w+\b", "^a", "a$", r"\R+", r"\X", "[a", "(", "a)", "[[a]b]+", "[a&&b]"),
        *("a{99}", "a{1,99}", "a{2,}b", "a{1}{2}", "a**", "x|" * 40 + "x", "x" * 1001, "\\", r"\p{", r"\s+(?!\S)+"),
    ],
)
def test_any_other_pattern_counts_as_not_linear(pattern: str) -> None:
    assert not is_linear(pattern)


def test_the_check_itself_takes_no_exponential_time() -> None:
    for part in ("a", "a?", "a|", "(", "[a", "\\", "[\\", "a{1,2}", "[a]?", "a+a*", "'s|", "a{", r"\s*[\r\n]|"):
        is_linear(part * (1000 // len(part)))  # stopped by the suite's time limit otherwise
