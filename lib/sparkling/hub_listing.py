"""What a hub holds: one listing of a repository, pinned to a commit, from ModelScope or Hugging Face.

Listings go through the hubs' own libraries: `huggingface_hub`, and `modelscope_hub`, which the
`modelscope` package is built on. The bytes do not (`weights_fetch`): huggingface_hub 2.4.0 starts a
killed plain download at byte 0 again and leaves its partial file behind. Each listing is one
request, so a branch that moves afterwards changes nothing in it:

* Hugging Face names the commit; every address then carries that commit.
* ModelScope names for each file the commit that last changed it, and a SHA-256; every address
  carries that commit. A revision that it does not have is answered there with an empty listing.

Xet, in which Hugging Face keeps large files, is not spoken: the `resolve` address answers clients
without it with plain bytes, and a range of them when asked.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from sparkling.errors import SparklingError, UsageError
from sparkling.hubs import (
    HUBS,
    TITLES,
    HubError,
    HubFile,
    HubRefusal,
    Listing,
    direct_to_loopback,
    endpoint,
    gated,
    missing,
    reachable,
    refused,
)

LISTING_S = 30.0
EMPTY = hashlib.sha256(b"").hexdigest()

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def listing(repo: str, *, hub: str = "auto", revision: str | None = None) -> Listing:
    """List a repository, pinned. hub "auto": the reachable one that answers soonest and has it.

    revision: a branch, tag or commit; None is the hub's default branch. Raises UsageError for a
    bad name, HubRefusal where a hub says no, HubError where none can be asked.
    """
    if not _REPO.fullmatch(repo) or ".." in repo:
        raise UsageError(f"{repo!r} is no repository: give OWNER/NAME, as its page's address does.")
    if hub not in (*HUBS, "auto"):
        raise UsageError(f"There is no hub {hub!r}; the hubs are auto, {', '.join(HUBS)}.")
    answers = reachable(HUBS if hub == "auto" else (hub,))
    up = sorted((s, h) for h, s in answers.items() if isinstance(s, float))
    if not up:
        why = "; ".join(f"{TITLES[h]} ({endpoint(h)}): {answer}" for h, answer in answers.items())
        raise HubError(f"No hub can be reached: {why}; check the network or the proxy settings.")
    failures: list[SparklingError] = []
    for _, name in up:
        try:
            return _list(name, repo, revision)
        except (HubError, HubRefusal) as error:
            failures.append(error)
    raise failures[0] if len(failures) == 1 else _all_failed(repo, failures)


def _all_failed(repo: str, failures: list[SparklingError]) -> SparklingError:
    kind = HubRefusal if all(isinstance(f, HubRefusal) for f in failures) else HubError
    said = " And: ".join(str(failure) for failure in failures)
    return kind(f"No hub lists {repo}. {said}")


def _list(hub: str, repo: str, revision: str | None) -> Listing:
    with direct_to_loopback(endpoint(hub)):
        found = (_huggingface if hub == "huggingface" else _modelscope)(repo, revision)
    if not found.files:
        raise HubRefusal(f"{repo} on {TITLES[hub]} holds no files.")
    for file in found.files:
        parts = PurePosixPath(file.path).parts
        if not parts or file.path.startswith("/") or ".." in parts or "\\" in file.path:
            raise HubRefusal(
                f"{repo} on {TITLES[hub]} lists a file outside of its folder; it is not fetched."
            )
    if len({file.path for file in found.files}) != len(found.files):
        raise HubError(f"{repo} on {TITLES[hub]} lists a file twice; try the other hub.")
    return found


# -- Hugging Face --------------------------------------------------------------------------------


def _huggingface(repo: str, revision: str | None) -> Listing:
    from huggingface_hub import HfApi, errors

    base = endpoint("huggingface")
    try:
        info = HfApi(endpoint=base).model_info(
            repo, revision=revision, files_metadata=True, timeout=LISTING_S
        )
    except errors.GatedRepoError:
        raise gated("huggingface", repo) from None
    except errors.RevisionNotFoundError:
        raise HubRefusal(
            f"{repo} on Hugging Face has no revision {revision!r}; leave it out for the newest."
        ) from None
    except errors.RepositoryNotFoundError:
        raise missing("huggingface", repo) from None
    except errors.HfHubHTTPError as error:
        raise refused("huggingface", repo, _status(error)) from None
    except Exception as error:  # timeouts, broken answers: whatever its HTTP client raises
        raise HubError(
            f"Hugging Face ({base}) did not list {repo} ({type(error).__name__}); try again later "
            "or another hub."
        ) from None
    commit = info.sha
    files = []
    for found in info.siblings or ():
        lfs = found.lfs
        files.append(
            HubFile(
                path=found.rfilename,
                size=lfs.size if lfs and lfs.size is not None else found.size,
                url=f"{base}/{repo}/resolve/{quote(commit or revision or 'main', safe='')}/"
                f"{quote(found.rfilename)}",
                sha256=_hex(lfs.sha256, 64) if lfs else None,
                git_sha1=None if lfs else _hex(found.blob_id, 40),
            )
        )
    return Listing("huggingface", repo, revision, commit, tuple(files))


def _status(error: Any) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None) or getattr(
        error, "status_code", None
    )


def _hex(value: Any, length: int) -> str | None:
    """A checksum as the hub gives it, or None for anything that is none."""
    text = str(value or "").strip().lower()
    return text if len(text) == length and all(c in "0123456789abcdef" for c in text) else None


# -- ModelScope ----------------------------------------------------------------------------------


def _modelscope(repo: str, revision: str | None) -> Listing:
    from modelscope_hub import HubApi, HubConfig, errors

    base, asked = endpoint("modelscope"), revision or "master"
    logging.getLogger("modelscope_hub").setLevel(logging.ERROR)
    api = HubApi(HubConfig(endpoint=base))  # its own, so that a login since is seen
    try:
        rows = api.legacy.list_repo_files(repo, "model", revision=asked)
        # A revision that is not there is answered with an empty listing: ask which ones are.
        known = [] if rows else api.list_repo_revisions(repo, "model")
    except errors.NotExistError:
        raise missing("modelscope", repo) from None
    except errors.APIError as error:
        raise refused("modelscope", repo, _status(error)) from None
    except Exception as error:
        raise HubError(
            f"ModelScope ({base}) did not list {repo} ({type(error).__name__}); try again later or "
            "another hub."
        ) from None
    if not rows:
        names = [str(r.get("Revision") or r.get("name")) for r in known if isinstance(r, Mapping)]
        if names and asked not in names:
            raise HubRefusal(
                f"{repo} on ModelScope has no revision {asked!r}; it has {', '.join(names[:5])}."
            )
        raise HubRefusal(f"{repo} on ModelScope holds no files.")
    blobs = [row for row in rows if (row.get("Type") or "blob") != "tree"]
    files = []
    for row in blobs:
        path = str(row.get("Path") or row.get("Name") or "")
        pinned = _hex(row.get("Revision"), 40)
        files.append(
            HubFile(
                path=path,
                size=_size(row),
                url=api.legacy.get_download_url(repo, "model", path, pinned or asked),
                sha256=_hex(row.get("Sha256"), 64),
            )
        )
    return Listing("modelscope", repo, revision, _newest(blobs), tuple(files))


def _size(row: Mapping[str, Any]) -> int | None:
    """A file's size. ModelScope also says 0 where it does not know; its checksum tells."""
    size = row.get("Size")
    if not isinstance(size, int) or (size == 0 and row.get("Sha256") not in (None, "", EMPTY)):
        return None
    return size


def _newest(blobs: list[dict[str, Any]]) -> str | None:
    """The commit of the file that was changed last; None unless every file names its commit."""
    commits = [(row.get("CommittedDate") or 0, _hex(row.get("Revision"), 40)) for row in blobs]
    if not commits or any(commit is None for _, commit in commits):
        return None
    return max(commits, key=lambda pair: pair[0])[1]
