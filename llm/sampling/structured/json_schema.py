"""JSON schemas as `Language`s of compact JSON: no whitespace, properties in the schema's order.

Owns the meaning of the keywords, as llguidance reads them. A keyword whose effect on the length is not known raises
`UnknownLength`: llguidance still constrains the answer, but its length is not bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from llm.sampling.structured.language import DONE, EMPTY, IMPOSSIBLE, Language
from llm.sampling.structured.messages import unusable
from llm.sampling.structured.regex import Ranges, TooManyChoices, UnknownLength, Word, Words, complement, parse_regex

_ANNOTATIONS = frozenset(
    "title description default examples $schema $id $comment $defs definitions deprecated readOnly writeOnly".split()
)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_ALL_KEYWORDS = frozenset().union(*_KEYWORDS.values())
_SHORT_ESCAPES = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_CONTROLS = (*range(0x20), 0x7F)
_LAST = 0x10FFFF
_LONGEST_NUMBER = 40  # characters of one that is written without an exponent
_PLAIN: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0x10FFFF)]


# Of optional properties in a row each can come next: the time of a mask grows with their number, that of compiling with
# its square.
_MOST_OPTIONAL = 600
_LARGEST_DIVISOR = 64  # of `multipleOf`; a state for each remainder


def language_of(
    kind: str, value: object, build: Callable[[Language], int], lacking: Collection[int] = ()
) -> tuple[Language | None, int, str]:
    """(language, its node of all answers, why there is none) of a constraint whose node `build` makes.

    Args:
        lacking: bytes that no token of the vocabulary writes.

    Raises:
        ValidationError: masks for this constraint would take too long.
    """
    language = Language(lacking)
    try:
        root = build(language)
        language.close()
    except TooManyChoices as error:
        raise unusable(kind, value, str(error)) from error
    except UnknownLength as error:
        return None, 0, f"the length of an answer is not known: {error}"
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        # A keyword whose value has an unexpected shape: whether the schema is valid is for llguidance to say.
        return None, 0, f"the length of an answer is not known: {type(error).__name__}"
    if language.needs[root] >= IMPOSSIBLE:
        return None, 0, "no answer of a known length was found"
    return language, root, ""


# A JSON object. Values are of any JSON type; a shape that a keyword does not expect raises TypeError or ValueError,
# which `language_of` takes for an unknown length.
Schema = Mapping[str, Any]


def compile_schema(language: Language, schema: object, place: str = "") -> int:
    """The node of all compact JSON texts that the schema admits. The caller then calls `language.close`.

    Args:
        place: of the schema in a language of several, whose references are apart.

    Raises:
        UnknownLength: a keyword that is not supported here.
    """
    return _Compiler(language, schema, place).value(schema)


class _Compiler:
    def __init__(self, language: Language, root: object, place: str) -> None:
        self._language = language
        self._place = place
        self._root = root
        self._defined: set[str] = set()
        self._words = Words(language)
        self._any_character = self._character([(0, _LAST)])

    def _literal(self, text: str) -> int:
        return self._words.lexeme(self._words.literal(text))

    def _character(self, ranges: Ranges) -> Word:
        """One character of a JSON string: itself, or its escape."""
        words = self._words
        plain = [
            (max(low, first), min(high, last))
            for low, high in ranges
            for first, last in _PLAIN
            if max(low, first) <= min(high, last)
        ]
        short = [
            words.literal("\\" + letter)
            for code, letter in _SHORT_ESCAPES.items()
            if any(low <= code <= high for low, high in ranges)
        ]
        numbers = [
            words.cat(words.literal("\\u"), *(words.characters(_either_case(digit)) for digit in f"{code:04x}"))
            for code in _CONTROLS
            if any(low <= code <= high for low, high in ranges)
        ]
        return words.alt(*([words.characters(plain)] if plain else []), *short, *numbers)

    def _quoted(self, content: Word) -> int:
        quote = self._words.literal('"')
        return self._words.lexeme(self._words.cat(quote, content, quote))

    def value(self, schema: object) -> int:
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, Mapping):
            raise UnknownLength(f"the schema {schema!r}")
        keys = set(schema) - _ANNOTATIONS
        if not keys:
            return self._any()
        for keyword in ("$ref", "anyOf", "oneOf", "allOf", "const", "enum"):
            if keyword in keys:
                allowed = {keyword, "type"} if keyword in ("const", "enum") else {keyword}
                self._only(keys, allowed)
                return getattr(self, f"_{keyword.lstrip('$').lower()}")(schema)
        if "type" not in keys:
            raise UnknownLength("a schema without a type")
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        self._only(keys, {"type", *(name for kind in types for name in _KEYWORDS.get(kind, ()))})
        return self._language.alt(*(getattr(self, f"_{kind}")(schema) for kind in types))

    def _only(self, keys: set[str], allowed: set[str]) -> None:
        if keys - allowed:
            raise UnknownLength(f"the keyword {min(keys - allowed)!r}")

    # --- Combinations -----------------------------------------------------------------------------------------------

    def _ref(self, schema: Schema) -> int:
        name = schema["$ref"]
        if name not in self._defined:
            self._defined.add(name)
            self._language.define(self._place + name, self.value(self._resolve(name)))
        return self._language.ref(self._place + name)

    def _resolve(self, name: object) -> object:
        if not isinstance(name, str) or not name.startswith("#"):
            raise UnknownLength(f"the reference {name!r}")
        found = self._root
        for part in name[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise UnknownLength(f"the reference {name!r}")
            found = found[key]
        return found

    def _anyof(self, schema: Schema) -> int:
        return self._language.alt(*(self.value(choice) for choice in schema["anyOf"]))

    def _oneof(self, schema: Schema) -> int:
        return self._language.alt(*(self.value(choice) for choice in schema["oneOf"]))

    def _allof(self, schema: Schema) -> int:
        if len(schema["allOf"]) != 1:
            raise UnknownLength("'allOf' of several schemas")
        return self.value(schema["allOf"][0])

    def _const(self, schema: Schema) -> int:
        return self._literals([schema["const"]], schema)

    def _enum(self, schema: Schema) -> int:
        return self._literals(schema["enum"], schema)

    def _literals(self, values: Sequence[object], schema: Schema) -> int:
        types = schema.get("type", list(_TYPES))
        kept = [value for value in values if _is_of(value, types if isinstance(types, list) else [types])]
        # An array or object is put together, for it begins like others.
        simple = [value for value in kept if not isinstance(value, dict | list)]
        texts = self._words.any_of(_written(value) for value in simple)
        inner = [self.value(_as_schema(value)) for value in kept if isinstance(value, dict | list)]
        return self._language.alt(*([self._words.lexeme(texts)] if simple else []), *inner)

    def _any(self) -> int:
        if "any" not in self._defined:
            self._defined.add("any")
            self._language.define("any", self._language.alt(*(getattr(self, f"_{kind}")({}) for kind in _TYPES)))
        return self._language.ref("any")

    # --- Types ------------------------------------------------------------------------------------------------------

    def _null(self, schema: Schema) -> int:
        return self._literal("null")

    def _boolean(self, schema: Schema) -> int:
        return self._language.alt(self._literal("true"), self._literal("false"))

    def _number(self, schema: Schema) -> int:
        if _KEYWORDS["integer"] & set(schema):  # of ["integer", "number"]
            raise UnknownLength("a bound of numbers that need not be integers")
        return self._digits(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?")

    def _digits(self, pattern: str) -> int:
        return self._words.lexeme(parse_regex(self._words, pattern, self._words.characters))

    def _integer(self, schema: Schema) -> int:
        if not _KEYWORDS["integer"] & set(schema):
            return self._digits("-?(0|[1-9][0-9]*)")
        if "multipleOf" in schema:
            return self._multiples(schema)
        lows = [schema.get("minimum"), _plus(schema.get("exclusiveMinimum"), 1)]
        highs = [schema.get("maximum"), _plus(schema.get("exclusiveMaximum"), -1)]
        return self._digits(integer_range(_whole(lows, max), _whole(highs, min)))

    def _multiples(self, schema: Schema) -> int:
        """Digit by digit; what may follow depends on the remainder of those before."""
        if len(_KEYWORDS["integer"] & set(schema)) > 1:
            raise UnknownLength("'multipleOf' together with a bound")
        # An integer is a multiple of a fraction in lowest terms if it is one of the numerator.
        divisor = Fraction(str(schema["multipleOf"])).numerator
        if not 0 < divisor <= _LARGEST_DIVISOR:
            raise UnknownLength(f"'multipleOf' above {_LARGEST_DIVISOR}")
        language = self._language

        def name(remainder: int) -> str:
            return f"digits after a number that leaves {remainder} by {divisor}"

        def digits(remainder: int, first: int) -> int:
            """One digit, from `first` on, and what may follow it."""
            nexts: dict[int, list[tuple[int, int]]] = {}
            for digit in range(first, 10):
                nexts.setdefault((10 * remainder + digit) % divisor, []).append((0x30 + digit, 0x30 + digit))
            one = {after: self._words.lexeme(self._words.characters(ranges)) for after, ranges in nexts.items()}
            return language.alt(*(language.cat(digit, rest(after)) for after, digit in one.items()))

        def rest(remainder: int) -> int:
            more = language.ref(name(remainder))
            return language.optional(more) if remainder == 0 else more

        if name(0) not in self._defined:
            self._defined.add(name(0))
            for remainder in range(divisor):
                language.define(name(remainder), digits(remainder, 0))
        number = language.alt(self._literal("0"), digits(0, 1))
        return language.cat(language.optional(self._literal("-")), number)

    def _string(self, schema: Schema) -> int:
        if "pattern" in schema:
            if {"minLength", "maxLength"} & set(schema):
                raise UnknownLength("a pattern together with a length")
            return self._quoted(self._pattern(schema["pattern"]))
        low, high = schema.get("minLength", 0), schema.get("maxLength", -1)
        return self._quoted(self._words.repeat(self._any_character, low, high))

    def _pattern(self, pattern: str) -> Word:
        """A pattern is searched: without anchors, any text may precede and follow it."""
        if "|" in pattern and ("^" in pattern or "$" in pattern):
            raise UnknownLength("a pattern with anchors and alternatives")
        inner = pattern.removeprefix("^")
        ends = inner.endswith("$") and not inner.endswith(r"\$")
        words, anything = self._words, self._words.repeat(self._any_character, 0)
        return words.cat(
            words.cat() if inner != pattern else anything,
            parse_regex(words, inner[:-1] if ends else inner, self._character),
            words.cat() if ends else anything,
        )

    def _array(self, schema: Schema) -> int:
        language = self._language
        first = [self.value(item) for item in schema.get("prefixItems", [])]
        low, high = schema.get("minItems", 0), schema.get("maxItems", -1)
        items = schema.get("items", True)
        comma = self._literal(",")
        rest, most = EMPTY, len(first) if high == -1 else min(high, len(first))
        if items is not False and (high == -1 or high > len(first)):
            rest = self.value(items)
            least = max(0, low - len(first))
            if not first:
                more = language.repeat(language.cat(comma, rest), max(0, least - 1), high if high == -1 else high - 1)
                some = language.cat(rest, more)
                inside = language.optional(some) if least == 0 else some
                return language.cat(self._literal("["), inside, self._literal("]"))
            tail = language.repeat(language.cat(comma, rest), least, high if high == -1 else high - len(first))
        else:
            tail = DONE if low <= most else EMPTY
        node = tail
        for index in range(most - 1, -1, -1):
            node = language.cat(comma if index else DONE, first[index], node)
            node = language.alt(node, DONE) if index >= low else node
        return language.cat(self._literal("["), node, self._literal("]"))

    def _object(self, schema: Schema) -> int:
        language = self._language
        properties = dict(schema.get("properties", {}))
        required = list(schema.get("required", []))
        additional = schema.get("additionalProperties", True)
        for name in required:
            if name not in properties:
                properties[name] = additional
        _check_optional(properties, required)
        member = EMPTY if additional is False else self._member(sorted(properties), additional)
        comma, end = self._literal(","), self._literal("}")
        more = language.cat(language.star(language.cat(comma, member)), end)
        # Built from the last property on: the rest of the object before any member was written, and after one was.
        at_start, later = language.alt(end, language.cat(member, more)), more
        for name, inner in reversed(properties.items()):
            key = _written(name) + ":"
            value = EMPTY if inner is False else self.value(inner)
            pair = language.cat(self._literal(key), value)
            skip_first, skip = (EMPTY, EMPTY) if name in required else (at_start, later)
            at_start = language.alt(language.cat(pair, later), skip_first)
            later = language.alt(language.cat(comma, pair, later), skip)
        return language.cat(self._literal("{"), at_start)

    def _member(self, names: Sequence[str], schema: object) -> int:
        """A property with a name that is none of these."""
        words, quote, end = self._words, self._words.literal('"'), self._words.literal('":')
        every = words.cat(quote, words.repeat(self._any_character, 0), end)
        if not names:
            return self._language.cat(words.lexeme(every), self.value(schema))
        taken = words.cat(quote, words.any_of(_written(name)[1:-1] for name in names), end)
        key = self._language.cat(quote.node, self._other(sorted(names), ""), end.node)
        return self._language.cat(self._language.lexeme(key, f"/{every.text}/ & ~/{taken.text}/"), self.value(schema))

    def _other(self, names: Sequence[str], prefix: str) -> int:
        """The rest of a string that starts with `prefix` and is none of the names."""
        language = self._language
        nexts = sorted({name[len(prefix)] for name in names if len(name) > len(prefix)})
        others = self._character(complement([(ord(character), ord(character)) for character in nexts]))
        choices = [language.cat(others.node, language.star(self._any_character.node))]
        for character in nexts:
            inner = [name for name in names if name[len(prefix) : len(prefix) + 1] == character]
            one = self._character([(ord(character), ord(character))])
            choices.append(language.cat(one.node, self._other(inner, prefix + character)))
        return language.alt(*choices, *([DONE] if prefix not in names else []))


def _check_optional(properties: Iterable[str], required: Sequence[str]) -> None:
    needed, run, longest = set(required), 0, 0
    for name in properties:
        run = 0 if name in needed else run + 1
        longest = max(longest, run)
    if longest > _MOST_OPTIONAL:
        raise TooManyChoices(
            f"an object has {longest} optional properties in a row and at most {_MOST_OPTIONAL} can be told apart in "
            "time; list more of them in required or split the object"
        )


def integer_range(low: int | None, high: int | None) -> str:
    """A regular expression for the integers from `low` to `high`, without leading zeros; None: no limit."""
    if low is not None and high is not None and low > high:
        raise UnknownLength("a range without numbers")
    parts = []
    if low is None or low < 0:
        largest = None if low is None else -low
        smallest = 0 if high is None or high >= 0 else -high  # -0 is an integer
        parts.append(f"-({_digits(smallest, largest)})")
    if high is None or high >= 0:
        parts.append(_digits(max(0, low or 0), high))
    return "|".join(parts)


def _digits(low: int, high: int | None) -> str:
    """Decimal numbers from `low` to `high`, both at least 0."""
    length = len(str(low))
    if high is None:
        return f"{_digits(low, 10**length - 1)}|[1-9][0-9]{{{length},}}"
    parts = []
    for size in range(length, len(str(high)) + 1):
        first, last = max(low, 10 ** (size - 1) if size > 1 else 0), min(high, 10**size - 1)
        parts.append(_same_size(str(first), str(last)))
    return "|".join(parts)


def _same_size(low: str, high: str) -> str:
    if not low:
        return ""
    if low[0] == high[0]:
        return low[0] + _grouped(_same_size(low[1:], high[1:]))
    rest = len(low) - 1
    parts = [low[0] + _grouped(_same_size(low[1:], "9" * rest)), high[0] + _grouped(_same_size("0" * rest, high[1:]))]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join(parts)


def _grouped(pattern: str) -> str:
    return f"({pattern})" if "|" in pattern else pattern


def _plus(value: float | None, more: int) -> float | None:
    return None if value is None else value + more


def _whole(bounds: Sequence[float | None], choose: Callable[[Iterable[float]], float]) -> int | None:
    given = [bound for bound in bounds if bound is not None]
    if any(isinstance(bound, bool) or bound != int(bound) for bound in given):
        raise UnknownLength("a bound that is no integer")
    return int(choose(given)) if given else None


def _written(value: object) -> str:
    """A string, number or constant as JSON has it; of the ways to write a number or a character, one."""
    if isinstance(value, float):
        text = format(Decimal(repr(value)), "f")
        return text if len(text) <= _LONGEST_NUMBER else repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")


def _as_schema(value: object) -> Schema:
    """The schema of exactly this value."""
    if isinstance(value, list):
        items = [_as_schema(item) for item in value]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if isinstance(value, dict):
        inner = {name: _as_schema(item) for name, item in value.items()}
        return {"type": "object", "properties": inner, "required": list(inner), "additionalProperties": False}
    return {"const": value}


def _either_case(digit: str) -> Ranges:
    return [(ord(case), ord(case)) for case in sorted({digit.lower(), digit.upper()})]


def _is_of(value: object, types: Sequence[str]) -> bool:
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean") in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and value == int(value))
    return ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object") in types
