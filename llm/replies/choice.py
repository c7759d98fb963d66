"""Whether a reply calls functions, and which: OpenAI's `tool_choice` and `parallel_tool_calls`.

Owns the constraint of a reply that must call: the calls and nothing else, in the form that the template teaches. Where
no form is known, or a schema cannot be kept in it, it is JSON, as in vLLM: a list of `{"name", "parameters"}` where a
call is required, the arguments alone where the function is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llm.base.checks import check_flag
from llm.base.text import quote, show
from llm.base.types import JsonObject
from llm.errors import ValidationError, nearest
from llm.replies.calls import Call, call_of, json_object, json_value
from llm.replies.forms import CannotWrite, Writing
from llm.sampling_params import SamplingParams, StructuredOutputsParams

_CLOSED: JsonObject = {"additionalProperties": False}
_NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, **_CLOSED}
_DEFINITIONS = ("$defs", "definitions")
_OF_DATA = ("const", "enum", "default", "examples")  # their values are no schemas


@dataclass(frozen=True)
class ToolChoice:
    """A choice.

    Attributes:
        kind: "none", "auto", "required" or "named".
        name: of the function, if it is named; else "".
        is_parallel: False: a reply has one call at most.
        functions: the schema of each function's arguments, by its name.
    """

    kind: str = "auto"
    name: str = ""
    is_parallel: bool = True
    functions: Mapping[str, JsonObject] = field(default_factory=dict)

    @classmethod
    def of(cls, given: object, parallel: object, tools: object) -> tuple[ToolChoice, list[JsonObject] | None]:
        """The choice, and the tools that the chat template shows the model; None: it shows none.

        Raises:
            ValidationError: one of them is wrong, or a call is wanted of a function that is not there.
        """
        if parallel is not None:
            check_flag("parallel_tool_calls", parallel)
        if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools)):
            raise ValidationError("tools must be a list of objects.", parameter="tools", value=tools)
        name = _named(given)
        if name is None and given not in (None, "auto", "none", "required"):
            right = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"
            raise ValidationError(f"tool_choice must be {right}, got {show(given)}.", parameter="tool_choice")
        kind = "named" if name else str(given or "auto")
        functions = _functions(tools or [], strict=kind in ("named", "required"))
        choice = cls(kind, name or "", parallel is not False, functions)
        if choice.forces:
            choice._check_functions(list(functions))
        return choice, None if choice.kind == "none" or not tools else tools

    @property
    def forces(self) -> bool:
        """True if the reply is a call, and nothing else."""
        return self.kind in ("required", "named")

    def structured(self, writing: Writing | None) -> StructuredOutputsParams | None:
        """What constrains the reply; None: nothing does."""
        if not self.forces:
            return None
        named = {self.name: self.functions[self.name]} if self.kind == "named" else self.functions
        if writing is not None:
            try:
                made = writing.format(named, self.is_parallel and self.kind == "required")
                return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": made})
            except CannotWrite:
                pass
        return StructuredOutputsParams(
            json=named[self.name] if self.kind == "named" else _required(named, self.is_parallel)
        )

    def constrained(
        self,
        params: SamplingParams | Sequence[SamplingParams] | None,
        writing: Writing | None,
        default: Callable[[], SamplingParams],
    ) -> SamplingParams | Sequence[SamplingParams] | None:
        """`params`, or the default ones, with `structured`; what is none is left to who checks it.

        Raises:
            ValidationError: they have a constraint of their own.
        """
        structured = self.structured(writing)
        if structured is None:
            return params
        params = default() if params is None else params
        if isinstance(params, list | tuple):
            return [_with(own, structured) for own in params]
        return _with(params, structured) if isinstance(params, SamplingParams) else params

    def constrained_row(self, params: SamplingParams, writing: Writing | None) -> SamplingParams:
        """As `constrained`, of one row."""
        structured = self.structured(writing)
        return params if structured is None else _with(params, structured)

    def calls(self, text: str) -> list[Call]:
        """The calls of a reply that had to call, as JSON; none if it is not complete."""
        if self.kind == "named":
            arguments = json_object(text)
            return [] if arguments is None else [(self.name, arguments)]
        items = json_value(text)
        found = [call_of(item) for item in items] if isinstance(items, list) else []
        return [] if None in found else [call for call in found if call is not None]

    def _check_functions(self, names: list[str]) -> None:
        if not names:
            raise ValidationError("tools must be given where tool_choice asks for a call.", parameter="tools")
        if self.name and self.name not in names:
            hint = nearest(self.name, names)
            message = f"tool_choice names {quote(self.name)}, which is none of the tools.{hint}"
            raise ValidationError(message, parameter="tool_choice", value=self.name)


def _with(params: SamplingParams, structured: StructuredOutputsParams) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        return params
    if params.structured_outputs is not None:
        message = "structured_outputs must be None where tool_choice asks for a call: the call is the constraint."
        raise ValidationError(message, parameter="structured_outputs")
    return dataclasses.replace(params, structured_outputs=structured)


def _named(given: object) -> str | None:
    function = given.get("function") if isinstance(given, Mapping) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and name else None


def _functions(tools: Sequence[JsonObject], strict: bool) -> dict[str, JsonObject]:
    """The schema of each function's arguments, by its name; not `strict`: tools of another form are left out."""
    found: dict[str, JsonObject] = {}
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name or name in found:
            if not strict:
                continue
            message = "tools must be functions with names of their own: {'type': 'function', 'function': {'name': ...}}"
            raise ValidationError(f"{message}, got {show(tool)}.", parameter="tools")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            if not strict:
                continue
            message = f"the parameters of the tool {quote(name)} must be a JSON schema, an object, got "
            raise ValidationError(f"{message}{show(parameters)}.", parameter="tools")
        found[name] = _NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
    return found


def _required(functions: Mapping[str, JsonObject], is_parallel: bool) -> JsonObject:
    """A list of at least one call. References begin at the root, so definitions of all functions move there."""
    definitions: JsonObject = {}
    choices: list[JsonObject] = []
    for index, (name, schema) in enumerate(functions.items()):
        place = f"tool{index}"
        for keyword in _DEFINITIONS:
            own = schema.get(keyword)
            if isinstance(own, Mapping):
                definitions |= {f"{place}.{keyword}.{key}": _moved(item, place) for key, item in own.items()}
        definitions[place] = _moved({key: item for key, item in schema.items() if key not in _DEFINITIONS}, place)
        properties = {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}}
        choices.append({"type": "object", "properties": properties, "required": list(properties), **_CLOSED})
    several: JsonObject = {} if is_parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **several, "items": {"anyOf": choices}, "$defs": definitions}


def _moved(schema: object, place: str) -> object:
    """The schema with its references to where `_required` puts what they name."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: item if key in _OF_DATA else _moved(item, place) for key, item in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        head, keyword, name = target[1:].split("/", 2) if target.count("/") > 1 else ("", "", "")
        inside = not head and keyword in _DEFINITIONS
        moved["$ref"] = f"#/$defs/{place}.{keyword}.{name}" if inside else f"#/$defs/{place}{target[1:]}"
    return moved
