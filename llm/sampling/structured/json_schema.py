"""JSON schemas as `Language`s of compact JSON: no whitespace, properties in the schema's order.

Owns the meaning of the keywords, as llguidance reads them. A keyword whose effect on the length is not known raises
`UnknownLength`: llguidance still constrains the answer, but its length is not bounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from llm.sampling.structured.algebra import Algebra, Alternative, all_of, of_property
from llm.sampling.structured.formats import FORMATS
from llm.sampling.structured.language import DONE, EMPTY, IMPOSSIBLE, Language
from llm.sampling.structured.messages import unusable
from llm.sampling.structured.regex import (
    LONGEST_PATTERN,
    Ranges,
    TooManyChoices,
    UnknownLength,
    Word,
    Words,
    alternatives_of,
    complement,
    parse_regex,
)

_SHORT_ESCAPES = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_CONTROLS = (*range(0x20), 0x7F)
_LAST = 0x10FFFF
_LONGEST_NUMBER = 40  # characters of one that is written without an exponent
_PLAIN: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0x10FFFF)]


# Of optional properties in a row each can come next: the time of a mask grows with their number, that of compiling with
# its square.
_MOST_OPTIONAL = 600
_MOST_LISTED = 2000
_MOST_DISTINCT = 8  # values of different items; a state for each set of them
_MOST_PATTERNS = 5  # of properties; a kind of names for each set of them
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LARGEST_BOUND = 10**40
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
        self._algebra = Algebra(self._resolve)
        self._scalars: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self._ones: dict[str, int] = {}
        self._values: dict[str, int] = {}
        self._open: dict[str, bool] = {}  # being made -> whether it refers to itself
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
        """The node of all values that the schema admits."""
        name = self._place + json.dumps(schema, sort_keys=True)
        if name in self._open:
            self._open[name] = True
            return self._language.ref(name)
        if name not in self._values:
            self._open[name] = False
            node = self._any_of(self._algebra.alternatives(schema))
            if self._open.pop(name):
                if self._language.kinds[node] == ("ref", name):
                    raise UnknownLength("a schema that refers to itself alone")
                self._language.define(name, node)
            self._values[name] = node
        return self._values[name]

    def _any_of(self, items: Sequence[Alternative]) -> int:
        numbers = [item for item in items if item["type"] in ("integer", "number")]
        if len(numbers) > 1 and any("multipleOf" in item for item in numbers):
            raise UnknownLength("'multipleOf' next to other numbers")
        return self._language.alt(*map(self._one_type, items))

    def _one_type(self, item: Alternative) -> int:
        name = json.dumps(item, sort_keys=True)
        if item["type"] in ("array", "object"):
            return int(getattr(self, f"_{item['type']}")(item))
        if name not in self._scalars:
            self._scalars[name] = getattr(self, f"_{item['type']}")(item)
        return self._scalars[name]

    def _resolve(self, name: object) -> object:
        if not isinstance(name, str) or not name.startswith("#"):
            raise UnknownLength(f"the reference {name!r}")
        found = self._root
        for part in unquote(name[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                raise UnknownLength(f"the reference {name!r}")
        if "/" not in name and name != "#":
            raise UnknownLength(f"the reference {name!r}")
        return found

    # --- Types ------------------------------------------------------------------------------------------------------

    def _null(self, item: Alternative) -> int:
        return self._literal("null")

    def _boolean(self, item: Alternative) -> int:
        return self._language.alt(*(self._literal(_written(value)) for value in item.get("enum", (True, False))))

    @staticmethod
    def _check_bounds(item: Alternative) -> None:
        """The pattern of a bound grows with the square of its digits."""
        if any(abs(item[name]) >= _LARGEST_BOUND for name in _BOUNDS if name in item):
            raise UnknownLength("bounds of numbers with hundreds of digits")

    def _number(self, item: Alternative) -> int:
        self._check_bounds(item)
        if "enum" in item:
            return self._words.lexeme(self._words.any_of(map(_written, item["enum"])))
        if not set(item) - {"type", "negated"}:
            return self._digits(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?")
        wanted = [_FRACTION if item.get("fraction") else _DECIMAL]
        if "multipleOf" in item:
            multiple = Fraction(str(item["multipleOf"]))
            if multiple.denominator == 1:
                return self._integer(item)
            wanted.append(_multiple_of(multiple))
        for name, is_strict in (("minimum", False), ("exclusiveMinimum", True)):
            wanted += [_at_least(_exact(item[name]), is_strict)] if name in item else []
        for name, is_strict in (("maximum", False), ("exclusiveMaximum", True)):
            wanted += [_at_most(_exact(item[name]), is_strict)] if name in item else []
        return self._decimals(wanted, item)

    def _decimals(self, wanted: Sequence[str], item: Alternative) -> int:
        excluded = [_spellings(_exact(value)) for value in item.get("excluded", ())]
        return self._words.lexeme(*map(self._decimal, dict.fromkeys(wanted)), without=[*map(self._decimal, excluded)])

    def _decimal(self, pattern: str) -> Word:
        if len(pattern) > LONGEST_PATTERN:
            raise UnknownLength("bounds of numbers with hundreds of digits")
        return parse_regex(self._words, pattern, self._words.characters)

    def _digits(self, pattern: str) -> int:
        return self._words.lexeme(self._decimal(pattern))

    def _integer(self, item: Alternative) -> int:
        self._check_bounds(item)
        if "enum" in item:
            return self._words.lexeme(self._words.any_of(map(_written, item["enum"])))
        lows = [math.ceil(item[name]) for name in ("minimum",) if name in item]
        lows += [math.floor(item[name]) + 1 for name in ("exclusiveMinimum",) if name in item]
        highs = [math.floor(item[name]) for name in ("maximum",) if name in item]
        highs += [math.ceil(item[name]) - 1 for name in ("exclusiveMaximum",) if name in item]
        low, high = max(lows, default=None), min(highs, default=None)
        if low is not None and high is not None and low > high:
            return EMPTY
        # An integer is a multiple of a fraction in lowest terms if it is one of the numerator.
        divisor = Fraction(str(item["multipleOf"])).numerator if "multipleOf" in item else 1
        if divisor == 1:
            return self._decimals([integer_range(low, high) if lows or highs else "-?(0|[1-9][0-9]*)"], item)
        if low is not None and high is not None and (high - low) // divisor < _MOST_LISTED:
            listed = range(-(-low // divisor) * divisor, high + 1, divisor)
            kept = [str(value) for value in listed if value not in item.get("excluded", ())]
            return self._words.lexeme(self._words.any_of(kept)) if kept else EMPTY
        bounds = [integer_range(low, high)] if lows or highs else []
        if 1000 % divisor == 0:
            return self._decimals([_ending_in(divisor), *bounds], item)
        if bounds or "excluded" in item:
            raise UnknownLength("'multipleOf' together with a bound")
        return self._multiples(divisor)

    def _multiples(self, divisor: int) -> int:
        """Digit by digit; what may follow depends on the remainder of those before."""
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

    def _string(self, item: Alternative) -> int:
        words, quote = self._words, self._words.literal('"')
        if "enum" in item:
            return words.lexeme(words.any_of(map(_written, item["enum"])))
        wanted = self._text_of(item)
        without = [self._pattern(pattern) for pattern in item.get("nopatterns", ())]
        without += [words.any_of(_written(value)[1:-1] for value in item["excluded"])] if "excluded" in item else []
        quoted = [[words.cat(quote, text, quote) for text in texts] for texts in (wanted, without)]
        return words.lexeme(*quoted[0], without=quoted[1])

    def _text_of(self, item: Alternative) -> list[Word]:
        """What a string must be, all of it."""
        patterns = item.get("patterns", [])
        formats = [FORMATS[name] for name in item.get("formats", ()) if name in FORMATS]
        found = [self._pattern(pattern) for pattern in patterns]
        found += [parse_regex(self._words, pattern, self._character) for pattern in formats]
        low, high = item.get("minLength", 0), item.get("maxLength", -1)
        if not found or (low, high) != (0, -1):
            found.append(self._words.repeat(self._any_character, low, high))
        return found

    def _pattern(self, pattern: str) -> Word:
        """A pattern is searched: without anchors, any text may precede and follow it."""
        words, anything = self._words, self._words.repeat(self._any_character, 0)
        choices = []
        for part in alternatives_of(pattern):
            inner = part.removeprefix("^")
            ends = inner.endswith("$") and not inner.endswith(r"\$")
            choices.append(
                words.cat(
                    words.cat() if inner != part else anything,
                    parse_regex(words, inner[:-1] if ends else inner, self._character),
                    words.cat() if ends else anything,
                )
            )
        return words.alt(*choices)

    def _array(self, item: Alternative) -> int:
        language = self._language
        low, high = item.get("minItems", 0), item.get("maxItems", -1)
        if item.get("uniqueItems") and high not in (0, 1):
            distinct = self._distinct(item)
            if distinct is not None:
                return distinct
            language.caveat = "'uniqueItems' is not looked at: items may repeat"
        if "contained" in item:
            return self._containing(item)
        first = [self.value(schema) for schema in item.get("prefixItems", [])]
        items = item.get("items", True)
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

    def _distinct(self, item: Alternative) -> int | None:
        """Arrays of different items, where they are few values; None: they are many."""
        alternatives = self._algebra.alternatives(item.get("items", True))
        values: list[object] = []
        for each in alternatives:
            known = {"null": [None], "boolean": [True, False]}.get(each["type"])
            values += each.get("enum", known) or [...]
        if "prefixItems" in item or "contained" in item or ... in values or len(values) > _MOST_DISTINCT:
            return None
        language, low, high = self._language, item.get("minItems", 0), item.get("maxItems", len(values))
        nodes: dict[int, int] = {}
        for used in range(2 ** len(values) - 1, -1, -1):
            count = used.bit_count()
            choices = [self._literal("]")] if low <= count <= high else []
            for index, value in enumerate(values):
                if not used >> index & 1 and count < high:
                    comma = self._literal(",") if count else DONE
                    choices.append(language.cat(comma, self._literal(_written(value)), nodes[used | 1 << index]))
            nodes[used] = language.alt(*choices)
        return language.cat(self._literal("["), nodes[0])

    def _containing(self, item: Alternative) -> int:
        """Arrays of which so many items are of a schema: each is, or is not, and both are counted."""
        low, high = item.get("minItems", 0), item.get("maxItems")
        if len(item["contained"]) != 1 or "prefixItems" in item:
            raise UnknownLength("'contains' next to 'prefixItems' or to another one")
        [(schema, least, most)] = item["contained"]
        longest, enough = (max(low, 1) if high is None else high), (least if most is None else most)
        if longest * enough > _MOST_LISTED:
            raise UnknownLength("'contains' of long arrays")
        language, items = self._language, item.get("items", True)
        inside = self.value(all_of(items, schema))
        # Where any number may be of the schema, what is not counted may be of it too.
        outside = self.value(items if most is None else all_of(items, {"not": schema}))
        comma, end = self._literal(","), self._literal("]")
        nodes: dict[tuple[int, int], int] = {}
        for count in range(longest, -1, -1):
            for found in range(enough, -1, -1):
                choices = [end] if count >= low and found >= least else []
                before = comma if count else DONE
                further = count < longest or high is None
                after = min(count + 1, longest)
                loops = []
                if further:
                    for node, more in ((inside, found + 1), (outside, found)):
                        if more > enough and most is not None:
                            continue
                        target = (after, min(more, enough))
                        if target == (count, found):
                            loops.append(language.cat(comma, node))
                        else:
                            choices.append(language.cat(before, node, nodes[target]))
                body = language.alt(*choices)
                if loops:
                    body = language.cat(language.star(language.alt(*loops)), body)
                nodes[count, found] = body
        return language.cat(self._literal("["), nodes[0, 0])

    def _object(self, item: Alternative) -> int:
        language = self._language
        required = item.get("required", [])
        names = list(dict.fromkeys([*item.get("properties", {}), *required]))
        inner = {name: of_property(item, name) for name in names}
        for name in names if "names" in item else []:
            if not self._algebra.both(self._algebra.alternatives({"const": name}), self._names(item)):
                inner[name] = False
        _check_optional(inner, required)
        member, extra = self._member(item, names, True), EMPTY
        if "extra" in item:
            extra = self._member(item, names, item["extra"])
        low, high = item.get("minProperties", 0), item.get("maxProperties")
        low = 0 if low <= len(required) else low
        high = None if high is not None and member == EMPTY and high >= len(names) else high
        if (low or high is not None) and extra != EMPTY:
            raise UnknownLength("'not' of 'additionalProperties' next to a number of properties")
        most = low if high is None else high
        if most * (len(names) + 1) > _MOST_LISTED:
            raise UnknownLength("large numbers of properties")
        comma, end = self._literal(","), self._literal("}")
        # Per number of members that were written, up to `most`: the rest of the object.
        later: list[int] = []
        for count in range(most + 1):
            more = language.cat(comma, member)
            others = language.repeat(more, 0, -1 if high is None else high - count)
            if extra != EMPTY:
                first = language.cat(language.star(more), comma, extra)
                at_start = language.cat(extra, language.star(more), end)
                at_start = language.alt(at_start, language.cat(member, first, language.star(more), end))
                later.append(language.cat(first, language.star(more), end))
                continue
            # Names may repeat, so that of further members one is sure to count.
            if count >= low:
                later.append(language.cat(others, end))
            elif count + 1 >= low and (high is None or high > count):
                more = language.repeat(more, 1, -1 if high is None else high - count)
                later.append(language.cat(more, end))
            else:
                later.append(EMPTY)
        if extra == EMPTY:
            at_start = end if low == 0 else EMPTY
            if low <= 1 and high != 0:
                rest = language.repeat(language.cat(comma, member), 0, -1 if high is None else high - 1)
                at_start = language.alt(at_start, language.cat(member, rest, end))
        for name, schema in reversed(inner.items()):
            value = EMPTY if schema is False else self.value(schema)
            pair = language.cat(self._literal(_written(name) + ":"), value)
            is_open = high is None
            after = [later[min(count + 1, most)] if is_open or count < most else EMPTY for count in range(most + 1)]
            skipped = name not in required
            start_after = after[0] if most or is_open else EMPTY
            at_start = language.alt(language.cat(pair, start_after), at_start if skipped else EMPTY)
            later = [
                language.alt(language.cat(comma, pair, then), now if skipped else EMPTY)
                for then, now in zip(after, later, strict=True)
            ]
        return language.cat(self._literal("{"), at_start)

    def _names(self, item: Alternative) -> list[Alternative]:
        return [each for each in self._algebra.alternatives(all_of(*item["names"])) if each["type"] == "string"]

    def _member(self, item: Alternative, names: Sequence[str], also: object) -> int:
        """A property with a name that is none of these, and a value that is `also` of a schema."""
        words, quote, end = self._words, self._words.literal('"'), self._words.literal('":')
        patterns = item.get("patternProperties", {})
        additional = item.get("additionalProperties", True)
        if len(patterns) > _MOST_PATTERNS:
            raise UnknownLength(f"more than {_MOST_PATTERNS} patterns of properties")
        every = words.cat(quote, words.repeat(self._any_character, 0), end)
        taken = words.cat(quote, words.any_of(_written(name)[1:-1] for name in names), end) if names else None
        if not patterns and "names" not in item:
            schema = all_of(additional, also)
            if schema is False:
                return EMPTY
            if taken is None:
                return self._language.cat(words.lexeme(every), self.value(schema))
            key = self._language.cat(quote.node, self._other(sorted(names), ""), end.node)
            key = self._language.lexeme(key, f"/{every.text}/ & ~/{taken.text}/")
            return self._language.cat(key, self.value(schema))
        keys = {pattern: words.cat(quote, self._pattern(pattern), end) for pattern in patterns}
        said = self._names(item) if "names" in item else [{"type": "string"}]
        choices = []
        for size in range(len(patterns) + 1):
            for matched in combinations(patterns, size):
                schema = all_of(*(patterns[name] for name in matched), also) if matched else all_of(additional, also)
                if schema is False:
                    continue
                for each in said:
                    texts = [words.any_of(_written(value)[1:-1] for value in each["enum"])] if "enum" in each else None
                    wanted = [words.cat(quote, text, end) for text in texts or self._text_of(each)]
                    without = [words.cat(quote, self._pattern(text), end) for text in each.get("nopatterns", ())]
                    gone = each.get("excluded", ())
                    without += (
                        [words.cat(quote, words.any_of(_written(text)[1:-1] for text in gone), end)] if gone else []
                    )
                    without += [keys[name] for name in patterns if name not in matched] + ([taken] if taken else [])
                    key = words.lexeme(*wanted, *(keys[name] for name in matched), without=without)
                    choices.append(self._language.cat(key, self.value(schema)) if key != EMPTY else EMPTY)
        return self._language.alt(*choices)

    def _other(self, names: Sequence[str], prefix: str) -> int:
        """The rest of a string that starts with `prefix` and is none of the names."""
        language = self._language
        nexts = "".join(sorted({name[len(prefix)] for name in names if len(name) > len(prefix)}))
        choices = [self._none_of(nexts)]
        for character in nexts:
            inner = [name for name in names if name[len(prefix) : len(prefix) + 1] == character]
            choices.append(language.cat(self._one(character), self._other(inner, prefix + character)))
        return language.alt(*choices, *([DONE] if prefix not in names else []))

    def _none_of(self, characters: str) -> int:
        """A string that starts with none of these."""
        if characters not in self._starts:
            others = self._character(complement([(ord(each), ord(each)) for each in characters]))
            rest = self._language.star(self._any_character.node)
            self._starts[characters] = self._language.cat(others.node, rest)
        return self._starts[characters]

    def _one(self, character: str) -> int:
        if character not in self._ones:
            self._ones[character] = self._character([(ord(character), ord(character))]).node
        return self._ones[character]


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


def _written(value: object) -> str:
    """A string, number or constant as JSON has it; of the ways to write a number or a character, one."""
    if isinstance(value, float):
        text = format(Decimal(repr(value)), "f")
        return text if len(text) <= _LONGEST_NUMBER else repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")


def _either_case(digit: str) -> Ranges:
    return [(ord(case), ord(case)) for case in sorted({digit.lower(), digit.upper()})]


# --- Decimal numbers ----------------------------------------------------------------------------------------------

_WHOLE = "(0|[1-9][0-9]*)"
_DECIMAL = rf"-?{_WHOLE}(\.[0-9]+)?"
_FRACTION = rf"-?{_WHOLE}\.[0-9]*[1-9][0-9]*"


def _exact(value: float) -> Decimal:
    return Decimal(str(value))


def _parts(value: Decimal) -> tuple[int, str]:
    """The whole part of a number that is at least 0, and the digits after its point without zeros at the end."""
    whole, _, digits = format(value, "f").partition(".")
    return int(whole), digits.rstrip("0")


def _at_least(bound: Decimal, is_strict: bool) -> str:
    if bound < 0 or (bound == 0 and not is_strict):
        return f"{_WHOLE}(\\.[0-9]+)?|-({_up_to(-bound, is_strict)})"
    return _from(bound, is_strict)


def _at_most(bound: Decimal, is_strict: bool) -> str:
    if bound > 0 or (bound == 0 and not is_strict):
        return f"-{_WHOLE}(\\.[0-9]+)?|{_up_to(bound, is_strict)}"
    return f"-({_from(-bound, is_strict)})"


def _from(bound: Decimal, is_strict: bool) -> str:
    """Decimals without a sign from `bound`, at least 0, on."""
    whole, digits = _parts(bound)
    larger = [digits[:i] + f"[{int(d) + 1}-9][0-9]*" for i, d in enumerate(digits) if d != "9"]
    larger.append(digits + ("[0-9]*[1-9][0-9]*" if is_strict else "[0-9]*"))
    tail = f"\\.({'|'.join(larger)})" if digits or is_strict else r"(\.[0-9]+)?"
    return f"({_digits(whole + 1, None)})(\\.[0-9]+)?|{whole}{tail}"


def _up_to(bound: Decimal, is_strict: bool) -> str:
    """Decimals without a sign up to `bound`, at least 0."""
    whole, digits = _parts(bound)
    below = [f"({_digits(0, whole - 1)})(\\.[0-9]+)?"] if whole else []
    if not digits:
        return "|".join([*below, *([] if is_strict else [rf"{whole}(\.0+)?"])]) or "x{0}[^\\x00-\\uffff]"
    smaller = [digits[:i] + f"[0-{int(d) - 1}][0-9]*" for i, d in enumerate(digits) if d != "0"]
    smaller += [digits[:i] for i in range(1, len(digits))]
    smaller += [] if is_strict else [digits + "0*"]
    return "|".join([*below, str(whole), rf"{whole}\.({'|'.join(smaller)})"])


def _ending_in(divisor: int) -> str:
    """Integers that are multiples of a divisor of 1000, which their last three digits say."""
    ends = range(0, 1000, divisor)
    short = "|".join(str(value) for value in ends)
    return f"-?({short}|[1-9][0-9]*({'|'.join(f'{value:03d}' for value in ends)}))"


def _multiple_of(divisor: Fraction) -> str:
    """Decimals that are multiples of a fraction, which the digits after the point say where it divides 1."""
    places = next((n for n in range(1, 4) if (divisor * 10**n).denominator == 1), None)
    if places is None or divisor.numerator <= 0 or 10**places % int(divisor * 10**places):
        raise UnknownLength("'multipleOf' of a fraction that does not divide 1")
    endings = [f"{value:0{places}d}" for value in range(0, 10**places, int(divisor * 10**places))]
    texts = sorted({text for each in endings for text in (each, each.rstrip("0") or "0")})
    return rf"-?{_WHOLE}(\.({'|'.join(texts)})0*)?"


def _spellings(value: Decimal) -> str:
    """All ways to write a number without an exponent."""
    whole, digits = _parts(abs(value))
    sign = "-" if value < 0 else "-?" if value == 0 else ""
    return sign + (rf"{whole}\.{digits}0*" if digits else rf"{whole}(\.0+)?")
