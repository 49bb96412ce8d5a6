"""Check that a regular expression of a tokenizer.json matches in linear time.

The `tokenizers` library uses Oniguruma, a backtracking engine in which a pattern such as `(a+)+$` takes exponential
time and `a*b` quadratic time (decision 021).
"""

import re

MAX_PATTERN = 1000  # characters
MAX_ALTERNATIVES = 32

_ATOM = (
    r"(?:[^\\\[\](){}|?*+^$]"  # a literal character, or the dot
    r"|\\[dDsSwWhHrntfv]|\\[-.+*?()\[\]{}|^$/\\]|\\[pP]\{\^?[A-Za-z_]{1,40}\}"
    r"|\[\^?(?:[^\\\[\]]|\\[^\n])+\])"  # a class without a nested class
)
_BOUNDED = r"(?:\?\+?|\{\d\}|\{\d,\d\}\+?)"
_FIXED = rf"(?:{_ATOM}(?![?*+{{]))*"
_UNBOUNDED = r"(?:[*+]\+?|\{\d,\})"
# One alternative. Everything after its first unbounded repetition may match the empty string, so from there on matching
# cannot fail and backtrack. Before it, at most one bounded repetition multiplies the work.
_LINEAR = rf"(?=[^|]){_FIXED}(?:{_ATOM}{_BOUNDED}{_FIXED})?(?:{_ATOM}{_UNBOUNDED}(?:{_ATOM}[*?]\+?)*)?"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Patterns from published tokenizers that are not of the form _LINEAR. Those with several alternatives take linear time
# as a whole: text on which one alternative fails is matched by the next.
_PUBLISHED = (
    _CONTRACTIONS,
    "'(?i:[sdmt]|ll|ve|re)",
    "(?:'s|'t|'re|'ve|'m|'ll|'d)",
    "'(?:[sdmt]|ll|ve|re)",
    *(  # o200k, and Tekken without contractions
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}"
        for end in ("", _CONTRACTIONS + "?")
    ),
    r"\s+(?!\S)|\s+",
    r"\s+(?!\S)|\s",
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\s*[\r\n]|\s+(?!\S)|\s+",
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    # DeepSeek-V3's first alternative, whose class contains both brackets
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
)
_PART = "|".join([*sorted(map(re.escape, _PUBLISHED), key=len, reverse=True), _LINEAR])
_PATTERN = re.compile(rf"(?:{_PART})(?:\|(?:{_PART})){{0,{MAX_ALTERNATIVES - 1}}}")


def is_linear(pattern: str) -> bool:
    """Whether a pattern is non-empty and known to match in time linear in the length of the text.

    True for the patterns of published tokenizers, for alternatives without groups in which only the end repeats without
    bound, and for alternatives of both kinds. Any other pattern counts as not linear.
    """
    if not pattern or len(pattern) > MAX_PATTERN or "&&" in pattern:  # && intersects character classes
        return False
    return _PATTERN.fullmatch(pattern.replace("\r", r"\r").replace("\n", r"\n")) is not None
