r"""Mathematical answers as people and models write them, made ready for math-verify, and what it does not look at.

In: a reply or a reference. Out: the part of it that is the answer, in LaTeX that math-verify reads; its unit; whether
two expressions that it takes for equal are.

    reply ─last_boxes─▶ `1.2e5 cm` ─latex─▶ `1.2 \cdot 10^{5} cm` ─math-verify─▶ 120000    unit_of ─▶ cm
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*+\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_BETWEEN = re.compile(
    r"(?:[\s$]|\\[)\]])*(?:[,;]\s*(?:and|or)?|(?:\\text\{)?\s*(?:and|or)\b)(?:[\s$}]|\\[(\[]|[A-Za-z]\s*=)*"
)
"""What may stand between two boxes that are one answer."""

_CHARACTERS = str.maketrans(
    dict(zip("−–∞π×·÷≤≥∪∩∈∅²³°", [
        "-", "-", r"\infty ", r"\pi ", r"\times ", r"\cdot ", r"\div ", r"\le ", r"\ge ", r"\cup ", r"\cap ", r"\in ",
        r"\emptyset ", "^2", "^3", r"^\circ ",
    ], strict=True))
)  # fmt: skip
THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
"""What LaTeX puts between groups of digits: 1\\,234."""
_BOLD = re.compile(r"\*\*([^*\n]++)\*\*")
_REPEATING = re.compile(r"(?<![\w.])(\d*+)\.(\d*+)\\(?:overline|bar|dot)\s*+(?:\{(\d++)\}|(\d))")
_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(r"(?<=\d)(?:\s|\\text\s*\{\s*)+(thousand|million|billion|trillion)\b(?:\s*\})?")
_FORMS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (THOUSANDS, ""),
    (re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)"), lambda match: match[0].replace(" ", "")),  # 1 234
    (re.compile(r"(?<![\d/.,])(\d+) (\d+)/(\d+)(?!\d)"), r"(\1+\\frac{\2}{\3})"),  # 2 1/2
    (re.compile(r"[€£¥]"), ""),
    (re.compile(r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<=[\d)}\s])(?:and|or)\s"), ","),
    (re.compile(r"^\s*\\(?:text|math)(?:bf|rm)?\s*\{\s*\([A-E]\)\s*\}[\s\\]*(?=\S)"), ""),  # \textbf{(C)}\ 10
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"(?<=[A-Za-z])\\(?:mathrm|text|textrm)\s*\{\s*([A-Za-z])\s*\}"), r" \1"),  # \sin\mathrm{x}
    (re.compile(r"\\(?:mathrm|text|textrm)\s*\{\s*([A-Za-z])\s*\}"), r"\1"),  # 2\mathrm{i}
    (re.compile(r"\\text\{(?=[^{}]*[A-Za-z]{2}[^{}]* [^{}]*\}\s*[-\d\\])[^{}]*\}"), ""),  # \text{The answer is }42
    (re.compile(r"(?<![\w.])(\d++(?:\.\d++)?)[eE]([-+]?\d{1,3})(?!\w)"), r"\1 \\cdot 10^{\2}"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\*"), r" \\cdot "),
    (re.compile(r"\^\s*+(-?\d{2,})"), r"^{\1}"),  # 2^10
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"(?<![\\A-Za-z])sqrt\s?\(([^()]*+)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s?(?:\(([^()]*+)\)|(\d++))"), r"\\sqrt{\1\2}"),
]

_UNITS = {
    word: line.split()[0]
    for line in """
        m meter metre
        cm centimeter centimetre
        mm millimeter millimetre
        km kilometer kilometre
        in inch inche
        ft foot feet
        yd yard
        mi mile
        s sec second
        min minute
        h hr hour
        day
        week
        month
        year yr
        mg milligram
        g gram
        kg kilogram
        lb pound
        oz ounce
        l liter litre
        ml milliliter millilitre
        gallon gal
        n newton
        j joule
        w watt
        v volt
        k kelvin
        hz hertz
        mph
        dollar
        cent
        degree
        rad radian
    """.strip().splitlines()
    for word in line.split()
}
"""Of a word without its plural's s: the unit."""
_UNIT = re.compile(
    r"""(?:(?<=\S)(?:\\[,;:!\ ]|[\s~])*\\(?:text|textrm|mathrm|mbox)\s*\{(?P<text>[^{}\d]*)\}
        |(?<=[\d)}!])(?:\\[,;:!\ ]|[\s~])+(?P<bare>[A-Za-z][A-Za-z ./]*))
    \s*(?P<power>\^\s*\{?[23]\}?)?\s*$""",
    re.VERBOSE,
)
_BASE = re.compile(r"^\s*[0-9A-Za-z]+_\{?(\d+)\}?\s*$")
_PROSE = re.compile(r"\b(?:is|are|was|equals|the|answer|result|so|thus|we|it|that|this)\b", re.IGNORECASE)
_IN_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{[^{}]*\}")
_NEAR = 1e-5
"""Relative; of numbers of which one is written as a decimal."""
_DIGITS = 60


def last_boxes(text: str) -> str | None:
    r"""What is in the last `\boxed{…}` or `\fbox{…}`; several that only a comma, "and" or "or" parts, joined by commas.

    None without a box that is closed. Takes time in proportion to the text.

    >>> last_boxes(r"\boxed{41}. Wait, it is \boxed{42}"), last_boxes(r"\boxed{1} and $\boxed{2}$"), last_boxes("42")
    ('42', '1, 2', None)
    """
    opened: list[re.Match[str] | None] = []
    boxes: list[tuple[int, int, str]] = []
    for token in _TOKEN.finditer(text):
        if token["box"] or token["open"]:
            opened.append(token if token["box"] else None)
        elif token["close"] and opened and (box := opened.pop()) is not None:
            while boxes and boxes[-1][0] > box.start():  # boxes in this one
                boxes.pop()
            boxes.append((box.start(), token.end(), text[box.end() : token.start()]))
    if not boxes:
        return None
    values = [boxes[-1]]
    while len(values) < len(boxes):
        before = boxes[-len(values) - 1]
        if not _BETWEEN.fullmatch(text, before[1], values[0][0]):
            break
        values.insert(0, before)
    return ", ".join(re.sub(r"\\(?:boxed|fbox)(?=\s*\{)", "", value) for _, _, value in values)


def unicode_to_latex(text: str) -> str:
    """Signs outside ASCII as LaTeX, and Markdown's bold as plain text."""
    return _BOLD.sub(r"\1", text).translate(_CHARACTERS)


def latex(answer: str) -> str:
    r"""An answer in LaTeX that means the same: `10\,000` is 10000, `-2*pi` is `-2 \cdot \pi`, `100 dollars` is 100.

    >>> latex(r"0.1\overline{6}"), latex("1.2e5"), latex("100 dollars")
    ('\\frac{1}{6}', '1.2 \\cdot 10^{5}', '100')
    """
    answer = unicode_to_latex(answer).rstrip(" .")
    answer = _SCALE.sub(lambda match: rf" \cdot 10^{{{_POWERS[match[1]]}}}", answer)
    unit = _UNIT.search(answer)
    words = (unit["text"] or unit["bare"] or "").strip() if unit else ""
    if unit and (len(words) > 1 or words.lower() in _UNITS):
        answer = answer[: unit.start()]
    answer = _REPEATING.sub(_repeating, answer)
    for pattern, replacement in _FORMS:
        answer = pattern.sub(replacement, answer)
    return answer


def unit_of(answer: str) -> str:
    r"""The unit an answer ends with, in its short form, or the base of a number like `12_5`; empty without one.

    >>> unit_of(r"5\text{ centimeters}"), unit_of("25 square meters"), unit_of("12_{5}"), unit_of("3 eggs")
    ('cm', 'm^2', 'base 5', '')
    """
    answer = unicode_to_latex(answer).rstrip(" .")
    if base := _BASE.match(answer):
        return f"base {base[1]}"
    if not (found := _UNIT.search(answer)):
        return ""
    words = re.sub(r"\s*\bper\b\s*", "/", (found["text"] or found["bare"]).strip()).lower()
    power = re.sub(r"[^23]", "", found["power"] or "")
    if match := re.match(r"(square|sq|cubic|cu)\.? +", words):
        words, power = words[match.end() :], "2" if match[1].startswith("sq") else "3"
    parts = [_UNITS.get(part) or _UNITS.get(part.removesuffix("s"), "") for part in words.split("/")]
    return "/".join(parts) + (f"^{power}" if power else "") if all(parts) else ""


def is_prose(answer: str) -> bool:
    """True for a reference that is a sentence: math-verify would read its letters as variables."""
    return _PROSE.search(_IN_TEXT.sub("", answer)) is not None


def differ(first: Any, second: Any) -> bool:
    """True if two numbers of sympy differ, or two of the numbers in sets, tuples and intervals, however small they are.

    math-verify rounds to six decimals. Here exact numbers are compared exactly, and decimals to six digits.
    """
    import sympy

    def unwrapped(value: Any) -> Any:
        is_assignment = isinstance(value, sympy.Eq) and isinstance(value.lhs, sympy.Symbol)
        return value.rhs if is_assignment else value

    first, second = unwrapped(first), unwrapped(second)
    if not (isinstance(first, sympy.Basic) and isinstance(second, sympy.Basic)) or first.has(sympy.UnevaluatedExpr):
        return False  # texts and matrices; a percentage may be the number or its hundredth
    if first.is_number and second.is_number and not second.has(sympy.UnevaluatedExpr):
        near = _NEAR if first.has(sympy.Float) or second.has(sympy.Float) else sympy.Float(10) ** (20 - _DIGITS)
        one, other = sympy.N(first, _DIGITS), sympy.N(second, _DIGITS)
        if one.is_finite and other.is_finite:
            return bool(abs(one - other) > near * max(abs(one), abs(other)))
        return False
    if type(first) is type(second) and len(first.args) == len(second.args) and not isinstance(first, sympy.Expr):
        if isinstance(first, sympy.Set) and not isinstance(first, sympy.Interval | sympy.ProductSet):
            return any(all(differ(a, b) for b in second.args) for a in first.args)
        return any(differ(a, b) for a, b in zip(first.args, second.args, strict=True))
    return False


def _repeating(match: re.Match[str]) -> str:
    """`0.1\\overline{6}` as a fraction."""
    whole, fixed, period = match[1] or "0", match[2], match[3] or match[4]
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), scale) + Fraction(int(period), (10 ** len(period) - 1) * scale)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
