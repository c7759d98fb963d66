"""Numbers as regular expressions of their digits: ranges, decimals with bounds, multiples, and other spellings.

Patterns grow with the square of a bound's digits. Multiples that the last digits do not tell are an automaton of the
remainders.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

from llm.sampling.structured.regex import UnknownLength


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
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return low[0] + _grouped(_same_size(low[1:], high[1:]))
    rest = len(low) - 1
    parts = [low[0] + _grouped(_same_size(low[1:], "9" * rest)), high[0] + _grouped(_same_size("0" * rest, high[1:]))]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join(parts)


def _grouped(pattern: str) -> str:
    return f"({pattern})" if "|" in pattern else pattern


_WHOLE = "(0|[1-9][0-9]*)"
DECIMAL = rf"-?{_WHOLE}(\.[0-9]+)?"
FRACTION = rf"-?{_WHOLE}\.[0-9]*[1-9][0-9]*"


def exact(value: float) -> Decimal:
    return Decimal(str(value))


def _parts(value: Decimal) -> tuple[int, str]:
    """The whole part of a number that is at least 0, and the digits after its point without zeros at the end."""
    whole, _, digits = format(value, "f").partition(".")
    return int(whole), digits.rstrip("0")


def at_least(bound: Decimal, is_strict: bool) -> str:
    if bound < 0 or (bound == 0 and not is_strict):
        return f"{_WHOLE}(\\.[0-9]+)?|-({_up_to(-bound, is_strict)})"
    return _from(bound, is_strict)


def at_most(bound: Decimal, is_strict: bool) -> str:
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


def ending_in(divisor: int) -> str:
    """Integers that are multiples of a divisor of 1000, which their last three digits say."""
    ends = range(0, 1000, divisor)
    short = "|".join(str(value) for value in ends)
    return f"-?({short}|[1-9][0-9]*({'|'.join(f'{value:03d}' for value in ends)}))"


def multiple_of(divisor: Fraction) -> str | None:
    """Decimals that are multiples of a fraction, which the digits after the point say where it divides 1."""
    places = next((n for n in range(1, 4) if (divisor * 10**n).denominator == 1), None)
    if places is None or divisor.numerator <= 0 or 10**places % int(divisor * 10**places):
        return None
    endings = [f"{value:0{places}d}" for value in range(0, 10**places, int(divisor * 10**places))]
    texts = sorted({text for each in endings for text in (each, each.rstrip("0") or "0")})
    return rf"-?{_WHOLE}(\.({'|'.join(texts)})0*)?"


def remainders(numerator: int, places: int, with_points: bool) -> tuple[list[list[tuple[int, int]]], list[bool]]:
    """An automaton of the decimals that are multiples of numerator / 10**places: its moves, and which states accept."""
    # States: the start, after "-", after a leading zero, then (digits after the point or -1, remainder, is "." next).
    states: dict[tuple[int, int, int], int] = {(-2, 0, 0): 0, (-2, 0, 1): 1, (-2, 0, 2): 2}
    left = list(states)
    moves: list[list[tuple[int, int]]] = []
    accepts = []
    for depth, remainder, extra in left:
        targets: dict[tuple[int, int, int], int] = {}

        def move(byte: int, state: tuple[int, int, int], targets: dict[tuple[int, int, int], int] = targets) -> None:
            targets[state] = targets.get(state, 0) | 1 << byte

        is_start = depth == -2 and extra < 2
        digits = range(10) if depth != -2 or is_start else ()
        if depth == -2 and extra == 0:
            move(0x2D, (-2, 0, 1))
        for digit in digits:
            if is_start:
                move(0x30 + digit, (-1, digit * 10**places % numerator, 0) if digit else (-2, 0, 2))
            elif depth == -1:
                move(0x30 + digit, (-1, (10 * remainder + digit * 10**places) % numerator, 0))
            elif depth < places:
                move(0x30 + digit, (depth + 1, (remainder + digit * 10 ** (places - depth - 1)) % numerator, 0))
            elif digit == 0:
                move(0x30, (depth, remainder, 1))
        if with_points and (depth == -1 or (depth == -2 and extra == 2)):
            move(0x2E, (0, remainder, 0))
        for state in targets:
            if state not in states:
                states[state] = len(states)
                left.append(state)
        moves.append([(bits, states[state]) for state, bits in targets.items()])
        accepts.append(remainder == 0 and not is_start)
    return moves, accepts


def spellings(value: Decimal) -> str:
    """All ways to write a number without an exponent."""
    whole, digits = _parts(abs(value))
    sign = "-" if value < 0 else "-?" if value == 0 else ""
    return sign + (rf"{whole}\.{digits}0*" if digits else rf"{whole}(\.0+)?")
