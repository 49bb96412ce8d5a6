"""Jinja's compiler for untrusted templates: the compiled code counts the work of its loops, macros and expressions.

Methods of the environment (`template_sandbox`) count their own work.
"""

from collections.abc import Mapping, Sequence

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import TemplateAssertionError

ITERATION = 100  # work of an iteration of a loop or a call of a macro, besides that of its body
NODE = 2  # work of a node of the syntax tree
UNSUPPORTED: Mapping[type[nodes.Node], str] = {  # statements by the type of their node
    nodes.Block: "block",
    nodes.Extends: "extends",
    nodes.FromImport: "from",
    nodes.Import: "import",
    nodes.Include: "include",
    nodes.ScopedEvalContextModifier: "autoescape",
}


class CountingCompiler(CodeGenerator):
    """Jinja's compiler, with calls that count work; the environment must be a TemplateEnvironment."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        """Compile the template after adding the statements that count work."""
        self._count(node)
        super().visit_Template(node, frame)

    def _count(self, node: nodes.Node) -> int:
        """The work of executing a node once. Adds a statement that counts work to the body of each loop, macro and call
        block.

        Raises TemplateAssertionError for a node in UNSUPPORTED.
        """
        if type(node) in UNSUPPORTED:
            raise TemplateAssertionError(f"{{% {UNSUPPORTED[type(node)]} %}} is not supported", node.lineno)
        work = NODE + sum(map(self._count, node.iter_child_nodes()))
        if isinstance(node, nodes.TemplateData):
            work += len(node.data)
        elif isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
            take = nodes.EnvironmentAttribute(f"take({ITERATION + work})", lineno=node.lineno)  # environment.take()
            node.body.insert(0, nodes.ExprStmt(take, lineno=node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.Or(take, node.test, lineno=node.lineno)  # `take` returns None
        return work

    def _write_call(self, method: str, arguments: Sequence[nodes.Expr | None], frame: Frame) -> None:
        """Write a call of a method of the environment; `None` is passed for a missing argument."""
        self.write(f"environment.{method}(")
        for argument in arguments:
            self.visit(argument or nodes.Const(None), frame)
            self.write(", ")
        self.write(")")

    def _write_counted(self, node: nodes.Expr, frame: Frame) -> None:
        """Write an expression, and count the work of copying its value unless it is a constant."""
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
        else:
            self._write_call("counted", [node], frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        """A tuple, or the targets of an assignment."""
        self.write("environment.counted(" if node.ctx == "load" else "(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        """A list."""
        self.write("environment.counted(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """A dict. The work of hashing its keys is counted before it is made."""
        self.write("environment.counted({")
        for item in node.items:
            self._write_counted(item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """The operator ~."""
        self._write_call("concatenate", node.nodes, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """Comparisons. Except for `in`, each counts as a copy of its left operand, unless the right one is constant."""
        names = [comparison.op for comparison in node.ops]
        operands = [node.expr, *(comparison.expr for comparison in node.ops)]
        if names == ["in"] or names == ["notin"]:
            self.write("(not " if names == ["notin"] else "(")
            self._write_call("contains", operands, frame)
        else:
            self.write("(")
            for name, left, right in zip(names, operands, operands[1:], strict=False):
                if name in ("in", "notin"):
                    self.fail("a chain of comparisons with in is not supported", node.lineno)
                if isinstance(right, nodes.Const):
                    self.visit(left, frame)
                else:
                    self._write_counted(left, frame)
                self.write(f" {operators[name]} ")
            self.visit(operands[-1], frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """An entry or a slice."""
        if isinstance(node.arg, nodes.Slice):
            self._write_call("part", [node.node, node.arg.start, node.arg.stop, node.arg.step], frame)
        else:
            super().visit_Getitem(node, frame)
