"""Checks that a vLLM version has an upstream name in the form that an adapter relies on.

Works on syntax trees; nothing of vLLM is imported.
"""

import ast
from dataclasses import dataclass
from enum import StrEnum

from tests.compat.source_tree import SourceTree
from tests.compat.symbol import Symbol, Use
from tests.compat.upstream import TABLE
from tests.compat.upstream_versions import UpstreamVersion


class TableVerdict(StrEnum):
    """How a version's sources compare with a row of the table."""

    PRESENT = "present"
    ABSENT = "absent"
    """Missing, as the capability table says: the adapters do without it."""

    BROKEN = "broken"
    """Missing or different, although the adapters rely on it."""

    UNDECLARED = "undeclared"
    """Present, although the capability table says otherwise."""


@dataclass(frozen=True, slots=True)
class Finding:
    symbol: Symbol
    verdict: TableVerdict
    found: str
    """The form found in the sources, for the reader of a failed check."""

    @property
    def agrees(self) -> bool:
        return self.verdict in {TableVerdict.PRESENT, TableVerdict.ABSENT}


def compare(tree: SourceTree, table: UpstreamVersion) -> tuple[Finding, ...]:
    """Compare every row of the upstream table with the sources of one version."""
    return tuple(_finding(symbol, tree, table) for symbol in TABLE)


def _finding(symbol: Symbol, tree: SourceTree, table: UpstreamVersion) -> Finding:
    expected, actual = symbol.when(table), holds(symbol, tree)
    if expected:
        verdict = TableVerdict.PRESENT if actual else TableVerdict.BROKEN
    else:
        verdict = TableVerdict.UNDECLARED if actual else TableVerdict.ABSENT
    return Finding(symbol, verdict, _describe(symbol, tree))


def holds(symbol: Symbol, tree: SourceTree) -> bool:
    """Whether the sources have the name in the stated form."""
    if symbol.use is Use.ROUTE:
        module = tree.module(symbol.module)
        return module is not None and (symbol.name, *symbol.details) in _routes(module)
    node = tree.find(symbol.module, symbol.name)
    match symbol.use:
        case Use.READ:
            return node is not None and _strings(node).issuperset(symbol.details)
        case Use.ASK:
            return node is not None and _attributes(node).issuperset(symbol.details)
        case Use.SUBCLASS:
            return isinstance(node, ast.ClassDef) and _bases(node) == symbol.details
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    names, optional = parameters(node)
    if symbol.use is Use.OVERRIDE:
        return names == symbol.details
    return set(symbol.details) <= set(names) <= set(symbol.details) | optional


def parameters(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> tuple[tuple[str, ...], set[str]]:
    """Return the parameters without the receiver, and the names of the optional ones."""
    args = function.args
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    keyword = [arg.arg for arg in args.kwonlyargs]
    star = [f"*{args.vararg.arg}"] if args.vararg else []
    stars = [f"**{args.kwarg.arg}"] if args.kwarg else []
    optional = {
        *positional[len(positional) - len(args.defaults) :],
        *(name for name, value in zip(keyword, args.kw_defaults, strict=True) if value is not None),
        *star,
        *stars,
    }
    names = [*positional, *star, *keyword, *stars]
    return tuple(names[1:] if names[:1] in (["self"], ["cls"]) else names), optional


def _describe(symbol: Symbol, tree: SourceTree) -> str:
    if tree.module(symbol.module) is None:
        return "no such module"
    if symbol.use is Use.ROUTE:
        return "no such route"
    node = tree.find(symbol.module, symbol.name)
    if node is None:
        return "no such name"
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(_bases(node))})"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"({ast.unparse(node.args)})"
    return ast.unparse(node)[:80]


def _bases(node: ast.ClassDef) -> tuple[str, ...]:
    return tuple(map(ast.unparse, node.bases))


def _strings(node: ast.AST) -> set[str]:
    return {
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }


def _attributes(node: ast.AST) -> set[str]:
    return {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def _routes(module: ast.Module) -> set[tuple[str, str]]:
    """Return (path, method) of every `@router.METHOD("/path")` in a module."""
    return {
        (call.args[0].value, call.func.attr)
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }
