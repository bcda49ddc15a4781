"""The checkpoint, from a hub to "verified": what a notebook or a command calls.

weights.plan(repo, folder)      what a download would do, before it does it
weights.get(repo, folder)       do it, with live progress; go on with what is there; verify
weights.verify(folder)          is it what it should be
weights.builds(folder)          the other builds, their sizes and whether they fit
weights.sample(model, folder)   a plan against a folder that is whole: no network, to look at
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkling import builds as _builds
from sparkling import (
    hub_listing,
    show,
    weightcheck,
    weights_manifest,
    weights_plan,
    weights_verify,
)
from sparkling.errors import SparklingError, UsageError
from sparkling.files import absolute
from sparkling.hubs import HubFile, Listing
from sparkling.lane import Lane, tiny_model
from sparkling.live import Live
from sparkling.weights_fetch import JOBS, Fetched, Progress, fetch, possible
from sparkling.weights_plan import Plan
from sparkling.weights_verify import Verified

REPO = "inclusionAI/Ling-3.0-flash-fp4"


@dataclass(frozen=True, repr=False)
class Got:
    """A download and what its check found; `verified` is None for files that SGLang cannot load
    (GGUF), which are hashed all the same."""

    fetched: Fetched
    verified: Verified | None

    @property
    def ok(self) -> bool:
        return self.verified is None or (self.verified.ok and self.verified.verified)

    def __str__(self) -> str:
        return str(self.fetched) + (f"\n{self.verified}" if self.verified else "")

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        text = show.note(str(self.fetched).replace("\n", " "))
        return (text + self.verified.view() if self.verified else text)._repr_html_()

    def to_json(self) -> dict[str, Any]:
        checked = self.verified.to_json() if self.verified else None
        return {**self.fetched.to_json(), "ok": self.ok, "verified": checked}


def plan(
    repo: str,
    folder: Path | str,
    *,
    hub: str = "auto",
    revision: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Plan:
    """What fetching `repo` into `folder` would do. Asks a hub; changes nothing."""
    found = hub_listing.listing(repo, hub=hub, revision=revision)
    return weights_plan.plan(found, absolute(folder), include=include, exclude=exclude)


def get(
    repo: str,
    folder: Path | str,
    *,
    hub: str = "auto",
    revision: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    jobs: int = JOBS,
    live: bool = True,
) -> Got:
    """Fetch `repo` into `folder` (or finish, or find that nothing is missing) and verify it.

    hub: "modelscope", "huggingface" or "auto" (the reachable one that answers soonest). revision:
    a branch, tag or commit. Raises UsageError, HubRefusal, HubError, SparklingError; running it
    again goes on where it stopped.
    """
    possible(absolute(folder), jobs)
    found = hub_listing.listing(repo, hub=hub, revision=revision)
    options = {"include": include, "exclude": exclude, "jobs": jobs}
    if live:
        with Live(f"Fetching {repo}") as view:

            def show(progress: Progress) -> None:
                view.update(progress.rows(), note=str(progress))

            fetched = fetch(found, folder, progress=show, **options)  # type: ignore[arg-type]
            view.update([], note="complete")
    else:
        fetched = fetch(found, folder, **options)  # type: ignore[arg-type]
    loadable = any(fetched.folder.glob("*.safetensors")) and not include
    return Got(fetched, weights_verify.verify(fetched.folder) if loadable else None)


def obtain(
    lane: Lane, repo: str = REPO, *, hub: str = "auto", revision: str | None = None
) -> show.View | Got:
    """The lane's checkpoint: left as it is where it is there, fetched otherwise.

    The cpu lane's models come with the repository (the tiny Ling is built), so nobody is asked. A
    checkpoint that somebody put there by other means is not touched. Raises as `get` does.
    """
    model = lane.model
    if lane.kind == "cpu":
        if not model.exists() and model.absolute() == tiny_model(lane.root).absolute():
            from sparkling import tiny

            return show.note(f"The tiny Ling is built, not fetched: {tiny.build(model)}.")
        return show.note(f"This lane's checkpoint needs no download: {model}.")
    manifest = weights_manifest.read(model) if model.is_dir() else None
    about = manifest.about if manifest else {}
    held = about.get("repo")
    if held and held != repo:
        raise UsageError(
            f"{model} holds {held}, not {repo}: set SPARKLING_MODEL to a folder of its own."
        )
    if held and revision in (None, about.get("revision"), about.get("commit")):
        return show.note(
            f"{repo} is complete in {model} since {about.get('when')}, at commit "
            f"{about.get('commit')}; no hub is asked. `sparkling weights fetch` asks for a newer one."
        )
    if model.is_dir() and not held and not (model / weights_plan.WORK).exists():
        try:
            weightcheck.check(model, contents=False)
        except UsageError:
            pass  # not a whole checkpoint: finish it
        else:
            return show.note(
                f"The checkpoint in {model} was not fetched by Sparkling and stays as it is; "
                f"`sparkling weights fetch --to {model}` compares it with the hub's checksums."
            )
    return get(repo, model, hub=hub, revision=revision)


def verify(folder: Path | str, *, full: bool = False) -> Verified:
    """Check a checkpoint: form, content, tensors (see `weights_verify`)."""
    return weights_verify.verify(absolute(folder), full=full)


def builds(folder: Path | str, *, ask: bool = False, hub: str = "auto") -> _builds.Builds:
    """The published builds, their sizes, and whether they fit here. ask: fill unknown sizes in
    from a hub."""
    asking = (lambda repo: hub_listing.listing(repo, hub=hub)) if ask else None
    return _builds.survey(absolute(folder), ask=asking)


def sample(model: Path | str, folder: Path | str) -> Plan:
    """What a download into `folder` would do if the hub held exactly the files of `model`.

    From the manifest of `model`, without any network: to see a plan, or what is wrong in a copy.
    Raises SparklingError where `model` has no manifest.
    """
    source = absolute(model)
    manifest = weights_manifest.read(source)
    if manifest is None:
        raise SparklingError(f"{source} has no manifest, so nobody knows what it should hold.")
    files = [
        HubFile(path=name, size=(source / name).stat().st_size, url="", sha256=row.sha256)
        for name, row in sorted(manifest.rows.items())
        if (source / name).is_file()
    ]
    return weights_plan.plan(
        Listing("folder", source.name, None, None, tuple(files)), absolute(folder)
    )


def stopped(model: Path | str, folder: Path | str, share: float = 0.5) -> Path:
    """Make `folder` what a download of `model` leaves when it is stopped at `share` of its largest
    file: the small files whole, that one partial, other weight files not begun. The folder.

    Raises SparklingError where `model` has no manifest or `folder` is not empty.
    """
    source, target = absolute(model), absolute(folder)
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{target} is not empty; give a new folder.")
    listing = sample(source, target).listing
    (target / weights_plan.WORK).mkdir(parents=True, exist_ok=True)
    largest = max(listing.files, key=lambda file: file.size or 0)
    for file in listing.files:
        data = (source / file.path).read_bytes()
        if file == largest:
            weights_plan.State.of(file, None).save(target)
            begun = data[: int(share * len(data))]
            weights_plan.part_of(target, file.path).write_bytes(begun)
        elif not file.path.endswith(".safetensors"):
            (target / file.path).write_bytes(data)
    return target
