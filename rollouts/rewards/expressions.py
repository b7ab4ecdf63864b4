r"""Mathematical answers as people and models write them, made ready for math-verify, and what it does not look at.

In: a reply or a reference. Out: the part of it that is the answer, in LaTeX that math-verify reads; its unit; whether
two expressions that it takes for equal are.

    reply ─last_boxes─▶ `1.2e5 cm` ─latex─▶ `1.2 \cdot 10^{5} cm` ─math-verify─▶ 120000    unit_of ─▶ cm
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_TOKEN = re.compile(r"(?P<box>\\(?:boxed|f(?:rame)?box)\s*+\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_BETWEEN = re.compile(
    r"(?:[\s$]|\\[)\]])*(?:[,;]\s*(?:and|or)?|(?:\\text\{)?\s*(?:and|or)\b)(?:[\s$}]|\\[(\[]|[A-Za-z]\s*=)*"
)
"""What may stand between two boxes that are one answer."""

_CHARACTERS = str.maketrans(
    dict(zip("−–∞π×·÷≤≥∪∩∈∅°", [
        "-", "-", r"\infty ", r"\pi ", r"\times ", r"\cdot ", r"\div ", r"\le ", r"\ge ", r"\cup ", r"\cap ", r"\in ",
        r"\emptyset ", r"^\circ ",
    ], strict=True))
    | dict(zip("ℝℤℚℕℂ", [rf"\mathbb{{{letter}}}" for letter in "RZQNC"], strict=True))
)  # fmt: skip
_RAISED = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_ONE_SIGN = re.compile("[０-９．，（）＝＋－／％＜＞：]")  # full width
FRACTION_SIGN = re.compile("[¼-¾⅐-⅞]")
THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\}|_|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
"""What LaTeX puts between groups of digits: 1\\,234."""
_BOLD = re.compile(r"\*\*([^*\n]++)\*\*")
_MOST_DIGITS = 4000
_REPEATING = re.compile(
    r"""(?<![\w.])(?P<whole>\d*+)\.(?P<fixed>\d{0,40}?)
    (?:\\(?:overline|bar|dot)\s*+(?:\{(?P<braced>\d++)\}|(?P<bare>\d))    # 0.1\overline{6}
      |\\dot\s*\{?(?P<first>\d)\}?(?P<middle>\d*)\\dot\s*\{?(?P<last>\d)\}?  # 0.\dot{1}4285\dot{7}
      |\((?P<bracketed>\d++)\)                                            # 0.(3)
      |(?P<shown>(?P<digits>\d{1,6}?)(?P=digits){2,40})(?:\.{2,}|…|\\[lc]?dots)   # 0.333...
    )(?!\d|\\dot)""",
    re.VERBOSE,
)
POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
POWERS |= {"百": 2, "千": 3, "万": 4, "萬": 4, "亿": 8, "億": 8}
"""How many zeros a word adds."""
_SCALE = re.compile(
    r"(?<=\d)(?:(?:\s|\\text\s*\{\s*)+(thousand|million|billion|trillion)\b(?:\s*\})?|\s?([百千万萬亿億]))"
)
_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve"
_WORDS = {word: str(number) for number, word in enumerate(_NUMBERS.split())}
_TEXT_OF_NUMBER = re.compile(r"^\s*\\(?:text|textbf|mathrm|mbox)\s*\{\s*(-?\d[^{}]*?)\s*\}(?!\s*\S)")
_RELATION = r"(<|>|\\leq?(?![a-z])|\\geq?(?![a-z]))\s*([^<>,=]+?)"
_UNION = re.compile(
    rf"^\s*([a-z])\s*{_RELATION}\s*(?:\\text\s*\{{\s*or\s*\}}|\bor\b|\\lor|\\vee|\\cup)\s*\1\s*{_RELATION}\s*$"
)
"""x < 1 or x > 2"""
_FUNCTIONS = "frac|exp|ln|log|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan"
_FORMS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\\(?:text|mathrm)\s*\{\s*(-?\d[\d.,]*)\s*\}"), r"\1"),
    (re.compile(r"\\(?:text)?color\s*\{\w+\}|\\(?:underline|displaystyle|limits|small|large)(?![A-Za-z])"), ""),
    (re.compile(r"(?:\\[,;:! ]|[~\s])+(?=\\?%)|\\pmod\s*\{?\w+\}?"), ""),
    (re.compile(r"(?<=\d)\^\s*\{?\s*(?:\\(?:text|mathrm)\s*\{)?\s*o\s*\}*\s*$"), r"^\\circ "),
    (re.compile(r"\\lg(?![A-Za-z])"), r"\\log_{10}"),
    (_UNION, lambda match: r" \cup ".join(_interval(match[n], match[n + 1]) for n in (2, 4))),
    (
        re.compile(r"^[\s#`*]*(?:\\text\s*\{)?\s*(?:[A-Za-z]+ )*(?<![\\A-Za-z])[A-Za-z]{4,}\s*[:=]\s*\}?"),
        "",  # Total: 5
    ),
    (re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)"), lambda match: match[0].replace(" ", "")),  # 1 234
    (re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.])"), lambda match: match[0].replace(".", "")),  # 1.234.567
    (re.compile(r"(?<![\d/.,])(\d+) (\d+)/(\d+)(?!\d)"), r"(\1+\\frac{\2}{\3})"),  # 2 1/2
    (
        re.compile(
            r"^\s*(?:USD|EUR|GBP|Rs\.?)\s*(?=\d)|[€£¥₹₩¢]|(?<=\d)\s*[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+\s*$"
        ),
        "",
    ),
    (re.compile(r"(?<=\d)\s*\^?\s*\{?\s*\\(?:text|textrm|mathrm)\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?"), ""),
    (re.compile(r"^\s*\\?\](?=[^\[\]]*,[^\[\]]*\[\s*$)|\\langle(?![A-Za-z])"), "("),  # ]1, 2[
    (re.compile(r"(?<=,)([^\[\]]*)(?<!\\left)\[\s*$|\\rangle(?![A-Za-z])"), r"\1)"),
    (re.compile(r"\\([lr])brace(?![A-Za-z])"), lambda match: r"\{" if match[1] == "l" else r"\}"),
    (re.compile(r"\\mathbb\s+([A-Z])"), r"\\mathbb{\1}"),
    (
        re.compile(
            r"^\s*\\(?:left)?\\?\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{R\}\s*)?(?:\\mid|\\vert|\||:)(.*)\\(?:right\\)?\}\s*$"
        ),
        r"\1",
    ),
    (
        re.compile(r"(?<=\\sin|\\cos|\\tan|\\cot|\\sec|\\csc)\s*\(?\s*(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?\s*\)?"),
        r"(\\frac{\1\\pi}{180})",
    ),
    (re.compile(r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<=[\d)}\s])(?:and|or)\s"), ","),
    (re.compile(r"\\degree(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"^\s*\\(?:text|math)(?:bf|rm)?\s*\{\s*\([A-E]\)\s*\}[\s\\]*(?=\S)"), ""),  # \textbf{(C)}\ 10
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"(?<=[A-Za-z])\\(?:mathrm|text|textrm)\s*\{\s*([A-Za-z])\s*\}"), r" \1"),  # \sin\mathrm{x}
    (re.compile(r"\\(?:mathrm|text|textrm)\s*\{\s*([A-Za-z])\s*\}"), r"\1"),  # 2\mathrm{i}
    (re.compile(r"\\text\{(?=[^{}]*[A-Za-z]{2}[^{}]* [^{}]*\}\s*[-\d\\])[^{}]*\}"), ""),  # \text{The answer is }42
    (re.compile(r"(?<![\w.])(\d++(?:\.\d++)?)[eE]([-+]?\d{1,3})(?!\w)"), r"\1 \\cdot 10^{\2}"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\*|(?<=\d)\s*[xX]\s*(?=10\s*\^)"), r" \\cdot "),  # 1.5 x 10^3
    (re.compile(r"\^\s*+(-\d+|\d{2,})"), r"^{\1}"),  # 2^10
    (re.compile(rf"(?<![\\A-Za-z])({_FUNCTIONS})(?=\s?[({{])"), r"\\\1"),
    (re.compile(r"(?<![\\A-Za-z])(?:oo|inf(?:inity)?)(?![A-Za-z])"), r"\\infty "),
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
        mol mole
        euro
        yen
        rupee
        am
        pm
        celsius c
        fahrenheit f
        ohm \\omega
        rad radian
    """.strip().splitlines()
    for word in line.split()
}
"""Word, without its plural's s → unit."""
_UNIT = re.compile(
    r"""(?:(?<=\S)(?:\\[,;:!\ ]|[\s~])*\\(?:text|textrm|mathrm|mbox)\s*\{(?P<text>[^{}\d]*)\}
        |(?<=[\d)}!])(?:\\[,;:!\ ]|[\s~])+(?P<bare>[A-Za-z][A-Za-z ./]*|\\Omega)
        |(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z]))\s*(?:\\(?:text|mathrm)\s*\{\s*)?(?P<degrees>[CF])\s*\}?
        |(?<=\d)(?P<glued>cm|mm|km|kg|lbs?|hours?|minutes?|seconds?|days?|inches|feet|meters|dollars?|cents?|mph))
    \s*(?P<power>\^\s*\{?[23]\}?)?\s*$""",
    re.VERBOSE,
)
_LETTER_UNIT = re.compile(r"\s*-?\d[\d.,]*(?P<text>(?!))?(?P<bare>[A-Za-z])(?P<power>\^\s*\{?[23]\}?)?\s*$")
_BASE = re.compile(r"^\s*(?:\\(?:text|mathrm)\s*\{)?\s*[0-9A-Za-z]+\s*\}?\s*_\s*\{?(\d+)\}?\s*$")
_WORD = re.compile(r"\s*(?:\\(?:text|math)(?:bf|rm|it)?\s*\{)?\s*([A-Za-z]{2,})\s*\}?\s*\.?\s*")
_AFTER = " .,;:`\\\n"
"""Signs behind an answer that are no part of it."""
_PROSE = re.compile(
    r"\b(?:is|are|was|equals|the|answer|result|so|thus|we|it|that|this|therefore|hence|because|since|has|have|had|she|he"
    r"|they|makes?|gets?|total|about|approximately|around|let|see|es|est|ist)\b|答案",
    re.IGNORECASE,
)
_LONG_WORD = re.compile(r"(?<![\\\w{])(?=[a-z]*[aeiou])[a-z]{5,}", re.IGNORECASE)
"""No product of variables is as long."""
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
    boxes = boxes_in(text)
    if not boxes:
        return None
    values = [boxes[-1]]
    while len(values) < len(boxes):
        before = boxes[-len(values) - 1]
        if not _BETWEEN.fullmatch(text, before[1], values[0][0]):
            break
        values.insert(0, before)
    return ", ".join(re.sub(r"\\(?:boxed|f(?:rame)?box)(?=\s*\{)", "", value) for _, _, value in values)


def boxes_in(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of every closed box that is in no other one. Takes time in proportion to the text."""
    opened: list[re.Match[str] | None] = []
    boxes: list[tuple[int, int, str]] = []
    for token in _TOKEN.finditer(text):
        if token["box"] or token["open"]:
            opened.append(token if token["box"] else None)
        elif token["close"] and opened and (box := opened.pop()) is not None:
            while boxes and boxes[-1][0] > box.start():  # boxes in this one
                boxes.pop()
            boxes.append((box.start(), token.end(), text[box.end() : token.start()]))
    return boxes


def unicode_to_latex(text: str) -> str:
    """Signs outside ASCII as LaTeX, and Markdown's bold as plain text."""
    text = _RAISED.sub(lambda match: f"^{{{_plain(match)}}}", _BOLD.sub(r"\1", text))
    text = FRACTION_SIGN.sub(fraction, text)
    return re.sub(r"[∛]\s?\(?(\d++)\)?", r"\\sqrt[3]{\1}", _ONE_SIGN.sub(_plain, text)).translate(_CHARACTERS)


def fraction(match: re.Match[str]) -> str:
    """`½` as ` 1/2`."""
    return " " + _plain(match).replace("⁄", "/")


def _plain(match: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", match[0]).replace("−", "-")


def latex(answer: str) -> str:
    r"""An answer in LaTeX that means the same: `10\,000` is 10000, `-2*pi` is `-2 \cdot \pi`, `100 dollars` is 100.

    >>> latex(r"0.1\overline{6}"), latex("1.2e5"), latex("100 dollars")
    ('\\frac{1}{6}', '1.2 \\cdot 10^{5}', '100')
    """
    answer = _bare(answer)
    if number := _WORDS.get(word_of(answer)):
        return number
    answer = _SCALE.sub(lambda match: rf" \cdot 10^{{{POWERS[match[1] or match[2]]}}}", answer)
    unit = _UNIT.search(answer)
    words = _words(unit) if unit else ""
    if unit and (unit["degrees"] or (len(words) > 1 or words.lower() in _UNITS)):
        answer = answer[: unit.start()].rstrip("^ ")
    for pattern, replacement in _FORMS:
        answer = pattern.sub(replacement, answer)
    return answer


def unit_of(answer: str) -> str:
    r"""The unit an answer ends with, in its short form, or the base of a number like `12_5`; empty without one.

    >>> unit_of(r"5\text{ centimeters}"), unit_of("25 square meters"), unit_of("12_{5}"), unit_of("3 eggs")
    ('cm', 'm^2', 'base 5', '')
    """
    answer = _bare(answer)
    if base := _BASE.match(answer):
        return f"base {base[1]}"
    if not (unit := _UNIT.search(answer) or _LETTER_UNIT.match(answer)):
        return "dollar" if re.match(r"\s*\\?\$\s*[\d.]", answer) else ""
    words = re.sub(r"\s*\bper\b\s*", "/", _words(unit)).lower().replace(".m.", "m")
    power = re.sub(r"[^23]", "", unit["power"] or "")
    if match := re.match(r"(square|sq|cubic|cu)\.? +", words):
        words, power = words[match.end() :], "2" if match[1].startswith("sq") else "3"
    parts = [_UNITS.get(part) or _UNITS.get(part.removesuffix("s"), "") for part in words.split("/")]
    return "/".join(parts) + (f"^{power}" if power else "") if all(parts) else ""


def word_of(answer: str) -> str:
    """The one word that an answer is, in lower case; empty if it is no word of two letters or more."""
    match = _WORD.fullmatch(answer)
    return match[1].lower() if match else ""


def _words(unit: re.Match[str]) -> str:
    """What a match of `_UNIT` names."""
    return next(filter(None, map(unit.groupdict().get, ("text", "bare", "degrees", "glued"))), "").strip("~ ")


def _bare(answer: str) -> str:
    r"""An answer in LaTeX's signs, without what may stand around it: `\text{…}`, white space, a full stop."""
    answer = re.sub(r"\s{2,}", " ", unicode_to_latex(answer))  # or white space costs time in proportion to its square
    answer = _REPEATING.sub(_repeating, answer).rstrip(_AFTER).lstrip("`# ~")
    return THOUSANDS.sub("", _TEXT_OF_NUMBER.sub(r"\1", answer))


def is_prose(answer: str) -> bool:
    """True for a reference that is a sentence, or has words beside numbers: math-verify reads letters as variables."""
    if _PROSE.search(_IN_TEXT.sub("", answer)):
        return True
    rest = _IN_TEXT.sub("", latex(answer))
    return re.search(r"\d", rest) is not None and _LONG_WORD.search(rest) is not None


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


def _interval(relation: str, bound: str) -> str:
    """`<` and 1 as `(-\\infty, 1)`."""
    ends = "[]" if "e" in relation else "()"
    return rf"(-\infty, {bound}{ends[1]}" if relation[:2] in ("<", "\\l") else rf"{ends[0]}{bound}, \infty)"


def _repeating(match: re.Match[str]) -> str:
    """`0.1\\overline{6}` as a fraction; one of more digits than Python makes a number of stays."""
    whole, fixed = match["whole"] or "0", match["fixed"]
    turning = (match["first"] or "") + (match["middle"] or "") + (match["last"] or "")
    period = match["braced"] or match["bare"] or match["bracketed"] or match["digits"] or turning
    if len(whole) + len(fixed) + len(period) > _MOST_DIGITS:
        return match[0]
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), scale) + Fraction(int(period), (10 ** len(period) - 1) * scale)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def with_i(value: Any) -> Any:
    """A number of sympy in which the letter i is the imaginary unit, because nothing else in it is unknown."""
    import sympy

    alone = isinstance(value, sympy.Expr) and {str(symbol) for symbol in value.free_symbols} == {"i"}
    return value.subs({symbol: sympy.I for symbol in value.free_symbols}) if alone else value
