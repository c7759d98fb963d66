"""Languages of bytes, read one byte at a time, and the fewest bytes that complete a string.

Expressions, their derivatives (Brzozowski 1964) and their lengths. The derivative of an expression by a byte is
the expression of what may follow; a reading state is that expression. Equal expressions are one node, so states can be
compared and their lengths are computed once. References by name allow recursive languages, such as nested JSON.
`grammar_of` writes a language for llguidance: what one reads the other reads, because there is one source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

# More bytes than any answer has: there is no string.
IMPOSSIBLE = 1 << 30
EMPTY = 0  # the node of no string at all
DONE = 1  # the node of the empty string
ALL_BYTES = (1 << 256) - 1
_UNKNOWN = -1
_MOST_STATES = 5000  # of one automaton
_LONG_TEXT = 64  # a longer one is a node of its own, not one for each byte
_MOST_COMPARED = 64  # alternatives of one alternation that are compared with each other


class Language:
    """An arena of expressions; a node is an index into it.

    Args:
        lacking: bytes that no string has, for no token writes them.

    Attributes:
        kinds: per node ("set", bits), ("cat", head, tail), ("alt", nodes), ("star", node), ("repeat", node, low, high)
            (high -1: no limit), ("text", bytes, start), ("lexeme", node, text), ("ref", name) or
            ("machine", number, state).
        has_grammar: False if a word has no regular expression for `grammar_of`.
        caveat: what answers may not meet that was asked for; "" if they meet all of it.
        nullable: per node, True if it contains the empty string.
        needs: per node, the length in bytes of its shortest string; valid for references after `close`.
        reach: per node, an upper bound of `needs` over all states reachable from it; `IMPOSSIBLE` if values nest
            without limit. Valid after `close`.
    """

    def __init__(self, lacking: Collection[int] = ()) -> None:
        self.lacking = frozenset(lacking)
        self._writable = ALL_BYTES & ~sum(1 << byte for byte in self.lacking)
        self.caveat = ""
        self.has_grammar = True
        self._machines: list[_Machine] = []
        self._splits: dict[int, frozenset[int]] = {}
        self.kinds: list[tuple] = []
        self.nullable: list[bool] = []
        self.needs: list[int] = []
        self.reach: list[int] = []
        self._index: dict[tuple, int] = {}
        self._moves: dict[tuple[int, int], int] = {}
        self._contained: dict[tuple[int, int], bool] = {}
        self._definitions: dict[str, int] = {}
        self._closed = False
        self._node(("alt", ()), False)
        self._node(("done",), True)

    # --- Building ---------------------------------------------------------------------------------------------------

    def byte_set(self, bits: int) -> int:
        """One byte, out of those whose bits are set."""
        bits &= self._writable
        return self._node(("set", bits), False) if bits else EMPTY

    def literal(self, data: bytes) -> int:
        if len(data) > _LONG_TEXT:
            return EMPTY if self.lacking.intersection(data) else self._node(("text", data, 0), False)
        return self.cat(*(self.byte_set(1 << byte) for byte in data))

    def cat(self, *parts: int) -> int:
        result = DONE
        for part in reversed(parts):
            result = self._cat(part, result)
        return result

    def alt(self, *choices: int) -> int:
        flat: set[int] = set()
        bits = 0
        for choice in choices:
            for node in self.kinds[choice][1] if self.kinds[choice][0] == "alt" else (choice,):
                if self.kinds[node][0] == "set":
                    bits |= self.kinds[node][1]
                else:
                    flat.add(node)
        if bits:
            flat.add(self.byte_set(bits))
        if len(flat) == 1:
            return flat.pop()
        nodes = tuple(sorted(self._without_contained(flat)))
        if len(nodes) == 1:
            return nodes[0]
        return self._node(("alt", nodes), any(self.nullable[node] for node in nodes)) if nodes else EMPTY

    def words(self, texts: Iterable[bytes]) -> int:
        """One of these strings, as a trie: a byte leaves one alternative of each node."""
        # (length of a prefix of the last string, what it can continue with), the shortest first.
        open_nodes: list[tuple[int, list[int]]] = [(0, [])]
        last = b""

        def close(length: int) -> None:
            while open_nodes[-1][0] > length:
                end, choices = open_nodes.pop()
                start = max(length, open_nodes[-1][0])
                if open_nodes[-1][0] < start:
                    open_nodes.append((start, []))
                open_nodes[-1][1].append(self._cat(self.literal(last[start:end]), self.alt(*choices)))

        for text in sorted(set(texts)):
            close(
                next((i for i, (a, b) in enumerate(zip(last, text, strict=False)) if a != b), min(len(last), len(text)))
            )
            open_nodes.append((len(text), [DONE]))
            last = text
        close(0)
        return self.alt(*open_nodes[0][1])

    def star(self, node: int) -> int:
        return DONE if node in (EMPTY, DONE) else self._node(("star", node), True)

    def all_of(self, wanted: Iterable[int], unwanted: Iterable[int] = ()) -> int:
        """The strings of each of the `wanted` expressions and of none of the `unwanted`, all without references.

        Raises:
            ValueError: its automaton has too many states.
        """
        first = (tuple(sorted(set(wanted))), tuple(sorted(set(unwanted))))
        states, left = {first: 0}, [first]
        moves: list[list[tuple[int, int]]] = []
        for state in left:
            moves.append([])
            for bits in self._classes([*state[0], *state[1]]):
                byte = (bits & -bits).bit_length() - 1
                nexts = {self.step(node, byte) for node in state[0]}
                if EMPTY in nexts:
                    continue
                others = {self.step(node, byte) for node in state[1]} - {EMPTY}
                after = (tuple(sorted(nexts)), tuple(sorted(others)))
                if after not in states:
                    if len(states) == _MOST_STATES:
                        raise ValueError("too many states")
                    states[after] = len(states)
                    left.append(after)
                moves[-1].append((bits, states[after]))
        accepts = [all(self.nullable[n] for n in a) and not any(self.nullable[n] for n in b) for a, b in states]
        return self.machine(moves, accepts)

    def machine(self, moves: list[list[tuple[int, int]]], accepts: list[bool]) -> int:
        """The strings of a finite automaton from state 0: per state its (set of bytes, next state), all disjoint."""
        machine = _Machine(moves, accepts, _distances(moves, accepts))
        if machine.needs[0] == IMPOSSIBLE:
            return EMPTY
        self._machines.append(machine)
        return self._state(len(self._machines) - 1, 0)

    def _state(self, number: int, state: int) -> int:
        return self._node(("machine", number, state), self._machines[number].accepts[state])

    def _classes(self, nodes: Iterable[int]) -> list[int]:
        """Sets of bytes, each of bytes that all of the nodes read alike."""
        found = [ALL_BYTES]
        for bits in sorted(frozenset().union(*(self._split(node) for node in nodes))):
            found = [part for each in found for part in (each & bits, each & ~bits) if part]
        return found

    def _split(self, node: int) -> frozenset[int]:
        """Sets of bytes whose members, and the others, the node reads alike."""
        found = self._splits.get(node)
        if found is None:
            kind, *arguments = self.kinds[node]
            if kind == "set":
                found = frozenset({arguments[0]})
            elif kind == "cat":
                found = self._split(arguments[0])
                found |= self._split(arguments[1]) if self.nullable[arguments[0]] else frozenset()
            elif kind == "alt":
                found = frozenset().union(*(self._split(choice) for choice in arguments[0]))
            elif kind in ("star", "repeat", "lexeme"):
                found = self._split(arguments[0])
            elif kind == "text":
                found = frozenset({1 << arguments[0][arguments[1]]})
            elif kind == "machine":
                found = frozenset(bits for bits, _ in self._machines[arguments[0]].moves[arguments[1]])
            elif kind == "ref":
                raise ValueError("a reference inside of an automaton")
            else:
                found = frozenset()
            self._splits[node] = found
        return found

    def optional(self, node: int) -> int:
        return self.alt(DONE, node)

    def repeat(self, node: int, low: int, high: int = -1) -> int:
        """`node` repeated `low` to `high` times; -1: no upper limit."""
        if high == 0 or node == DONE:
            return DONE
        if node == EMPTY:
            return DONE if low == 0 else EMPTY
        if low == 0 and high == -1:
            return self.star(node)
        if (low, high) == (1, 1):
            return node
        return self._node(("repeat", node, low, high), low == 0 or self.nullable[node])

    def lexeme(self, node: int, text: str) -> int:
        """`node` as one word of a grammar, where `text` is the expression for it; see `grammar_of`."""
        return self._node(("lexeme", node, text), self.nullable[node]) if node != EMPTY else EMPTY

    def ref(self, name: str) -> int:
        """A reference to a name that `define` sets, before or later; it must not contain the empty string."""
        return self._node(("ref", name), False)

    def definition(self, name: str) -> int:
        return self._definitions[name]

    def define(self, name: str, node: int) -> None:
        if self.nullable[node]:
            raise ValueError(f"{name} contains the empty string")
        self._definitions[name] = node

    def close(self) -> None:
        """Compute the lengths by fixed-point iteration, once every name is defined."""
        changed = True
        while changed:
            before = list(self.needs)
            for node in range(len(self.kinds)):
                self.needs[node] = self._need(node)
            changed = self.needs != before
        rounds = len(self._definitions) + 2
        for last in (False, True):
            before = list(self.reach)
            for _ in range(rounds):
                before = list(self.reach)
                for node in range(len(self.kinds)):
                    self.reach[node] = self._reach(node)
            if not last:  # still growing: a recursive value
                for node, (old, new) in enumerate(zip(before, self.reach, strict=True)):
                    self.reach[node] = new if old == new else IMPOSSIBLE
        self._closed = True

    # --- Reading ----------------------------------------------------------------------------------------------------

    def step(self, node: int, byte: int) -> int:
        """The derivative of `node` by `byte`; `EMPTY` if none of its strings starts with it."""
        found = self._moves.get((node, byte))
        if found is None:
            found = self._moves[node, byte] = self._derive(node, byte)
        return found

    def read(self, node: int, data: Iterable[int]) -> int:
        for byte in data:
            node = self.step(node, byte)
        return node

    def _derive(self, node: int, byte: int) -> int:
        kind, *arguments = self.kinds[node]
        if kind == "set":
            return DONE if arguments[0] >> byte & 1 else EMPTY
        if kind == "cat":
            head, tail = arguments
            read = self._cat(self.step(head, byte), tail)
            return self.alt(read, self.step(tail, byte)) if self.nullable[head] else read
        if kind == "alt":
            return self.alt(*(self.step(choice, byte) for choice in arguments[0]))
        if kind == "star":
            return self._cat(self.step(arguments[0], byte), node)
        if kind == "repeat":
            inner, low, high = arguments
            rest = self.repeat(inner, max(0, low - 1), high if high == -1 else high - 1)
            return self._cat(self.step(inner, byte), rest)
        if kind == "text":
            data, start = arguments
            if data[start] != byte:
                return EMPTY
            return self._node(("text", data, start + 1), False) if start + 1 < len(data) else DONE
        if kind == "lexeme":
            return self.step(arguments[0], byte)
        if kind == "machine":
            number, state = arguments
            machine = self._machines[number]
            after = next((target for bits, target in machine.moves[state] if bits >> byte & 1), None)
            return EMPTY if after is None or machine.needs[after] == IMPOSSIBLE else self._state(number, after)
        return self.step(self._definitions[arguments[0]], byte) if kind == "ref" else EMPTY

    # --- Nodes ------------------------------------------------------------------------------------------------------

    def _without_contained(self, nodes: set[int]) -> set[int]:
        """Without the repetitions that another alternative contains.

        A text splits into the repetitions of `(x{0,200}y?){0,50}` in as many ways as there are pairs of counts.
        All but a few are contained in others; kept, they would make each state as large as the product of the counts.
        """
        if not 1 < len(nodes) <= _MOST_COMPARED:
            return nodes
        heads = {node: self._head(node) for node in nodes}
        if not any(self.kinds[head][0] == "repeat" for head in heads.values()):
            return nodes
        compared = [node for node in nodes if self.nullable[heads[node]]]
        kept = nodes
        for node in sorted(compared):
            others = [other for other in compared if other != node and other in kept]
            if any(self._is_within(node, other) for other in others):
                kept = kept - {node}
        return kept

    def _head(self, node: int) -> int:
        return self.kinds[node][1] if self.kinds[node][0] == "cat" else node

    def _is_within(self, node: int, other: int) -> bool:
        """True if it is plain that every string of `node` is one of `other`."""
        if node == other or (node == DONE and self.nullable[other]):
            return True
        found = self._contained.get((node, other))
        if found is None:
            found = self._contained[node, other] = self._find_within(node, other)
        return found

    def _find_within(self, node: int, other: int) -> bool:
        kind, outer = self.kinds[node], self.kinds[other]
        if outer[0] == "cat" and self.nullable[outer[1]] and self._is_within(node, outer[2]):
            return True
        if kind[0] == outer[0] == "cat":
            return self._is_within(kind[1], outer[1]) and self._is_within(kind[2], outer[2])
        if kind[0] == "repeat" and outer[0] == "star":
            return kind[1] == outer[1]
        if kind[0] == outer[0] == "repeat" and kind[1] == outer[1]:
            return (kind[2] >= outer[2] or self.nullable[kind[1]]) and (outer[3] == -1 or -1 < kind[3] <= outer[3])
        return False

    def _cat(self, head: int, tail: int) -> int:
        if head == EMPTY or tail == EMPTY:
            return EMPTY
        if head == DONE:
            return tail
        if tail == DONE:
            return head
        while self.kinds[head][0] == "cat":  # to the right, so that the head is what is read next
            _, head, middle = self.kinds[head]
            tail = self._cat(middle, tail)
        return self._node(("cat", head, tail), self.nullable[head] and self.nullable[tail])

    def _node(self, kind: tuple, nullable: bool) -> int:
        node = self._index.get(kind)
        if node is None:
            node = self._index[kind] = len(self.kinds)
            self.kinds.append(kind)
            self.nullable.append(nullable)
            self.needs.append(IMPOSSIBLE)
            self.reach.append(0)
            self.needs[node] = self._need(node)
            self.reach[node] = self._reach(node) if self._closed else 0
        return node

    def _need(self, node: int) -> int:
        kind, *arguments = self.kinds[node]
        if kind == "set":
            return 1
        if kind == "cat":
            return min(IMPOSSIBLE, self.needs[arguments[0]] + self.needs[arguments[1]])
        if kind == "alt":
            return min((self.needs[choice] for choice in arguments[0]), default=IMPOSSIBLE)
        if kind == "repeat":
            return min(IMPOSSIBLE, self.needs[arguments[0]] * arguments[1])
        if kind == "lexeme":
            return self.needs[arguments[0]]
        if kind == "machine":
            return self._machines[arguments[0]].needs[arguments[1]]
        if kind == "text":
            return len(arguments[0]) - int(arguments[1])
        if kind == "ref":
            return self.needs[self._definitions[arguments[0]]] if arguments[0] in self._definitions else IMPOSSIBLE
        return 0  # done, star

    def _reach(self, node: int) -> int:
        kind, *arguments = self.kinds[node]
        if kind == "cat":
            head, tail = arguments
            return min(IMPOSSIBLE, max(self.reach[head] + self.needs[tail], self.reach[tail]))
        if kind == "alt":
            return max((self.reach[choice] for choice in arguments[0]), default=0)
        if kind == "machine":
            return max(need for need in self._machines[arguments[0]].needs if need < IMPOSSIBLE)
        if kind in ("star", "lexeme"):
            return self.reach[arguments[0]]
        if kind == "repeat":
            return min(IMPOSSIBLE, self.reach[arguments[0]] + self.needs[arguments[0]] * arguments[1])
        if kind == "ref":
            return self.reach[self._definitions[arguments[0]]]
        return self.needs[node]  # set, done


class _Machine(NamedTuple):
    """A finite automaton: per state its moves (bytes, next state), whether it accepts, and the bytes to the end."""

    moves: list[list[tuple[int, int]]]
    accepts: list[bool]
    needs: list[int]


def _distances(moves: list[list[tuple[int, int]]], accepts: list[bool]) -> list[int]:
    """The fewest bytes from each state to one that accepts."""
    before: list[list[int]] = [[] for _ in moves]
    for state, targets in enumerate(moves):
        for _, target in targets:
            before[target].append(state)
    found = [0 if accepted else IMPOSSIBLE for accepted in accepts]
    level = [state for state, accepted in enumerate(accepts) if accepted]
    while level:
        earlier = {state for target in level for state in before[target] if found[state] == IMPOSSIBLE}
        for state in earlier:
            found[state] = 1 + min(found[target] for _, target in moves[state])
        level = list(earlier)
    return found


def _shared(first: bytes, second: bytes) -> int:
    """The length of the prefix that both have."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


class TokenReader:
    """Reads whole tokens, all of a vocabulary at once.

    Args:
        token_bytes: token id -> its bytes. Ids that are absent or without bytes have no next state.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], vocab_size: int) -> None:
        present = [token for token, data in token_bytes.items() if data and token < vocab_size]
        # Longest first: at each position, the tokens that have a byte there come first.
        self.ids = np.array(sorted(present, key=lambda token: -len(token_bytes[token])), dtype=np.int64)
        self.vocab_size = vocab_size
        lengths = np.array([len(token_bytes[token]) for token in self.ids.tolist()], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        data = np.frombuffer(b"".join(token_bytes[token] for token in self.ids.tolist()), dtype=np.uint8)
        counts = [int((lengths > position).sum()) for position in range(lengths[0] if len(lengths) else 0)]
        self.columns = [data[starts[:count] + position].astype(np.int64) for position, count in enumerate(counts)]
        self.bytes_that_are_tokens = {data[0] for data in token_bytes.values() if len(data) == 1}


class Needs:
    """The bytes that an answer in `language` still needs after each token of the vocabulary, by state.

    Results are cached for the last `_KEPT` states.
    """

    _KEPT = 32

    def __init__(self, language: Language, reader: TokenReader) -> None:
        self._language = language
        self._reader = reader
        self._rows: dict[int, int] = {}  # state -> its index in the table
        self._states: list[int] = []
        self._table = np.empty((0, 256), dtype=np.int32)
        self._found: dict[int, np.ndarray] = {}

    def after(self, state: int) -> np.ndarray:
        """int64 [vocab]: bytes needed after each token; `IMPOSSIBLE` if no string continues with it."""
        if state not in self._found:
            if len(self._found) == self._KEPT:
                del self._found[next(iter(self._found))]
            self._found[state] = self._compute(state)
        return self._found[state]

    def _compute(self, state: int) -> np.ndarray:
        rows = np.full(len(self._reader.ids), self._row(state), dtype=np.int64)
        for column in self._reader.columns:
            rows[: len(column)] = self._move(rows[: len(column)], column)
        needs = np.array([self._language.needs[node] for node in self._states], dtype=np.int64)
        result = np.full(self._reader.vocab_size, IMPOSSIBLE, dtype=np.int64)
        result[self._reader.ids] = needs[rows]
        return result

    def _move(self, rows: np.ndarray, column: np.ndarray) -> np.ndarray:
        moved = self._table[rows, column]
        missing = np.flatnonzero(moved == _UNKNOWN)
        if len(missing):
            for key in np.unique(rows[missing] * 256 + column[missing]).tolist():
                row, byte = divmod(key, 256)
                target = self._row(self._language.step(self._states[row], byte))
                self._table[row, byte] = target
            moved = self._table[rows, column]
        return moved

    def _row(self, state: int) -> int:
        row = self._rows.get(state)
        if row is None:
            row = self._rows[state] = len(self._states)
            self._states.append(state)
            if row == len(self._table):
                more = np.full((max(64, len(self._table)), 256), _UNKNOWN, dtype=np.int32)
                self._table = np.concatenate([self._table, more])
        return row


def grammar_of(language: Language, root: int) -> str:
    """The grammar whose `start` is the node `root`."""
    return "\n".join(rules_of(language, root, "start"))


def rules_of(language: Language, root: int, start: str) -> list[str]:
    """Rules, of which `start` is the node `root`; the names of the others begin with it."""
    return _Writer(language, start).rules(root)


class _Writer:
    """Lexemes become terminals, all else rules.

    llguidance takes the longest terminal that can come next and does not go back: where one lexeme begins like another,
    they must be told apart before the shorter one ends and the text goes on.
    """

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
