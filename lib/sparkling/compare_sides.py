"""What is compared, and whether it may be: two arms, with the manifests that say how they ran.

A side is written RUN, RUN:ARM or a file of rows (JSONL). A frozen baseline is nothing more than a
stored run: its manifest says versions, machine, recipe, seeds and flags, its rows say workload,
sampling and the hash of every prompt, and whatever differs beyond the declared switch is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkling import recipe as _recipe
from sparkling.errors import SparklingError, UsageError
from sparkling.files import read_json, read_rows
from sparkling.report_rows import evaluations, kind_of, ladder_rows
from sparkling.store import Run

# Packages of the manifest that draw and execute, and so change no number.
_NOT_MEASURING = {"matplotlib", "papermill", "nbclient", "ipykernel"}
_PLACES = {"--host", "--port", "--model-path", "--speculative-draft-model-path"}
# Columns of evaluation rows that must agree pair by pair, or over all rows.
_PER_PAIR = ("gold", "prompt_hash", "case_hash", "prompt_tokens")
_PER_ARM = (
    *("dataset", "data_sha256", "mode", "shots", "seed", "sampling", "max_tokens", "thinking"),
    *("settings", "model_id", "machine_id", "concurrency"),
)


@dataclass(frozen=True)
class Side:
    """One arm of a comparison with its rows (either list may be empty) and its manifest ({} when
    there is none beside the file)."""

    name: str  # as it is shown
    arm: str
    evaluation: tuple[dict[str, Any], ...] = ()
    bench: tuple[dict[str, Any], ...] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)
    task: str = ""  # which questions (the name of their file)
    file: Path | None = None  # where a side that is no run's was read

    @property
    def launch(self) -> Mapping[str, Any]:
        found = (self.manifest.get("launches") or {}).get(self.arm)
        return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class Difference:
    """Something in which two sides differ. `declared`: it is the switch under test, or its flags."""

    what: str
    first: str
    second: str
    declared: bool = False

    def __str__(self) -> str:
        return f"{self.what} ({self.first} against {self.second})"


# -- reading -------------------------------------------------------------------------------------


def sides(text: str, runs: Path) -> list[Side]:
    """All arms that `text` stands for: RUN, RUN:ARM, FILE or FILE:ARM. UsageError, also when it
    holds nothing that can be compared."""
    place, arm = _place(text, runs)
    found = _of_run(place) if place.is_dir() else _of_file(place)
    if arm is not None:
        found = [s for s in found if s.arm == arm] or _no_arm(text, arm, found)
    if not found:
        raise UsageError(f"{place} holds no evaluated questions and no measured requests.")
    return found


def choose(first: Sequence[Side], second: Sequence[Side]) -> list[tuple[Side, Side]]:
    """Which is compared with which: the two, if each text gives one; else arms of the same name
    (if each text names one arm, those), with the same questions. UsageError when nothing is left."""
    if len(first) == len(second) == 1:
        return [(first[0], second[0])]
    one_each = len({s.arm for s in first}) == len({s.arm for s in second}) == 1
    theirs = {("" if one_each else s.arm, s.task): s for s in second}
    keys = [("" if one_each else s.arm, s.task) for s in first]
    pairs = [(s, theirs[key]) for s, key in zip(first, keys, strict=True) if key in theirs]
    if not pairs:
        raise UsageError(
            f"The first has {_names(first)}, the second {_names(second)}; say which to compare, as "
            "RUN:ARM."
        )
    return pairs


def _names(found: Iterable[Side]) -> str:
    return ", ".join(dict.fromkeys(s.arm for s in found))


def _no_arm(text: str, arm: str, found: Sequence[Side]) -> list[Side]:
    raise UsageError(f"{text}: there is no arm {arm!r}, only {_names(found) or 'none at all'}.")


def _place(text: str, runs: Path) -> tuple[Path, str | None]:
    for place, arm in ((text, None), (text.rpartition(":")[0], text.rpartition(":")[2])):
        for path in (Path(place), runs / place) if place else ():
            if path.is_dir() or path.is_file():
                return path, arm
    raise UsageError(f"There is no run and no file {text!r} (runs are looked for in {runs}).")


def _of_run(folder: Path) -> list[Side]:
    run = Run(folder, None)
    manifest = run.manifest  # refuses what is no run
    bench = _by_arm(r for r in ladder_rows(run) if kind_of(r) == "bench")
    tested = by_task(evaluations(folder))
    out = []
    for arm in dict.fromkeys((*bench, *(a for a, _ in tested))):
        tasks = [t for a, t in tested if a == arm]
        name, requests = f"{run.id}:{arm}", tuple(bench.get(arm, ()))
        if len(tasks) > 1:
            # Questions of two kinds may have the same ids: each kind is compared by itself.
            out += [
                Side(f"{name} ({t})", arm, tuple(tested[arm, t]), (), manifest, t) for t in tasks
            ]
            if requests:
                out.append(Side(f"{name} (requests)", arm, (), requests, manifest, "requests"))
        else:
            rows = tuple(tested[arm, tasks[0]]) if tasks else ()
            out.append(Side(name, arm, rows, requests, manifest, tasks[0] if tasks else ""))
    return out


def by_task(
    files: Mapping[Path, Sequence[dict[str, Any]]],
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Evaluation rows by (arm, task), the task being the name of the file."""
    out: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path, rows in files.items():
        for arm, group in _by_arm(rows).items():
            out.setdefault((arm, path.stem), []).extend(group)
    return out


def _of_file(path: Path) -> list[Side]:
    rows = read_rows(path)
    manifest: Mapping[str, Any] = {}
    for folder in list(path.resolve().parents)[:2]:
        try:
            found = read_json(folder / "manifest.json")
            manifest = found if isinstance(found, Mapping) else {}
            break
        except (FileNotFoundError, SparklingError):
            continue
    by_kind = {
        kind: _by_arm(r for r in rows if kind_of(r) == kind) for kind in ("evaluation", "bench")
    }
    tested, bench = by_kind["evaluation"], by_kind["bench"]
    return [
        Side(
            f"{path}:{a}",
            a,
            tuple(tested.get(a, ())),
            tuple(bench.get(a, ())),
            manifest,
            file=path.resolve(),
        )
        for a in dict.fromkeys((*bench, *tested))
    ]


def _by_arm(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    out: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        out.setdefault(str(row.get("arm") or "unnamed"), []).append(row)
    return out


# -- may they be compared? -----------------------------------------------------------------------


def differences(first: Side, second: Side, *, root: Path | None = None) -> list[Difference]:
    """In what two sides differ, as far as manifests and evaluation rows say; the rows of a
    benchmark are checked by `ladder` as well. root: the repository, to find the recipe in."""
    out: list[Difference] = []
    a, b = first.manifest, second.manifest
    if a and b:
        for what, key in (("lane", "lane"), ("recipe", "recipe"), ("machine", "machine")):
            _note(out, f"the {what}", a.get(key), b.get(key))
        va, vb = a.get("versions") or {}, b.get("versions") or {}
        for package in sorted((va.keys() | vb.keys()) - _NOT_MEASURING):
            _note(out, f"the version of {package}", va.get(package), vb.get(package))
        out += _launches(first, second, root)
    for key in _PER_ARM:
        mine, theirs = (_values(s.evaluation, key) for s in (first, second))
        if mine and theirs:
            _note(out, f"{key} of the questions", mine, theirs)
    out += _per_pair(first, second)
    return out


def _note(out: list[Difference], what: str, a: Any, b: Any) -> None:
    if a != b:
        out.append(Difference(what, _short(a), _short(b)))


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_short(v)[:16]}" for k, v in value.items())
    if isinstance(value, list) and len(value) == 1:
        return _short(value[0])
    return "none" if value is None else str(value)


def _values(rows: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    seen: list[Any] = []
    for row in rows:
        if row.get(key) is not None and row[key] not in seen:
            seen.append(row[key])
    return sorted(seen, key=str)


def _per_pair(first: Side, second: Side) -> list[Difference]:
    theirs = {r["id"]: r for r in second.evaluation}
    out = []
    for key in _PER_PAIR:
        for row in first.evaluation:
            other = theirs.get(row["id"], {})
            a, b = row.get(key), other.get(key)
            if a is not None and b is not None and a != b:
                out.append(Difference(f"{key} of question {row['id']}", str(a), str(b)))
                break
    return out


def _launches(first: Side, second: Side, root: Path | None) -> list[Difference]:
    if not (first.launch and second.launch):
        return []
    try:
        a, b = (_recipe.Launch.from_json(s.launch) for s in (first, second))
    except (KeyError, TypeError) as error:
        raise UsageError(f"A manifest's launch cannot be read ({error}); it is damaged.") from None
    out = [
        Difference(f"the switch {name}", _on(a.switches.get(name)), _on(b.switches.get(name)), True)
        for name in dict.fromkeys((*a.switches, *b.switches))
        if a.switches.get(name) != b.switches.get(name)
    ]
    _note(out, "the variant", a.variant, b.variant)
    _note(out, "the regime", a.regime, b.regime)
    declared = _declared(a, b, first.manifest, root) if out else set()
    for change in _recipe.diff(a, b):
        if change.name in _PLACES:
            continue
        ours = declared is None or change.name in declared
        what = f"the {'flag' if change.kind == 'flag' else 'variable'} {change.name}"
        out.append(Difference(what, _set(change.before), _set(change.after), ours))
    return out


def _declared(
    a: _recipe.Launch, b: _recipe.Launch, manifest: Mapping[str, Any], root: Path | None
) -> set[str] | None:
    """The flags and variables that the recipe itself changes between the two stages; None when the
    recipe as it was then is not at hand."""
    book = recipe_at_hand(a.recipe, manifest, root)
    try:
        if book is None:
            return None
        one, two = (book.render(x.stage, model=Path("/m"), variant=x.variant) for x in (a, b))
    except SparklingError:
        return None
    return {change.name for change in _recipe.diff(one, two)}


def recipe_at_hand(
    name: str, manifest: Mapping[str, Any], root: Path | None = None
) -> _recipe.Recipe | None:
    """The recipe that a run was made with, if it is here and unchanged since."""
    try:
        book = _recipe.load(name, root=root)
    except SparklingError:
        return None
    return book if book.sha256 == (manifest.get("recipe") or {}).get("sha256") else None


def _on(value: bool | None) -> str:
    return {True: "on", False: "off", None: "unknown"}[value]


def _set(value: str | None) -> str:
    return "not set" if value is None else value or "set"


def refuse(first: Side, second: Side, found: Sequence[Difference], switches: Sequence[str]) -> None:
    """UsageError when the sides differ in more than the declared switch: anything not declared by
    the recipe, or, where `switches` are named, any other switch."""
    bad = [d for d in found if not d.declared]
    if switches:
        named = {f"the switch {s}" for s in switches}
        bad += [d for d in found if d.what.startswith("the switch ") and d.what not in named]
    if not bad:
        return
    said = "; ".join(map(str, bad[:6])) + (f"; and {len(bad) - 6} more" if len(bad) > 6 else "")
    raise UsageError(
        f"{first.name} and {second.name} differ in more than the declared switch: {said}. They cannot "
        "be compared."
    )
