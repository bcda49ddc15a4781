"""The static gate: what a notebook of this repository must be, checked without running it.

Seconds, no heavy imports. Two kinds of rules. *Form*: the file is canonical byte for byte, so that
a diff shows what changed and nothing else; `fix` puts it into that form. *Content*: forms that fail
silently under papermill (a shell line, a magic, a thread, an unawaited task) do not occur, cells
are short and explained, the parameters come first, the cards are there.

`check(paths)` returns the problems, `fix(paths)` the files that it rewrote.
`sparkling check-notebooks [--fix]` is its command.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LINES = 15  # of code in a cell
KEEPS_OUTPUTS = "nbval"  # name of the folder whose notebooks keep their outputs, for nbval
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#{1,6}) +(.*)$", re.MULTILINE)
_NUMBERED = re.compile(r"\b\d\d_[a-z]|\b[Nn]otebooks? \d\d\b")
_HOME = re.compile(r"(?:^|[\s\"'=(:])(~/|/home/|/root/|/Users/)")


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one notebook; `cell` counts from 0, None means the whole file."""

    path: Path
    cell: int | None
    text: str

    def __str__(self) -> str:
        where = "" if self.cell is None else f"cell {self.cell}: "
        return f"{self.path}: {where}{self.text}"


Found = Iterator[tuple[int | None, str]]
Cells = list[dict[str, Any]]


def notebooks(paths: Sequence[Path]) -> list[Path]:
    """The notebooks among `paths`; a folder stands for those in it, one level deep."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob("*.ipynb")) if path.is_dir() else [path]
    return found


def check(paths: Sequence[Path]) -> list[Problem]:
    """All problems of the notebooks among `paths`; an empty list is a pass."""
    problems: list[Problem] = []
    for path in paths:
        if path.is_dir() and not any(path.glob("*.ipynb")):
            problems.append(Problem(path, None, "there is no notebook here"))
    for path in notebooks(paths):
        problems += [Problem(path, cell, text) for cell, text in _check_one(path)]
    return problems


def fix(paths: Sequence[Path]) -> list[Path]:
    """Rewrite into canonical form whatever can be read; return the files that changed.

    Content is never touched, apart from blank space at a cell's end.
    """
    changed = []
    for path in notebooks(paths):
        try:
            raw = path.read_bytes()
            text = canonical(json.loads(raw), keep_outputs=_keeps(path)).encode()
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue  # `check` says what is wrong with it
        if text != raw:
            path.write_bytes(text)
            changed.append(path)
    return changed


def canonical(notebook: dict[str, Any], *, keep_outputs: bool = False) -> str:
    """The one text that this notebook may have."""
    cells, ids = [], set()
    for number, old in enumerate(notebook["cells"]):
        source = _source(old).rstrip()
        wanted = old.get("id")
        if not isinstance(wanted, str) or not _ID.fullmatch(wanted) or wanted in ids:
            wanted = hashlib.sha256(f"{number}\n{source}".encode()).hexdigest()[:8]
        ids.add(wanted)
        tags = old.get("metadata", {}).get("tags")
        cell: dict[str, Any] = {
            "cell_type": old["cell_type"],
            "id": wanted,
            "metadata": {"tags": tags} if tags else {},
            "source": source.splitlines(keepends=True),
        }
        if old["cell_type"] == "code":
            cell["execution_count"] = old.get("execution_count") if keep_outputs else None
            cell["outputs"] = copy.deepcopy(old.get("outputs", [])) if keep_outputs else []
            for output in cell["outputs"]:
                output.get("metadata", {}).clear()
        cells.append(cell)
    whole = {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _keeps(path: Path) -> bool:
    return path.absolute().parent.name == KEEPS_OUTPUTS


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def _check_one(path: Path) -> Found:
    try:
        raw = path.read_bytes()
        notebook = json.loads(raw)
        cells: Cells = notebook["cells"]
        wanted = canonical(notebook, keep_outputs=_keeps(path)).encode()
    except OSError as error:
        yield None, f"cannot be read ({error.strerror})"
        return
    except (ValueError, TypeError, KeyError, AttributeError):
        yield None, "is not a notebook"
        return
    if raw != wanted:
        yield None, f"is not in canonical form ({_why(raw, notebook, path)}); use --fix"
    for rule in _RULES:
        yield from rule(cells)
    if _keeps(path):
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code" and cell.get("execution_count") is None:
                yield number, "keeps no output: run it, nbval compares nothing here"
        return
    yield from _place(path, cells)


def _why(raw: bytes, notebook: dict[str, Any], path: Path) -> str:
    cells = notebook["cells"]
    ids = [cell.get("id") for cell in cells]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    if (notebook.get("nbformat"), notebook.get("nbformat_minor")) != (4, 5):
        return "it is not nbformat 4.5"
    if len({i for i in ids if isinstance(i, str)}) < len(ids):
        return "a cell lacks an id of its own"
    if notebook.get("metadata") != METADATA:
        return "its metadata are not the fixed ones"
    if not _keeps(path) and any(c.get("outputs") or c.get("execution_count") for c in code):
        return "it holds outputs"
    if not raw.endswith(b"\n"):
        return "no newline at its end"
    return "order of keys, indentation or metadata of a cell"


# --------------------------------------------------------------------- rules about the content


def _code(cells: Cells) -> Iterator[tuple[int, str, ast.Module | None]]:
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            source = _source(cell)
            try:
                yield number, source, ast.parse(source)
            except (SyntaxError, ValueError):
                yield number, source, None


def _no_shell(cells: Cells) -> Found:
    """A failing shell line or magic leaves papermill's exit code at 0."""
    for number, source, tree in _code(cells):
        if tree is not None:
            continue
        lines = [line.strip() for line in source.splitlines()]
        shell = [line for line in lines if re.match(r"(\w+\s*=\s*)?[!%]|\?", line)]
        if shell:
            yield number, f"{shell[0]!r} fails silently: call the library instead"
        else:
            yield number, "does not parse as Python"


_MODULES = {
    "threading": "a thread's exception is lost",
    "_thread": "a thread's exception is lost",
    "multiprocessing": "a child's exception is lost",
    "concurrent": "a worker's exception is lost unless asked for",
    "subprocess": "use the library, which checks the exit code",
    "nest_asyncio": "it changes the kernel's event loop",
}
_CALLS = {
    "os.system": "its exit code is lost",
    "os.popen": "its exit code is lost",
    "os.fork": "the kernel cannot be forked",
    "get_ipython": "magics fail silently",
    "asyncio.create_task": "a task's exception is lost",
    "asyncio.ensure_future": "a task's exception is lost",
    "loop.create_task": "a task's exception is lost",
    "sys.exit": "it ends the kernel as if all were well",
    "os._exit": "it ends the kernel without a word",
    "exit": "it ends the kernel as if all were well",
    "quit": "it ends the kernel as if all were well",
    "input": "nobody answers under papermill",
}


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _no_hidden_failure(cells: Cells) -> Found:
    for number, _, tree in _code(cells):
        for node in ast.walk(tree) if tree else ():
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
                modules += [f"{node.module}.{alias.name}" for alias in node.names]
            for name in modules:
                if name.split(".")[0] in _MODULES:
                    yield number, f"imports {name}: {_MODULES[name.split('.')[0]]}"
                    break
                if name in _CALLS:
                    yield number, f"imports {name}: {_CALLS[name]}"
            if isinstance(node, ast.Call):
                name = _dotted(node.func)
                tail = name.rpartition(".")[2]
                reason = _CALLS.get(name)
                if tail in ("create_task", "ensure_future", "run_in_executor", "to_thread"):
                    reason = "a task's exception is lost"
                if reason:
                    yield number, f"calls {name}: {reason}"
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None or all(isinstance(inner, ast.Pass) for inner in node.body)
            ):
                yield number, "swallows an exception: a check that cannot fail is none"


def _no_paths(cells: Cells) -> Found:
    for number, source, tree in _code(cells):
        dotted = {_dotted(node) for node in ast.walk(tree)} if tree else set()
        if "sys.path" in dotted or "PYTHONPATH" in source:
            yield number, "changes where modules come from: the library is installed, import it"
        for match in _HOME.finditer(source):
            yield number, f"holds a path of one machine ({match[1]}...): take it from the lane"


def _short_and_explained(cells: Cells) -> Found:
    for number, source, _ in _code(cells):
        lines = len(source.splitlines())
        if lines > MAX_LINES:
            yield number, f"has {lines} lines of code, more than {MAX_LINES}"
        if not source.strip():
            yield number, "is empty"
        before = cells[number - 1] if number else None
        if before is None or before["cell_type"] != "markdown" or not _source(before).strip():
            yield number, "has no text before it"


def _parameters(cells: Cells) -> Found:
    code = [number for number, *_ in _code(cells)]
    tagged = [n for n in code if "parameters" in cells[n].get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        yield None, f"has {len(tagged)} cells tagged `parameters`, must have one"
    elif tagged[0] != code[0]:
        yield tagged[0], "`parameters` must be the first code cell"
    for number, cell in enumerate(cells):
        extra = set(cell.get("metadata", {}).get("tags", [])) - {"parameters"}
        if extra:
            yield number, f"has the tag {sorted(extra)[0]!r}, which one runner or other ignores"


def _prose(cells: Cells) -> Iterator[tuple[int, str]]:
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "markdown":
            yield number, _FENCE.sub("", _source(cell))


def _headings(cells: Cells) -> Found:
    tops, level = [], 0
    for number, text in _prose(cells):
        for marks, title in _HEADING.findall(text):
            if len(marks) == 1:
                tops.append(number)
            if len(marks) > level + 1:
                yield number, f"heading {title!r} skips a level"
            level = len(marks)
            if re.match(r"(\W*\d+[.)_:]?\s)", title):
                yield number, f"heading {title!r} carries a number; numbers are in file names only"
    if tops != [0]:
        yield None, f"has {len(tops)} first-level headings, must have one, in its first cell"


def _no_numbers(cells: Cells) -> Found:
    for number, text in _prose(cells):
        match = _NUMBERED.search(_LINK.sub(lambda m: m[1], text))
        if match:
            yield number, f"{match[0]!r} names a notebook by its number, which may change"


_RULES: tuple[Callable[[Cells], Found], ...] = (
    _no_shell,
    _no_hidden_failure,
    _no_paths,
    _short_and_explained,
    _parameters,
    _headings,
    _no_numbers,
)


# ------------------------------------------------------------------- rules about its surroundings


def _place(path: Path, cells: Cells) -> Found:
    """Cards, links and the README's table."""
    stem = path.name.removesuffix(".ipynb")
    last, trees = None, []
    for number, _, tree in _code(cells):
        last = number
        trees.append((number, tree))
    names = [(n, _uses(tree)) for n, tree in trees]
    opening = [n for n, used in names if "opening" in used]
    if not opening or any(
        "start" in used or "check" in used for n, used in names if n < opening[0]
    ):
        yield None, "does not open with its card (nb.opening, before anything else is done)"
    if last is not None and "closing" not in names[-1][1]:
        yield last, "must be nb.closing: a notebook ends with its closing card"
    if not any("check" in used for _, used in names):
        yield None, "has no cell that checks what it needs (nb.check())"
    for number, tree in trees:
        for told in _begun(tree):
            if told != stem:
                yield number, f"begins {told!r} but the file is called {stem}"
    if not any(told for _, tree in trees for told in _begun(tree)):
        yield None, f"never begins: call notebook.begin({stem!r}, ...)"
    for number, text in _prose(cells):
        for target in (m[2] for m in _LINK.finditer(text)):
            file = target.partition("#")[0]
            if "://" not in target and file and not (path.parent / file).exists():
                yield number, f"links to {target}, which does not exist"
    yield from _listed(path, stem)


def _uses(tree: ast.Module | None) -> set[str]:
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} if tree else set()


def _begun(tree: ast.Module | None) -> Iterator[str]:
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[2] == "begin":
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield str(argument.value)


def _listed(path: Path, stem: str) -> Found:
    cards = path.parent / "cards.toml"
    if cards.is_file():
        try:
            if stem not in tomllib.loads(cards.read_text("utf-8")):
                yield None, "has no card in cards.toml"
        except ValueError:
            yield None, "cards.toml is not readable TOML"
    readme = path.absolute().parent.parent / "README.md"
    if (
        readme.is_file()
        and f"]({path.absolute().parent.name}/{stem}.ipynb)" not in readme.read_text("utf-8")
    ):
        yield None, "is not linked in README.md"


def main(arguments: Iterable[str]) -> int:
    """`python -m sparkling.nbcheck [--fix] PATH...`: print the problems; 1 if there is any."""
    words = list(arguments)
    paths = [Path(word) for word in words if word != "--fix"] or [Path("notebooks")]
    if "--fix" in words:
        for path in fix(paths):
            print(f"{path}: rewritten")
    problems = check(paths)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
