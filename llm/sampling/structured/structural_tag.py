"""`structural_tag`: free text in which a beginning, such as `<f>`, is followed by JSON of a schema and by an end.

vLLM's second form, `{"format": {"type": ...}}`, is formats that hold each other, whose names are xgrammar's; its first,
`{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, is read as one of them. Refused are free text that
nothing ends, unless it comes last, and the formats `grammar` and `qwen_xml_parameter`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llm.base.text import list_names, show
from llm.base.types import JsonObject
from llm.errors import ValidationError
from llm.sampling.structured import first_line, unusable
from llm.sampling.structured.json_schema import compile_schema, language_of
from llm.sampling.structured.language import DONE, Language, rules_of
from llm.sampling.structured.regex import UnknownLength, ascii_classes, complement, parse_regex, utf8
from llm.sampling.structured.schema import check_numbers, check_size, read_schema

# The fields of each format, and what they must be.
_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "const_string": {"value": str},
    "json_schema": {"json_schema": (dict, bool)},
    "regex": {"pattern": str},
    "any_text": {},
    "sequence": {"elements": list},
    "or": {"elements": list},
    "tag": {"begin": str, "content": dict, "end": str},
    "triggered_tags": {"triggers": list, "tags": list},
    "tags_with_separator": {"tags": list, "separator": str},
}
_FLAGS = ("at_least_one", "stop_after_first")
_FREE = ("any_text", "triggered_tags")


def read_format(given: object, closed: bool, is_last: bool = True) -> JsonObject:
    """The format as plain data, its schemas read; raises `ValidationError` for one that is not understood.

    Args:
        closed: objects of schemas allow no additional properties unless the schema says so.
        is_last: nothing follows it.
    """
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(kind, str) or kind not in _FIELDS:
        raise _wrong(given, f"the type of a format must be one of {', '.join(_FIELDS)}, got {show(kind)}")
    wanted = _FIELDS[kind]
    flags = _FLAGS if kind in ("triggered_tags", "tags_with_separator") else ()
    unknown = [name for name, value in given.items() if name not in ("type", *wanted, *flags) and value not in ([], ())]
    if unknown:
        raise _wrong(given, f"a format {kind} has no {list_names(map(str, unknown))}")
    for name, type_of in wanted.items():
        if not isinstance(given.get(name), type_of):
            raise _wrong(given, f"the {name} of a format {kind} is {show(given.get(name))}")
    for name in flags:
        if not isinstance(given.get(name, False), bool):
            raise _wrong(given, f"{name} is {show(given[name])}, must be true or false")
    if kind in _FREE and not is_last:
        raise _wrong(
            given, f"nothing ends the text of {kind} here; it can stand last, and any_text in a tag with an end"
        )
    return _read_fields(kind, dict(given), closed, is_last)


def _read_fields(kind: str, given: JsonObject, closed: bool, is_last: bool) -> JsonObject:
    if kind == "json_schema":
        given["json_schema"] = read_schema(given["json_schema"], closed)
    elif kind in ("sequence", "or"):
        elements = given["elements"]
        if not elements:
            raise _wrong(given, f"a format {kind} needs at least one element")
        last = len(elements) - 1
        given["elements"] = [
            read_format(element, closed, is_last and kind == "sequence" and index == last)
            for index, element in enumerate(elements)
        ]
    elif kind == "tag":
        # Text is ended by the end of its tag.
        ends = given["content"].get("type") == "any_text" and bool(given["end"])
        given["content"] = read_format(given["content"], closed, ends or (is_last and not given["end"]))
    elif "tags" in given:
        tags = [{"type": "tag", **tag} if isinstance(tag, Mapping) else tag for tag in given["tags"]]
        if not tags or any(not isinstance(tag, Mapping) or tag["type"] != "tag" for tag in tags):
            raise _wrong(given, "tags must be a list of at least one tag")
        given["tags"] = [read_format(tag, closed, False) for tag in tags]
        for tag in given["tags"] if kind == "triggered_tags" else []:
            _trigger_of(tag["begin"], given["triggers"])
    return given


def _trigger_of(begin: str, triggers: Sequence[object]) -> str:
    found = [text for text in triggers if isinstance(text, str) and text and begin.startswith(text)]
    if len(found) != 1:
        raise _wrong(begin, f"{show(begin)} starts with {'none' if not found else 'several'} of the triggers")
    return found[0]


def format_grammar(given: JsonObject, settings: JsonObject, special_tokens: Mapping[str, int]) -> str:
    """The Lark grammar of a format that was read.

    Args:
        settings: of the JSON's form.
        special_tokens: name -> id; texts among them are tokens.
    """
    writer = _Writer(settings, special_tokens)
    start = writer.format(given)
    return "\n".join(["%llguidance {}", f"start: {start}", "TEXT: /(.|\\n)*/", *writer.rules])


def schema_rules(schema: object, start: str, settings: JsonObject) -> list[str]:
    """Rules for the JSON of a schema, of which the first is `start`."""
    language, root, why = language_of("json", schema, lambda language: compile_schema(language, schema))
    if language is not None and language.has_grammar:
        return rules_of(language, root, start)
    check_numbers(schema, why)
    return [f"{start}: %json " + json.dumps({**(schema if isinstance(schema, dict) else {}), "x-guidance": settings})]


@dataclass
class _Writer:
    """Writes expressions; rules that they need are collected in `rules`."""

    settings: JsonObject
    special_tokens: Mapping[str, int]
    rules: list[str] = field(default_factory=list)

    def format(self, given: JsonObject) -> str:
        kind = given["type"]
        if kind == "const_string":
            return self._text(given["value"])
        if kind == "json_schema":
            name = f"json_{len(self.rules)}"
            self.rules += schema_rules(given["json_schema"], name, self.settings)
            return name
        if kind == "regex":
            return self._rule("/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", _pattern(given)) + "/")
        if kind == "any_text":
            return "TEXT"
        if kind == "sequence":
            return " ".join(map(self.format, given["elements"]))
        if kind == "or":
            return self._any_of(map(self.format, given["elements"]))
        return str(getattr(self, f"_{kind}")(given))

    def _tag(self, given: JsonObject) -> str:
        begin, content, end = given["begin"], given["content"], given["end"]
        if content["type"] == "any_text" and end:
            return f"{self._text(begin)} {self._text_until(end)}"
        return f"{self._text(begin)} {self.format(content)} {self._text(end)}"

    def _triggered_tags(self, given: JsonObject) -> str:
        triggered, bare = [], []
        heads = {trigger: self._text_until(trigger) for trigger in dict.fromkeys(given["triggers"])}
        for tag in given["tags"]:
            trigger = _trigger_of(tag["begin"], given["triggers"])
            bare.append(self._rule(self._tag(tag)))
            rest = {**tag, "begin": tag["begin"][len(trigger) :]}
            triggered.append(f"{heads[trigger]} {self._tag(rest)}")
        if given.get("at_least_one") and given.get("stop_after_first"):
            return self._any_of(bare)
        first = f"{self._any_of(bare)} " if given.get("at_least_one") else ""
        if given.get("stop_after_first"):
            return self._any_of([*triggered, "TEXT"])
        return f"{first}{self._any_of(triggered)}* TEXT"

    def _tags_with_separator(self, given: JsonObject) -> str:
        tag = self._any_of(map(self._tag, given["tags"]))
        more = "" if given.get("stop_after_first") else f" ({self._text(given['separator'])} {tag})*"
        return f"{tag}{more}" if given.get("at_least_one") else f"({tag}{more})?"

    def _text_until(self, end: str) -> str:
        """Free text up to the first `end`, and it: no text holds a special token, of all others the first counts."""
        pieces = _pieces(end, self.special_tokens)
        if pieces[0] in self.special_tokens:
            return f"TEXT {self._text(end)}"
        if len(pieces) > 1:
            raise _wrong(end, f"{show(end)} ends free text, so its special token must come first in it")
        name = f"until_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: TEXT {json.dumps(end)}")
        return name

    def _text(self, text: str) -> str:
        """By their ids, special tokens may have any name."""
        pieces = _pieces(text, self.special_tokens)
        tokens = self.special_tokens
        return " ".join(f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece) for piece in pieces) or '""'

    def _any_of(self, expressions: Iterable[str]) -> str:
        names = [self._rule(expression) for expression in expressions]
        return f"({' | '.join(names)})"

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name


def _pieces(text: str, special_tokens: Collection[str]) -> list[str]:
    """Special tokens, and the text between them."""
    names = sorted((re.escape(token) for token in special_tokens if token.strip()), key=len, reverse=True)
    return [piece for piece in re.split(f"({'|'.join(names)})", text) if piece] if names else [text]


def format_language(language: Language, given: JsonObject, special_tokens: Collection[str]) -> int:
    """The node of all texts of a format that was read, in which a special token is its `special_bytes`.

    Raises:
        UnknownLength: the format has free text with triggers, or a schema or pattern of unknown length.
    """
    return _Lengths(language, special_tokens).format(given)


def special_bytes(name: str) -> bytes:
    """What stands for a special token: no text has the first byte."""
    return b"\xff" + name.encode()


@dataclass
class _Lengths:
    """As `_Writer`, into a language."""

    language: Language
    special_tokens: Collection[str]
    schemas: int = 0

    def format(self, given: JsonObject) -> int:
        language, kind = self.language, given["type"]
        if kind == "const_string":
            return self._text(given["value"])
        if kind == "json_schema":
            self.schemas += 1
            return compile_schema(language, given["json_schema"], f"{self.schemas} ")
        if kind == "regex":
            return parse_regex(language, given["pattern"], lambda ranges: utf8(language, ranges))
        if kind == "any_text":
            return language.star(self._character())
        if kind == "sequence":
            return language.cat(*map(self.format, given["elements"]))
        if kind == "or":
            return language.alt(*map(self.format, given["elements"]))
        if kind == "tag":
            begin, content, end = given["begin"], given["content"], given["end"]
            if content["type"] == "any_text" and end:
                return language.cat(self._text(begin), self._text_until(end))
            return language.cat(self._text(begin), self.format(content), self._text(end))
        if kind == "tags_with_separator":
            tag = language.alt(*map(self.format, given["tags"]))
            more = language.star(language.cat(self._text(given["separator"]), tag))
            some = tag if given.get("stop_after_first") else language.cat(tag, more)
            return some if given.get("at_least_one") else language.optional(some)
        raise UnknownLength(f"a format {kind}")

    def _text_until(self, end: str) -> int:
        """Free text up to the first `end`, and it, as the automaton of Knuth, Morris and Pratt (1977)."""
        language = self.language
        if _pieces(end, self.special_tokens)[0] in self.special_tokens:
            return language.cat(language.star(self._character()), self._text(end))
        letters = sorted(set(end))
        others = complement([(ord(letter), ord(letter)) for letter in letters])

        def state(read: str) -> int:
            """What follows when the text so far ends with `read`, a beginning of `end`."""
            return language.ref(f"until {end!r} {len(read)}") if read != end else DONE

        for length in range(len(end)):
            choices = [language.cat(utf8(language, others), state(""))]
            for letter in letters:
                text = end[:length] + letter
                longest = next(text[start:] for start in range(len(text) + 1) if end.startswith(text[start:]))
                choices.append(language.cat(language.literal(letter.encode()), state(longest)))
            language.define(f"until {end!r} {length}", language.alt(*choices))
        return state("")

    def _text(self, text: str) -> int:
        pieces = _pieces(text, self.special_tokens)
        data = (special_bytes(piece) if piece in self.special_tokens else piece.encode() for piece in pieces)
        return self.language.literal(b"".join(data))

    def _character(self) -> int:
        return utf8(self.language, complement([]))


def _pattern(given: JsonObject) -> str:
    if "\n" in given["pattern"]:
        raise _wrong(given, "a pattern of a format has no line breaks; write \\n")
    return ascii_classes(given["pattern"])


def _wrong(value: object, reason: str) -> ValidationError:
    return unusable("structural_tag", value, reason)


_FORM = "it must be {'structures': [{'begin': ..., 'schema': ..., 'end': ...}], 'triggers': [...]} or {'format': ...}"


def read_tags(value: object, disable_additional_properties: bool) -> JsonObject:
    """The format, or the structures as one; raises `ValidationError` if the value has another form."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise unusable("structural_tag", value, f"it is no JSON ({first_line(error)})") from error
    check_size("structural_tag", parsed)
    if not isinstance(parsed, Mapping):
        raise unusable("structural_tag", value, _FORM)
    if "format" in parsed:
        return read_format(parsed["format"], disable_additional_properties)
    structures, triggers = parsed.get("structures"), parsed.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise unusable("structural_tag", value, _FORM)
    given = [text for text in triggers if isinstance(text, str) and text]
    tags = [_read_tag(item, given) for item in structures]
    used = dict.fromkeys(next(text for text in given if tag["begin"].startswith(text)) for tag in tags)
    return read_format({"type": "triggered_tags", "triggers": list(used), "tags": tags}, disable_additional_properties)


def _read_tag(item: object, triggers: list[str]) -> JsonObject:
    """The structure as a tag of a format."""
    begin = item.get("begin") if isinstance(item, Mapping) else None
    end = item.get("end") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or not isinstance(begin, str) or not isinstance(end, str) or "schema" not in item:
        raise unusable("structural_tag", item, _FORM)
    if not begin.startswith(tuple(triggers)):
        raise unusable("structural_tag", item, f"{begin!r} starts with none of the triggers")
    if not isinstance(item["schema"], dict):
        raise unusable("structural_tag", item, "a schema is a JSON object")
    content = {"type": "json_schema", "json_schema": item["schema"]}
    return {"type": "tag", "begin": begin, "content": content, "end": end}
