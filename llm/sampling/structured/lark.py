"""Writes a `Language` as a grammar for llguidance: what one reads the other reads, because there is one source.

Lexemes become terminals, all else rules. llguidance takes the longest terminal that can come next and does not go back:
where one lexeme begins like another, they must be told apart before the shorter one ends and the text goes on.
"""

from __future__ import annotations

from collections import Counter

from llm.sampling.structured.language import DONE, Language


def grammar_of(language: Language, root: int) -> str:
    """The grammar whose `start` is the node `root`."""
    return "\n".join(rules_of(language, root, "start"))


def rules_of(language: Language, root: int, start: str) -> list[str]:
    """Rules, of which `start` is the node `root`; the names of the others begin with it."""
    return _Writer(language, start).rules(root)


class _Writer:
    def __init__(self, language: Language, start: str) -> None:
        self._language = language
        self._start = start
        self._names: dict[int, str] = {}
        self._waiting: list[int] = []
        self._terminals: dict[str, str] = {}
        self._shared: set[int] = set()

    def rules(self, root: int) -> list[str]:
        self._shared = self._find_shared(root)
        written = [f"{self._start}: {self._rule(root)}"]
        while self._waiting:
            node = self._waiting.pop()
            written.append(f"{self._names[node]}: {self._body(node)}")
        return [*written, *(f"{name}: {text}" for text, name in self._terminals.items())]

    def _find_shared(self, root: int) -> set[int]:
        """The nodes that several others hold."""
        seen, left, held = {root}, [root], Counter[int]()
        while left:
            for inner in self._inside(left.pop()):
                held[inner] += 1
                if inner not in seen:
                    seen.add(inner)
                    left.append(inner)
        return {node for node, count in held.items() if count > 1}

    def _inside(self, node: int) -> tuple[int, ...]:
        kind, *arguments = self._language.kinds[node]
        if kind == "alt":
            return tuple(arguments[0])
        if kind == "ref":
            return (self._language.definition(arguments[0]),)
        return tuple(arguments) if kind == "cat" else (arguments[0],) if kind in ("star", "repeat") else ()

    def _rule(self, node: int) -> str:
        """The name of the node's rule, which is written later."""
        if node not in self._names:
            self._names[node] = f"{self._start}_{len(self._names)}"
            self._waiting.append(node)
        return self._names[node]

    def _body(self, node: int) -> str:
        """A rule's right side."""
        kind, *arguments = self._language.kinds[node]
        if kind == "alt":
            return " | ".join(self._expression(choice) for choice in arguments[0])
        if kind != "cat":
            return self._expression(node)
        parts = []
        while kind == "cat":
            parts.append(self._expression(arguments[0]))
            node = arguments[1]
            kind, *arguments = self._language.kinds[node]
            if node in self._shared:
                break
        return " ".join([*parts, self._expression(node)])

    def _expression(self, node: int) -> str:
        kind, *arguments = self._language.kinds[node]
        if node == DONE:
            return '""'
        if kind == "lexeme":
            return self._terminals.setdefault(arguments[1], f"{self._start.upper()}_{len(self._terminals)}")
        if kind in ("cat", "alt"):
            return self._rule(node)
        if kind == "ref":
            return self._rule(self._language.definition(arguments[0]))
        inner = self._expression(arguments[0])
        if kind == "star":
            return f"({inner})*"
        if kind == "repeat":
            low, high = arguments[1:]
            return f"({inner}){{{low},{'' if high == -1 else high}}}"
        raise ValueError(f"a {kind} outside of a lexeme")
