"""Generate faults that change one operator, number, condition or statement of a file.

They are typical mistakes: a comparison with or without equality, a wrong sign or index, min instead of max, an inverted
condition, a missing statement. Strings, annotations and raised errors are not changed. Some faults have no observable effect (a
bound that is never reached), so that tests need not notice all of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .fault import Edit

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
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
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: (r"\|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any", "exp2": "exp"}
UNTOUCHED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)


@dataclass(frozen=True)
class Generated:
    """A fault with its line."""

    edit: Edit
    line: int
    old: str

    def __str__(self) -> str:
        return f"{self.edit.file}:{self.line}: {self.old or 'nothing'} -> {self.edit.new or 'nothing'}"


class Generator(ast.NodeVisitor):
    """Collects the faults of one file."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.lines = [0]
        for line in text.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.found: list[Generated] = []

    def offset(self, line: int, column: int) -> int:
        start = self.lines[line - 1]
        whole = self.text[start : self.lines[line]]
        return start + len(whole.encode()[:column].decode())  # columns of the tree count bytes

    def ends(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def replace(self, start: int, end: int, new: str) -> None:
        line = self.text.count("\n", 0, start) + 1
        self.found.append(Generated(Edit(self.file, start, end, new), line, self.text[start:end]))

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replace the operator between two expressions."""
        start, end = self.ends(left)[1], self.ends(right)[0]
        if match := re.search(old, self.text[start:end]):
            self.replace(start + match.start(), start + match.end(), new)

    def generic_visit(self, node: ast.AST) -> None:
        if not isinstance(node, UNTOUCHED):
            super().generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:  # not its annotations, default values and decorators
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for operator, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False):
            self.between(left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC and not isinstance(node.left, (ast.JoinedStr, ast.List, ast.Tuple)):
            self.between(node.left, node.right, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start, end = self.ends(node)[0], self.ends(node.operand)[0]
        if isinstance(node.op, (ast.Not, ast.USub)) and "(" not in self.text[start:end]:
            self.replace(start, end, "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace(*self.ends(node), str(not node.value))
        elif isinstance(node.value, int):
            self.replace(*self.ends(node), str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        end = self.ends(node.func)[1]
        name = re.search(r"\w+$", self.text[:end])
        if name and name[0] in CALLS:
            self.replace(name.start(), end, CALLS[name[0]])
        self.generic_visit(node)

    def condition(self, node: ast.If | ast.IfExp | ast.While) -> None:
        start, end = self.ends(node.test)
        self.replace(start, end, f"not ({self.text[start:end]})")
        self.generic_visit(node)

    visit_If = visit_IfExp = visit_While = condition

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.replace(*self.ends(node), "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace(*self.ends(node), "pass")
        self.generic_visit(node)


def faults(root: Path, file: str) -> Iterator[Generated]:
    """The faults of a file of the repository at root that are valid Python, in the order of their places."""
    text = (root / file).read_text()
    generator = Generator(file, text)
    generator.visit(ast.parse(text))
    for fault in sorted(generator.found, key=lambda fault: (fault.edit.start, fault.edit.end, fault.edit.new)):
        try:
            compile(text[: fault.edit.start] + fault.edit.new + text[fault.edit.end :], file, "exec")
        except SyntaxError:
            continue
        yield fault
