"""Translates regular expressions from ECMA-262 (JSON Schema's dialect) to llguidance's.

Promise: the result matches exactly the same text, or the pattern is refused with a reason. The two dialects
differ silently in `.`, `\\s`, `\\d`, `\\w` and in brackets inside character classes.
"""

import re

from minisgl.grammar.limits import MAX_EXPANDED_CHARS, MAX_PATTERN_CHARS, MAX_REPEATS

SPACE = r"\t\n\v\f\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": f"[{SPACE}]",
    "S": f"[^{SPACE}]",
}
ANY_BUT_LINE_ENDS = r"[^\n\r\u{2028}\u{2029}]"
CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d+)(,(\d*))?\})\??")
GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_]\w*>|i:)")
META = frozenset("\\.+*?()|[]{}^$#&-~/")


class PatternError(ValueError):
    """A regular expression that can't be taken; the message says why."""


def to_llguidance(pattern: str) -> str:
    """The same regular expression in llguidance's dialect; groups capture nothing.

    Raises:
        PatternError: it is too long, malformed, or needs lookaround or backreferences.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"has {len(pattern)} characters; at most {MAX_PATTERN_CHARS} are taken")
    return _Translator(pattern).run()


class _Translator:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def run(self) -> str:
        out: list[str] = []
        if self.pattern.startswith("(?i)"):  # Python's way to ignore case
            out.append("(?i)")
            self.at = 4
        sizes = [0]  # per open group: its characters with repetitions written out
        while self.at < len(self.pattern):
            char = self.pattern[self.at]
            size, is_class = 1, False
            if char == "(":
                out.append(self._open_group())
                sizes.append(0)
                continue
            if char == ")":
                if len(sizes) == 1:
                    raise PatternError("has a ) without its (")
                self.at += 1
                out.append(")")
                size = sizes.pop()
            elif char in "|^$":
                self.at += 1
                out.append(char)
                continue
            elif char == ".":
                self.at += 1
                out.append(ANY_BUT_LINE_ENDS)
                is_class = True
            elif char == "[":
                out.append(self._character_class())
                is_class = True
            elif char == "\\":
                text, one = self._escape(inside=False)
                out.append(text)
                is_class = one is None
            elif char in "*+?":
                raise PatternError(f"has a {char} with nothing before it to repeat")
            else:
                self.at += 1
                out.append(_literal(char))
            text, count = self._quantifier()
            out.append(text)
            sizes[-1] += size if is_class else size * count
            if sizes[-1] > MAX_EXPANDED_CHARS:
                raise PatternError(
                    f"has repetitions that expand to more than {MAX_EXPANDED_CHARS} characters"
                )
        if len(sizes) > 1:
            raise PatternError("has a ( without its )")
        return "".join(out)

    def _open_group(self) -> str:
        if not self.pattern.startswith("(?", self.at):
            self.at += 1
            return "(?:"
        found = GROUP.match(self.pattern, self.at)
        if found is None:
            kind = self.pattern[self.at : self.at + 4]
            if kind.startswith(("(?=", "(?!", "(?<")):
                raise PatternError(f"needs lookaround ({kind[:4]}...), which is not supported")
            raise PatternError(f"has a group of an unknown kind, {kind}")
        self.at = found.end()
        return "(?i:" if found[0] == "(?i:" else "(?:"

    def _quantifier(self) -> tuple[str, int]:
        """The quantifier that comes next, without the mark of lazy ones, and how often it repeats."""
        found = QUANTIFIER.match(self.pattern, self.at)
        if found is None:
            return "", 1
        self.at = found.end()
        text = found[0] if len(found[0]) == 1 else found[0].removesuffix("?")
        if found[1] is None:
            return text, 1
        if max(len(found[1]), len(found[3] or "")) > len(str(MAX_REPEATS)):
            raise PatternError(f"repeats more than {MAX_REPEATS} times")
        least = int(found[1])
        most = int(found[3]) if found[3] else least
        if most < least:
            raise PatternError(f"has numbers out of order in {text}")
        if QUANTIFIER.match(self.pattern, self.at):
            raise PatternError("has two quantifiers in a row")
        if most > MAX_REPEATS:
            raise PatternError(f"repeats more than {MAX_REPEATS} times")
        return text, max(most, 1)

    def _escape(self, inside: bool) -> tuple[str, str | None]:
        """An escape's translation, and the one character it stands for (None: a class of them)."""
        char = self.pattern[self.at + 1 : self.at + 2]
        if not char:
            raise PatternError("ends in a backslash")
        self.at += 2
        if char in CLASSES:
            return CLASSES[char], None
        if char in "pP":
            end = self.pattern.find("}", self.at)
            if self.pattern[self.at : self.at + 1] != "{" or end < 0:
                raise PatternError(f"has \\{char} without a name in braces")
            name, self.at = self.pattern[self.at : end + 1], end + 1
            return f"\\{char}{name}", None
        if char == "0" and self.pattern[self.at : self.at + 1].isdigit():
            raise PatternError("has an octal escape")
        if char in CONTROLS:
            return _literal(CONTROLS[char]), CONTROLS[char]
        if inside and char == "b":
            return _literal("\b"), "\b"
        if char in "xuc":
            code = self._code(char)
            return _literal(code), code
        if char.isdigit() or char == "k":
            raise PatternError("needs a backreference, which is not supported")
        if char in "bB":
            raise PatternError(f"needs the word boundary \\{char}, which is not supported")
        if char.isascii() and char.isalnum():
            raise PatternError(f"has \\{char}, which ECMA-262 does not have")
        return _literal(char), char

    def _code(self, kind: str) -> str:
        """The character of \\xHH, \\uHHHH (also as a pair), \\u{H...} or \\cX, behind its letter."""
        form = {"x": r"([0-9a-fA-F]{2})", "u": r"([0-9a-fA-F]{4})|\{([0-9a-fA-F]{1,6})\}", "c": r"([A-Za-z])"}
        found = re.compile(form[kind]).match(self.pattern, self.at)
        if found is None:
            raise PatternError(f"has a malformed \\{kind}")
        self.at = found.end()
        if kind == "c":
            return chr(ord(found[1]) % 32)
        code = int(found[1] or found[2], 16)
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.pattern, self.at)
        if 0xD800 <= code < 0xDC00 and low:
            self.at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise PatternError("has half of a surrogate pair, or a character beyond Unicode")
        return chr(code)

    def _character_class(self) -> str:
        self.at += 1
        negated = self.pattern.startswith("^", self.at)
        self.at += negated
        out: list[str] = []
        pending: str | None = None  # a character that may begin a range
        while True:
            char = self.pattern[self.at : self.at + 1]
            if not char:
                raise PatternError("has a [ without its ]")
            if char == "]":
                self.at += 1
                break
            if (
                char == "-"
                and pending is not None
                and self.pattern[self.at + 1 : self.at + 2] not in ("]", "")
            ):
                self.at += 1
                text, last = self._class_item()
                if last is None:
                    raise PatternError("has a range that ends in a class of characters")
                if last < pending:
                    raise PatternError(f"has a range out of order, {pending}-{last}")
                out[-1] += f"-{text}"
                pending = None
                continue
            text, pending = self._class_item()
            out.append(text)
        if not out:
            if negated:
                return r"[\s\S]"
            raise PatternError("has an empty class [], which matches nothing")
        return f"[{'^' if negated else ''}{''.join(out)}]"

    def _class_item(self) -> tuple[str, str | None]:
        if self.pattern[self.at] == "\\":
            return self._escape(inside=True)
        char = self.pattern[self.at]
        self.at += 1
        return _literal(char), char


def _literal(char: str) -> str:
    """A character as itself, inside and outside of a class."""
    if char in META:
        return f"\\{char}"
    return char if char.isprintable() and char.isascii() else f"\\u{{{ord(char):x}}}"
