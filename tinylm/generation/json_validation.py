"""JSON Schemas, and the values that are valid by them, with exact numbers.

Numbers are `int` or `Decimal`, in schemas and in values: float64 has integers up to 2**53 only.
"""

import functools
import itertools
import json
import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn
from urllib.parse import unquote

from tinylm.errors import UsageError

Schema = Any  # a bool, or a dict of keywords
Bound = tuple[int | Decimal, bool]  # and whether the bound itself is excluded
MAX_DIGITS = 400  # of a number in a schema
MAX_STEPS = 1_000_000  # of comparing parts of a schema, and values with them: seconds
STEPS_PER_MATCHER = 20
TYPES = ("null", "boolean", "number", "string", "array", "object", "integer")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
SCHEMAS = ("items", "additionalItems", "additionalProperties")
LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
# Those of which no grammar can be made. Others that are not in KEYWORDS say nothing about values.
REFUSED = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef"),
}
KEYWORDS = {
    *("type", "enum", "const", "required", "pattern", "format", "$ref", "properties", "patternProperties"),
    *(*NUMBERS, *COUNTS, *SCHEMAS, *LISTS_OF_SCHEMAS),
}
# What llguidance's regexes of these formats leave out: days that a year may lack, leap seconds, the whole length.
NO_LEAP_DAY = {"pattern": "^[0-9]{4}-(02-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-)"}
NO_LEAP_SECOND = {"pattern": "^([^:]*:){2}[0-5]"}
FORMATS: dict[str, list[dict[str, Any]]] = {
    "date": [NO_LEAP_DAY],
    "time": [NO_LEAP_SECOND],
    "date-time": [NO_LEAP_DAY, NO_LEAP_SECOND],
    "hostname": [{"maxLength": 253}],
    **{name: [] for name in ("duration", "email", "ipv4", "ipv6", "uuid", "uri")},
}
HEADER = "%llguidance {}\nstart: "


def refusal(reason: str) -> UsageError:
    """The error about a schema that cannot be used."""
    return UsageError(f"`json_schema` cannot be used: {reason}.")


def parse_exact_json(text: str) -> Any:
    """The value of a JSON text, with exact numbers. Raises ValueError for text that is not JSON or repeats a name."""
    try:
        return json.loads(text, parse_float=Decimal, parse_constant=_no_number, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found


def spelled(value: Any) -> str:
    """The JSON text of a value."""
    match value:
        case Decimal():
            return f"{value:f}"
        case list():
            return f"[{', '.join(map(spelled, value))}]"
        case dict():
            return f"{{{', '.join(f'{spelled(name)}: {spelled(item)}' for name, item in value.items())}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")  # which the grammars never have bare


class JSONSchema:
    """A schema with its definitions.

    Raises UsageError, with the keyword and its place as the fragment of a URI, for a schema that is invalid, or has
    what no grammar can say.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        try:
            self.root: Schema = _exact(schema)
            _check(self.root, "#")
            self._resolved: dict[str, Schema] = {}
            self.steps = 0
        except RecursionError:
            raise refusal("it is nested too deeply") from None

    def resolve(self, reference: str, place: str) -> Schema:
        """The schema that a `$ref` names. Raises UsageError if it is not in this schema."""
        if reference in self._resolved:
            return self._resolved[reference]
        found: Any = self.root
        try:
            first, *steps = reference.split("/")
            for step in steps:
                step = unquote(step).replace("~1", "/").replace("~0", "~")
                found = found[int(step)] if isinstance(found, list) else found[step]
            if first != "#":
                raise KeyError(first)
        except (LookupError, TypeError, ValueError):
            raise refusal(
                f"`$ref` at {place} is {spelled(reference)[:80]}; it must be a place in the schema, such as "
                "#/$defs/name"
            ) from None
        _check(found, reference)
        self._resolved[reference] = found
        return found

    def count(self, steps: int = 1) -> None:
        """Raise UsageError after MAX_STEPS: combinations of schemas multiply."""
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise refusal("it combines too many schemas")

    def is_valid(self, value: Any, schema: Schema) -> bool:
        """Whether a value is valid by a part of the schema."""
        self.count()
        if not schema or schema is True:
            return schema is not False
        kind, get = _type(value), schema.get
        if kind not in types_of(schema) and not (kind == "integer" and "number" in types_of(schema)):
            return False
        if ("enum" in schema or "const" in schema) and not any(same(value, other) for other in listed_values(schema)):
            return False
        if "$ref" in schema and not self.is_valid(value, self.resolve(schema["$ref"], "#")):
            return False
        fit = {key: [self.is_valid(value, part) for part in get(key, [True])] for key in ("allOf", "anyOf", "oneOf")}
        if not (all(fit["allOf"]) and any(fit["anyOf"]) and sum(fit["oneOf"]) == 1):
            return False
        match kind:
            case "integer" | "number":
                low, high = bounds(schema)
                return (
                    (low is None or value > low[0] or (value == low[0] and not low[1]))
                    and (high is None or value < high[0] or (value == high[0] and not high[1]))
                    and (Fraction(value) / Fraction(get("multipleOf", value or 1))).denominator == 1
                )
            case "string":
                return has_size(value, schema, "Length") and self.matches(value, schema, "#")
            case "array":
                first, others = items_of(schema)
                parts = itertools.chain(first, itertools.repeat(others))
                return has_size(value, schema, "Items") and all(map(self.is_valid, value, parts))
            case "object":
                return (
                    has_size(value, schema, "Properties")
                    and all(name in value for name in get("required", ()))
                    and all(
                        self.is_valid(item, part)
                        for name, item in value.items()
                        for part in self.schemas_of_name(name, schema, "#")
                    )
                )
        return True

    def schemas_of_name(self, name: str, schema: dict[str, Any], place: str) -> list[Schema]:
        """The schemas of the value that an object has under a name."""
        found = [schema["properties"][name]] if name in schema.get("properties", {}) else []
        patterns = schema.get("patternProperties", {})
        found += [part for pattern, part in patterns.items() if self.matches(name, {"pattern": pattern}, place)]
        return found or [schema.get("additionalProperties", True)]

    def matches(self, text: str, schema: dict[str, Any], place: str) -> bool:
        """Whether a string has the pattern and the format of a schema, as llguidance reads them."""
        if not schema.keys() & {"pattern", "format"}:
            return True
        import llguidance

        self.count(STEPS_PER_MATCHER)
        grammar = HEADER + string_grammar(schema, {}, place)
        matcher = llguidance.LLMatcher(_byte_tokens(), grammar, log_level=0)
        content = list(spelled(text).encode(errors="replace"))
        return bool(matcher.try_consume_tokens(content) == len(content) and matcher.is_accepting())


@functools.cache
def _byte_tokens() -> Any:
    import llguidance

    return llguidance.LLTokenizer("byte")


def string_grammar(schema: dict[str, Any], lengths: dict[str, int], place: str) -> str:
    """The strings with a pattern, a format or both: for a grammar. Raises UsageError if llguidance refuses them."""
    keywords: dict[str, Any] = {key: schema[key] for key in ("pattern", "format") if key in schema}
    parts = FORMATS.get(schema.get("format", ""), [])
    named = " with ".join(f"`{key}`" for key in keywords)
    return converted({"type": "string", **keywords, **lengths, "allOf": parts}, f"{named} at {place}")


def converted(schema: dict[str, Any], subject: str) -> str:
    """A schema that llguidance converts itself: a part of a grammar. Raises UsageError if it refuses."""
    part = f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}"
    check_grammar(HEADER + part, subject)
    return part


def check_grammar(grammar: str, subject: str) -> None:
    """Raise UsageError if llguidance cannot follow a grammar."""
    import llguidance

    messages: list[str]
    try:
        is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    except ValueError as error:
        is_wrong, messages = True, [str(error)]
    if is_wrong:
        reason = " ".join(messages[0].partition("\n   1 | ")[0].rpartition("error: ")[2].split())
        raise refusal(f"{subject} is not supported: {reason[:200]}")


def types_of(schema: dict[str, Any]) -> list[str]:
    """The types of the values; "number" has the integers, too."""
    kinds = schema.get("type", TYPES)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]


def listed_values(schema: dict[str, Any]) -> list[Any]:
    """The values of `enum` and `const`."""
    if "const" not in schema:
        return list(schema["enum"])
    value = schema["const"]
    return [value] if any(same(value, other) for other in schema.get("enum", [value])) else []


def bounds(schema: dict[str, Any]) -> tuple[Bound | None, Bound | None]:
    """The lower and the upper bound of numbers."""
    lows = [(schema[key], key != "minimum") for key in ("minimum", "exclusiveMinimum") if key in schema]
    highs = [(schema[key], key != "maximum") for key in ("maximum", "exclusiveMaximum") if key in schema]
    return max(lows, default=None), min(highs, default=None, key=lambda bound: (bound[0], not bound[1]))


def items_of(schema: dict[str, Any]) -> tuple[list[Schema], Schema]:
    """The schemas of the first items and that of the others, also as early drafts have them."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", []), items


def has_size(value: Any, schema: dict[str, Any], what: str) -> bool:
    """Whether the length of a value is within the schema's bounds on its `what`: Length, Items or Properties."""
    return bool(schema.get(f"min{what}", 0) <= len(value) <= schema.get(f"max{what}", math.inf))


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal: 1 and 1.0 are, 1 and true are not."""
    if a is b:
        return True
    if isinstance(a, bool) or isinstance(b, bool):
        return False
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    return bool(a == b)


def escaped(name: str) -> str:
    """A name as a step of a place."""
    return name.replace("~", "~0").replace("/", "~1")


def _type(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case Decimal():
            return "integer" if value == value.to_integral_value() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "null"


def _exact(value: Any) -> Any:
    """A value with `Decimal` in place of `float`. Raises UsageError for what JSON does not have."""
    match value:
        case bool() | None:
            return value
        case str():
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise refusal("a text in it has half of a character (a lone surrogate)")
            return value
        case int() | float() | Decimal():
            number = Decimal(repr(value)) if isinstance(value, float) else value
            is_short = not isinstance(number, Decimal) or (
                number.is_finite()
                and abs(number.adjusted()) <= MAX_DIGITS
                and len(number.as_tuple().digits) <= MAX_DIGITS
            )
            if not is_short or not -(10**MAX_DIGITS) < number < 10**MAX_DIGITS:
                raise refusal(f"a number in it is not finite, or has more than {MAX_DIGITS} digits")
            return number or 0  # without -0
        case list() | tuple():
            return [_exact(item) for item in value]
        case Mapping():
            return {_exact(str(name)): _exact(item) for name, item in value.items()}
    raise refusal(f"JSON has no {type(value).__name__}")


def _check(schema: Any, place: str) -> None:
    """Raise UsageError for a keyword with a wrong value, or that no grammar can say, here or in the schemas within."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise refusal(f"a schema is an object, true or false, but {place} is {spelled(schema)[:60]}")
    for key, value in schema.items():
        if (key in REFUSED and value is not False) or (key == "$id" and place != "#"):
            raise refusal(f"`{key}` at {place} is not supported")
        expected = _expected(key, value)
        if expected is not None:
            raise refusal(f"`{key}` at {place} is {spelled(value)[:60]}; it must be {expected}")
        if isinstance(value, list) and (key in LISTS_OF_SCHEMAS or key == "items"):
            for index, item in enumerate(value):
                _check(item, f"{place}/{key}/{index}")
        elif key in NAMED_SCHEMAS:
            for name, item in value.items():
                _check(item, f"{place}/{key}/{escaped(name)}")
        elif key in SCHEMAS:
            _check(value, f"{place}/{key}")


def _expected(key: str, value: Any) -> str | None:
    """What the value of a keyword must be; `None` if it is."""
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    is_list = isinstance(value, list)
    kinds = value if is_list else [value]
    if key == "type":
        is_right, expected = (
            bool(kinds) and all(kind in TYPES for kind in kinds),
            f"one or several of {', '.join(TYPES)}",
        )
    elif key in NUMBERS:
        is_right, expected = is_number, "a number"
        if key == "multipleOf":
            is_right, expected = is_number and value > 0, "a number above 0"
    elif key in COUNTS:
        is_right, expected = is_number and value >= 0 and value == int(value), "a whole number of at least 0"
    elif key in ("pattern", "$ref"):
        is_right, expected = isinstance(value, str), "a string"
    elif key == "format":
        is_right, expected = isinstance(value, str) and value in FORMATS, f"one of {', '.join(sorted(FORMATS))}"
    elif key in ("required", "enum"):
        is_right = is_list and (key == "enum" or all(isinstance(name, str) for name in value))
        expected = "a list" if key == "enum" else "a list of strings"
    elif key in LISTS_OF_SCHEMAS:
        is_right, expected = is_list and (bool(value) or key == "prefixItems"), "a list of schemas"
    elif key in NAMED_SCHEMAS:
        is_right, expected = isinstance(value, dict), "an object of schemas"
    else:
        return None
    return None if is_right else expected
