"""Numbers as people and models write them, read exactly: `$1,234.50`, `-3/4`, `2½`, `\\frac{3}{4}`.

`plain` turns LaTeX and typography into plain text, `find` gives the numbers in it, from left to
right, as Fractions: 0.1 + 0.2 is 0.3 here. Figures within words (`x2`, `5th`) are no numbers.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

MOST_DIGITS = 400  # a model that repeats a digit for ever writes no number
MOST_POWER = 400

# Characters that stand for another one. Minus signs and dashes are all "-" here: whether that is a
# sign is decided by what stands before it.
_SAME = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
    **dict.fromkeys("\u2014\u2015", " "),  # long dashes separate clauses
    **dict.fromkeys(
        "\u00a0\u202f\u2009\u2007\u2006\u205f", "\u2009"
    ),  # spaces that may group digits
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    "\u2044": "/",
    "\uff0f": "/",
    "\u00d7": " x ",
    "\u22c5": " x ",
    "\uff05": "%",
    "\uff0b": "+",
    "\uff0e": ".",
    "\uff0c": ",",
    **{chr(0xFF10 + i): str(i) for i in range(10)},
}
_SAME_TABLE = str.maketrans(_SAME)
_RAISED = re.compile("[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_RAISED_TABLE = str.maketrans(
    "\u207a\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "+-0123456789"
)
_VULGAR = re.compile(r"(?<=[0-9])?[¼-¾⅐-⅞]")

_WRAPPERS = r"text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|rm|it|sf|tt|normal)|mbox|hbox|emph|underline"
_WRAPPED = re.compile(rf"\\(?:{_WRAPPERS}|operatorname)\s*\{{([^{{}}]*)\}}")
_FRACTION = re.compile(
    r"\\[dtc]?frac\s*(?:\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}|([0-9])\s*([0-9]))"
)
_LATEX_GROUP = re.compile(r"(?<=[0-9])(?:\\[ ;:]|~)(?=[0-9]{3}(?![0-9]))")
_POWER = re.compile(r"\^\s*\{\s*([+-]?[0-9]+)\s*\}")

_CURRENCY = r"(?:(?:US|A|C|NZ|HK|S)?\$|[€£¥₹₽₩฿₫₱]|(?:USD|EUR|GBP|INR|RMB|CNY|Rs\.?))"
_GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])"
_INDIAN = r"[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?!,?[0-9])"
_SPACED = r"[0-9]{1,3}(?:[\u2009'’][0-9]{3})+(?![0-9])"
_WHOLE = rf"(?:{_GROUPED}|{_INDIAN}|{_SPACED}|[0-9]+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.[0-9]+)?|\.[0-9]+)"
_TOKEN = re.compile(
    rf"""
    (?P<sign>(?<![+-])[+-]\s?)?
    (?P<money>{_CURRENCY}\s?)?
    (?P<sign2>[+-])?
    (?<![0-9]) (?<![0-9]\.) (?P<start>)
    (?>
        (?P<whole>[0-9]+)[ \u2009]+(?P<part>[0-9]{{1,4}}/[1-9][0-9]{{0,3}})(?![0-9/]|[.,][0-9])
      | (?<!/)(?P<top>{_DECIMAL})\s?/\s?(?=[0-9.,]*[1-9])(?P<bottom>{_DECIMAL})(?!\.?[0-9]|\s?/\s?[0-9])
      | (?P<number>{_DECIMAL})
        (?:(?P<e>[eE][+-]?[0-9]{{1,3}}(?![0-9A-Za-z]))
          |\s*(?:x|\*)\s*10\s?\^\s?(?P<power>[+-]?[0-9]{{1,3}})(?![0-9])
          |\^(?P<exponent>[+-]?[0-9]{{1,3}})(?![0-9]|\.[0-9]))?
    )
    (?!(?:st|nd|rd|th)\b)
    """,
    re.VERBOSE,
)
# Not "$", which also stands before a last line break: the 18 of "eggs\n18" is a number.
_LETTER_BEFORE = re.compile(r"[A-Za-z_]\Z")
_POWER_OF_LETTERS = re.compile(r"[A-Za-z_)\]\s]\^\s?\Z")  # the 2 of m^2; of 10^2 see `_TOKEN`
_OPERAND_BEFORE = re.compile(r"[0-9)\]}%]\s*$")


@dataclass(frozen=True)
class Number:
    """A number and where it stands in the text it was found in. `fraction`: written as one."""

    value: Fraction
    start: int
    end: int
    fraction: bool = False

    @property
    def text(self) -> str:
        """In plain figures: "18", "-0.75", "3/4". Decimals stay decimals, fractions fractions."""
        return shown(self.value, fraction=self.fraction)


def shown(value: Fraction, *, fraction: bool = False) -> str:
    """A value in figures, exactly: whole, as a decimal where it ends as one (unless `fraction`),
    else as numerator/denominator."""
    if value.denominator == 1:
        return str(value.numerator)
    rest, digits = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest, count = rest // prime, count + 1
        digits = max(digits, count)
    if fraction or rest != 1:
        return f"{value.numerator}/{value.denominator}"
    scaled = abs(value.numerator) * 10**digits // value.denominator
    figures = str(scaled).rjust(digits + 1, "0")
    return f"{'-' if value < 0 else ''}{figures[:-digits]}.{figures[-digits:]}"


def plain(text: str) -> str:
    """`text` without LaTeX, Markdown emphasis and typographic characters around its numbers."""
    text = _VULGAR.sub(_spelled, text)
    text = _RAISED.sub(lambda m: "^" + m[0].translate(_RAISED_TABLE), text)
    text = text.translate(_SAME_TABLE)
    text = text.replace("{,}", ",").replace("**", "").replace("__", "").replace("`", "")
    text = _POWER.sub(r"^\1", text)
    if "\\" in text:
        text = _latex(text)
    return text.replace("{", " ").replace("}", " ")


def _spelled(match: re.Match[str]) -> str:
    value = Fraction(unicodedata.numeric(match[0])).limit_denominator(16)
    return f" {value.numerator}/{value.denominator}"


def _latex(text: str) -> str:
    text = text.replace("\\!", "").replace("\\,", "\u2009")
    text = _LATEX_GROUP.sub("\u2009", text)
    text = re.sub(r"\\[$%#&_]", lambda m: m[0][1], text)
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])", "", text)
    text = re.sub(r"\\(?:times|cdot)(?![A-Za-z])", " x ", text)
    text = re.sub(r"\\(?:approx|equiv)(?![A-Za-z])", " = ", text)
    text = re.sub(r"\\div(?![A-Za-z])", " : ", text)
    for _ in range(8):  # what is nested deeper is no answer
        before = text
        text = _WRAPPED.sub(r" \1 ", text)
        text = _FRACTION.sub(_quotient, text)
        if text == before:
            break
    text = re.sub(r"\\[()\[\];:> ]|\\\\|~", " ", text)
    return re.sub(r"\\(?:quad|qquad|circ|degree)(?![A-Za-z])", " ", text)


def _quotient(match: re.Match[str]) -> str:
    top, bottom = _alone(match[1] or match[3] or ""), _alone(match[2] or match[4] or "")
    if top is None or not bottom:
        return f" ({match[1]})/({match[2]}) "
    value = top / bottom
    # "2\\frac12" is a mixed number: a space keeps its parts apart.
    space = " " if match.string[: match.start()][-1:].isdigit() else ""
    return f"{space}{value.numerator}/{value.denominator} "


def _alone(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else."""
    found = find(text)
    if len(found) == 1 and text[: found[0].start].strip() == text[found[0].end :].strip() == "":
        return found[0].value
    return None


def find(text: str) -> list[Number]:
    """The numbers in `text` (after `plain`), from left to right.

    A minus is a sign when it touches the number and follows neither a number nor a bracket:
    `16-3` holds 16 and 3, `= -3` holds -3, and the `- 3` of a list holds 3.
    """
    out = []
    for match in _TOKEN.finditer(text):
        number = _number(text, match)
        if number is not None:
            out.append(number)
    return out


def _number(text: str, match: re.Match[str]) -> Number | None:
    start = match.start("start")
    edge = match.start() if match["sign"] or match["money"] else start
    near = text[max(0, edge - 40) : edge]
    if _LETTER_BEFORE.search(near) and not match["money"] and not match["sign"]:
        return None  # x2, H2O
    if _POWER_OF_LETTERS.search(near):
        return None
    value = _value(match)
    if value is None:
        return None
    begin = match.start()
    if match["sign"]:
        touches = not match["sign"][-1].isspace()
        if not touches or _OPERAND_BEFORE.search(near):
            begin += len(match["sign"])
        elif "-" in match["sign"]:
            value = -value
    if match["sign2"] == "-":
        value = -value
    fraction = match["bottom"] is not None or match["part"] is not None
    return Number(value, begin, match.end(), fraction)


def _value(match: re.Match[str]) -> Fraction | None:
    if match["part"] is not None:
        whole, part = _exact(match["whole"]), Fraction(match["part"])
        return None if whole is None else whole + part
    if match["bottom"] is not None:
        top, bottom = _exact(match["top"]), _exact(match["bottom"])
        return None if top is None or not bottom else top / bottom
    value = _exact(match["number"])
    if value is None:
        return None
    if match["exponent"] is not None:
        return _raised(value, int(match["exponent"]))
    power = int((match["e"] or "e0")[1:]) + int(match["power"] or 0)
    return None if abs(power) > MOST_POWER else value * Fraction(10) ** power


def _raised(value: Fraction, exponent: int) -> Fraction | None:
    """`value` to a whole power; None where that has too many digits, or is a division by zero."""
    size = max(len(str(value.numerator)), len(str(value.denominator)))
    if size * abs(exponent) > MOST_DIGITS or (not value and exponent < 0):
        return None
    return value**exponent


def _exact(figures: str) -> Fraction | None:
    digits = re.sub(r"[,'’\u2009]", "", figures)
    return Fraction(Decimal(digits)) if len(digits) <= MOST_DIGITS else None
