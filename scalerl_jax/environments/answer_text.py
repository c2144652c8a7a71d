"""Answers as text: normalizes different spellings of the same answer, and extracts the final answer of a text.

    plain(s)            no delimiters, no spacing commands, one kind of minus, digit, fraction, bracket
    same_text(a, b)     equal in that form, ignoring spaces
    is_mathematics(s)   contains a digit, an operator or a command, and no words; letters alone are words
    words(s)            without case, punctuation and text commands
    final_answers(s)    the last boxed part; else the part tagged <answer>; else the text after "the answer is";
                        else the whole text, its last line, or the answer in its last sentence (so B; B is correct)

`\\$` is money, not a delimiter.
"""

import functools
import itertools
import re
import unicodedata

# Characters replaced by commands or by other characters; all others are left unchanged.
_SYMBOLS = str.maketrans({
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full width
    **dict.fromkeys("−﹣－", "-"), **dict.fromkeys("  　   ⁠​\ufeff", " "),
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∕": "/", "⁄": "/",
    "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^\circ ", "±": r"\pm ", "∅": r"\emptyset ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "‖": "||",
    "’": "'", "‘": "'", "′": "'", "″": "''", "“": '"', "”": '"', "…": "...",
})  # fmt: skip
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴-ⁿ]+"), re.compile("[₀-₉]+")
# At the end of a one-letter word ! and ' are operators; elsewhere they are punctuation.
_OPERATOR = re.compile(r"[+*/^=<>|-]|(?<=(?<![\w'\"])[^\W\d_])[!']+(?!\w)|[^\w\s\x00-\x7f]")
TEXT_COMMAND = (
    r"\\(?:text(?:bf|it|rm|normal|sf|tt|sc)?|mbox|hbox|mathrm|mathbf|mathit|mathsf|mathtt|operatorname\*?|rm|bf)"
)
_TEXT_GROUP = re.compile(TEXT_COMMAND + r"\s*\{([^{}]*)\}")
_UPRIGHT = re.compile(TEXT_COMMAND + r"\s*\{\s*([a-fijknopqrtuvwxyz])\s*\}")  # letters that are no unit
_DELIMITERS = re.compile(r"(?<!\\)\$\$?|\\[()\[\]]")
_MONEY = re.compile(r"(?<![\\$\w])\$(?=-?\s*\d)")
_BOXED = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_SEPARATORS = re.compile(r"(?:[\s,;$&]|\\[()\[\],;!]|\\(?:q?quad|text)(?![a-zA-Z])|[{}]|\b(?:and|or)\b)*")
_ANCHOR = re.compile(
    r"####|\b(?:answer|option|choice|solution|result)s?\**\s*(?:is|are|would be|must be|:|=)(?![a-z])[\s*:]*",
    re.IGNORECASE,
)
_CONCLUSION = re.compile(
    r"(?<![a-z'])(?:choose|pick|select|letter is|therefore|so|hence|thus|it's|it is)(?![a-z'])[\s,:*]*", re.IGNORECASE
)
_IS_RIGHT = re.compile(
    r"(?:(?:so|therefore|thus|hence)\b,?\s*)?(?:(?:option|choice|answer|letter)\s+)?(\S{1,40})\s+is\s+(?:the\s+)?"
    r"(?:(?:correct|right|best)(?:\s+(?:one|answer|choice|option|letter))?|answer)",
    re.IGNORECASE,
)
_COPULA = re.compile(r"(?<![a-zA-Z'])(?:is|are|was|were|equals)(?![a-zA-Z'])\s*:?", re.IGNORECASE)
_REASON = re.compile(r",?\s+because\b|,\s*(?:since|as|not)\b", re.IGNORECASE)
# These words in the clause before an answer negate it, or leave it open.
_DENIED = re.compile(
    r"(?<![a-z])(?:not|never|cannot|no|none|neither|nor|nobody|nothing|impossible|unlikely|doubt\w*|whether|if|wrong|"
    r"incorrect|false|another|other|possible|one|perhaps|maybe|might|may|could|unless)(?![a-z])|n't(?![a-z])",
    re.IGNORECASE,
)
MARKED_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(\s*([A-Z])\s*\)|\[\s*([A-Z])\s*\]|([A-Z])\s*[).:])", re.IGNORECASE
)
_RETRACTED = re.compile(
    r"[.!?\s*]*(?:or|and|but|no|not|wait|actually|maybe|perhaps|alternatively)(?![a-z])", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[.!?](?=[\s*]|$)|\n")
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt max min gcd lcm mod pi det dim "
    "deg arg infinity inf".split()
)
_SHORT_WORDS = frozenset(
    "is to of in at on no by am pm cm mm km kg ft mg he we me my us it if so up as an be do go hi oh ok tv id".split()
)
_OPERATION = re.compile(r"[\w)}]\s*[=+*^<>|/_-]\s*[\w({\\-]")
LONGEST_SENTENCE = 1_000  # characters; only the end of a longer line is read
LONGEST_COMPARED = 20_000  # characters; longer texts must be equal character by character
_NEW_ROW = "\ue000"  # stands for two backslashes, neither of which begins a command
MATRIX = re.compile(r"\\begin\s*\{[a-z]*(?:matrix|array|cases)\*?\}")


@functools.lru_cache(maxsize=64)  # scoring one completion normalizes the same text many times
def plain(text: str) -> str:
    """`text` without parts that do not change its meaning, and with one spelling of everything that has several."""
    s = _RAISED.sub(lambda run: f"^{{{unicodedata.normalize('NFKC', run[0])}}}", text)
    s = _LOWERED.sub(lambda run: f"_{{{unicodedata.normalize('NFKC', run[0])}}}", s)
    s = re.sub(r"(?![0-9])\d", lambda digit: str(unicodedata.decimal(digit[0])), s.translate(_SYMBOLS))
    s = s.replace("\\\\", _NEW_ROW)
    s = _mark_money(s)
    s = _DELIMITERS.sub(" ", s)
    s = re.sub(r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|Biggl|Biggr|big|Big|bigg|Bigg)(?![a-zA-Z])\s*", "", s)
    s = re.sub(r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|mathstrut)(?![a-zA-Z])\s*", "", s)
    s = re.sub(r"(?<=\d)\s*(?:\{\s*,\s*\}|,\s*\\[!,]|\\,|,)\s*(?=\d{3}(?!\d))", ",", s) if _grouped(s) else s
    s = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", s)
    s = re.sub(r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le", s)
    s = re.sub(r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge", s)
    s = re.sub(r"\\neq(?![a-zA-Z])", r"\\ne", s)
    s = re.sub(r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset ", s)
    s = re.sub(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])", r"^\\circ ", s)
    s = re.sub(r"\\l?r?brack(?![a-zA-Z])", lambda m: "[" if "l" in m[0] else "]", s)
    s = re.sub(r"\\l?r?brace(?![a-zA-Z])", lambda m: r"\{" if "l" in m[0] else r"\}", s)
    s = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", s)
    s = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", s)
    s = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", s)
    s = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", s)
    s = re.sub(r"\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~", " ", s)
    s = re.sub(r"\\(?:text)?color\s*\{[^{}]*\}", " ", s)
    s = _UPRIGHT.sub(r" \1 ", s)
    s = re.sub(r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}", s)
    s = re.sub(r"\\(?:pmod|bmod)\s*\{?\s*(\w+)\s*\}?|\(\s*" + TEXT_COMMAND + r"\s*\{\s*mod\s*\}\s*(\w+)\s*\)",
               lambda m: f"\\pmod{{{m[1] or m[2]}}}", s)  # fmt: skip
    s = re.sub(r"(\d*)\.(\d*)\s*\\(?:overline|bar|dot)\s*\{\s*(\d+)\s*\}", _repeating, s)
    s = s.replace("**", "^") if re.search(r"[\w)]\*\*[\w(]", s) else s.replace("**", " ")  # a power, or bold print
    return re.sub(r"\s+", " ", s.replace(_NEW_ROW, "\\\\ ")).strip()


def _repeating(decimal: re.Match[str]) -> str:
    """0.1\\overline{6} as a fraction."""
    whole, once, again = decimal[1], decimal[2], decimal[3]
    if len(decimal[0]) > 100:
        return decimal[0]
    above = int(f"{whole}{once}{again}") - int(f"{whole}{once}" or "0")
    return f"\\frac{{{above}}}{{{'9' * len(again)}{'0' * len(once)}}}"


def _grouped(s: str) -> bool:
    """Whether any comma groups digits as in 1,234,567 (a list of three-digit numbers looks the same)."""
    return re.search(r"\d\s*(?:\{\s*,\s*\}|,\s*\\[!,]|\\,)\s*\d{3}", s) is not None


def _mark_money(s: str) -> str:
    """Escapes dollar signs before numbers as money, if their count is odd or a pair of them encloses words."""
    count = len(re.findall(r"(?<!\\)\$", s))
    if count == 0 or not _MONEY.search(s):
        return s
    inner = re.sub(_TEXT_GROUP.pattern + r"|\\[a-zA-Z]+", " ", s)
    pairs = re.findall(r"(?<!\\)\$([^$]*)(?<!\\)\$", inner)
    if count % 2 or any(re.search(r"[A-Za-z]{3,}", pair) for pair in pairs):
        return _MONEY.sub(r"\\$", s)
    return s


def unwrapped(text: str) -> str:
    """Replaces text commands by their contents."""
    for _ in range(20):
        changed = _TEXT_GROUP.sub(r" \1 ", text)
        if changed == text:
            break
        text = changed
    return text


@functools.lru_cache(maxsize=64)
def bare(text: str) -> str:
    """plain(), without braces around the whole text, punctuation at the end, and the sign of a positive number."""
    s = plain(re.sub(r"</?answer>|```(?:[a-z]*\n)?", " ", text)).strip("` ")
    while s.endswith((".", ",", ";")) and not s.endswith("..."):
        s = s[:-1].rstrip()
    s = re.sub(r"^(?:=|\\approx(?![a-zA-Z]))\s*", "", s)
    if s.startswith("{") and _braces(s).get(0) == len(s) - 1:
        s = s[1:-1].strip()
    return re.sub(r"^\+\s*(?=[\d.\\(a-zA-Z])", "", s)


def squeezed(text: str) -> str:
    """bare(), without text commands, and with spaces only where two letters or digits would otherwise run together."""
    s = re.sub(r"\s+", " ", unwrapped(bare(text))).strip()
    return re.sub(r"(?<![\w]) | (?![\w])", "", s)


def subscripts_gone(text: str) -> str:
    """CO_2 is CO2."""
    return re.sub(r"[_{}]", "", squeezed(text))


def same_primes(a: str, b: str) -> bool:
    """Whether two formulas have as many primes, which math-verify drops; f'(x) = 2x may be given as 2x."""
    sides = [bare(text) if "=" in a and "=" in b else bare(text).rpartition("=")[2] for text in (a, b)]
    counts = [len(re.findall(r"(?<=[a-zA-Z'])'|\\prime(?![a-zA-Z])", side)) for side in sides]
    return counts[0] == counts[1]


def same_text(a: str, b: str) -> bool:
    """Whether both texts are equal except for spaces, delimiters and the like."""
    if max(len(a), len(b)) > LONGEST_COMPARED:
        return a.strip() == b.strip() != ""
    left = squeezed(a)
    return left != "" and left == squeezed(b)


def is_mathematics(text: str) -> bool:
    """Whether the text is mathematics rather than words."""
    s = bare(text)
    without_text = _TEXT_GROUP.sub(" ", s)
    if MATRIX.search(s):
        return True
    named = re.findall(r"\\([a-zA-Z]+)", without_text)
    s = re.sub(r"\\[a-zA-Z]+", " ", unwrapped(s))
    has_digit = any(character.isdigit() for character in s)
    # Where mathematics is joined by "and" or "or" it is a list.
    runs = [run for run in re.findall(r"[^\W\d_]+", s) if run.lower() not in ("and", "or")]
    wordy = any(len(run) > 1 and run.lower() not in FUNCTIONS for run in runs)
    if named or has_digit:
        return not wordy or _short_product(runs)
    if wordy:  # "ac - bd" is mathematics, "well-known" is not
        return (
            _short_product([run for run in runs if run not in ("by", "mg")])
            and re.search(_OPERATION.pattern + r"|^-[\w(]", s) is not None
        )
    if _OPERATION.search(s) or re.search(r"^-\s*[\w(]|\w!$|\w'|^\|.+\|$", s):
        return True
    if s[:1] in ("(", "[") and s[-1:] in (")", "]") and "," in s:
        return True
    return (any(run.lower() in FUNCTIONS for run in runs) and len(runs) > 1) or s.lower() in ("pi", "infinity")


def operators(text: str) -> tuple[str, ...]:
    """The operators in a text; hyphens between two words, bullets, dashes and emoji are not operators."""
    s = unicodedata.normalize("NFKC", unwrapped(plain(text)))
    s = re.sub(r"^\s*(?:-\s+(?=[^\W\d_]{3})|[*←-⇿■-⛿]\s+)", "", s)
    s = re.sub(r"(?<=[^\W\d_]{2})\s*-+\s*(?=[^\W\d_]{2})", " ", s)
    found = _OPERATOR.findall(s)
    return tuple(one for one in found if one.isascii() or unicodedata.category(one) == "Sm" or "←" <= one <= "⛿")


def _short_product(runs: list[str]) -> bool:
    """Whether all runs of letters look like products of variables (2ab, xy+1): two letters or a function, no word."""
    return all(len(run) <= 2 or run.lower() in FUNCTIONS for run in runs) and all(
        run.lower() not in _SHORT_WORDS for run in runs
    )


def words(text: str) -> tuple[str, ...]:
    """The words of a text in lower case, without punctuation; a leading article is dropped."""
    s = unwrapped(plain(text))
    s = re.sub(r"\\([$%&#_{}])", r"\1", s)
    s = unicodedata.normalize("NFKC", s).casefold()
    s = re.sub(r"(?<=\w)['.](?=\w|$)", "", s)  # O'Neil, U.S.A
    found = re.findall(r"[^\W_]+(?:[+#-]+(?!\w))?|[$%€£]", s)  # A+ is not A
    if len(found) > 1 and found[0] in ("the", "a", "an") and len(found[1]) > 1:
        found = found[1:]
    return tuple(word for word in found if word != "and") if len(found) > 1 else tuple(found)


def boxed(text: str) -> str | None:
    """Content of the last complete \\boxed, joined by commas with any directly before it; None without one."""
    spans, closed_by = [], _braces(text)
    for match in _BOXED.finditer(text):
        start = match.end()
        if (end := closed_by.get(start)) is not None:
            spans.append((match.start(), end + 1, text[start + 1 : end]))
        elif start < len(text) and text[start].isalnum():
            spans.append((match.start(), start + 1, text[start]))
    if not spans:
        return None
    inner = [spans[-1]]
    for span in reversed(spans[:-1]):
        if span[1] > inner[0][0]:  # around the one after it
            continue
        between = text[span[1] : inner[0][0]]
        if len(between) > 40 or not _SEPARATORS.fullmatch(between):
            break
        inner.insert(0, span)
    contents: list[str] = []
    for _, _, content in inner:
        if content.strip() not in contents:
            contents.append(content.strip())
    return ", ".join(contents)


def _braces(text: str) -> dict[int, int]:
    """Position of the closing brace, by the position of its opening brace."""
    found, opened = {}, []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            found[opened.pop()] = match.start()
    return found


def items(text: str) -> list[str]:
    """The comma-separated items of a list without brackets, or of a set in braces; empty if there is only one."""
    s = bare(text)
    s = s[2:-2] if s.startswith("\\{") and s.endswith("\\}") else s
    depth, found = 0, [""]
    for character in s:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return found if len(found) > 1 else []


def in_parentheses(text: str) -> bool:
    """Whether the parenthesis that opens the text closes at its end."""
    depths = [*itertools.accumulate((character == "(") - (character == ")") for character in text)]
    return text.startswith("(") and 0 in depths and depths.index(0) == len(depths) - 1


def final_answers(text: str) -> list[str]:
    """Possible readings of the text's final answer, the most likely first; empty if it gives no answer.

    No reading omits a part of the text that retracts the answer.
    """
    held = boxed(text)
    if held is not None:
        return [held]
    if _BOXED.search(text):  # never closed
        return []
    tagged = re.findall(r"<answer>(.*?)</answer>", text[-LONGEST_COMPARED:], re.DOTALL)
    if tagged:
        return [tagged[-1].strip()] if tagged[-1].strip() else []
    anchors = list(_ANCHOR.finditer(text))
    if anchors:
        rest = text[anchors[-1].end() :].strip()
        if _denied(text[: anchors[-1].start()]) or _lists_choices(rest):
            return []
        end = _SENTENCE_END.search(rest)
        if end is None or _RETRACTED.match(rest, end.start()):
            return _with_reasons_cut([rest])
        return _with_reasons_cut([rest[: end.start()].strip(), rest])
    lines = [line.strip() for line in text.splitlines() if _DELIMITERS.sub("", line).strip(" *.`")]
    last = [] if not lines or _ends_a_list(lines) else lines[-1:]
    return _with_reasons_cut([text.strip(), *last, *(_answers_in_sentence(last[0]) if last else [])])


def _with_reasons_cut(readings: list[str]) -> list[str]:
    """The readings, plus the first one cut at its "because" or another reason."""
    if readings and (reason := _REASON.search(readings[0])) and "\n" not in readings[0]:
        readings = [*readings, readings[0][: reason.start()].strip()]
    return [each for each in dict.fromkeys(readings) if each]


def _clause(text: str) -> str:
    """The part of `text` after its last punctuation mark, at most 200 characters."""
    return re.split(r"[.,;:!?\n]", text[-200:])[-1]


def _denied(before: str) -> bool:
    return _DENIED.search(_clause(before)) is not None


def _lists_choices(text: str) -> bool:
    """Whether several lines begin with different choices, or one line lists several choices with their content."""
    lines = text.splitlines()
    if any(len({letter for line in lines if (letter := _listed(line, marked=marked))}) > 1 for marked in (True, False)):
        return True
    return len(set(re.findall(r"(?:^|(?<=\s))\(?([A-H])[.):]\s+(?=\S)", text))) > 1


def _listed(line: str, *, marked: bool) -> str | None:
    """marked: the choice letter at the start of a line, as in "B. 6"; else the letter that is the whole line."""
    line = line.strip(" *`")
    if not marked:
        return line.casefold() if re.fullmatch(r"[A-Za-z]", line) else None
    match = MARKED_CHOICE.match(line)
    return next(filter(None, match.groups())).casefold() if match else None


def _ends_a_list(lines: list[str]) -> bool:
    """Whether the last line is a choice in the same format as earlier lines, or lists several choices itself."""
    for marked in (True, False):
        letter = _listed(lines[-1], marked=marked)
        if letter and any(_listed(line, marked=marked) not in (None, letter) for line in lines[:-1]):
            return True
    return _lists_choices(lines[-1])


def _answers_in_sentence(line: str) -> list[str]:
    """Extracts the answers that the last sentence of a line states."""
    line = line[-LONGEST_SENTENCE:].rstrip(" .!*")
    ends = list(_SENTENCE_END.finditer(line))
    sentence = (line[ends[-1].end() :] if ends else line).strip()
    if "?" in line[-1:]:
        return []
    if reason := _REASON.search(sentence):
        sentence = sentence[: reason.start()]
    if (judged := _IS_RIGHT.fullmatch(sentence)) and not _DENIED.search(judged[1]):
        return [judged[1]]
    found = []
    for pattern in (_CONCLUSION, _COPULA):
        matches = list(pattern.finditer(sentence))
        if not matches or _denied(sentence[: matches[-1].start()]):
            continue
        if _COPULA.search(_clause(sentence[: matches[-1].start()])):  # it is true that it is false
            continue
        found.append(sentence[matches[-1].end() :].strip())
    return found
