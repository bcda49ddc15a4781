"""What a notebook shows of the server's environment: made ready, and how each edition is told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparkling import environments, recipe, show
from sparkling.errors import SparklingError
from sparkling.recipe import Launch, Recipe
from sparkling.show import View

if TYPE_CHECKING:
    from sparkling.notebook import Session

CPU_IMPORTS = (
    "torch",
    "sgl_kernel",
    "sglang.launch_server",
    "sglang.srt.models.bailing_moe_v3",
    "sparkling_sglang.plugin",
)
"""What the cpu lane's server imports; its environment is made by scripts/setup.sh."""


def ready(session: Session) -> View:
    """Build the edition's environment where the lane has pins for it, and verify it; else verify the
    one that is there. What is installed goes into the run's manifest.

    Raises SparklingError with one sentence when that fails.
    """
    lane, book = session.lane, session.recipe
    if book.built.requirements is not None and lane.server_python.is_relative_to(
        environments.folder_of(lane.root, book.built)
    ):
        with show.Live(f"Building {book.built.environment}") as live:
            built = environments.build(
                lane.root, book.built, progress=lambda line: live.update(note=line)
            )
            live.end("built and verified" if built.fresh else "up to date")
        environments.note(session.run, lane.server_python, again=built.fresh)
        rows = _rows(built.lock["packages"], {m: None for m in built.unjudged})
        return show.table(rows, ["what", "found"], title=str(built))
    told = environments.verify(lane.server_python, CPU_IMPORTS)
    broken = {module: why for module, why in told.items() if why is not None}
    if broken:
        module, why = next(iter(broken.items()))
        raise SparklingError(
            f"{module} cannot be imported by {lane.server_python}: {why}; run ./scripts/setup.sh."
        )
    found = environments.installed(lane.server_python)
    title = f"{lane.server_python} imports what its server needs: {', '.join(told)}."
    return show.table(_rows(found["packages"], {}), ["what", "found"], title=title)


def _rows(packages: dict[str, str], unjudged: dict[str, None]) -> list[tuple[str, str]]:
    named = ("sglang", "sparkling-sglang", "torch", "transformers", "flashinfer-python")
    rows = [(name, packages[name]) for name in (*named, "humming-kernels") if name in packages]
    rows.append(("packages in all", str(len(packages))))
    if unjudged:
        rows.append(("not importable without a driver", ", ".join(unjudged)))
    return rows


def told(book: Recipe, switch: str, edition: str) -> str:
    """How a switch is turned on in an edition: the change its stage makes, as in a diff."""
    chosen = book.with_edition(edition)
    for name in book.ladder:
        stage = book.stage(name)
        if stage.switch == switch and stage.parent:
            before, after = (_at(chosen, one) for one in (stage.parent, name))
            return "\n".join(str(change) for change in recipe.diff(before, after))
    return "no stage turns it on"


def _at(book: Recipe, stage: str) -> Launch:
    return book.render(stage, model=Path("MODEL"), cache="CACHE")


def editions(book: Recipe) -> View:
    """Every edition: its environment, its pins, and how each switch is told to it."""
    rows = []
    for edition in book.editions.values():
        row = {
            "edition": edition.name,
            "what it is": edition.title,
            "environment, pins": f"{edition.environment}\n{edition.requirements or ''}".strip(),
        }
        for switch in ("humming", "fp8-head", "nextn"):
            has = switch in edition.switches
            row[switch] = told(book, switch, edition.name) if has else "not there"
        rows.append(row)
    caption = "The last three columns are what turning the switch on changes in the command."
    return show.table(rows, title=f"Editions of {book.shown}", caption=caption, width=140)
