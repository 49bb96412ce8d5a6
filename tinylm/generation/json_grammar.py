"""JSON Schemas as grammars that llguidance follows.

Each JSON text of a grammar is valid by its schema, if no object repeats a name. The reverse does not hold: a grammar
has one spelling of a value, with at most one blank after a comma or a colon, and an object whose names are listed has
others only if the schema has `additionalProperties`.

llguidance's own conversion of schemas is used for patterns, formats and `multipleOf` only: it rounds numbers to
float64, and admits some bounds that are excluded (1.9.1).
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from fractions import Fraction
from typing import Any

from tinylm.generation.json_validation import (
    HEADER,
    KEYWORDS,
    TYPES,
    Bound,
    JSONSchema,
    Schema,
    bounds,
    check_grammar,
    converted,
    escaped,
    items_of,
    listed_values,
    refusal,
    same,
    spelled,
    string_grammar,
    types_of,
)

DIGITS = 15  # before and after the decimal point, where the schema has no bound: float64 has as many exactly
MAX_COUNT = 100_000  # of characters, items and names
MAX_LISTED = 1000  # multiples that are listed
MAX_SIZE = 1_000_000  # characters of a grammar
MAX_SCHEMAS = 20_000  # that are converted; combinations of schemas multiply
EXACT = 2**53  # below which llguidance's integers are exact
EXACTLY = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)

STRING = r'"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])'  # with the number of characters and a quotation mark after it
ANY = rf"""
any: NULL | BOOLEAN | NUMBER | STRING | list | object
list: "[" (any (COMMA any)*)? "]"
object: "{{" (member (COMMA member)*)? "}}"
member: STRING COLON any
NULL: "null"
BOOLEAN: /true|false/
NUMBER: /-?(0|[1-9][0-9]{{0,{DIGITS - 1}}})(\.[0-9]{{1,{DIGITS}}})?/
STRING: /{STRING}*"/
COMMA: /, ?/
COLON: /: ?/
"""


def json_grammar(schema: JSONSchema) -> str:
    """The grammar of a schema, in llguidance's form of Lark.

    Raises UsageError, with the place in the schema, if nothing is valid, or if no grammar says what is.
    """
    try:
        return _Grammar(schema).text()
    except RecursionError:
        raise refusal("it is nested too deeply, or refers to itself without end") from None


class _Grammar:
    def __init__(self, schema: JSONSchema) -> None:
        self._schema = schema
        self._names: dict[str, str] = {}  # of rules and terminals, by their content
        self._definitions: dict[str, str | None] = {}  # content of the rules that a `$ref` names
        self._references: dict[str, str] = {}  # their names
        self._reasons: list[str] = []  # why parts of the schema have no valid values
        self._counter = itertools.count()
        self._size = 0

    def text(self) -> str:
        root = self._value(self._schema.root, "#")
        if root is None:
            reasons = dict.fromkeys((self._reasons[-1], self._reasons[0]))
            raise refusal(f"nothing is valid: {', since '.join(reasons)}")
        rules = {name: content for content, name in self._names.items()} | self._definitions
        grammar = "\n".join([HEADER + root, *(f"{name}: {content}" for name, content in rules.items())]) + ANY
        check_grammar(grammar, "it")
        return grammar

    def _rule(self, content: str, letter: str = "r") -> str:
        """The name of the rule with this content; with the letter T, of the terminal."""
        self._size += len(content)
        if self._size > MAX_SIZE:
            raise refusal("it is too large")
        return self._names.setdefault(content, f"{letter}{len(self._names)}")

    def _count(self) -> None:
        if next(self._counter) == MAX_SCHEMAS:
            raise refusal("it is too large, or combines too many schemas")

    def _choice(self, options: Iterable[str | None]) -> str | None:
        found = list(dict.fromkeys(option for option in options if option is not None))
        return self._rule(" | ".join(found)) if found else None

    def _nothing(self, reason: str, place: str) -> str | None:
        """`None`: the rule of a schema that has no values, for this reason."""
        self._reasons.append(f"{reason} at {place}")
        return None

    def _value(self, schema: Schema, place: str, resolved: tuple[str, ...] = ()) -> str | None:
        """The rule of the values of a schema, `None` if there are none. resolved: what its `$ref` was."""
        self._count()
        if schema is False:
            return self._nothing("the schema is false", place)
        schema = {} if schema is True else {key: value for key, value in schema.items() if key in KEYWORDS}
        if not schema:
            return "any"
        if schema.keys() == {"$ref"}:
            return self._definition(schema["$ref"], place)
        for keyword in ("$ref", "allOf", "anyOf", "oneOf"):
            if keyword not in schema:
                continue
            parts = schema.pop(keyword)
            if keyword == "$ref":
                if parts in resolved:
                    raise refusal(f"`$ref` at {place} leads to itself without end")
                schema = self._merged(self._schema.resolve(parts, place), schema, place)
                return self._value(schema, place, (*resolved, parts))
            if keyword == "allOf":
                for part in parts:
                    schema = self._merged(schema, part, place)
                return self._value(schema, place, resolved)
            if keyword == "oneOf":
                self._schema.count(len(parts) ** 2)
            if keyword == "oneOf" and not all(self._differ(a, b) for a, b in itertools.combinations(parts, 2)):
                raise refusal(
                    f"`oneOf` at {place} has schemas with common values, as far as can be seen, which is not "
                    "supported; use `anyOf`, or a required name with another `const` in each"
                )
            return self._choice(
                self._value(self._merged(schema, part, place), f"{place}/{keyword}/{index}", resolved)
                for index, part in enumerate(parts)
            )
        if "enum" in schema or "const" in schema:
            others = {key: value for key, value in schema.items() if key not in ("enum", "const")}
            values = [value for value in listed_values(schema) if self._schema.is_valid(value, others)]
            return self._choice(map(_literal, values)) or self._nothing("no value of `enum` or `const` is valid", place)
        if not types_of(schema):
            return self._nothing("two schemas have no type in common", place)
        return self._choice(self._of_type(kind, schema, place) for kind in types_of(schema))

    def _definition(self, reference: str, place: str) -> str:
        if reference not in self._references:
            name = self._references[reference] = f"d{len(self._references)}"
            content = self._definitions[name] = self._value(self._schema.resolve(reference, place), reference)
            if content is None or content == name:
                reason = "refers to itself" if content else f"names a schema that has no values: {self._reasons[-1]}"
                raise refusal(f"`$ref` at {place} {reason}")
        return self._references[reference]

    def _of_type(self, kind: str, schema: dict[str, Any], place: str) -> str | None:
        match kind:
            case "integer" | "number":
                return self._number(kind == "integer", schema, place)
            case "string":
                return self._string(schema, place)
            case "array":
                return self._array(schema, place)
            case "object":
                return self._object(schema, place)
        return kind.upper()

    def _number(self, is_integer: bool, schema: dict[str, Any], place: str) -> str | None:
        low, high = bounds(schema)
        step = Fraction(schema["multipleOf"]) if "multipleOf" in schema else None
        if step is not None and (is_integer or step.denominator == 1):
            is_integer, step = True, Fraction(step.numerator)  # among the integers, multiples of 5/2 are those of 5
        if is_integer:
            low, high = _integer_bound(low, math.ceil, 1), _integer_bound(high, math.floor, -1)
        fraction = "" if is_integer else r"(\.[0-9]+)?"
        if step is None or (is_integer and step == 1):
            found = self._choice(self._rule(content, "T") for content in _number_terminals(low, high, fraction))
            return found or self._nothing("`minimum` and `maximum` leave no number", place)
        if low and high and Fraction(high[0]) - Fraction(low[0]) <= MAX_LISTED * step:
            first, last = math.ceil(Fraction(low[0]) / step), math.floor(Fraction(high[0]) / step)
            values = [_decimal(step * index) for index in range(first, last + 1)]
            values = [value for value in values if self._schema.is_valid(value, schema)]
            return self._choice(map(_literal, values)) or self._nothing("`multipleOf` leaves no number", place)
        least, most = (bound[0] if bound else end for bound, end in ((low, 1 - 10**DIGITS), (high, 10**DIGITS - 1)))
        if is_integer and -EXACT < least <= most < EXACT and step < 2**31:
            keywords = {"type": "integer", "multipleOf": int(step), "minimum": int(least), "maximum": int(most)}
            return self._rule(converted(keywords, f"`multipleOf` at {place}"))
        if step.numerator == 1 and step.denominator <= MAX_LISTED:
            digits = len(f"{_decimal(step):f}") - 2  # after the decimal point
            parts = (f"{_decimal(step * index):.{digits}f}"[2:] for index in range(step.denominator))
            terminals = _number_terminals(low, high, rf"(\.({'|'.join(parts)}))?")
            return self._choice(self._rule(content, "T") for content in terminals)
        raise refusal(
            f"`multipleOf` at {place} needs a `minimum` and a `maximum` with at most {MAX_LISTED} multiples between "
            "them"
        )

    def _string(self, schema: dict[str, Any], place: str) -> str | None:
        least, most = _counts(schema, "Length", place)
        if least > most:
            return self._nothing("`minLength` is above `maxLength`", place)
        if schema.keys() & {"pattern", "format"}:
            lengths = {"minLength": least, **({} if most == math.inf else {"maxLength": int(most)})}
            return self._rule(string_grammar(schema, lengths, place))
        return "STRING" if (least, most) == (0, math.inf) else self._rule(f'/{STRING}{_times(least, most)}"/', "T")

    def _array(self, schema: dict[str, Any], place: str) -> str | None:
        least, most = _counts(schema, "Items", place)
        first, others = items_of(schema)
        heads: list[str] = []
        for index, item in enumerate(first):
            if len(heads) == most:
                break
            rule = self._value(item, f"{place}/prefixItems/{index}")
            if rule is None:
                most = index
            else:
                heads.append(rule)
        tail = self._value(others, f"{place}/items") if most > len(heads) else None
        if least > (len(heads) if tail is None else most):
            return self._nothing("there cannot be as many items as `minItems` and the required ones", place)
        # From the last item to the first, each with those after it
        content = "" if tail is None else _repeated(tail, least - len(heads), most - len(heads), not heads)
        for index, head in reversed(list(enumerate(heads))):
            content = f"{'COMMA ' if index else ''}{head} {content}"
            content = content if index < least else f"({content})?"
        return self._rule(f'"[" {content} "]"')

    def _object(self, schema: dict[str, Any], place: str) -> str | None:
        least, most = _counts(schema, "Properties", place)
        if least > most:
            return self._nothing("`minProperties` is above `maxProperties`", place)
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        required, others = schema.get("required", []), schema.get("additionalProperties", True)

        # The names that the schema lists
        members: list[tuple[str, bool]] = []
        names = list(dict.fromkeys([*properties, *required]))
        for name in names:
            parts = self._schema.schemas_of_name(name, schema, place)
            rule = self._value({"allOf": parts}, f"{place}/properties/{escaped(name)}")
            if rule is not None:
                members.append((f"{_literal(name)} COLON {rule}", name in required))
            elif name in required:
                return self._nothing(f"the required {spelled(name)} has no valid value", place)

        # Those that it leaves open
        open_member = None
        if len(patterns) == 1 and not names:
            [(pattern, part)] = patterns.items()
            name = self._rule(string_grammar({"pattern": pattern}, {}, place))
            rule = self._value(part, f"{place}/patternProperties/{escaped(pattern)}")
            open_member = rule and self._rule(f"{name} COLON {rule}")
        elif patterns and not names:
            raise refusal(f"`patternProperties` at {place} with several patterns is not supported")
        elif not patterns and ("additionalProperties" in schema or least > len(members) or not names):
            listed = " | ".join(map(_literal, names))
            name = self._rule(f'/{STRING}*"/ & ~({listed})', "T") if names else "STRING"
            rule = self._value(others, f"{place}/additionalProperties")
            open_member = rule and self._rule(f"{name} COLON {rule}")

        # From the last name to the first, by the number of names before it
        cap = int(most) if most < math.inf else max(1, least)  # more of them make no difference
        ends: list[str | None] = []
        for count in range(min(cap, len(members)) + 1):
            is_enough = least <= count <= most
            end = "" if is_enough else None
            if open_member is not None and count < most:
                end = _repeated(open_member, least - count, most - count, not count)
            ends.append(end)
        for index, (member, is_required) in reversed(list(enumerate(members))):
            starts: list[str | None] = []
            for count in range(min(cap, index) + 1):
                after = ends[min(count + 1, cap)] if count < most else None
                options = [] if after is None else [f"{'COMMA ' if count else ''}{member} {after}"]
                if not is_required and (skipped := ends[count]) is not None:
                    options.append(skipped or '""')
                starts.append(self._choice(options))
            ends = starts
        if ends[0] is None:
            return self._nothing("there cannot be as many names as `minProperties` and the required ones", place)
        return self._rule(f'"{{" {ends[0]} "}}"')

    def _merged(self, a: Schema, b: Schema, place: str) -> Schema:
        """The schema of the values that are valid by both. Raises UsageError if keywords do not say it."""
        self._count()
        if isinstance(a, bool) or isinstance(b, bool):
            return False if a is False or b is False else (b if a is True else a)
        a, b = ({key: value for key, value in one.items() if key in KEYWORDS} for one in (a, b))
        if not a or not b:
            return a or b
        if "$ref" in a and "$ref" in b and a["$ref"] != b["$ref"]:
            b["allOf"] = [*b.get("allOf", []), {"$ref": b.pop("$ref")}]
        merged = {**a, **b}
        for keyword in [key for key in b if key in a and not same(a[key], b[key])]:
            x, y = a[keyword], b[keyword]
            match keyword:
                case "minimum" | "exclusiveMinimum" | "minLength" | "minItems" | "minProperties":
                    merged[keyword] = max(x, y)
                case "maximum" | "exclusiveMaximum" | "maxLength" | "maxItems" | "maxProperties":
                    merged[keyword] = min(x, y)
                case "type":
                    merged[keyword] = _common_types(a, b)
                case "enum":
                    self._schema.count(len(x) * len(y))
                    merged[keyword] = [value for value in x if any(same(value, other) for other in y)]
                case "const":
                    return False
                case "required":
                    merged[keyword] = list(dict.fromkeys([*x, *y]))
                case "allOf":
                    merged[keyword] = [*x, *y]
                case "anyOf" if len(x) * len(y) < MAX_SCHEMAS:
                    merged[keyword] = [{"allOf": [one, other]} for one in x for other in y]
                case "items" | "additionalProperties" if not isinstance(x, list) and not isinstance(y, list):
                    merged[keyword] = {"allOf": [x, y]}
                case "properties":
                    pass
                case _:
                    raise refusal(f"two different `{keyword}` meet at {place}, which is not supported")
        for one, other in ((a, b), (b, a)):
            for keyword, others in (
                ("patternProperties", ("properties", "additionalProperties", "patternProperties")),
                ("prefixItems", ("items", "additionalItems")),
                ("additionalItems", ("items",)),
            ):
                if keyword in one and any(key in other and not same(other[key], one.get(key)) for key in others):
                    raise refusal(f"`{keyword}` at {place} is not supported together with other schemas")
        if "properties" in merged and "patternProperties" not in merged:
            names = {**a.get("properties", {}), **b.get("properties", {})}
            merged["properties"] = {
                name: {"allOf": [part for one in (a, b) for part in self._schema.schemas_of_name(name, one, place)]}
                for name in names
            }
        return merged

    def _differ(self, a: Schema, b: Schema, depth: int = 0) -> bool:
        """Whether no value is valid by both, as far as their types, constants and required names show."""
        self._schema.count()
        for _ in range(depth, 10):
            a, b = (
                self._schema.resolve(one["$ref"], "#") if isinstance(one, dict) and "$ref" in one else one
                for one in (a, b)
            )
        if isinstance(a, bool) or isinstance(b, bool):
            return a is False or b is False
        for one, other in ((a, b), (b, a)):
            if "enum" in one or "const" in one:
                return not any(
                    self._schema.is_valid(value, one) and self._schema.is_valid(value, other)
                    for value in listed_values(one)
                )
        kinds = _common_types(a, b)
        names = set(a.get("required", ())) & set(b.get("required", ()))
        parts = [one.get("properties", {}) for one in (a, b)]
        return kinds in ([], ["object"]) and (
            not kinds
            or any(
                self._differ(parts[0][name], parts[1][name], depth + 1)
                for name in names & parts[0].keys() & parts[1].keys()
            )
        )


def _literal(value: Any) -> str:
    """The JSON text of a value, as a string of the grammar."""
    return json.dumps(spelled(value))


def _times(least: int, most: float) -> str:
    return f"{{{least},{'' if most == math.inf else int(most)}}}"


def _repeated(rule: str, least: int, most: float, is_first: bool) -> str:
    """A rule repeated with commas between, and unless it is the first, before."""
    least = max(0, least)
    if not is_first:
        return f"(COMMA {rule}){_times(least, most)}" if most else ""
    if not most:
        return ""
    content = f"{rule} {_repeated(rule, least - 1, most - 1, False)}"
    return content if least else f"({content})?"


def _counts(schema: dict[str, Any], what: str, place: str) -> tuple[int, float]:
    """The least and the largest number of characters, items or names."""
    least, most = int(schema.get(f"min{what}", 0)), schema.get(f"max{what}", math.inf)
    if least > MAX_COUNT:
        raise refusal(f"`min{what}` at {place} is above {MAX_COUNT}")
    return least, most if most == math.inf else min(int(most), MAX_COUNT)


def _common_types(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    kinds = [{*types_of(one), *(["integer"] if "number" in types_of(one) else [])} for one in (a, b)]
    return types_of({"type": [kind for kind in TYPES if kind in kinds[0] & kinds[1]]})


def _integer_bound(bound: Bound | None, nearest: Callable[[Any], int], step: int) -> Bound | None:
    """The bound of the integers within a bound. nearest: rounds into the range, whose next integer is `step` away."""
    if bound is None:
        return None
    whole = nearest(bound[0])
    return (whole + step if bound[1] and whole == bound[0] else whole), False


def _decimal(value: Fraction) -> Decimal:
    """A number that decimal digits can write, exactly."""
    digits = next(digits for digits in itertools.count() if 10**digits % value.denominator == 0)
    return Decimal(int(value * 10**digits)).scaleb(-digits, EXACTLY)


def _number_terminals(low: Bound | None, high: Bound | None, fraction: str) -> Iterator[str]:
    """Terminals of the numbers between bounds: of those without a minus sign, and of those with one, which 0 has not.

    fraction: a regex of what may follow the integer digits.
    """
    negated: list[Bound | None] = [bound and (EXACTLY.minus(Decimal(bound[0])), bound[1]) for bound in (high, low)]
    for sign, (least, most) in (("", (low, high)), ("-", negated)):
        if least is None or least[0] < 0 or (sign and not least[0]):
            least = (0, bool(sign))
        if most is None or most[0] > least[0] or (most[0] == least[0] and not least[1] and not most[1]):
            limits = [_magnitudes(least, True), *([] if most is None else [_magnitudes(most, False)])]
            yield " & ".join([f"/{sign}[0-9]+{fraction}/", *(f"/{sign}({limit})/" for limit in limits)])


def _magnitudes(bound: Bound, is_above: bool) -> str:
    """A regex of the decimal numbers without a sign on one side of a bound of at least 0."""
    value, is_excluded = bound
    whole, _, fraction = f"{Decimal(value):f}".partition(".")
    fraction = fraction.rstrip("0")
    some, rest = f"[0-9]{{0,{DIGITS}}}", rf"(\.[0-9]{{1,{DIGITS}}})?"
    found = []
    # The first digit that differs
    for index, digit in enumerate(map(int, whole + fraction)):
        lowest = int(index == 0 and len(whole) > 1)
        digits = range(digit + 1, 10) if is_above else range(lowest, digit)
        if not digits:
            continue
        differing = f"[{digits[0]}-{digits[-1]}]"
        if index < len(whole):
            found.append(f"{whole[:index]}{differing}[0-9]{{{len(whole) - index - 1}}}{rest}")
        else:
            found.append(rf"{whole}\.{fraction[: index - len(whole)]}{differing}{some}")
    # More digits, or fewer
    if is_above:
        found.append(f"[1-9][0-9]{{{len(whole)},{max(DIGITS - 1, len(whole) + 1)}}}{rest}")
    else:
        found += [f"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){rest}"] if len(whole) > 1 else []
        found += [rf"{whole}\.{fraction[:length]}" if length else whole for length in range(len(fraction))]
    # The bound itself, also with zeros, and what begins with it
    if is_above and is_excluded:
        found.append(rf"{whole}\.{fraction}{some}[1-9]{some}")
    elif is_above:
        found.append(rf"{whole}\.{fraction}{some}" if fraction else f"{whole}{rest}")
    elif not is_excluded:
        found.append(rf"{whole}\.{fraction}0{{0,{DIGITS}}}" if fraction else rf"{whole}(\.0{{1,{DIGITS}}})?")
    return "|".join(found)
