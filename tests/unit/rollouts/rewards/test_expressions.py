r"""Mathematical answers as people write them: reply ‖ reference, rows parted by ⏎. Each was graded wrongly once."""

from __future__ import annotations

import pytest

from rollouts.rewards.answers import math_answer
from rollouts.rewards.expressions import last_boxes, unit_of
from settings.errors import InvalidInput

_RIGHT = r"""
\boxed{\text{(C) }10} ‖ 10  ⏎  \boxed{45°} ‖ 45  ⏎  \boxed{∞} ‖ \infty  ⏎  \boxed{12 \text{ inches}} ‖ 12 in
\boxed{0.\overline{142857}} ‖ 1/7  ⏎  \boxed{1.\overline{9}} ‖ 2  ⏎  \boxed{3.\dot{3}} ‖ 10/3
\boxed{2e3} ‖ 2000  ⏎  \boxed{2.5e-3} ‖ 0.0025  ⏎  \boxed{41}\boxed{42} ‖ 42  ⏎  \boxed{41}. \boxed{42} ‖ 42
first \fbox{1}, then finally \fbox{2} ‖ 2  ⏎  \boxed{√2} ‖ \sqrt{2}  ⏎  \boxed{x ≥ 3} ‖ [3,\infty)
\boxed{(-∞, 2) ∪ (3, ∞)} ‖ (-\infty,2)\cup(3,\infty)  ⏎  \boxed{1 234} ‖ 1234  ⏎  \boxed{-10\,000} ‖ -10000
\boxed{10\,000.5} ‖ 10000.5  ⏎  \boxed{60 km/h} ‖ 60 \text{ km/h}  ⏎  \boxed{5 m^2} ‖ 5\text{ m}^2
\boxed{5 m²} ‖ 5\text{ m}^2  ⏎  \boxed{3 + 4i} ‖ 3+4\mathrm{i}  ⏎  \boxed{-i} ‖ -\mathrm{i}
\boxed{\sin\mathrm{x}} ‖ \sin x  ⏎  \boxed{42.} ‖ 42  ⏎  \boxed{1} and then \boxed{2} ‖ 2
The answer is −3. ‖ -3  ⏎  I get \boxed{41}. Wait, I forgot the carry, so it is \boxed{42}. ‖ 42
I get \boxed{41}, then \boxed{42} ‖ 42  ⏎  \fbox{42} ‖ 42  ⏎  \boxed{100 dollars} ‖ 100
\boxed{10\,000} ‖ 10000  ⏎  \boxed{1.2e5} ‖ 120000  ⏎  \boxed{-2*pi} ‖ -2\pi  ⏎  \boxed{0.\overline{3}} ‖ 1/3
\boxed{0.1\overline{6}} ‖ 1/6  ⏎  \boxed{(−∞,3)} ‖ x<3  ⏎  \boxed{x<3} ‖ (-\infty,3)
\boxed{2\mathrm{i}} ‖ 2i  ⏎  \boxed{1\,234\,567} ‖ 1234567  ⏎  \boxed{3+4\text{i}} ‖ 3+4i
\boxed{pi/2} ‖ \frac{\pi}{2}  ⏎  \boxed{\text{The answer is }42} ‖ 42  ⏎  \boxed{2 \le x \le 5} ‖ [2,5]
\boxed{x \geq 3} ‖ [3,\infty)  ⏎  \boxed{x>3} ‖ (3,∞)  ⏎  \boxed{10 \text{ m/s}} ‖ 10 m/s
\boxed{\mathrm{e}^2} ‖ e^2  ⏎  \boxed{x**2} ‖ x^2  ⏎  \boxed{\frac{1}{3}} ‖ 0.\overline{3}
\boxed{0.1\bar{6}} ‖ 1/6  ⏎  \boxed{\emptyset} ‖ \varnothing
\(\boxed{3}\), \(\boxed{4}\) ‖ 4,3  ⏎  x=\boxed{3} and y=\boxed{4} ‖ 3,4  ⏎  \boxed{2 1/2} ‖ 5/2  ⏎  \boxed{€5} ‖ 5
\boxed{\$1.5\text{ million}} ‖ 1500000  ⏎  \boxed{2 billion dollars} ‖ 2000000000
\boxed{\text{(B) } 5} ‖ B  ⏎  \boxed{B. 5} ‖ B  ⏎  The answer is (B). ‖ B  ⏎  Answer: B ‖ (B)
\boxed{\text{no solution}} ‖ no solution
The correct option is **C**. ‖ C  ⏎  The answer is \textbf{(C)}. ‖ C  ⏎  正确答案是B。 ‖ B  ⏎  \boxed{A, C} ‖ C and A
\boxed{e^{i\pi}} ‖ -1  ⏎  \boxed{\sqrt{-1}} ‖ i  ⏎  \boxed{\cos 60^\circ} ‖ 1/2  ⏎  \boxed{\mathbb R} ‖ \mathbb{R}
\boxed{0.\dot{1}4285\dot{7}} ‖ 1/7  ⏎  \boxed{0.(3)} ‖ 1/3  ⏎  \boxed{0.333...} ‖ 1/3  ⏎  \boxed{five} ‖ 5
\boxed{True} ‖ true  ⏎  \boxed{USD 18} ‖ 18  ⏎  \boxed{18dollars} ‖ 18  ⏎  \boxed{100元} ‖ 100  ⏎  \boxed{3万} ‖ 30000
\boxed{\{x \mid x > 3\}} ‖ (3,\infty)  ⏎  \boxed{\lbrace 1,2 \rbrace} ‖ \{1,2\}  ⏎  \boxed{]1,2[} ‖ (1,2)
\boxed{\langle 1, 2\rangle} ‖ (1,2)  ⏎  \boxed{(-oo, 3)} ‖ (-\infty,3)  ⏎  \boxed{1.5*10^-3} ‖ 0.0015
\boxed{1.5 x 10^3} ‖ 1500  ⏎  \boxed{1.234.567} ‖ 1234567  ⏎  \boxed{exp(2)} ‖ e^2  ⏎  \boxed{frac{1}{2}} ‖ 1/2
\boxed{42\\} ‖ 42  ⏎  \boxed{42,} ‖ 42  ⏎  \boxed{`42`} ‖ 42  ⏎  \boxed{Answer: 42} ‖ 42  ⏎  \framebox{42} ‖ 42
\boxed{\underline{42}} ‖ 42  ⏎  \boxed{\textcolor{red}{42}} ‖ 42  ⏎  \boxed{３．５} ‖ 3.5  ⏎  \boxed{2½} ‖ 5/2
\boxed{2⁵} ‖ 32  ⏎  \boxed{∛27} ‖ 3  ⏎  \boxed{3^\text{rd}} ‖ 3  ⏎  \boxed{\text{1011}_2} ‖ 1011_2
\boxed{25 °C} ‖ 25  ⏎  \boxed{100 \degree} ‖ 100  ⏎  \boxed{5\ \Omega} ‖ 5 ohms  ⏎  \boxed{5cm} ‖ 5 \text{ centimeters}
\boxed{x<1 \text{ or } x \ge 2} ‖ (-\infty,1)\cup[2,\infty)  ⏎  \boxed{70\,\%} ‖ 70  ⏎  \boxed{\lg 100} ‖ 2
\boxed{\text{2 and 3}} ‖ 2,3  ⏎  \boxed{\small{42}} ‖ 42  ⏎  \boxed{~42} ‖ 42  ⏎  \boxed{42^{\text{o}}} ‖ 42
\boxed{2 \pmod{5}} ‖ 2  ⏎  \boxed{\text{5:30 PM}} ‖ 5:30 p.m.  ⏎  \boxed{1_000} ‖ 1000  ⏎  \boxed{\text{5 cm}} ‖ 5
\boxed{Total: 12} ‖ 12  ⏎  \boxed{12} ‖ Number of ways: 12  ⏎  \boxed{12} ‖ Area = 12  ⏎  \boxed{2abcd+1} ‖ 1+2abcd
\boxed{\text{Option D}} ‖ D  ⏎  \boxed{Option D} ‖ D  ⏎  **D** ‖ D  ⏎  D. 12 ‖ D  ⏎  D ‖ (D)
"""
_WRONG = r"""
\boxed{\infty} ‖ -\infty  ⏎  \boxed{1,2,3} ‖ 1,2  ⏎  \boxed{\left(3,\frac{\pi}{2}\right)} ‖ (3,\frac{\pi}{3})
\boxed{1010_2} ‖ 1010_3  ⏎  \boxed{\text{Evelyn}} ‖ \text{Carla}  ⏎  \boxed{\frac{1}{100!}} ‖ \frac{1}{101!}
\boxed{5\pi \text{ cm}} ‖ 5\pi\text{ m}  ⏎  \boxed{4 \times 10^{-7}} ‖ 5\times 10^{-7}
\boxed{\frac{1}{2^{100}}} ‖ 2^{-101}  ⏎  \boxed{10^{-12}} ‖ 0  ⏎  \boxed{\{10^{-12}, 1\}} ‖ \{10^{-13}, 1\}
\boxed{[0, 10^{-9}]} ‖ [0, 2 \cdot 10^{-9}]  ⏎  \boxed{100 pounds} ‖ 100 kilograms  ⏎  \boxed{3 feet} ‖ 3 yards
\boxed{60 km/h} ‖ 60 mph  ⏎  \boxed{5 m^2} ‖ 5 m^3  ⏎  \boxed{25 square meters} ‖ 25 m
\boxed{\text{Monday}} ‖ \text{Tuesday}  ⏎  \boxed{\text{True}} ‖ \text{False}  ⏎  \boxed{a/b} ‖ b/a
\boxed{90^\circ} ‖ \frac{\pi}{2}  ⏎  \boxed{42!} ‖ 42  ⏎  \boxed{-42} ‖ 42  ⏎  \boxed{4.2} ‖ 42
\boxed{x_1} ‖ x_2  ⏎  \boxed{1 \text{ or } 2} ‖ 1  ⏎  \boxed{42}. So not \boxed{41} ‖ 42
\boxed{0.\overline{3}} ‖ 0.3  ⏎  \boxed{\frac{1}{2^{98}}} ‖ \frac{1}{2^{99}}  ⏎  \boxed{1e-7} ‖ 2e-7
\boxed{0.0000001} ‖ 0.0000002  ⏎  \boxed{\frac{1}{20!}} ‖ \frac{1}{21!}  ⏎  \boxed{5\text{ cm}} ‖ 5\text{ m}
\boxed{5 cm} ‖ 5 m  ⏎  \boxed{12_5} ‖ 12_6  ⏎  \boxed{B} ‖ C  ⏎  \boxed{\text{even}} ‖ \text{odd}
\boxed{\begin{pmatrix}1\\2\end{pmatrix}} ‖ \begin{pmatrix}1\\3\end{pmatrix}  ⏎  \boxed{(0,1)} ‖ [0,1)
\boxed{(1,2)} ‖ (2,1)  ⏎  \boxed{0.33} ‖ 1/3  ⏎  \boxed{x<3} ‖ (3,\infty)  ⏎  \boxed{10 m/s} ‖ 10 km/h
\boxed{5\text{ cm}^2} ‖ 5\text{ cm}  ⏎  \boxed{3 hours} ‖ 3 minutes  ⏎  \boxed{ ‖ 42  ⏎  \boxed{} ‖ 42
\boxed{12:30} ‖ 12:45  ⏎  \boxed{100000000000000000001} ‖ 100000000000000000000
\boxed{\frac{1}{10^{30}}} ‖ 0  ⏎  \boxed{\sqrt{2}\cdot 10^{-9}} ‖ \sqrt{3}\cdot 10^{-9}
\boxed{1.5 million} ‖ 1.5  ⏎  \boxed{2 1/2} ‖ 21/2  ⏎  \boxed{(B)} ‖ C  ⏎  The answer is A. ‖ B
\boxed{(1/2^{98}, 1)} ‖ (1/2^{99}, 1)  ⏎  \boxed{\{1e-7\}} ‖ \{2e-7\}
\boxed{5kg} ‖ 5g  ⏎  \boxed{5 \mathrm{~km}} ‖ 5 \mathrm{~m}  ⏎  \boxed{\$10} ‖ 10 cents  ⏎  \boxed{25 °C} ‖ 25 °F
\boxed{A, B} ‖ A  ⏎  \boxed{\text{A and B}} ‖ A  ⏎  Answer: A or B ‖ A  ⏎  The answer is A and C ‖ A
A plausible answer is harder to find. ‖ A  ⏎  \boxed{5 \Omega} ‖ 5 V  ⏎  \boxed{3万} ‖ 3  ⏎  \boxed{2½} ‖ 21/2
\boxed{5:30 PM} ‖ 5:30 AM  ⏎  \boxed{5 mol} ‖ 5 g  ⏎  \boxed{5 dollars} ‖ 5 euros  ⏎  \boxed{100元} ‖ 100万元
I considered A and B but the answer is C. ‖ A  ⏎  \boxed{x<1 \text{ or } x>2} ‖ (1,2)  ⏎  D. 12 ‖ C
"""


@pytest.mark.parametrize(("rows", "expected"), [(_RIGHT, 1.0), (_WRONG, 0.0)])
def test_answers_are_equal_as_people_take_them(rows: str, expected: float) -> None:
    pairs = [row.strip().split(" ‖ ") for line in rows.strip().splitlines() for row in line.split("⏎")]
    graded = {(reply, answer): math_answer(reply, answer) for reply, answer in pairs}
    assert {pair: score for pair, score in graded.items() if score != expected} == {}
    assert len(graded) > 30


@pytest.mark.parametrize(
    "answer",
    [
        "answer is 10000",
        "The answer: 42",
        "it is 5",
        "x is 3",
        "Therefore 42",
        "John has 5 apples",
        "答案是5",
        r"\boxed{the result is 4}",
        "exactly 5",
        "Perimeter 12",
        "5 apples and 3 pears",
        "12 hours and 30 minutes",
    ],
)
def test_a_reference_in_prose_is_a_fault_of_the_data(answer: str) -> None:
    with pytest.raises(InvalidInput, match="is a sentence; write the bare answer"):
        math_answer(r"\boxed{10000}", answer)


def test_a_reference_of_more_digits_than_python_reads_is_no_error_of_the_reward() -> None:
    reference = rf"0.\overline{{{'123' * 1700}}}"
    assert math_answer(rf"\boxed{{{reference}}}", reference) == 1.0 and math_answer(r"\boxed{1/3}", reference) == 0.0


def test_a_reference_in_words_is_an_answer() -> None:
    for answer in ("no real solutions", r"\text{It is impossible}", "18 dollars", "x=2 or x=3", "50 miles per hour"):
        assert math_answer(rf"\boxed{{{answer}}}", answer) == 1.0 and math_answer(r"\boxed{7}", answer) == 0.0


def test_a_million_characters_of_boxes_take_linear_time_and_an_open_box_is_none() -> None:
    assert last_boxes(r"\boxed{" * 100_000) is None and last_boxes(r"\boxed{42") is None
    assert last_boxes(r"\boxed{" * 1000 + "1" + "}" * 1000) == "{" * 999 + "1" + "}" * 999
    assert last_boxes(r"{ \boxed{7} \{ \boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert unit_of("60 miles per hour") == "mi/h" and unit_of("a cat and b") == "" and unit_of(r"\text{Monday}") == ""
