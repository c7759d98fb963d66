"""JSON schemas as `Language`s of compact JSON: no whitespace, properties in the schema's order.

The keywords mean what llguidance reads in them. A keyword whose effect on the length is not known raises
`UnknownLength`: llguidance still constrains the answer, but its length is not bounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import combinations, product
from typing import Any
from urllib.parse import unquote

from llm.sampling.structured import unusable
from llm.sampling.structured.language import DONE, EMPTY, IMPOSSIBLE, Language
from llm.sampling.structured.regex import (
    DECIMAL,
    FORMATS,
    FRACTION,
    LONGEST_PATTERN,
    BuiltRegex,
    Ranges,
    RegexBuilder,
    TooManyChoices,
    UnknownLength,
    alternatives_of,
    at_least,
    at_most,
    complement,
    ending_in,
    exact,
    integer_range,
    multiple_of,
    parse_regex,
    remainders,
    spellings,
)
from llm.sampling.structured.schema import Algebra, Alternative, all_of, is_named, negation, of_property

_SHORT_ESCAPES = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_CONTROLS = (*range(0x20), 0x7F)
_LAST = 0x10FFFF
_LONGEST_NUMBER = 40  # characters of one that is written without an exponent
_PLAIN: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0x10FFFF)]


# Of optional properties in a row each can come next: the time of a mask grows with their number, that of compiling with
# its square.
_MOST_OPTIONAL = 600
_MOST_LISTED = 2000  # numbers
_MOST_DISTINCT = 8  # values of different items; a state for each set of them
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LARGEST_BOUND = 10**40
_LARGEST_DIVISOR = 64  # of `multipleOf`; a rule of the grammar for each remainder
_LARGEST_MACHINE = 4000  # states, about one for each remainder
_MOST_STATES = 2000  # of a list or an object that counts its members
_MOST_KINDS = 64  # of names of properties


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
        self._builder = RegexBuilder(language)
        self._algebra = Algebra(self._resolve)
        self._scalars: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self._ones: dict[str, int] = {}
        self._values: dict[str, int] = {}
        self._keys: dict[tuple[frozenset[_Said], tuple[str, ...]], int] = {}
        self._open: dict[str, bool] = {}  # being made -> whether it refers to itself
        self._any_character = self._character([(0, _LAST)])

    def _literal(self, text: str) -> int:
        return self._builder.lexeme(self._builder.literal(text))

    def _character(self, ranges: Ranges) -> BuiltRegex:
        """One character of a JSON string: itself, or its escape."""
        builder = self._builder
        plain = [
            (max(low, first), min(high, last))
            for low, high in ranges
            for first, last in _PLAIN
            if max(low, first) <= min(high, last)
        ]
        short = [
            builder.literal("\\" + letter)
            for code, letter in _SHORT_ESCAPES.items()
            if any(low <= code <= high for low, high in ranges)
        ]
        numbers = [
            builder.cat(builder.literal("\\u"), *(builder.characters(_either_case(digit)) for digit in f"{code:04x}"))
            for code in _CONTROLS
            if any(low <= code <= high for low, high in ranges)
        ]
        return builder.alt(*([builder.characters(plain)] if plain else []), *short, *numbers)

    def value(self, schema: object) -> int:
        """The node of all values that the schema admits."""
        name = self._place + _canonical(schema)
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
        # A grammar tells words apart, not the digits of two kinds of numbers.
        several = sum(item["type"] in ("integer", "number") for item in items) > 1
        return self._language.alt(
            *(self._one_type({**item, "several": True} if several and "multipleOf" in item else item) for item in items)
        )

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
            return self._builder.lexeme(self._builder.any_of(map(_written, item["enum"])))
        if not set(item) - {"type", "negated"}:
            return self._digits(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?")
        wanted = [FRACTION if item.get("fraction") else DECIMAL]
        machines = []
        if "multipleOf" in item:
            multiple = Fraction(str(item["multipleOf"]))
            if multiple.denominator == 1:
                return EMPTY if item.get("fraction") else self._integer(item)
            pattern = multiple_of(multiple)
            wanted += [pattern] if pattern else []
            machines += [] if pattern else [self._multiples_machine(multiple, True)]
        for name, is_strict in (("minimum", False), ("exclusiveMinimum", True)):
            wanted += [at_least(exact(item[name]), is_strict)] if name in item else []
        for name, is_strict in (("maximum", False), ("exclusiveMaximum", True)):
            wanted += [at_most(exact(item[name]), is_strict)] if name in item else []
        if not set(item) - {"type", "negated", *_BOUNDS}:
            others = _with_exponents(item)
            wanted = ["|".join([f"({pattern})", *others]) for pattern in wanted]
        return self._decimals(wanted, item, machines)

    def _decimals(self, wanted: Sequence[str], item: Alternative, machines: Sequence[BuiltRegex] = ()) -> int:
        excluded = [spellings(exact(value)) for value in item.get("excluded", ())]
        without = [*map(self._decimal, excluded)]
        without += [self._multiples_machine(Fraction(str(each)), True) for each in item.get("nomultiples", ())]
        return self._builder.lexeme(*map(self._decimal, dict.fromkeys(wanted)), *machines, without=without)

    def _decimal(self, pattern: str) -> BuiltRegex:
        if len(pattern) > LONGEST_PATTERN:
            raise UnknownLength("bounds of numbers with hundreds of digits")
        return parse_regex(self._builder, pattern, self._builder.characters)

    def _digits(self, pattern: str) -> int:
        return self._builder.lexeme(self._decimal(pattern))

    def _integer(self, item: Alternative) -> int:
        self._check_bounds(item)
        if "enum" in item:
            return self._builder.lexeme(self._builder.any_of(map(_written, item["enum"])))
        lows = [math.ceil(item[name]) for name in ("minimum",) if name in item]
        lows += [math.floor(item[name]) + 1 for name in ("exclusiveMinimum",) if name in item]
        highs = [math.floor(item[name]) for name in ("maximum",) if name in item]
        highs += [math.ceil(item[name]) - 1 for name in ("exclusiveMaximum",) if name in item]
        low, high = max(lows, default=None), min(highs, default=None)
        if low is not None and high is not None and low > high:
            return EMPTY
        # An integer is a multiple of a fraction in lowest terms if it is one of the numerator.
        divisor = Fraction(str(item["multipleOf"])).numerator if "multipleOf" in item else 1
        unwanted = [Fraction(str(value)).numerator for value in item.get("nomultiples", ())]
        if (
            low is not None
            and high is not None
            and (high - low) // divisor < _MOST_LISTED
            and (divisor > 1 or unwanted)
        ):
            listed = range(-(-low // divisor) * divisor, high + 1, divisor)
            kept = [str(value) for value in listed if value not in item.get("excluded", ())]
            kept = [text for text in kept if all(int(text) % each for each in unwanted)]
            return self._builder.lexeme(self._builder.any_of(kept)) if kept else EMPTY
        pattern = integer_range(low, high) if lows or highs else "-?(0|[1-9][0-9]*)"
        if divisor == 1:
            return self._decimals([pattern], item)
        if 1000 % divisor == 0:
            return self._decimals([ending_in(divisor), pattern], item)
        if lows or highs or set(item) & {"excluded", "several", "nomultiples"} or divisor > _LARGEST_DIVISOR:
            return self._decimals([pattern], item, [self._multiples_machine(Fraction(divisor), False)])
        return self._multiples(divisor)

    def _multiples_machine(self, divisor: Fraction, with_points: bool) -> BuiltRegex:
        """Decimals that are multiples, read by the remainders of their digits; a grammar has no word for them."""
        places, step = 0, divisor
        while step.denominator > 1:
            places, step = places + 1, step * 10
        numerator = abs(step.numerator)
        if numerator == 0 or numerator * (places + 2) > _LARGEST_MACHINE:
            raise UnknownLength(f"'multipleOf' with more than {_LARGEST_MACHINE} remainders")
        return self._builder.machine(*remainders(numerator, places, with_points))

    def _multiples(self, divisor: int) -> int:
        """Digit by digit; what may follow depends on the remainder of those before."""
        language = self._language

        def name(remainder: int) -> str:
            return f"digits after a number that leaves {remainder} by {divisor}"

        def digits(remainder: int, first: int) -> int:
            """One digit, from `first` on, and what may follow it."""
            nexts: dict[int, list[tuple[int, int]]] = {}
            for digit in range(first, 10):
                nexts.setdefault((10 * remainder + digit) % divisor, []).append((0x30 + digit, 0x30 + digit))
            one = {after: self._builder.lexeme(self._builder.characters(ranges)) for after, ranges in nexts.items()}
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
        builder, quote = self._builder, self._builder.literal('"')
        if "enum" in item:
            return builder.lexeme(builder.any_of(map(_written, item["enum"])))
        wanted = self._text_of(item)
        without = [self._pattern(pattern) for pattern in item.get("nopatterns", ())]
        without += [builder.any_of(_written(value)[1:-1] for value in item["excluded"])] if "excluded" in item else []
        quoted = [[builder.cat(quote, text, quote) for text in texts] for texts in (wanted, without)]
        return builder.lexeme(*quoted[0], without=quoted[1])

    def _text_of(self, item: Alternative) -> list[BuiltRegex]:
        """What a string must be, all of it."""
        patterns = item.get("patterns", [])
        formats = [FORMATS[name] for name in item.get("formats", ()) if name in FORMATS]
        found = [self._pattern(pattern) for pattern in patterns]
        found += [parse_regex(self._builder, pattern, self._character) for pattern in formats]
        low, high = item.get("minLength", 0), item.get("maxLength", -1)
        if not found or (low, high) != (0, -1):
            found.append(self._builder.repeat(self._any_character, low, high))
        return found

    def _pattern(self, pattern: str) -> BuiltRegex:
        """A pattern is searched: without anchors, any text may precede and follow it."""
        builder, anything = self._builder, self._builder.repeat(self._any_character, 0)
        choices = []
        for part in alternatives_of(pattern):
            inner = part.removeprefix("^")
            ends = inner.endswith("$") and not inner.endswith(r"\$")
            choices.append(
                builder.cat(
                    builder.cat() if inner != part else anything,
                    parse_regex(builder, inner[:-1] if ends else inner, self._character),
                    builder.cat() if ends else anything,
                )
            )
        return builder.alt(*choices)

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
        """Arrays of which so many items are of these schemas: each is, or is not, and all are counted."""
        language, contained, first = self._language, item["contained"], item.get("prefixItems", [])
        low, high = item.get("minItems", 0), item.get("maxItems")
        # Where any number may be of a schema, what is not counted may be of it too.
        enough = tuple(least if most is None else most for _, least, most, _ in contained)
        longest = max(low, 1, len(first), *(start for *_, start in contained)) if high is None else high
        if longest * math.prod(count + 1 for count in enough) > _MOST_STATES:
            raise UnknownLength("'contains' of long arrays")
        comma, end = self._literal(","), self._literal("]")
        nodes: dict[tuple[int, tuple[int, ...]], int] = {}
        states = sorted(product(*(range(count + 1) for count in enough)), reverse=True)
        for count, found in product(range(longest, -1, -1), states):
            is_enough = all(had >= least for had, (_, least, _, _) in zip(found, contained, strict=True))
            choices = [end] if count >= low and is_enough else []
            loops = []
            after = min(count + 1, longest)
            schema = first[count] if count < len(first) else item.get("items", True)
            for more, own in self._counted(schema, count, found, item) if count < longest or high is None else ():
                if (after, more) == (count, found):
                    loops.append(language.cat(comma, self.value(own)))
                else:
                    choices.append(language.cat(comma if count else DONE, self.value(own), nodes[after, more]))
            body = language.alt(*choices)
            nodes[count, found] = language.cat(language.star(language.alt(*loops)), body) if loops else body
        return language.cat(self._literal("["), nodes[0, (0,) * len(enough)])

    def _counted(
        self, schema: object, place: int, found: tuple[int, ...], item: Alternative
    ) -> Iterator[tuple[tuple[int, ...], object]]:
        """(the counts after an item at this place, its schema), for each set of schemas that it can be of."""
        options: list[list[tuple[int, object]]] = []
        for had, (wanted, least, most, start) in zip(found, item["contained"], strict=True):
            further = [(had + 1, wanted)] if had < (least if most is None else most) else []
            if place < start:
                options.append([(had, True)])
            else:
                options.append([(had, True if most is None else negation(wanted)), *further])
        for chosen in product(*options):
            own = all_of(schema, *(each for _, each in chosen))
            if own is not False:
                yield tuple(count for count, _ in chosen), own

    def _object(self, item: Alternative) -> int:
        """Properties in their order, each with the number of those before it and which of `some` they are."""
        language = self._language
        required = item.get("required", [])
        names = list(dict.fromkeys([*item.get("properties", {}), *required]))
        inner = {name: of_property(item, name) for name in names}
        for name in names if "names" in item else []:
            if not self._algebra.both(self._algebra.alternatives({"const": name}), self._names(item)):
                inner[name] = False
        _check_optional(inner, required)
        low, high, some = item.get("minProperties", 0), item.get("maxProperties"), item.get("some", [])
        if not some and self._member(item, names) == EMPTY:
            low, high = 0 if low <= len(required) else low, None if high is not None and high >= len(names) else high
        item = {**item, "minProperties": low, "maxProperties": high}
        most = low if high is None else high
        if (most + 1) * 2 ** len(some) * (len(names) + 1) > _MOST_STATES and (most or some):
            raise UnknownLength("large numbers of properties")
        states = list(product(range(most + 1), range(2 ** len(some))))
        comma = self._literal(",")
        # What follows the properties so far, by their number, up to `most`, and the set of `some` among them.
        later = {state: self._others(item, names, *state, is_first=False) for state in states}
        first = self._others(item, names, 0, 0, is_first=True)
        for name, schema in reversed(inner.items()):
            pair = self._literal(_written(name) + ":")
            chosen = [(1 << index, each) for index, (wanted, each) in enumerate(some) if is_named(name, wanted)]
            values = [
                (sum(bit for bit, _ in each), all_of(schema, *(own for _, own in each)))
                for size in range(len(chosen) + 1)
                for each in combinations(chosen, size)
            ]
            written = [(had, language.cat(pair, self.value(own))) for had, own in values if own is not False]
            skipped = name not in required

            nexts = {}
            for count, seen in states:
                after, fits = min(count + 1, most), high is None or count < high
                choices = [language.cat(node, later[after, seen | had]) for had, node in written if fits]
                nexts[count, seen] = language.alt(*choices)
            first = language.alt(nexts[0, 0], first if skipped else EMPTY)
            later = {
                state: language.alt(language.cat(comma, nexts[state]), later[state] if skipped else EMPTY)
                for state in states
            }
        return language.cat(self._literal("{"), first)

    def _others(self, item: Alternative, names: Sequence[str], count: int, seen: int, is_first: bool) -> int:
        """The rest of an object after `count` of the named properties: others, and the end.

        Names may repeat, and the last value of a name counts: of further members one is sure to be one more property,
        and after one that `some` asks for, others of such names have such values.
        """
        language, comma, end = self._language, self._literal(","), self._literal("}")
        low, high, some = item.get("minProperties", 0), item.get("maxProperties"), item.get("some", [])
        left = [index for index in range(len(some)) if not seen >> index & 1]
        room = -1 if high is None else high - count
        if low - count > 1 or (high is not None and room < max(0, low - count)):
            return EMPTY
        if not left:
            member = self._member(item, names)
            more = language.repeat(language.cat(comma, member), max(0, low - count), room)
            if not is_first:
                return language.cat(more, end)
            some_of_them = language.cat(member, language.repeat(language.cat(comma, member), 0, max(room - 1, -1)), end)
            return language.alt(some_of_them if room else EMPTY, end if low <= count else EMPTY)
        if max(room, 0) * 2 ** len(left) > _MOST_STATES:
            raise UnknownLength("large numbers of properties")
        nodes: dict[tuple[int, int], int] = {}

        def rest(had: int, used: int, start: bool) -> int:
            if not start and (had, used) in nodes:
                return nodes[had, used]
            choices, loops = [end] if had == (1 << len(left)) - 1 else [], []
            further = [number for number in range(len(left)) if not had >> number & 1]
            rules = [some[index] for number, index in enumerate(left) if had >> number & 1]
            for chosen in (each for size in range(len(further) + 1) for each in combinations(further, size)):
                if used == room:
                    break
                member = self._member(item, names, rules, [some[left[number]] for number in chosen])
                if member == EMPTY:
                    continue
                if not chosen and not start and room == -1:
                    loops.append(language.cat(comma, member))
                    continue
                after = rest(had | sum(1 << number for number in chosen), used + (room != -1), False)
                choices.append(language.cat(DONE if start else comma, member, after))
            node = language.cat(language.star(language.alt(*loops)), language.alt(*choices))
            if not start:
                nodes[had, used] = node
            return node

        return rest(0, 0, is_first)

    def _names(self, item: Alternative) -> list[Alternative]:
        return [each for each in self._algebra.alternatives(all_of(*item["names"])) if each["type"] == "string"]

    def _member(
        self, item: Alternative, names: Sequence[str], rules: Sequence[_Rule] = (), wanted: Sequence[_Rule] = ()
    ) -> int:
        """A property with a name that is none of these.

        Args:
            rules: as the alternative's.
            wanted: [names, schema] that this property is one of.
        """
        kinds: list[tuple[frozenset[_Said], object]] = [(frozenset(), True)]
        for own, schema in wanted:
            kinds = [(kind | said, all_of(before, schema)) for kind, before in kinds for said in _said_of(own, names)]
        for own, schema in [*item.get("rules", ()), *rules]:
            kinds = [part for kind in kinds for part in self._split(kind, _said_of(own, names), schema, names)]
            if len(kinds) > _MOST_KINDS:
                raise UnknownLength(f"properties of more than {_MOST_KINDS} kinds")
        if "names" in item:
            said = _said_of(self._names(item), names)
            kinds = [(kind | own, schema) for kind, schema in kinds for own in said]
        keys = ((self._key(kind, names), schema) for kind, schema in kinds if schema is not False)
        return self._language.alt(
            *(self._language.cat(key, self.value(schema)) for key, schema in keys if key != EMPTY)
        )

    def _split(
        self, kind: tuple[frozenset[_Said], object], rule: list[frozenset[_Said]], schema: object, names: Sequence[str]
    ) -> list[tuple[frozenset[_Said], object]]:
        """A kind of names in the parts that a rule speaks of, and those that it does not."""
        said, before = kind
        joined = all_of(before, schema)
        if any(own <= said for own in rule):
            return [(said, joined)]
        found: list[tuple[frozenset[_Said], object]] = [(said | own, joined) for own in rule]
        outside = [said]
        for own in rule:
            outside = [
                rest
                for each in outside
                for rest in ([each] if any(_not(one) in each for one in own) else [each | {_not(one)} for one in own])
            ]
        found += [(each, before) for each in dict.fromkeys(outside)]
        return [(own, value) for own, value in found if value is not False and self._key(own, names) != EMPTY]

    def _key(self, kind: frozenset[_Said], names: Sequence[str]) -> int:
        """The name of a property with `":`, of this kind and none of these names."""
        key = (kind, tuple(names))
        if key not in self._keys:
            self._keys[key] = EMPTY if any(_not(each) in kind for each in kind) else self._new_key(kind, names)
        return self._keys[key]

    def _new_key(self, kind: frozenset[_Said], names: Sequence[str]) -> int:
        builder, quote, end = self._builder, self._builder.literal('"'), self._builder.literal('":')
        every = builder.cat(quote, builder.repeat(self._any_character, 0), end)
        taken = builder.cat(quote, builder.any_of(_written(name)[1:-1] for name in names), end) if names else None
        if not kind:
            if taken is None:
                return builder.lexeme(every)
            key = self._language.cat(quote.node, self._other(sorted(names), ""), end.node)
            return self._language.lexeme(key, f"/{every.text}/ & ~/{taken.text}/")
        texts = [(is_so, builder.cat(quote, self._text_like(*what), end)) for is_so, what in sorted(kind, key=repr)]
        wanted = [text for is_so, text in texts if is_so] or [every]
        without = [text for is_so, text in texts if not is_so] + ([taken] if taken else [])
        return builder.lexeme(*wanted, without=without)

    def _text_like(self, kind: str, value: str | tuple[str, ...] | tuple[int, int]) -> BuiltRegex:
        if isinstance(value, str):
            return (
                self._pattern(value)
                if kind == "pattern"
                else parse_regex(self._builder, FORMATS[value], self._character)
            )
        if kind == "values":
            return self._builder.any_of(_written(text)[1:-1] for text in value)
        low, high = map(int, value)
        return self._builder.repeat(self._any_character, low, high)

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


# --- Names of properties. ---

# Whether a name is, or is not: one of "values", like a "pattern", of a "format", of a "length".
_Said = tuple[bool, tuple[str, str | tuple[str, ...] | tuple[int, int]]]
# (names, the schema of each property, or of one, with such a name).
_Rule = tuple[Sequence[Alternative], object]


def _not(said: _Said) -> _Said:
    return (not said[0], said[1])


def _said_of(names: Sequence[Alternative], but: Collection[str]) -> list[frozenset[_Said]]:
    """What the alternatives say of names other than these; none: there are no others."""
    found = []
    for each in names:
        said = {(True, ("pattern", pattern)) for pattern in each.get("patterns", ())}
        said |= {(False, ("pattern", pattern)) for pattern in each.get("nopatterns", ())}
        said |= {(True, ("format", name)) for name in each.get("formats", ()) if name in FORMATS}
        values, gone = (
            tuple(value for value in each.get(keyword, ()) if value not in but) for keyword in ("enum", "excluded")
        )
        if "enum" in each:
            if not values:
                continue
            said.add((True, ("values", values)))
        if gone:
            said.add((False, ("values", gone)))
        if "minLength" in each or "maxLength" in each:
            said.add((True, ("length", (each.get("minLength", 0), each.get("maxLength", -1)))))
        found.append(frozenset(said))
    return found


def _canonical(schema: object) -> str:
    """A name that schemas with the same parts in another order have too."""
    if isinstance(schema, dict) and set(schema) == {"allOf"}:
        return json.dumps(["allOf", *sorted(json.dumps(part, sort_keys=True) for part in schema["allOf"])])
    return json.dumps(schema, sort_keys=True)


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


def _with_exponents(item: Alternative) -> list[str]:
    """Patterns of numbers with one digit before the point and an exponent that is not 0, of those sizes and signs of
    which all are within the bounds: 1.5e-07 lies between 0 and 1, and 1e+20 is at least 10.

    Small ones only where what stands before the exponent is within the bounds too: up to 1, a model that means 95 would
    be led to 9.5e-10. Exponents are at most 299: smaller numbers are 0 as a float, larger ones infinite.
    """
    exponent = "0*([1-9][0-9]?|[12][0-9]{2})"
    mantissa = r"[1-9](\.[0-9]+)?[eE]"
    low = max([-math.inf, *(float(item[name]) for name in ("minimum", "exclusiveMinimum") if name in item)])
    high = min([math.inf, *(float(item[name]) for name in ("maximum", "exclusiveMaximum") if name in item)])
    found = []
    for sign, least, most in (("", low, high), ("-", -high, -low)):  # of the absolute value
        if least <= 0 and most >= 10:
            found.append(f"({sign}{mantissa}-{exponent})")
        if least < 10 and most == math.inf:
            found.append(f"({sign}{mantissa}[+]?{exponent})")
    return found


def _written(value: object) -> str:
    """A string, number or constant as JSON has it; of the ways to write a number or a character, one."""
    if isinstance(value, float):
        text = format(Decimal(repr(value)), "f")
        return text if len(text) <= _LONGEST_NUMBER else repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")


def _either_case(digit: str) -> Ranges:
    return [(ord(case), ord(case)) for case in sorted({digit.lower(), digit.upper()})]
