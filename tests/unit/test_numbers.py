"""Numbers in text, read exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest
from sparkling.numbers import find, plain, shown


def values(text):
    return [n.text for n in find(plain(text))]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("18", ["18"]),
        ("$1,234,567.891", ["1234567.891"]),
        ("12,34,567 rupees", ["1234567"]),
        ("1\u202f234\u202f567 and 1'234", ["1234567", "1234"]),
        ("1{,}234, 1,\\!234 and 1\\,234", ["1234", "1234", "1234"]),
        ("1,2,3 and 10,18", ["1", "2", "3", "10", "18"]),
        ("16-3, 16 - 3, 16 -3", ["16", "3"] * 3),
        ("(5)-4", ["5", "4"]),
        ("= -3, is \u22125, is \u20135", ["-3", "-5", "-5"]),
        ("10\u201318", ["10", "18"]),
        ("- 3 apples", ["3"]),
        ("-$5, $-5, +5", ["-5", "-5", "5"]),
        (".5, 0.50, 18.00, 18.", ["0.5", "0.5", "18", "18"]),
        ("3/4, 6/8, 8/2, -3/4", ["3/4", "3/4", "4", "-3/4"]),
        ("2\u00bd cups, \u00be, 1 2/3", ["5/2", "3/4", "5/3"]),
        ("2\\frac{1}{2}, \\dfrac12, -\\frac{3}{4}, \\tfrac{-3}{4}", ["5/2", "1/2", "-3/4", "-3/4"]),
        ("\\frac{\\frac{1}{2}}{3}", ["1/6"]),
        ("5/0, 12/25/2024", ["5", "0", "12", "25", "2024"]),
        ("1.8e3, 1.8 \u00d7 10^3, 1.8 \\times 10^{3}, 2*10^-2", ["1800", "1800", "1800", "0.02"]),
        ("18%, 18\\%, \\$18, US$18, Rs.500, USD 500", ["18", "18", "18", "18", "500", "500"]),
        ("18kg and 5 km", ["18", "5"]),
        ("the 5th, x2, H2O, Q3, v1.2.3", []),
        (
            "10\u00b2, 10^3, 2^{10}, 10^-2, 1.5\u00d710\u00b3",
            ["100", "1000", "1024", "0.01", "1500"],
        ),
        ("18 m^2, 18 cm^{2}, 18\\text{ m}^2, 18 m\u00b3, 18 m s^-2", ["18"] * 5),
        ("eggs\n18, eggs\r\n19", ["18", "19"]),
        ("1\\ 234, 1~234, 1\\;234", ["1234"] * 3),
        ("9^999, 0^-1", []),
        ("\uff11\uff18", ["18"]),
        ("\\textbf{18}, \\mathrm{7}", ["18", "7"]),
        ("eighteen", []),
        ("9" * 500, []),
        ("", []),
    ],
)
def test_numbers_are_read(text, wanted):
    assert values(text) == wanted


def test_values_are_exact():
    (a,), (b,), (c,) = (find(t) for t in ("0.1", "0.2", "0.3"))
    assert a.value + b.value == c.value == Fraction(3, 10)
    assert find("0.30000000000000004")[0].value != c.value
    assert find("12345678901234567890123.25")[0].value == Fraction(49382715604938271560493, 4)


def test_a_number_says_where_it_stands():
    text = "so -$1,234 it is"
    (number,) = find(text)
    assert text[number.start : number.end] == "-$1,234"


@pytest.mark.parametrize(
    ("value", "fraction", "text"),
    [
        (Fraction(18), False, "18"),
        (Fraction(-3, 4), False, "-0.75"),
        (Fraction(3, 4), True, "3/4"),
        (Fraction(1, 3), False, "1/3"),
        (Fraction(1, 125), False, "0.008"),
        (Fraction(-1, 16), False, "-0.0625"),
        (Fraction(0), True, "0"),
    ],
)
def test_values_are_shown_exactly(value, fraction, text):
    assert shown(value, fraction=fraction) == text
    assert find(text)[0].value == value
