"""Which names of the code under test its tests use as classes.

In: the tests, parsed. Out: these names; and where objects of the code meet plain data so that no grade would be right.

`Vector(1, 2)` is an object where its attributes are used, and `Sum(2, 3)` is data in `abs(Sum(2, 3) - 5) < 1e-9`. That
has to be known: an object of the code could answer 0 to every `-`, so only one of a class may compute with plain data.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from rollouts.sandbox.code_tests.unsupported import Function
from rollouts.sandbox.code_tests.wire import DATA_NAMES

_ASSERTS = ("Equal", "Equals", "Less", "LessEqual", "Greater", "GreaterEqual")
_COMPARES = ast.Eq | ast.In | ast.Lt | ast.LtE | ast.Gt | ast.GtE


class Makers:
    """Which function a value of the tests comes from: `Vector` for `v` after `v = Vector(1, 2)`."""

    def __init__(self, nodes: Sequence[ast.AST]) -> None:
        assigned = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
        self._made = {ast.unparse(target): _callee(node.value) for node in assigned for target in node.targets}

    def of(self, node: ast.AST) -> str:
        """The name that is called for a value; "" if none is."""
        is_target = isinstance(node, ast.Name | ast.Attribute | ast.Subscript)
        return self._made.get(ast.unparse(node), "") if is_target else _callee(node)

    def within(self, node: ast.AST) -> set[str]:
        """The names that are called for a value and for its parts."""
        return {self.of(part) for part in ast.walk(node) if isinstance(part, ast.expr)} - {""}


def _callee(node: ast.AST) -> str:
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def classes_of_code(nodes: Sequence[ast.AST], makers: Makers) -> set[str]:
    """Names whose results have attributes that data lacks, are returned, or are on both sides of a comparison."""
    parts = [part for node in nodes if isinstance(node, ast.ClassDef) for part in node.body]
    methods = {part.name for part in parts if isinstance(part, Function)}
    classes = {"Solution"}
    for node in nodes:
        for left, right, _ in _compared(node):
            classes |= makers.within(left) & makers.within(right)
        match node:
            case ast.Attribute(value=owner, attr=name) if name not in DATA_NAMES | methods:
                classes |= {makers.of(owner), getattr(owner, "id", "")}
                classes |= makers.within(owner) if isinstance(owner, ast.BinOp | ast.UnaryOp) else set()
            case ast.Return(value=ast.Call() as call) | ast.Yield(value=ast.Call() as call):
                classes.add(_callee(call))
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                classes |= {
                    ast.unparse(part).rpartition(".")[2] for part in ast.walk(kinds) if isinstance(part, ast.expr)
                }
    return classes - {""}


def _compared(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """Both sides of a comparison, and whether it holds only for what is equal, contained or ordered."""
    match node:
        case ast.Compare(left=left, ops=[operator, *_], comparators=[right, *_]):
            yield left, right, isinstance(operator, _COMPARES)
        case ast.Call(func=ast.Attribute(attr=name), args=[left, right, *_]) if name.startswith("assert"):
            yield left, right, name.removeprefix("assert") in _ASSERTS


def met_with_data(nodes: Sequence[ast.AST], makers: Makers, classes: set[str], code_names: set[str]) -> Iterator[str]:
    """Sentences: where objects of the code are compared with plain data, or may be what computes with it.

    Args:
        classes: As `classes_of_code`.
        code_names: What the tests use of the code.
    """
    differences = {id(part) for node in nodes for part in _differences(node)}

    def named_as_class(node: ast.AST) -> str:
        name = makers.of(node)
        is_class = name in code_names and name[:1].isupper() and (len(name) == 1 or not name.isupper())
        return name if is_class else ""

    for node in nodes:
        for left, right, is_equal in _compared(node):
            is_in = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In)  # an object may contain data
            for value, other in ((left, right), (right, left))[: 1 if is_in else 2]:
                name = named_as_class(value)
                if is_equal and name in classes and _is_no_object(other):
                    yield (
                        f"{_quoted(node)} compares an object of the code's class {name} with plain data, and it could "
                        "equal everything: compare its attributes, or what its methods return"
                    )
        for value, others in _operands(node):
            name = named_as_class(value)
            is_data = not any(makers.within(other) & (code_names | classes) for other in others)
            if name and name not in classes and is_data and id(node) not in differences:
                yield (
                    f"{_quoted(node)} computes with plain data, and the tests do not say "
                    f"whether {name} is a class: if it is, let them first `assert isinstance({ast.unparse(value)}, "
                    f"{name})`; if not, compare what it returns as it is, with `==`"
                )


def _quoted(node: ast.AST) -> str:
    return f"line {getattr(node, 'lineno', 0)}: `{ast.unparse(node)}`"


def _is_no_object(node: ast.expr) -> bool:
    """True for a literal that no object of a class is: a namedtuple equals a tuple, and None is equal to nothing."""
    parts = (ast.Constant, ast.UnaryOp, ast.List, ast.Dict, ast.Set, ast.unaryop, ast.expr_context)
    is_literal = all(isinstance(part, parts) for part in ast.walk(node))
    return is_literal and not (isinstance(node, ast.Constant) and node.value is None)


def _operands(node: ast.AST) -> Iterator[tuple[ast.expr, list[ast.expr]]]:
    """Each operand of what computes, and those beside it."""
    values: list[ast.expr] = []
    match node:
        case ast.BinOp(left=ast.Constant(value=str() | bytes()), op=ast.Mod()):
            pass  # formats it
        case ast.BinOp(left=left, right=right):
            values = [left, right]
        case ast.AugAssign(target=target, value=value):
            values = [target, value]
        case ast.Call(func=ast.Name(id="divmod" | "pow"), args=[*arguments]):
            values = arguments
        case ast.Call(func=ast.Name(id="sum"), args=[ast.GeneratorExp(elt=element) | ast.ListComp(elt=element)]):
            values = [element]  # to 0
        case ast.Call(func=ast.Name(id="sum"), args=[ast.List(elts=elements) | ast.Tuple(elts=elements)]):
            values = elements[:1]
    for index, value in enumerate(values):
        yield value, values[:index] + values[index + 1 :]


def _differences(node: ast.AST) -> Iterator[ast.BinOp]:
    """What is small if two numbers are nearly equal: `abs(a - b)`, `a - b == 0`. Only data is asked that."""
    match node:
        case ast.Call(func=ast.Name(id="abs") | ast.Attribute(attr="fabs"), args=[ast.BinOp(op=ast.Sub()) as part]):
            yield part
        case ast.Compare(
            left=ast.BinOp(op=ast.Sub()) as part, comparators=[ast.Constant(value=int() | float() as most)]
        ):
            if abs(most) < 1:
                yield part
