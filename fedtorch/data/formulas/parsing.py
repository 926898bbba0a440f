"""Parser of model formulas; nothing in a formula is ever evaluated.

    formula   := response '~' sum
    response  := quantity ['|' 'trials' '(' (column | number) ')']
    sum       := ['-' | '+'] piece (('+' | '-') piece)*
    piece     := '0' | '1' | 'offset' '(' quantity ')' | '(' sum ('|' | '||') column ')' | product
    product   := interaction ('*' interaction)*          a * b is a + b + a:b
    interaction := atom (':' atom)*
    atom      := quantity | 'C(' column ')' | 'bs(' quantity ', df)' | 'poly(' quantity ', degree)'
               | 'center(' quantity ')' | 'scale(' quantity ')' | '(' product ('+' product)* ')'
    quantity  := column | 'log' '(' column ')'

A column is a name, or anything in backquotes. There is an intercept unless 0 or - 1 removes it.

>>> formula = parse("death ~ age * C(sex) + bs(log(sbp), 4) + (1 + age | hospital)")
>>> [term_name(term) for term in formula.terms]
['Intercept', 'age', 'C(sex)', 'bs(log(sbp), 4)', 'age:C(sex)']
>>> formula.random[0].name, formula.columns
('(1 + age | hospital)', ('death', 'age', 'sex', 'sbp'))
>>> parse("y ~ I(__import__('os').getpid())")
Traceback (most recent call last):
ValueError: Expected column names, ..., but got the function I(…) at character 4 of the formula, near ...
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple, NoReturn

from fedtorch.data.formulas.grammar import Formula, Quantity, Random, Term, Variable, term_name

MOST_TERMS = 500
MOST_VARIABLES = 6  # most variables in one term
DEEPEST = 20  # deepest nesting of parentheses
_FUNCTIONS = {"C": "", "center": "", "scale": "", "bs": "df", "poly": "degree"}
_BOUNDS = {"bs": (3, 50), "poly": (1, 10)}  # smallest and largest df or degree; bs is cubic
LONGEST = 10_000  # longest formula, in characters
_WORDS = re.compile(
    r"(?P<space>[ \t\r\n]+)|(?P<name>[^\W\d]\w*)|`(?P<quoted>[^`]*)`|(?P<number>[0-9]+)|(?P<sign>\|\||[-~+:*()|,=])"
)
_WRITTEN = {"/": "a + a:b for a/b", "^": "a*b for (a + b)^2", "%": "a + a:b for a + b %in% a"}
_LISTED = "column names, + : * - 0 1, ( | ) and the functions C, bs, poly, log, center, scale, offset"


class Token(NamedTuple):
    """One token of a formula."""

    kind: str  # name, quoted, number, sign, other, end
    text: str
    at: int  # position of its first character


def tokens(text: str) -> list[Token]:
    """Return the tokens of a formula, with an empty one of kind `end` last.

    Raises:
        TypeError: not a string.
        ValueError: too long, or a name with invisible characters; the message names it.
    """
    if not isinstance(text, str):
        raise TypeError(f"Expected a formula as a string, but got {type(text).__name__}; write 'y ~ x'")
    if len(text) > LONGEST:
        raise ValueError(f"Expected a formula of at most {LONGEST} characters, but got {len(text)}")
    words, at = [], 0
    while at < len(text):
        match = _WORDS.match(text, at)
        if match is None:
            words.append(Token("other", text[at], at))
            at += 1
            continue
        kind, word = str(match.lastgroup), match[str(match.lastgroup)]
        if kind in ("name", "quoted"):
            _check_name(text, at, kind, word)
        if kind != "space":
            words.append(Token(kind, word, at))
        at = match.end()
    return [*words, Token("end", "", len(text))]


def refuse(text: str, at: int, got: str, remedy: str = "") -> NoReturn:
    """Raise ValueError for an unsupported token."""
    near = text[max(0, at - 20) : at + 20].strip()
    raise ValueError(
        f"Expected {_LISTED}, but got {got} at character {at} of the formula, near {near!r}"
        + (f"; {remedy}" if remedy else "")
    )


def unquoted(character: str) -> str:
    """Return the remedy for a character that cannot be part of a name."""
    if character in _WRITTEN:
        return f"write {_WRITTEN[character]}, or a column name that has it in backquotes"
    return "write a column name that has it in backquotes" if character.isprintable() and character != "`" else ""


def _check_name(text: str, at: int, kind: str, word: str) -> None:
    if not word or not word.isprintable():
        refuse(text, at, f"the column name {word!r}", "rename the column, so that all its characters can be seen")
    if kind == "name" and unicodedata.normalize("NFKC", word) != word:
        refuse(text, at, f"{word!r}, another spelling of {unicodedata.normalize('NFKC', word)!r}", unquoted("."))


class _Piece(NamedTuple):
    """One summand, with its sign."""

    token: Token
    added: bool
    terms: list[Term]
    random: Random | None = None
    offset: Quantity | None = None

    @property
    def intercept(self) -> bool:
        return self.terms == [()]


def parse(text: str) -> Formula:
    """Read a formula.

    Raises:
        TypeError: not a string.
        ValueError: something outside the grammar above, which the message names; too long, too deep or with too many
            terms.
    """
    parser = _Parser(text)
    response, trials = parser.response()
    parser.sign("~")
    pieces = parser.sum(0)
    if parser.next.kind != "end":
        parser.refuse()
    random = [piece.random for piece in pieces if piece.random]
    offset = [piece.offset for piece in pieces if piece.offset]
    terms = parser.collected([piece for piece in pieces if not piece.random and not piece.offset])
    return Formula(text.strip(), response, trials, tuple(terms), tuple(random), tuple(offset))


class _Parser:
    """A recursive-descent parser over a list of tokens."""

    def __init__(self, text: str) -> None:
        self.text, self.words, self.place = text, tokens(text), 0

    @property
    def next(self) -> Token:
        return self.words[self.place]

    def take(self) -> Token:
        self.place += 1
        return self.words[self.place - 1]

    def taken(self, *signs: str) -> bool:
        """Consume and return the next token if it is one of these signs."""
        matches = self.next.kind == "sign" and self.next.text in signs
        self.place += matches
        return matches

    def refuse(self, token: Token | None = None, remedy: str = "") -> None:
        token = token or self.next
        remedy = remedy or (unquoted(token.text) if token.kind == "other" else "")
        refuse(self.text, token.at, "the end" if token.kind == "end" else repr(token.text), remedy)

    def sign(self, sign: str) -> None:
        if not self.taken(sign):
            self.refuse(remedy=f"expected {sign!r} there")

    def column(self) -> str:
        if self.next.kind not in ("name", "quoted"):
            self.refuse(remedy="expected the name of a column there")
        return self.take().text

    def calls(self) -> bool:
        """Return whether the next tokens call this function."""
        after = self.words[min(self.place + 1, len(self.words) - 1)]
        return self.next.kind == "name" and after.kind == "sign" and after.text == "("

    def number(self) -> int:
        if self.next.kind != "number" or len(self.next.text) > 9:
            self.refuse(remedy="expected a whole number there")
        return int(self.take().text)

    def quantity(self) -> Quantity:
        if not self.calls():
            return Quantity(self.column())
        if self.next.text != "log":
            self.refuse(remedy="only log(column) or a column can be there")
        self.place += 2
        column = self.column()
        self.sign(")")
        return Quantity(column, log=True)

    def response(self) -> tuple[Quantity, str | int | None]:
        quantity = self.quantity()
        if not self.taken("|"):
            return quantity, None
        if not self.calls() or self.next.text != "trials":
            self.refuse(remedy="after the response only trials(column) or trials(number) can be")
        self.place += 2
        trials = self.number() if self.next.kind == "number" else self.column()
        if trials == 0:
            self.refuse(self.words[self.place - 1], "expected at least 1 trial")
        self.sign(")")
        return quantity, trials

    def sum(self, depth: int) -> list[_Piece]:
        if depth > DEEPEST:
            self.refuse(remedy=f"expected at most {DEEPEST} parentheses within each other")
        added = not self.taken("-") if not self.taken("+") else True
        pieces = [self.piece(added, depth)]
        while self.next.kind == "sign" and self.next.text in "+-":
            pieces.append(self.piece(self.take().text == "+", depth))
        return pieces

    def piece(self, added: bool, depth: int) -> _Piece:
        token = self.next
        if token.kind == "number":
            if token.text not in ("0", "1"):
                self.refuse()
            self.take()
            return _Piece(token, added == (token.text == "1"), [()])
        if self.calls() and token.text == "offset":
            return self.whole(_Piece(token, added, [], offset=self.offset()), depth)
        if self.bar_ahead():
            self.take()
            pieces = self.sum(depth + 1)
            correlated = self.take().text == "|"
            random = Random(tuple(self.collected(pieces)), self.column(), correlated)
            self.sign(")")
            return self.whole(_Piece(token, added, [], random=random), depth)
        return _Piece(token, added, self.product(depth))

    def bar_ahead(self) -> bool:
        """Return whether the next parenthesis contains a bar at its own level."""
        open_now = 0
        for token in self.words[self.place :]:
            sign = token.text if token.kind == "sign" else ""
            open_now += (sign == "(") - (sign == ")")
            if open_now == 0 or (open_now == 1 and sign in ("|", "||")):
                return open_now == 1
        return False

    def whole(self, piece: _Piece, depth: int) -> _Piece:
        """Refuse an offset or a random term that is subtracted, multiplied, or inside parentheses."""
        if not piece.added or depth or (self.next.kind == "sign" and self.next.text in "*:"):
            self.refuse(piece.token, "an offset or a random term is a summand of its own, after +")
        return piece

    def offset(self) -> Quantity:
        self.place += 2
        quantity = self.quantity()
        self.sign(")")
        return quantity

    def product(self, depth: int) -> list[Term]:
        terms = self.interaction(depth)
        while self.taken("*"):
            right = self.interaction(depth)
            terms = self.distinct([*terms, *right, *self.crossed(terms, right)])
        return terms

    def interaction(self, depth: int) -> list[Term]:
        terms = self.atom(depth)
        while self.taken(":"):
            terms = self.crossed(terms, self.atom(depth))
        return terms

    def atom(self, depth: int) -> list[Term]:
        if self.taken("("):
            pieces = self.sum(depth + 1)
            for piece in pieces:
                if piece.intercept or not piece.added:
                    self.refuse(piece.token, "0, 1 and - stand outside of inner parentheses")
            self.sign(")")
            return self.distinct([term for piece in pieces for term in piece.terms])
        if not self.calls() or self.next.text == "log":
            return [(Variable(self.quantity()),)]
        token = self.next
        if token.text not in _FUNCTIONS:
            refuse(self.text, token.at, f"the function {token.text}(…)")
        self.place += 2
        quantity = Quantity(self.column()) if token.text == "C" else self.quantity()
        number = self.argument(token.text) if _FUNCTIONS[token.text] else 0
        self.sign(")")
        return [(Variable(quantity, token.text, number),)]

    def argument(self, function: str) -> int:
        self.sign(",")
        if self.next.kind == "name":
            if self.next.text != _FUNCTIONS[function]:
                self.refuse(remedy=f"expected {_FUNCTIONS[function]} there")
            self.take()
            self.sign("=")
        token, (low, high) = self.next, _BOUNDS[function]
        number = self.number()
        if not low <= number <= high:
            self.refuse(token, f"expected {_FUNCTIONS[function]} from {low} to {high}")
        return number

    def collected(self, pieces: list[_Piece]) -> list[Term]:
        """Return the terms of a sum, by their number of variables; the intercept comes first unless it is removed."""
        terms: list[Term] = [()]
        for piece in pieces:
            if piece.added:
                terms = self.distinct([*terms, *piece.terms])
                continue
            gone = {frozenset(term) for term in piece.terms}
            there = {frozenset(term) for term in [(), *terms]}
            for term in piece.terms:
                if frozenset(term) not in there:
                    self.refuse(piece.token, f"- takes out a term that is there, which {term_name(term)} is not")
            terms = [term for term in terms if frozenset(term) not in gone]
        return sorted(terms, key=len)

    def crossed(self, left: list[Term], right: list[Term]) -> list[Term]:
        if len(left) * len(right) > MOST_TERMS:
            raise ValueError(f"Expected at most {MOST_TERMS} terms, but got more by {len(left)} times {len(right)}")
        terms = self.distinct([tuple(dict.fromkeys((*a, *b))) for a in left for b in right])
        if terms and max(map(len, terms)) > MOST_VARIABLES:
            raise ValueError(
                f"Expected at most {MOST_VARIABLES} variables in one term, but got more in the product that ends at "
                f"character {self.next.at} of the formula; write + between some of them"
            )
        return terms

    def distinct(self, terms: list[Term]) -> list[Term]:
        different: dict[frozenset[Variable], Term] = {}
        for term in terms:
            different.setdefault(frozenset(term), term)
        if len(different) > MOST_TERMS:
            raise ValueError(f"Expected at most {MOST_TERMS} terms, but got {len(different)}")
        return list(different.values())
