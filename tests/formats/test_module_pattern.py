"""Patterns of module names, compared with Python's `re` on patterns on which it is fast."""

import re
import time

from tests.formats.refusals import assert_refused
from tinylm.formats.module_pattern import ModulePatterns

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.self_attn.o_proj",
    "model.layers.1.mlp.experts.gate_up_proj",
    "model.layers.1.mlp.experts.3.down_proj",
    "transformer.h.10.attn.c_attn",
    "transformer.h.1.mlp.c_proj",
    "lm_head",
]
PATTERNS = [
    "q_proj",
    "proj",
    "c.attn",
    r"mlp\.c_proj",
    "^model.layers.0.self_attn.q_proj",
    r".*\.gate_up_proj",
    r"model\.layers\.\d+\.self_attn\.[qo]_proj",
    r"layers\.(0|1)\..*",
    r"(?:.*?(?:self_attn|attn).*?(?:q_proj|c_attn).*?)|lm_head",
    r"\bmodel\.layers\.[\d]{1,}\.(?:self_attn)\.(?:(?:q_proj|o_proj))",
    r"h\.1{1,2}0?\.attn\.c_\w+",
    r"[^.]+_head$",
    "",
    "a|",
    r"layers\.1{2}.*",
    r"layers\.1{02}\..*",
    r"[\w.]*experts\.3.*",
    r"(q|k)_proj|lm_head",
]


def test_patterns_match_the_names_that_peft_matches_with_them_and_the_first_of_several_counts() -> None:
    for pattern in PATTERNS:
        patterns = ModulePatterns([pattern])
        found = [name for name in NAMES if patterns.first_match(name) == pattern]
        assert found == [name for name in NAMES if re.match(rf"(.*\.)?({pattern})$", name)], pattern
    patterns = ModulePatterns(["k_proj", r".*attn\..*", "q_proj"])
    assert patterns.first_match("model.layers.0.self_attn.q_proj") == r".*attn\..*"
    assert patterns.first_match("model.norm") is None


def test_patterns_that_take_exponential_time_in_re_end_soon() -> None:
    for pattern in (r"(a+)+b", r"(((a*)*)*)*b", "(a|a)*" * 20 + "b", ".*" * 400, "((((a{99}){99}){99}){99}){99}"):
        started = time.monotonic()
        try:
            patterns = ModulePatterns([pattern])
            for _ in range(200):
                patterns.first_match("a" * 200)
        except ValueError as error:
            assert "take too long" in str(error)
        assert time.monotonic() - started < 20, pattern


def test_what_is_not_supported_is_an_error() -> None:
    unsupported = ["(?=a)b", "(?P<n>a)", r"(a)\1", "(?i)a", "a**", "a++", "(", "a)", "[a", "*a", "x" * 1001]
    rows = [
        (pattern, "pattern of module names")
        for pattern in (*unsupported, r"\Z", "a{200}", "a{0012}", "(" * 21 + "a" + ")" * 21)
    ]
    assert_refused(rows, lambda pattern: ModulePatterns([pattern]), ValueError)
    deepest = "(" * 20 + "a" + ")" * 20
    assert ModulePatterns([deepest]).first_match("a") == deepest
