"""`sparkling weights …`: fetch a checkpoint, verify one, list builds and files, remove leftovers.

Tokens come from the environment (HF_TOKEN, MODELSCOPE_API_TOKEN) or the hubs' own logins; there is
no option for one, since options are seen by everybody on the machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkling.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

REPO = "inclusionAI/Ling-3.0-flash-fp4"


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command and its four verbs."""
    parser = command("weights", _missing, "fetch, verify and list checkpoints")
    verbs = parser.add_subparsers(metavar="VERB", parser_class=type(parser))

    def verb(name: str, handler: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = verbs.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
        )
        sub.set_defaults(handler=handler)
        sub.add_argument("--json", action="store_true", help="print JSON")
        return sub

    fetch = verb("fetch", _fetch, "download a checkpoint, or go on with a download, and verify it")
    fetch.add_argument("repo", nargs="?", metavar="REPO", default=REPO, help=f"default: {REPO}")
    _hub_options(fetch)
    fetch.add_argument("--to", metavar="DIR", help="the folder (default: .cache/models/NAME)")
    fetch.add_argument("--jobs", type=int, default=4, metavar="N", help="files at a time (4)")
    for option, text in (("--include", "only"), ("--exclude", "not")):
        fetch.add_argument(
            option,
            action="append",
            default=[],
            metavar="PATTERN",
            help=f"{text} files like this; may be repeated",
        )
    fetch.add_argument("--plan", action="store_true", help="say what would be done, and stop")

    verify = verb("verify", _verify, "check the form, content and tensors of a checkpoint")
    verify.add_argument("dir", nargs="?", metavar="DIR", help="default: the lane's checkpoint")
    verify.add_argument("--full", action="store_true", help="hash files untouched since, too")

    listing = verb("list", _list, "list the published builds, or the files of one repository")
    listing.add_argument("repo", nargs="?", metavar="REPO", help="list the files of this one")
    _hub_options(listing)
    listing.add_argument(
        "--offline", action="store_true", help="ask no hub for sizes that are unknown"
    )

    clean = verb("clean", _clean, "list what broken-off downloads left behind, and remove it")
    clean.add_argument("dir", nargs="?", metavar="DIR", help="default: where fetch puts REPO")
    clean.add_argument("--repo", metavar="REPO", help="look in the hubs' caches of this one, too")
    clean.add_argument("--yes", action="store_true", help="remove what is listed")
    clean.add_argument(
        "--all", action="store_true", help="also what a stopped fetch would go on with"
    )


def _hub_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hub",
        choices=("auto", "modelscope", "huggingface"),
        default="auto",
        help="default: the reachable one that answers soonest",
    )
    parser.add_argument("--revision", metavar="REV", help="a branch, tag or commit (newest)")


def _missing(args: argparse.Namespace) -> int:
    raise UsageError("Say what about weights: fetch, verify, list or clean (see --help).")


def _print(value: Any, as_json: bool, text: Callable[[], str]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False) if as_json else text())


def _folder(repo: str, told: str | None) -> Path:
    from sparkling import lane, recipe
    from sparkling.files import absolute

    if told:
        return absolute(told)
    root = lane.find_root()
    if repo == REPO:  # where the recipe of the Spark looks for it
        return recipe.load(lane.RECIPES["spark"], root=root).model
    return root / ".cache" / "models" / repo.rpartition("/")[2].lower()


def _lane_model() -> Path:
    from sparkling import lane

    return lane.detect().model


def _fetch(args: argparse.Namespace) -> int:
    from sparkling import weights
    from sparkling.files import absolute
    from sparkling.weights_fetch import possible

    folder = _folder(args.repo, args.to)
    options = {
        "hub": args.hub,
        "revision": args.revision,
        "include": args.include,
        "exclude": args.exclude,
    }
    if args.plan:
        possible(absolute(folder), args.jobs)
        plan = weights.plan(args.repo, folder, **options)
        _print(plan.to_json(), args.json, lambda: str(plan.view()))
        plan.require_disk()
        return 0
    got = weights.get(args.repo, folder, jobs=args.jobs, live=not args.json, **options)
    _print(got.to_json(), args.json, lambda: str(got))
    return 0 if got.ok else 1


def _verify(args: argparse.Namespace) -> int:
    from sparkling import weights

    found = weights.verify(args.dir or _lane_model(), full=args.full)
    _print(found.to_json(), args.json, lambda: str(found))
    return 0 if found.ok else 1


def _list(args: argparse.Namespace) -> int:
    from sparkling import hub_listing, lane, show, weights
    from sparkling.hubs import gb

    if args.repo is None:
        if args.revision:
            raise UsageError("--revision is one repository's: name it, as OWNER/NAME.")
        found = weights.builds(lane.find_root(), ask=not args.offline, hub=args.hub)
        _print(found.to_json(), args.json, lambda: str(found))
        return 0
    listing = hub_listing.listing(args.repo, hub=args.hub, revision=args.revision)
    rows = [
        {
            "path": file.path,
            "bytes": file.size,
            "sha256": file.sha256,
            "git_sha1": file.git_sha1,
        }
        for file in listing.files
    ]
    value = {
        "repo": listing.repo,
        "hub": listing.hub,
        "commit": listing.commit,
        "bytes": listing.size,
        "files": rows,
    }
    shown = [
        {"file": r["path"], "size": gb(r["bytes"]), "checksum": r["sha256"] or r["git_sha1"] or ""}
        for r in rows
    ]
    _print(value, args.json, lambda: str(show.table(shown, title=str(listing))))
    return 0


def _clean(args: argparse.Namespace) -> int:
    from sparkling import weights_orphans
    from sparkling.files import Journal, absolute
    from sparkling.hubs import gb
    from sparkling.weights_plan import DONE, WORK

    folder = absolute(args.dir) if args.dir else _folder(args.repo or REPO, None)
    if args.dir and not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.")
    found = weights_orphans.theirs(folder, args.repo or (None if args.dir else REPO))
    work = folder / WORK
    if args.all and work.is_dir():
        with Journal(work / DONE):  # nobody else is fetching into it
            found = [*found, *weights_orphans.ours(folder)]
    removable = [orphan for orphan in found if not orphan.busy]
    freed = weights_orphans.clean(removable) if args.yes else 0
    value = {
        "folder": str(folder),
        "leftovers": [
            {"path": str(o.path), "bytes": o.size, "why": o.why, "busy": o.busy} for o in found
        ],
        "freed": freed,
    }

    def text() -> str:
        lines = [str(orphan) for orphan in found] or [f"Nothing is left behind in {folder}."]
        if args.yes and removable:
            lines.append(f"Removed: {gb(freed)} are free again.")
        elif removable:
            lines.append("Nothing was removed; --yes removes it.")
        return "\n".join(lines)

    _print(value, args.json, text)
    return 0
