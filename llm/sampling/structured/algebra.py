"""JSON schemas as alternatives of one type each: what `allOf`, `anyOf`, `oneOf`, `not`, `if` and references come to.

An alternative is a dict of `type` and of that type's keywords, with the schemas of items and properties as they were
given, or joined by `allOf`. Beside JSON Schema's keywords it has `excluded` (values), `fraction` (numbers that are not
whole), `patterns`, `nopatterns`, `formats` (lists), `contained` (list of [schema, least, most]), `names` (the schemas
of property names), `extra` (the schema of one more property that must be there), `closed` (the additional properties
or items are said) and `negated` (it comes of `not`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product

from llm.base.types import JsonObject
from llm.sampling.structured.regex import UnknownLength

Alternative = JsonObject
TYPES = ("null", "boolean", "number", "string", "array", "object")
_MOST = 200  # alternatives of one schema
_DEEPEST = 60  # schemas inside each other without a value between them
_DATA = ("const", "enum")


class Algebra:
    """Args:
    resolve: the schema that a reference names.
    """

    def __init__(self, resolve: Callable[[object], object]) -> None:
        self._resolve = resolve
        self._depth = 0

    def alternatives(self, schema: object) -> list[Alternative]:
        """What the schema admits is what one of these admits; none: nothing.

        Raises:
            UnknownLength: a keyword that has no such form, or too many alternatives.
        """
        self._depth += 1
        try:
            if self._depth > _DEEPEST:
                raise UnknownLength("a schema that refers to itself without a value between")
            return _distinct(self._alternatives(schema))
        finally:
            self._depth -= 1

    def _alternatives(self, schema: object) -> list[Alternative]:
        if schema is True or schema == {}:
            return [{"type": kind} for kind in TYPES]
        if schema is False:
            return []
        if not isinstance(schema, dict):
            raise UnknownLength(f"the schema {schema!r}")
        found = self._own(schema)
        for part in self._applied(schema):
            found = self.both(found, part)
        if "unevaluatedProperties" in schema:
            found = [self._rest(item, "object", schema["unevaluatedProperties"]) for item in found]
        if "unevaluatedItems" in schema:
            found = [self._rest(item, "array", schema["unevaluatedItems"]) for item in found]
        return found

    def _applied(self, schema: JsonObject) -> Iterator[list[Alternative]]:
        """The alternatives of each keyword that applies schemas to the same value."""
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                raise UnknownLength(f"the keyword {keyword!r}")
        if "$ref" in schema:
            yield self.alternatives(self._resolve(schema["$ref"]))
        for inner in schema.get("allOf", ()):
            yield self.alternatives(inner)
        if "anyOf" in schema:
            yield [item for inner in schema["anyOf"] for item in self.alternatives(inner)]
        if "oneOf" in schema:
            yield self._one_of(list(schema["oneOf"]))
        if "not" in schema:
            yield self.complement(schema["not"])
        if "if" in schema and ("then" in schema or "else" in schema):
            condition = schema["if"]
            then = self.both(self.alternatives(condition), self.alternatives(schema.get("then", True)))
            yield then + self.both(self.complement(condition), self.alternatives(schema.get("else", True)))
        needed = {**schema.get("dependentRequired", {}), **schema.get("dependentSchemas", {})}
        for name, inner in {**schema.get("dependencies", {}), **needed}.items():
            there = {"allOf": [{"required": [name]}, {"required": inner} if isinstance(inner, list) else inner]}
            absent = {"type": "object", "properties": {name: False}}
            others = [{"type": kind} for kind in TYPES if kind != "object"]
            yield [*others, *self.alternatives(absent), *self.both([{"type": "object"}], self.alternatives(there))]

    def _one_of(self, schemas: list[object]) -> list[Alternative]:
        parts = [self.alternatives(inner) for inner in schemas]
        found = []
        for index, part in enumerate(parts):
            for other, inner in enumerate(schemas):
                if other != index and self.both(part, parts[other]):
                    part = self.both(part, self.complement(inner))
            found += part
        return found

    def complement(self, schema: object) -> list[Alternative]:
        """The alternatives of all other values."""
        found = self.alternatives(True)
        for item in self.alternatives(schema):
            found = self.both(found, [{**other, "negated": True} for other in self._negated(item)])
        return found

    def both(self, first: list[Alternative], second: list[Alternative]) -> list[Alternative]:
        if len(first) * len(second) > _MOST * 8:
            raise UnknownLength("too many alternatives")
        joined = [self._join(a, b) for a, b in product(first, second)]
        return _distinct([item for item in joined if item is not None])

    # --- One schema's own keywords ----------------------------------------------------------------------------------

    def _own(self, schema: JsonObject) -> list[Alternative]:
        given = schema.get("type", list(TYPES))
        types = given if isinstance(given, list) else [given]
        if not set(types) <= {*TYPES, "integer"} or not types:
            raise UnknownLength(f"the type {given!r}")
        found = []
        for kind in dict.fromkeys(types):
            if kind == "integer" and "number" in types:
                continue
            name = "number" if kind == "integer" else kind
            found.append({"type": kind, **getattr(self, f"_{name}")(schema)})
        if "enum" in schema:
            found = self.both(found, _of_values(schema["enum"]))
        if "const" in schema:
            found = self.both(found, [_of_value(schema["const"])])
        return [item for item in found if _can_be(item)]

    def _null(self, schema: JsonObject) -> Alternative:
        return {}

    def _boolean(self, schema: JsonObject) -> Alternative:
        return {}

    def _number(self, schema: JsonObject) -> Alternative:
        found: Alternative = {}
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            value = schema.get(keyword)
            if isinstance(value, bool) and keyword.startswith("exclusive"):  # of draft 4
                bound = keyword.removeprefix("exclusive").lower()
                if value and bound in schema:
                    found[keyword] = schema[bound]
                    found.pop(bound, None)
            elif value is not None:
                found[keyword] = _number(value)
        return found

    def _string(self, schema: JsonObject) -> Alternative:
        found: Alternative = {name: _count(schema[name]) for name in ("minLength", "maxLength") if name in schema}
        lists = {"patterns": [schema["pattern"]] if "pattern" in schema else []}
        lists["formats"] = [schema["format"]] if isinstance(schema.get("format"), str) else []
        return {**found, **{name: values for name, values in lists.items() if values}}

    def _array(self, schema: JsonObject) -> Alternative:
        found: Alternative = {
            keyword: _count(schema[keyword]) for keyword in ("minItems", "maxItems") if keyword in schema
        }
        items, prefix = schema.get("items"), schema.get("prefixItems", [])
        if isinstance(items, list):  # before draft 2020-12
            items, prefix = schema.get("additionalItems"), items
        if prefix:
            found["prefixItems"] = list(prefix)
        if items is not None:
            found |= {"items": items, "closed": True}
        if schema.get("uniqueItems"):
            found["uniqueItems"] = True
        if "contains" in schema:
            least, most = schema.get("minContains", 1), schema.get("maxContains")
            found["contained"] = [[schema["contains"], _count(least), None if most is None else _count(most)]]
        return found

    def _object(self, schema: JsonObject) -> Alternative:
        found: Alternative = {
            keyword: _count(schema[keyword]) for keyword in ("minProperties", "maxProperties") if keyword in schema
        }
        for keyword in ("properties", "patternProperties"):
            if schema.get(keyword):
                found[keyword] = dict(schema[keyword])
        required = schema.get("required", [])
        if isinstance(required, list) and required:  # a bool in draft 3
            found["required"] = [str(name) for name in dict.fromkeys(required)]
        if "additionalProperties" in schema:
            found |= {"additionalProperties": schema["additionalProperties"], "closed": True}
        if "propertyNames" in schema:
            found["names"] = [schema["propertyNames"]]
        return found

    def _rest(self, item: Alternative, kind: str, schema: object) -> Alternative:
        """`unevaluatedProperties` or `unevaluatedItems`."""
        if item["type"] != kind or item.get("closed"):
            return item
        if item.get("negated") or "contained" in item:
            raise UnknownLength("what is not evaluated next to 'not' or 'contains'")
        return {**item, "additionalProperties" if kind == "object" else "items": schema, "closed": True}

    # --- Joining two alternatives -----------------------------------------------------------------------------------

    def _join(self, a: Alternative, b: Alternative) -> Alternative | None:
        """What both admit."""
        types = {a["type"], b["type"]}
        if len(types) > 1 and types != {"integer", "number"}:
            return None
        kind = "integer" if "integer" in types else a["type"]
        found: Alternative = {**a, **b, "type": kind}
        for keyword, choose in _BOUNDS.items():
            if keyword in a and keyword in b:
                found[keyword] = choose(a[keyword], b[keyword])
        for keyword in ("patterns", "nopatterns", "formats", "contained", "names", "required", "excluded"):
            if keyword in a and keyword in b:
                found[keyword] = [*a[keyword], *(value for value in b[keyword] if value not in a[keyword])]
        if "enum" in a and "enum" in b:
            found["enum"] = [value for value in a["enum"] if any(_equal(value, other) for other in b["enum"])]
        if "multipleOf" in a and "multipleOf" in b:
            found["multipleOf"] = _common_multiple(a["multipleOf"], b["multipleOf"])
        if kind == "array":
            _join_items(a, b, found)
        if kind == "object":
            _join_properties(a, b, found)
        return found if _can_be(found) else None

    # --- Complements ------------------------------------------------------------------------------------------------

    def _negated(self, item: Alternative) -> list[Alternative]:
        """The alternatives of all values that this one does not admit."""
        kind = item["type"]
        others: list[Alternative] = [{"type": other} for other in TYPES if other != kind and (kind != "integer")]
        if kind == "integer":
            others = [{"type": other} for other in TYPES if other != "number"]
            others.append({"type": "number", "fraction": True})
        given = set(item) - {"type", "closed", "negated"}
        known = _NEGATED.get("number" if kind == "integer" else kind, {})
        if not given <= set(known):
            raise UnknownLength(f"'not' of {min(given - set(known))!r}")
        found = [{"type": kind, **other} for keyword in sorted(given) for other in known[keyword](item)]
        return [*others, *(other for other in found if _can_be(other))]


def _inverse(values: object) -> list[Alternative]:
    return [{"excluded": values}]


def _not_prefix(item: Alternative) -> list[Alternative]:
    return [
        {"minItems": index + 1, "prefixItems": [*[True] * index, {"not": schema}]}
        for index, schema in enumerate(item["prefixItems"])
        if schema is not True and schema != {}
    ]


def _not_items(item: Alternative) -> list[Alternative]:
    count = len(item.get("prefixItems", ()))
    if item["items"] is True or item["items"] == {}:
        return []
    if item["items"] is False:
        return [{"minItems": count + 1}]
    if count:
        raise UnknownLength("'not' of items after others")
    return [{"contained": [[{"not": item["items"]}, 1, None]]}]


def _not_contained(item: Alternative) -> list[Alternative]:
    found: list[Alternative] = []
    for schema, least, most in item["contained"]:
        if least == 1:
            found.append({"items": {"not": schema}})
        elif least > 1:
            found.append({"contained": [[schema, 0, least - 1]]})
        if most is not None:
            found.append({"contained": [[schema, most + 1, None]]})
    return found


def _not_properties(item: Alternative) -> list[Alternative]:
    return [
        {"required": [name], "properties": {name: {"not": schema}}}
        for name, schema in item["properties"].items()
        if schema is not True and schema != {}
    ]


def _not_additional(item: Alternative) -> list[Alternative]:
    schema = item["additionalProperties"]
    if schema is True or schema == {}:
        return []
    if "patternProperties" in item:
        raise UnknownLength("'not' of 'patternProperties'")
    return [{"properties": dict.fromkeys(item.get("properties", {}), True), "extra": {"not": schema}}]


# Type -> keyword -> the alternatives that violate it.
_NEGATED: Mapping[str, Mapping[str, Callable[[Alternative], list[Alternative]]]] = {
    "null": {},
    "boolean": {"enum": lambda item: [{"enum": [value for value in (True, False) if value not in item["enum"]]}]},
    "number": {
        "minimum": lambda item: [{"exclusiveMaximum": item["minimum"]}],
        "maximum": lambda item: [{"exclusiveMinimum": item["maximum"]}],
        "exclusiveMinimum": lambda item: [{"maximum": item["exclusiveMinimum"]}],
        "exclusiveMaximum": lambda item: [{"minimum": item["exclusiveMaximum"]}],
        "enum": lambda item: _inverse(item["enum"]),
        "excluded": lambda item: [{"enum": item["excluded"]}],
    },
    "string": {
        "minLength": lambda item: [{"maxLength": item["minLength"] - 1}] if item["minLength"] else [],
        "maxLength": lambda item: [{"minLength": item["maxLength"] + 1}],
        "patterns": lambda item: [{"nopatterns": [pattern]} for pattern in item["patterns"]],
        "nopatterns": lambda item: [{"patterns": [pattern]} for pattern in item["nopatterns"]],
        "enum": lambda item: _inverse(item["enum"]),
        "excluded": lambda item: [{"enum": item["excluded"]}],
    },
    "array": {
        "minItems": lambda item: [{"maxItems": item["minItems"] - 1}] if item["minItems"] else [],
        "maxItems": lambda item: [{"minItems": item["maxItems"] + 1}],
        "prefixItems": _not_prefix,
        "items": _not_items,
        "contained": _not_contained,
    },
    "object": {
        "minProperties": lambda item: [{"maxProperties": item["minProperties"] - 1}] if item["minProperties"] else [],
        "maxProperties": lambda item: [{"minProperties": item["maxProperties"] + 1}],
        "required": lambda item: [{"properties": {name: False}} for name in item["required"]],
        "properties": _not_properties,
        "additionalProperties": _not_additional,
    },
}
_BOUNDS: Mapping[str, Callable[..., object]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}


def all_of(*schemas: object) -> object:
    """The schema of what all of these admit."""
    kept: list[object] = []
    for schema in schemas:
        if schema is False:
            return False
        if schema is not True and schema != {} and schema not in kept:
            kept.append(schema)
    return {"allOf": kept} if len(kept) > 1 else kept[0] if kept else True


def _join_items(a: Alternative, b: Alternative, found: Alternative) -> None:
    first, second = a.get("prefixItems", []), b.get("prefixItems", [])
    rest = all_of(a.get("items", True), b.get("items", True))
    if first or second:
        longest = max(len(first), len(second))
        padded = [
            [*prefix, *[item.get("items", True)] * (longest - len(prefix))]
            for prefix, item in ((first, a), (second, b))
        ]
        found["prefixItems"] = [all_of(x, y) for x, y in zip(*padded, strict=True)]
    if "items" in a or "items" in b:
        found["items"] = rest


def _join_properties(a: Alternative, b: Alternative, found: Alternative) -> None:
    names = list(dict.fromkeys([*a.get("properties", {}), *b.get("properties", {})]))
    if names:
        found["properties"] = {name: all_of(of_property(a, name), of_property(b, name)) for name in names}
    first, second = a.get("additionalProperties", True), b.get("additionalProperties", True)
    patterns, more = a.get("patternProperties", {}), b.get("patternProperties", {})
    if patterns and more and not (first is True and second is True):
        raise UnknownLength("'patternProperties' of several schemas")
    if patterns or more:
        joined = {name: all_of(patterns.get(name, True), more.get(name, True)) for name in {**patterns, **more}}
        other = second if patterns else first
        found["patternProperties"] = {name: all_of(schema, other) for name, schema in joined.items()}
    if "additionalProperties" in a or "additionalProperties" in b:
        found["additionalProperties"] = all_of(first, second)
    if "extra" in a and "extra" in b and a["extra"] != b["extra"]:
        raise UnknownLength("'not' of several 'additionalProperties'")
    if "extra" in a or "extra" in b:
        for item, other in ((a, b), (b, a)):
            if "extra" in item and set(other.get("properties", {})) - set(item.get("properties", {})):
                raise UnknownLength("'not' of 'additionalProperties' next to 'properties'")


def of_property(item: Alternative, name: str) -> object:
    """The schema of the property of this name."""
    matched = [schema for pattern, schema in item.get("patternProperties", {}).items() if _finds(pattern, name)]
    if name in item.get("properties", {}):
        matched.append(item["properties"][name])
    return all_of(*matched) if matched else item.get("additionalProperties", True)


def _finds(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text, re.ASCII) is not None
    except re.error as error:
        raise UnknownLength(f"the pattern {pattern!r}") from error


def _of_values(values: Sequence[object]) -> list[Alternative]:
    """The alternatives of exactly these values; strings are one, and so are numbers."""
    found = [_of_value(value) for value in values]
    for kind in ("string", "number", "boolean"):
        listed = [value for item in found if item["type"] == kind for value in item["enum"]]
        joined: list[Alternative] = [{"type": kind, "enum": listed}] if listed else []
        found = [*(item for item in found if item["type"] != kind), *joined]
    return found


def _of_value(value: object) -> Alternative:
    """The alternative of exactly this value."""
    if value is None:
        return {"type": "null"}
    if isinstance(value, bool):
        return {"type": "boolean", "enum": [value]}
    if isinstance(value, str):
        return {"type": "string", "enum": [value]}
    if isinstance(value, int | float):
        return {"type": "number", "enum": [value]}
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        found: Alternative = {"type": "array", "minItems": len(value), "maxItems": len(value)}
        return {**found, "prefixItems": items} if items else found
    if not isinstance(value, dict):
        raise UnknownLength(f"the value {value!r}")
    inner = {name: {"const": item} for name, item in value.items()}
    return {
        **{"type": "object", "properties": inner, "required": list(inner)},
        **{"additionalProperties": False, "closed": True},
    }


def _can_be(item: Alternative) -> bool:
    """False if it is plain that nothing is admitted; values of `enum` that are not admitted are taken out."""
    if "enum" in item:
        item["enum"] = [value for value in item["enum"] if _fits(value, item)]
        if not item["enum"]:
            return False
        # Whatever else is said of them has been looked at.
        for keyword in [keyword for keyword in item if keyword not in ("type", "enum", "negated", "formats")]:
            del item[keyword]
    pairs = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
    if any(low in item and high in item and item[low] > item[high] for low, high in pairs):
        return False
    if item["type"] in ("integer", "number"):
        return _has_numbers(item)
    if item["type"] == "object":
        required = item.get("required", ())
        if "maxProperties" in item and len(required) > item["maxProperties"]:
            return False
        return all(of_property(item, name) is not False for name in required) and not _apart(item)
    if item["type"] == "array":
        return all(schema is not False for schema in item.get("prefixItems", [])[: item.get("minItems", 0)])
    return True


def _apart(item: Alternative) -> bool:
    """True if a required property must be two different constants: the usual way to tell alternatives apart."""
    for name in item.get("required", ()):
        schema = of_property(item, name)
        parts = schema["allOf"] if isinstance(schema, dict) and set(schema) == {"allOf"} else [schema]
        values: list[object] | None = None
        types: set[str] | None = None
        for part in parts:
            if not isinstance(part, dict):
                continue
            own = part["enum"] if "enum" in part else [part["const"]] if "const" in part else None
            if isinstance(own, list):
                values = own if values is None else [v for v in values if any(_equal(v, other) for other in own)]
            kinds = part.get("type")
            if isinstance(kinds, str):
                wide = {"number", "integer"} if kinds == "number" else {kinds}
                types = wide if types is None else types & wide
        if values == [] or types == set():
            return True
    return False


def _has_numbers(item: Alternative) -> bool:
    low = max((item[name] for name in ("minimum", "exclusiveMinimum") if name in item), default=-math.inf)
    high = min((item[name] for name in ("maximum", "exclusiveMaximum") if name in item), default=math.inf)
    if low > high or (item["type"] == "integer" and item.get("fraction")):
        return False
    return low < high or (item.get("exclusiveMinimum") != low and item.get("exclusiveMaximum") != high)


def _fits(value: object, item: Alternative) -> bool:
    """True if a string, number or bool is one of the alternative's."""
    if isinstance(value, bool):
        return True
    if isinstance(value, str):
        if not item.get("minLength", 0) <= len(value) <= item.get("maxLength", math.inf):
            return False
        if any(_finds(pattern, value) for pattern in item.get("nopatterns", ())):
            return False
        excluded = any(value == other for other in item.get("excluded", ()))
        return all(_finds(pattern, value) for pattern in item.get("patterns", ())) and not excluded
    if not isinstance(value, int | float):
        return False
    is_whole = value == int(value)
    if (item["type"] == "integer" and not is_whole) or (item.get("fraction") and is_whole):
        return False
    low, high = item.get("minimum", -math.inf), item.get("maximum", math.inf)
    above, below = item.get("exclusiveMinimum", -math.inf), item.get("exclusiveMaximum", math.inf)
    if not (low <= value <= high and above < value < below):
        return False
    if "multipleOf" in item and (Fraction(str(value)) / Fraction(str(item["multipleOf"]))).denominator != 1:
        return False
    return not any(_equal(value, other) for other in item.get("excluded", ()))


def _equal(a: object, b: object) -> bool:
    """Equal in JSON: true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnknownLength(f"the bound {value!r}")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UnknownLength(f"the count {value!r}")
    return value


def _common_multiple(a: float, b: float) -> float:
    first, second = Fraction(str(a)), Fraction(str(b))
    found = Fraction(math.lcm(first.numerator, second.numerator), math.gcd(first.denominator, second.denominator))
    return int(found) if found.denominator == 1 else float(found)


def _distinct(items: Sequence[Alternative]) -> list[Alternative]:
    found = {json.dumps(item, sort_keys=True): item for item in items}
    if len(found) > _MOST:
        raise UnknownLength("too many alternatives")
    return list(found.values())
