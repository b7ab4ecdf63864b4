r"""Rewards for answers that can be checked: text in, 1.0 or 0.0 out.

In: a model's reply and the reference answer, both plain text. Out: a float. The functions are pure and use no
signals. `gsm8k` and `exact` accept any reply and end soon. `math_answer` and `matches` may run for ever on some
strings, so call them in a reward process (`score` in `scoring.py`), which can be killed.

`gsm8k` compares the final answers of both:

    reply ──final_answer──> "1234.50" ──┐
                                        ├─ same number, exactly? ──> 1.0 or 0.0
    answer ─final_answer──> "1234.5"  ──┘

The final answer is the first of these that contains a readable answer; of several alike, the last one counts:

1. `#### 18`, GSM8K's own mark. The line must open with the answer: `#### Step 2` is a heading.
2. `\boxed{18}`
3. a phrase: `the answer is 18`, also in some other languages, `<answer>18</answer>`, or one of the labels
   `Answer: 18`, `Final answer = 18` and, at the start of a line, `A: 18`; after a label only the bare answer and a
   unit count, because working often follows a label
4. the text's last number
"""

import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from rollouts.rewards.expressions import (
    FRACTION_SIGN,
    POWERS,
    THOUSANDS,
    boxes_in,
    differ,
    fraction,
    is_prose,
    last_boxes,
    latex,
    unicode_to_latex,
    unit_of,
    with_i,
    word_of,
)
from settings.errors import InvalidInput

_TAIL_CHARACTERS = 20_000  # the answer is at the end; a runaway reply must not cost more than a long one
_REGION_CHARACTERS = 200  # how far after its mark an answer may reach
_MARKS_TRIED = 20  # a reply may consist of marks
_NUMBER_CHARACTERS = 100  # Python refuses to read numbers of more than 4,300 digits
_EXPRESSION_CHARACTERS = 60  # what math-verify compares in well under a second

# Every repetition is bounded or possessive (`++`), so matching takes linear time.
_NUMBER = re.compile(
    r"""(?<![^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af])(?<!\d\.)(?<![A-Za-z]\^)
    # not the 2 of CO2, 1.2 or m^2, but that of 是2
    (?P<sign>[-+]?)
    (?:(?P<hours>\d{1,2}):(?P<minutes>[0-5]\d)(?![\d:])          # 12:30 is a time
    |(?P<value>(?:(?:\d{1,3}(?:,\d{3}){1,9}+|\d{1,2}(?:,\d{2}){1,9},\d{3})(?!\d)|\d++)(?:\.\d++)?
        (?:[eE][-+]?\d{1,2}(?!\w)|(?![eE][-+]?\d))|\.\d++))
    (?:[ ]?/[ ]?(?P<divisor>[1-9]\d*+)                        # 3/4
      |[ ](?P<top>\d++)/(?P<bottom>[1-9]\d*+))?               # 2 1/2 is two and a half
    (?:[ ](?P<scale>thousand|million|billion)\b|[ ]?(?P<sign_of_scale>[万萬亿億]))?""",
    re.VERBOSE,
)

_HASHES = re.compile(r"#{4,}+")
_PHRASE = re.compile(
    r"""\b(?i:answer)\b[^.:=\n\d]{0,60}?\b(?:is|be|equals)\b|答案[是为為]|答えは|정?답은|<answer>
    |(?i:\b(?:réponse\ est|respuesta\ es|resposta\ é|risposta\ è|antwort\ (?:ist|lautet)|ответ\b[ ]?[:—–-]))
    |(?P<label>(?:(?<!</)\b(?i:answer)\b|答案|答え?|정답)[^\w.\n]{0,6}[:：=\n]|^[ *]{0,8}A:)""",
    re.VERBOSE | re.MULTILINE,
)
_LETTER = (
    r"(?:\\text\s*\{\s*)?(?:(?i:option|choice)\s+)?(?:\\(?:text|math)(?:bf|rm)?\s*\{)?\s*"
    r"\(?([A-J])\)?(?:\s|\\ )*\}?"
)
_CHOICE = re.compile(rf"\s*{_LETTER}(?=[).:,。，]|\s|$)(?!\s*[=<>+*/^-])\.?\s*")
_MORE_CHOICES = re.compile(
    rf"(?:\s|\*)*(?:(?:[,;&/]|\\text\s*\{{|\band\b|\bor\b|[和与、])(?:\s|\}})*)+{_LETTER}(?![\w.])"
)
_CHOICE_IN_FRONT = re.compile(r"\W*[A-J][).:]\s")
_CHOICE_IN_PROSE = re.compile(
    r"(?:\b(?i:answer|option|choice)|答案|[选選])[\W_]*(?:(?i:is|be)\b[\W_]*|[是为為][\W_]*)?"
    r"(?:\\?(?:text|math)(?:bf|rm)?\{)?\(?([A-J])\)?(?=[\s.,:)*}$。，]|$)(?![ ][a-z]{2,} (?!or|and))"
)
_NUMBERED_HEADING = re.compile(r"\d++[.)] +[A-Za-z]")  # `#### 3. Add the eggs`
_ASIDE = re.compile(r"[A-Za-z]{2}.*?(?:[(;]|, )|because|since|where")
_GOES_ON = re.compile(r"\s*+(?:[\\^*/×÷+]|-\s*+\d)|\(")  # the number was only the start of a sum
_SUM = re.compile(r"(?:\\(?:[dtc]?frac|sqrt|cdot|times|div|pi)(?![a-z])|,(?=\d{3})|\.(?=\d)|[\d +*/×÷^(){}-])++")

_SMALL_POWER_OR_ROOT = re.compile(
    r"\d ?\^ ?(?:\{-?\d{1,2}\}|-?\d{1,2}(?!\d))(?! ?\^)|\\sqrt ?(?:\{\d[\d.]*\}|\d)(?! ?\^)"
)

# LaTeX and Markdown around a number, in the order in which it is removed.
_MARKUP: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"<<[^<>]*+>>"), ""),  # GSM8K's calculator notes: $<<9*2=18>>18
    (re.compile(r"[−–‐‑]|\\textminus"), "-"),
    (re.compile(r"\\approx|≈"), "="),
    (FRACTION_SIGN, fraction),
    (re.compile(r"(?<=\d) ?x ?(?=10 ?\^)"), "×"),
    (THOUSANDS, ","),
    (re.compile(r"-(?:\\?\$|[£€])"), "-"),  # -$5 is a negative number
    (re.compile(r"\\(?:(?:text|math)(?:bf|it|rm)?|mbox|f?box(?:ed)?|left|right|quad)(?![A-Za-z])"), " "),
    (re.compile(r"\\[()\[\],;:! \\]|\\?\$|[£€`]|__|(?<!\d)\*\*|\*\*(?!\d)"), " "),
    (re.compile(r"\\%"), "%"),
]
_FRACTION = re.compile(r"\\[dtc]?frac ?(?:\{(-?\d+)\}|(\d)) ?(?:\{([1-9]\d*)\}|([1-9]))")


def gsm8k(reply: str, answer: str) -> float:
    r"""1.0 if `reply` and `answer` end in the same number, else 0.0.

    `answer` is a GSM8K reference solution ("... #### 1,234") or the bare answer ("1234").
    Numbers are compared as exact fractions: 3/4 is 0.75, but 0.333 is not 1/3. A percent or currency
    sign and a unit are ignored, because GSM8K's answers leave them out: 50% is 50, never 0.5.
    Other expressions (`2\sqrt{81}`) go to math-verify, which compares 6 decimals. Powers above 99, nested roots and
    more than 60 characters can take hours, so they score 0.0.

    Raises `InvalidInput` for an `answer` without a final answer, which is a fault of the data. A reply without one
    scores 0.0.

    >>> gsm8k("So she makes $18.", "She makes 9 * 2 = <<9*2=18>>18 dollars.\n#### 18")
    1.0
    >>> gsm8k("I cannot tell.", "18")
    0.0
    """
    _check_texts(reply=reply, answer=answer)
    final, expected = final_answer(reply), final_answer(answer)
    if expected is None:
        raise InvalidInput(f"the reference answer {answer!r} holds no final answer")
    if final is None:
        return 0.0
    final_value, expected_value = _fraction(final), _fraction(expected)
    if final_value is not None and expected_value is not None:
        return float(final_value == expected_value)
    return float(final == expected or _same_expression(final, expected))


def exact(reply: str, answer: str) -> float:
    """1.0 if the two texts are equal, apart from white space around them, else 0.0.

    Raises `InvalidInput` for an empty `answer`, which is a fault of the data.

    >>> exact(" Paris\\n", "Paris")
    1.0
    >>> exact("paris", "Paris")
    0.0
    """
    _check_texts(reply=reply, answer=answer)
    if not answer.strip():
        raise InvalidInput("the task has no answer to compare with")
    return float(reply.strip() == answer.strip())


def math_answer(reply: str, answer: str) -> float:
    r"""1.0 if math-verify finds the last answer of `reply` equal to `answer`, else 0.0.

    It compares LaTeX and plain expressions, intervals, sets, tuples, matrices and texts. The last box decides; boxes
    joined only by a comma, "and" or "or" are one answer of several values. Letters from A to J are a set of choices.
    Exact values are compared exactly, and a decimal equals another value to 6 decimals and 3 digits. A unit or base is
    compared if both name one. `answer` is the bare answer (`\frac{1}{2}`), or a solution with an answer in
    `\boxed{…}` or between `$`.

    Raises `InvalidInput` for an `answer` that is a sentence or has no expression, which is a fault of the data. It
    never returns for some replies (`9^{9^{9^{9}}}`), which a reward process makes 0.

    >>> math_answer(r"So $x = \boxed{\frac{2}{4}}$.", "1/2"), math_answer("I cannot tell.", "1/2")
    (1.0, 0.0)
    """
    _check_texts(reply=reply, answer=answer)
    import logging
    from itertools import product

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it runs without its signals
    given, bare = last_boxes(reply), last_boxes(answer)
    if bare is None and not re.search(r"(?<!\\)\$|\\[(\[]", answer):
        bare = answer
    if bare is not None and is_prose(bare):
        raise InvalidInput(f"the reference answer {answer!r} is a sentence; write the bare answer")
    if choices := _choices(bare or "", whole=True):
        in_prose = _last(_CHOICE_IN_PROSE.finditer(reply)) if given is None else None
        chosen = _choices(reply[in_prose.start(1) :] if in_prose else given or "")
        if given is None and in_prose is None:  # nothing but the letter, in front or on the last line
            *_, last_line = ["", *reply.strip().splitlines()]
            chosen = _choices(last_line, whole=True) or (_choices(reply) if _CHOICE_IN_FRONT.match(reply) else set())
        if chosen:
            return float(chosen == choices)
    if bare is not None and given is not None and word_of(bare) and word_of(bare) == word_of(given):
        return 1.0

    def parsed(text: str, boxed: str | None) -> list[Any]:
        return parse(unicode_to_latex(text) if boxed is None else rf"\boxed{{{latex(boxed)}}}", parsing_timeout=None)

    if not (golds := re.search(r"\w", unicode_to_latex(answer)) and parsed(answer, bare)):
        raise InvalidInput(f"the reference answer {answer!r} holds no mathematical expression")
    try:
        units = [unit_of(boxed) for boxed in (given, bare) if boxed is not None]
        if len(units) == 2 and all(units) and units[0] != units[1]:
            return 0.0
        pairs = ((with_i(gold), with_i(guess)) for gold, guess in product(golds, parsed(reply, given)))
        equal = (pair for pair in pairs if not differ(*pair))
        return float(any(verify(*pair, allow_set_relation_comp=True, timeout_seconds=None) for pair in equal))
    except Exception:  # noqa: BLE001 - math-verify stumbles over some replies, which must not choose to be excluded
        return 0.0


def matches(reply: str, pattern: str) -> float:
    r"""1.0 if `reply` contains a match of the regular expression `pattern`, else 0.0. The dot also matches newlines.

    Raises `re.error` for an invalid pattern, and `InvalidInput` for an empty one, of which every reply has a match.
    Some patterns never return for some replies.

    >>> matches("<think>Hm.</think>42", r"^<think>.*</think>\s*\d+$"), matches("42", r"^<think>")
    (1.0, 0.0)
    """
    _check_texts(reply=reply, pattern=pattern)
    if not pattern:
        raise InvalidInput("the pattern is empty, and every reply has a match of it")
    return float(re.search(pattern, reply, re.DOTALL) is not None)


def _check_texts(**arguments: Any) -> None:
    """Raise `InvalidInput` for an argument of a reward that is no text, which no reply can help."""
    for name, value in arguments.items():
        if not isinstance(value, str):
            raise InvalidInput(f"the {name} is a {type(value).__name__}, not text: use str({name})")


def final_answer(text: str) -> str | None:
    r"""The final answer in `text`, or None; the head of this module says which one counts.

    A number is returned without commas, currency, percent sign and unit, a sum or a LaTeX expression as
    written. Only the last 20,000 characters are read, and 200 after each mark. Raises nothing.

    >>> final_answer("#### $1,234.50"), final_answer(r"Thus $\boxed{\dfrac34}$"), final_answer("Hello.")
    ('1234.50', '3/4', None)
    >>> final_answer("The answer is 18. I checked it 2 times.")
    '18'
    """
    text = text[-_TAIL_CHARACTERS:]
    for mark in reversed(list(_HASHES.finditer(text))[-_MARKS_TRIED:]):
        region = _first_line(text, mark.end())
        if not _NUMBERED_HEADING.match(region) and (answer := _leading_answer(region)):
            return answer
    for *_, content in reversed(boxes_in(text)[-_MARKS_TRIED:]):
        region = _strip_markup(content[:_REGION_CHARACTERS])
        if answer := _leading_answer(region) or _last_number(region):
            return answer
    for mark in reversed(list(_PHRASE.finditer(text))[-_MARKS_TRIED:]):
        sentence = re.split(r"\.\s|。", _first_line(text, mark.end()))[0]
        # Base models write their whole working after `A:`, so after a label the line must be the bare answer.
        is_working = mark["label"] and ("=" in sentence or len(sentence.split()) > 4)
        answer = None if is_working else _leading_answer(sentence)
        if answer or (not mark["label"] and (answer := _last_number(sentence))):
            return answer
    text = _strip_markup(text).strip().rstrip(".")
    bare = len(text) <= _REGION_CHARACTERS and _SUM.fullmatch(text)  # nothing but "1 234" or "2\sqrt{3}"
    return _leading_answer(text) if bare else _last_number(text)


def _choices(text: str, *, whole: bool = False) -> set[str]:
    """The letters of the choices a text begins with, or, if `whole`, consists of; none if it is something else."""
    text = text.replace("**", "")
    if not (first := _CHOICE.match(text)):
        return set()
    letters, end = {first[1]}, first.end(1)
    end += len(text[end:]) - len(text[end:].lstrip(" \n)}"))
    while more := _MORE_CHOICES.match(text, end):
        letters.add(more[1])
        end = more.end()
    rest = text[max(end, first.end() if len(letters) == 1 else end) :]
    return letters if not whole or not rest.strip(" .}$)") else set()


def _last(matches: Iterable[re.Match[str]]) -> re.Match[str] | None:
    return next(reversed(list(matches)), None)


def _first_line(text: str, start: int) -> str:
    return _strip_markup(text[start : start + _REGION_CHARACTERS]).lstrip(" \t\r\n*:_").split("\n")[0]


def _strip_markup(text: str) -> str:
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text


def _plain_fractions(text: str) -> str:
    text = re.sub(r"(?<=\d) ?(?=\\[dtc]?frac)", " ", text)  # 2\frac{1}{2} is two and a half
    return _FRACTION.sub(r"\1\2/\3\4", text)


def _leading_answer(region: str) -> str | None:
    """The number or sum that `region` opens with, past an `x =` or a worked `9 * 2 =`."""
    left, equals, right = region.rpartition("=")
    if equals and not _ASIDE.search(left):
        region = right
    region = region.lstrip(" \t\r\n:*_~'\"").rstrip(" \t\r\n:*_~'\".,;")
    # Only here do spaces group thousands: in running text "3 100 dollar bills" has two numbers.
    region = re.sub(r"(?<![\d.,])\d{1,3}(?: \d{3}){1,9}+(?![\d/])", lambda m: m[0].replace(" ", ","), region)
    plain = _plain_fractions(region).lstrip("{[( ")
    number = _NUMBER.match(plain)
    if number and not _GOES_ON.match(plain, number.end()):
        return number.group().replace(",", "")
    if re.search(r"\d", region) and _SUM.fullmatch(region):
        return region
    return number.group().replace(",", "") if number else None


def _last_number(text: str) -> str | None:
    numbers = list(_NUMBER.finditer(_plain_fractions(text)))
    return numbers[-1].group().replace(",", "") if numbers else None


def _fraction(answer: str) -> Fraction | None:
    number = _NUMBER.fullmatch(answer)
    if number is None or len(answer) > _NUMBER_CHARACTERS:
        return None
    if number["hours"]:  # in hours
        return Fraction(int(number["hours"])) + Fraction(int(number["minutes"]), 60)
    value = Fraction(number["value"]) / int(number["divisor"] or 1)
    value += Fraction(int(number["top"] or 0), int(number["bottom"] or 1))
    value *= 10 ** POWERS.get(number["scale"] or number["sign_of_scale"], 0)
    return -value if number["sign"] == "-" else value


def _same_expression(final: str, expected: str) -> bool:
    from math_verify import parse, verify

    # math-verify's own time limit is a signal, which works only in the main thread. So an expression that could run for
    # long (10^{10^{10}}, a root of a root) is not passed to it, nor one with unbalanced brackets, which it would guess.
    for expression in (final, expected):
        balanced = all(expression.count(a) == expression.count(b) for a, b in ("()", "{}"))
        too_powerful = re.search(r"\^|sqrt|\*\*", _SMALL_POWER_OR_ROOT.sub("1", expression))
        if len(expression) > _EXPRESSION_CHARACTERS or not balanced or too_powerful:
            return False
    parsed = [parse(f"${expression}$", parsing_timeout=None) for expression in (expected, final)]
    return bool(verify(parsed[0], parsed[1], timeout_seconds=None))
