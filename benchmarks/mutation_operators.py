"""The faults that `mutants.py` inserts into source files: each changes one expression, operator or statement.

Annotations, decorators, docstrings, f-strings, messages of exceptions, notes and warnings, and code under
`if TYPE_CHECKING` are excluded: changes there do not affect behaviour, or only wording.
"""

import ast
import re
from dataclasses import dataclass
from itertools import pairwise

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
COMMUTATIVE = {"max", "min", "isclose"}  # functions whose result does not change if two arguments are swapped
WORDING = {"note", "warn"}  # functions that only print messages


@dataclass(frozen=True)
class Mutant:
    """One fault in one file: replaces the bytes `before`, which begin at offset `start`, by `after`."""

    path: str
    line: int
    operator: str
    start: int
    before: str
    after: str
    excerpt: str  # the lines of `before`, by which it is located in another version of the file
    column: int  # of `before` in the excerpt, in bytes
    statement: int  # the first line of the statement
    in_function: bool

    def apply(self, source: bytes) -> bytes | None:
        """The source with the fault, or None if the excerpt is not found in it."""
        start, before, excerpt = self.start, self.before.encode(), self.excerpt.encode()
        if source[start - self.column :][: len(excerpt)] != excerpt:
            if source.count(excerpt) != 1:
                return None
            start = source.index(excerpt) + self.column
        return source[:start] + self.after.encode() + source[start + len(before) :]

    def difference(self) -> str:
        """The fault on one line, with some of the text around it."""
        excerpt = self.excerpt.encode()
        left, right = excerpt[: self.column].decode(), excerpt[self.column + len(self.before.encode()) :].decode()
        before, after = (shortened(text, 60) for text in (self.before, self.after))
        return f"{shortened(left, -40)}[{before} -> {after}]{shortened(right, 40)}".strip()


def shortened(text: str, length: int) -> str:
    """At most `length` characters on one line, from the start of the text or, if negative, from its end."""
    text = re.sub(r"\s+", " ", text)
    if len(text) <= abs(length):
        return text
    return f"{text[:length]}..." if length > 0 else f"...{text[length:]}"


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a file, in the order of their positions."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda mutant: (mutant.start, mutant.operator))


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.statement: ast.stmt | None = None
        self.in_function = False

    def add(self, operator: str, start: int, end: int, after: str) -> None:
        before = self.source[start:end].decode()
        if before == after:
            return
        line = next(number for number, first in enumerate(self.starts) if first > start)
        last = next(number for number, first in enumerate(self.starts) if first >= end)
        excerpt = self.source[self.starts[line - 1] : self.starts[last]].decode()
        column, statement = start - self.starts[line - 1], self.statement.lineno if self.statement else line
        place = (before, after, excerpt, column, statement, self.in_function)
        self.found.append(Mutant(self.path, line, operator, start, *place))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def replace(self, operator: str, node: ast.expr | ast.stmt, after: str) -> None:
        self.add(operator, *self.span(node), after)

    def swap_between(self, operator: str, left: ast.expr, right: ast.expr, pattern: str, after: str) -> None:
        """Replace the operator between two operands, which `pattern` finds, by `after`."""
        start, end = self.span(left)[1], self.span(right)[0]
        if sign := re.search(pattern.encode(), self.source[start:end]):
            self.add(operator, start + sign.start(), start + sign.end(), after)

    def visit(self, node: ast.AST) -> None:
        outer = self.statement
        if isinstance(node, ast.stmt):
            self.statement = node
        super().visit(node)
        self.statement = outer

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.default(default)
        outer, self.in_function = self.in_function, True
        for statement in node.body:
            self.visit(statement)
        self.in_function = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and statement.value:
                self.statement = statement
                self.default(statement.value)
            else:
                self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def default(self, node: ast.expr) -> None:
        """Add the mutants of a default value."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
            self.replace("default", node, '""')
        self.visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace("boolean", node, str(not node.value))
        elif isinstance(node.value, int) and node.value <= 100:
            self.replace("off by one", node, str(node.value + 1))
        elif isinstance(node.value, int | float):  # an off-by-one in a large number rarely matters
            self.replace("constant", node, repr(node.value * 2 if node.value else 1.0))

    def visit_Compare(self, node: ast.Compare) -> None:
        for (left, right), sign in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
            self.swap_between("comparison", left, right, *COMPARISONS[type(sign)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            self.swap_between("and/or", left, right, *words)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC:
            sign, after = ARITHMETIC[type(node.op)]
            self.swap_between("arithmetic", node.left, node.right, re.escape(sign), after)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.replace("dropped not", node, self.text(node).removeprefix("not").lstrip())
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return
        self.condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test)
        self.generic_visit(node)

    def condition(self, test: ast.expr) -> None:
        dropped_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)  # the same fault
        if not dropped_not and not isinstance(test, ast.Constant):
            self.replace("negated condition", test, f"not ({self.text(test)})")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.replace("returned None", node.value, "None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _called(node.value) not in WORDING:
            self.replace("removed call", node, "pass")
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if _called(node) in WORDING:
            return
        first, second = (*node.args, None, None)[:2]
        plain = first and second and not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred)
        if plain and _called(node) not in COMMUTATIVE and self.text(first) != self.text(second):
            between = self.source[self.span(first)[1] : self.span(second)[0]].decode()
            swapped = self.text(second) + between + self.text(first)
            self.add("swapped arguments", self.span(first)[0], self.span(second)[1], swapped)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.removed(node)
        if type(node.op) in ARITHMETIC:
            sign, after = ARITHMETIC[type(node.op)]
            self.swap_between("arithmetic", node.target, node.value, re.escape(sign), after)
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets):
            self.removed(node)  # removing the assignment of a variable would only raise NameError later
        self.generic_visit(node)

    def removed(self, node: ast.stmt) -> None:
        """Replace a statement by `pass`."""
        self.replace("removed statement", node, "pass")

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Raise = visit_Delete = visit_Break = visit_Continue = removed


def _called(node: ast.Call) -> str:
    """The last name of the called function: `warn` of `console.warn("...")`."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))
