"""Whether an SGLang still has the shape that this plugin's hooks were written for.

Sources are read and parsed, never imported: no GPU, no torch and none of SGLang's dependencies are
needed, so any version can be looked at before it is installed (``scripts/check_sglang.py``). A test
holds the installed one against :data:`sparkling_sglang.needs.NEEDS`, so that a new SGLang fails
there and not in a user's server. What a parser cannot see is whether the code still *does* the same:
a version is known only once the tests of the switches have run on it, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sparkling_sglang.needs import NEEDS, Need

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Problem:
    """One need that is not met: the dotted path, and what is wrong with it."""

    target: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.target}: {self.wrong}"


class Sources:
    """The Python files of one SGLang, by dotted path.

    Args:
        folder: the folder that holds the package ``sglang``, or that package itself.

    Raises:
        FileNotFoundError: there is no such package.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self.root = folder.parent if (folder / "srt").is_dir() else folder
        if not (self.root / "sglang" / "srt").is_dir():
            raise FileNotFoundError(f"{folder} holds no SGLang: there is no sglang/srt in it.")
        self.module = lru_cache(maxsize=None)(self._module)

    def version(self) -> str | None:
        """What the package calls itself: from ``_version.py``, else its metadata's folder."""
        written = self.root / "sglang" / "_version.py"
        if written.is_file():
            for node in ast.walk(ast.parse(written.read_text("utf-8"))):
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    names = {t.id for t in node.targets if isinstance(t, ast.Name)}
                    if "__version__" in names and isinstance(node.value.value, str):
                        return node.value.value
        found = sorted(self.root.glob("sglang-*.dist-info"))
        return found[0].name.removeprefix("sglang-").removesuffix(".dist-info") if found else None

    def _module(self, dotted: str) -> ast.Module | None:
        path = self.root.joinpath(*dotted.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text("utf-8"))
        return None

    def find(self, dotted: str) -> ast.AST | None:
        """The node that defines, imports or assigns ``dotted``; None where nothing does."""
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            module = self.module(".".join(parts[:cut]))
            if module is not None:
                break
        else:
            return None
        node: ast.AST = module
        for name in parts[cut:]:
            found = _member(node, name, module)
            if found is None:
                return None
            node = found
        return node


def _scope(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in a module's or class's own body, inside ``if`` and ``try`` included."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*_Function, ast.ClassDef, ast.Lambda)):
            yield from _scope(child)


def _bound(node: ast.AST) -> set[str]:
    """The names that one statement binds."""
    if isinstance(node, (*_Function, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    return set()


def _member(node: ast.AST, name: str, module: ast.Module) -> ast.AST | None:
    found = [child for child in _scope(node) if name in _bound(child)]
    # A definition says more than an assignment or an import beside it.
    for kind in ((*_Function, ast.ClassDef), (ast.AST,)):
        for child in found:
            if isinstance(child, kind):
                return child
    for base in _bases(node, module):
        inherited = _member(base, name, module)
        if inherited is not None:
            return inherited
    return None


def _bases(node: ast.AST, module: ast.Module) -> Iterator[ast.ClassDef]:
    """The base classes that are defined in the same module."""
    if isinstance(node, ast.ClassDef):
        names = {base.id for base in node.bases if isinstance(base, ast.Name)}
        for child in _scope(module):
            if isinstance(child, ast.ClassDef) and child.name in names and child is not node:
                yield child


def parameters(node: ast.AST) -> tuple[str, ...] | None:
    """A function's parameters in order, ``*`` before keyword-only ones; None for anything else."""
    if not isinstance(node, _Function):
        return None
    a = node.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    names += [f"*{a.vararg.arg}"] if a.vararg else ["*"] * bool(a.kwonlyargs)
    names += [p.arg for p in a.kwonlyargs] + ([f"**{a.kwarg.arg}"] if a.kwarg else [])
    return tuple(names)


def _attributes(node: ast.AST, module: ast.Module) -> set[str]:
    """What a class and its bases here define, annotate, or assign to ``self``."""
    found: set[str] = set()
    for child in _scope(node):
        found |= _bound(child)
    for child in ast.walk(node):
        stored = isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)
        if stored and isinstance(child.value, ast.Name) and child.value.id == "self":
            found.add(child.attr)
    for base in _bases(node, module):
        found |= _attributes(base, module)
    return found


def _names(node: ast.AST) -> set[str]:
    """Every identifier, attribute and text in the source of ``node``."""
    found: set[str] = set()
    for child in ast.walk(node):
        found |= _bound(child)
        if isinstance(child, ast.Name):
            found.add(child.id)
        elif isinstance(child, ast.Attribute):
            found.add(child.attr)
        elif isinstance(child, (ast.arg, ast.keyword)) and child.arg:
            found.add(child.arg)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            found.add(child.value)
    return found


def problem(sources: Sources, need: Need) -> Problem | None:
    """What is wrong with one need, or None."""
    node = sources.find(need.target)
    if node is None:
        return Problem(need.target, "is not there")
    if need.parameters is not None:
        found = parameters(node)
        if found is None:
            return Problem(need.target, f"is no function but {type(node).__name__}")
        if found != need.parameters:
            theirs, ours = (f"({', '.join(names)})" for names in (found, need.parameters))
            return Problem(need.target, f"takes {theirs}, not {ours}")
    missing = [name for name in need.mentions if name not in _names(node)]
    if missing:
        return Problem(need.target, f"does not mention {', '.join(missing)}")
    if need.binds or need.lacks:
        module = sources.module(_module_of(sources, need.target)) or ast.Module([], [])
        has = _attributes(node, module)
        missing = [name for name in need.binds if name not in has]
        if missing:
            return Problem(need.target, f"has no {', '.join(missing)}")
        extra = [name for name in need.lacks if name in has]
        if extra:
            return Problem(need.target, f"has {', '.join(extra)} by now")
    return None


def _module_of(sources: Sources, dotted: str) -> str:
    while dotted and sources.module(dotted) is None:
        dotted = dotted.rpartition(".")[0]
    return dotted


def check(
    folder: Path | str, needs: Mapping[str, tuple[Need, ...]] = NEEDS
) -> dict[str, list[Problem]]:
    """Hold an SGLang against what the plugin needs.

    Args:
        folder: see :class:`Sources`.
        needs: switch to its needs.

    Returns:
        For each switch its problems; an empty list where it has the expected shape.

    Raises:
        FileNotFoundError: there is no SGLang in the folder.
    """
    sources = Sources(folder)
    return {
        switch: [found for need in its if (found := problem(sources, need)) is not None]
        for switch, its in needs.items()
    }
