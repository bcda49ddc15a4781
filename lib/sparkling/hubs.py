"""The two hubs, ModelScope and Hugging Face: their addresses, tokens, reachability and refusals.

Tokens come from the environment or from the hub's own login, through the hubs' own libraries; they
are sent to the hub's own address only and never shown. This machine is never reached through a
proxy, other machines are when the environment says so. What a hub lists is in `hub_listing`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sparkling.errors import SparklingError, UsageError

HUBS = ("modelscope", "huggingface")
TITLES = {"modelscope": "ModelScope", "huggingface": "Hugging Face", "folder": "this folder"}
TOKENS = {"modelscope": "MODELSCOPE_API_TOKEN", "huggingface": "HF_TOKEN"}
LOGINS = {"modelscope": "modelscope login", "huggingface": "hf auth login"}
PROBE_S = 6.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class HubError(SparklingError):
    """A hub cannot be reached or does not answer as a hub."""


class HubRefusal(UsageError):
    """A hub answers, and says no: no such repository or revision, no access, a bad token."""


@dataclass(frozen=True)
class HubFile:
    """One file as the hub lists it. size in bytes, None where it is not told; `sha256` and
    `git_sha1` (of the git blob) in hex, None where not told; `url` serves its bytes."""

    path: str
    size: int | None
    url: str
    sha256: str | None = None
    git_sha1: str | None = None

    @property
    def hashed(self) -> bool:
        """Whether the hub gives a checksum of its content."""
        return bool(self.sha256 or self.git_sha1)


@dataclass(frozen=True)
class Listing:
    """A repository at one moment. `commit` is what it is pinned to; None: it could not be."""

    hub: str
    repo: str
    asked: str | None
    commit: str | None
    files: tuple[HubFile, ...] = field(repr=False)

    @property
    def size(self) -> int:
        """Bytes of all files whose size is known."""
        return sum(file.size or 0 for file in self.files)

    def __str__(self) -> str:
        if self.hub == "folder":
            return f"{self.repo}, by its manifest: {len(self.files)} files, {gb(self.size)}"
        at = f" at commit {self.commit[:12]}" if self.commit else ", not pinned to a commit"
        return f"{self.repo} on {TITLES[self.hub]}{at}: {len(self.files)} files, {gb(self.size)}"


def gb(size: float | None) -> str:
    """Bytes in the unit that people buy disks in (1 GB = 10^9 bytes)."""
    if size is None:
        return "unknown size"
    for limit, unit, digits in ((1e9, "GB", 1), (1e6, "MB", 1), (1e3, "kB", 1)):
        if size >= limit:
            return f"{size / limit:,.{digits}f} {unit}"
    return "1 byte" if size == 1 else f"{size:,.0f} bytes"


# -- where, and as whom --------------------------------------------------------------------------


def endpoint(hub: str, env: Mapping[str, str] = os.environ) -> str:
    """The hub's address: `HF_ENDPOINT`, `MODELSCOPE_ENDPOINT` or `MODELSCOPE_DOMAIN`, else its own."""
    if hub == "huggingface":
        told = env.get("HF_ENDPOINT", "").strip() or "https://huggingface.co"
    else:
        told = (
            env.get("MODELSCOPE_ENDPOINT", "").strip()
            or env.get("MODELSCOPE_DOMAIN", "").strip()
            or "https://modelscope.cn"
        )
    if not told.lower().startswith(("http://", "https://")):
        told = f"https://{told}"
    return told.rstrip("/")


def token(hub: str) -> str | None:
    """The user's token: from the environment or from the hub's own login. Never to be shown."""
    if hub == "huggingface":
        from huggingface_hub import get_token

        return get_token()
    from modelscope_hub import HubConfig

    return HubConfig(endpoint=endpoint(hub)).token or None


def headers(hub: str) -> dict[str, str]:
    """Request headers for the hub's own address; whoever follows a redirect must drop them."""
    if hub == "folder":
        return {}
    secret = token(hub)
    if not secret:
        return {}
    made = {"Authorization": f"Bearer {secret}"}
    if hub == "modelscope":
        made["Cookie"] = f"m_session_id={secret}"
    return made


def is_loopback(url: str) -> bool:
    """Whether an address is this machine."""
    return (urlsplit(url).hostname or "") in _LOOPBACK


def client(**options: Any) -> Any:
    """An httpx.Client that honours the environment's proxies for everything but this machine."""
    import httpx

    known = _certificates()
    hosts = ("127.0.0.1", "localhost", "[::1]")
    direct = {f"all://{host}": httpx.HTTPTransport(verify=known) for host in hosts}
    return httpx.Client(mounts=direct, verify=known, **options)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes longer than most requests."""
    import httpx

    return httpx.create_ssl_context()


@contextlib.contextmanager
def direct_to_loopback(url: str) -> Iterator[None]:
    """While a hub's library speaks to this machine, no proxy comes between them."""
    if not is_loopback(url):
        yield
        return
    import huggingface_hub

    before = {name: os.environ.get(name) for name in ("NO_PROXY", "no_proxy")}
    for name, value in before.items():
        os.environ[name] = ",".join(filter(None, (value, *_LOOPBACK)))
    huggingface_hub.close_session()  # its one client has read the environment already
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        huggingface_hub.close_session()


# -- which hub -----------------------------------------------------------------------------------


def probe(hub: str, timeout_s: float = PROBE_S) -> float | str:
    """Seconds until the hub's address answers, or a clause saying why it does not."""
    import httpx

    began = time.monotonic()
    try:
        with client(timeout=timeout_s) as http:
            http.head(endpoint(hub))
    except httpx.TimeoutException:
        return f"no answer within {timeout_s:g} s"
    except httpx.HTTPError as error:
        return f"not reachable ({type(error).__name__})"
    except (httpx.InvalidURL, ValueError):
        return "its address is not one"
    return time.monotonic() - began


def reachable(hubs: tuple[str, ...] = HUBS, timeout_s: float = PROBE_S) -> dict[str, float | str]:
    """`probe` of several hubs at once, by name."""
    found: dict[str, float | str] = {}

    def ask(hub: str) -> None:
        try:
            found[hub] = probe(hub, timeout_s)
        except ImportError as error:  # a Python without the notebooks' packages
            found[hub] = f"{error.name} is not installed"

    threads = [threading.Thread(target=ask, args=(hub,), daemon=True) for hub in hubs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s * 2)
    return {hub: found.get(hub, f"no answer within {timeout_s * 2:g} s") for hub in hubs}


# -- a hub's "no", each with its own sentence ----------------------------------------------------


def missing(hub: str, repo: str) -> SparklingError:
    """Not there, or not for us: hubs do not tell the two apart."""
    also = "" if token(hub) else f", or it is private and you are not logged in (`{LOGINS[hub]}`)"
    return HubRefusal(f"{TITLES[hub]} has no {repo}{also}; check the name on its page.")


def gated(hub: str, repo: str) -> HubRefusal:
    """The repository wants its conditions accepted."""
    return HubRefusal(
        f"{repo} on {TITLES[hub]} is gated: accept its conditions on its page with your account, "
        f"then log in (`{LOGINS[hub]}`) or set {TOKENS[hub]}."
    )


def refused(hub: str, what: str, status: int | None) -> SparklingError:
    """What an HTTP status of a hub means; `what` is a repository or a file."""
    title = TITLES[hub]
    if status == 401:
        if token(hub):
            return HubRefusal(
                f"{title} refuses your token for {what} (401): it has expired or is wrong; log in "
                f"again (`{LOGINS[hub]}`) or set {TOKENS[hub]} anew. What was fetched is kept."
            )
        return HubRefusal(
            f"{title} wants a login for {what} (401): run `{LOGINS[hub]}` or set {TOKENS[hub]}."
        )
    if status == 403:
        return HubRefusal(
            f"{title} denies access to {what} (403): your account has no right to it, or its "
            "conditions are not accepted yet; open its page in a browser. What was fetched is kept."
        )
    if status == 404:
        return HubRefusal(
            f"{title} does not hold {what} (404), though it was listed or named; try the other hub."
        )
    if status == 429:
        return HubError(f"{title} asks for fewer requests (429); wait some minutes and run again.")
    said = f"HTTP {status}" if status else "no HTTP status"
    return HubError(f"{title} fails for {what} ({said}); run again later or try the other hub.")
