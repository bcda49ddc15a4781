"""Several users at once: throughput, and what each of them gets (`break_even` compares arms).

**Closed loop.** At a level of c, c users ask one prompt after the other without a pause, each from
its own place in the list of prompts, the same for every arm; every prompt is asked at every level. So
c requests are in flight until the first user has finished.

    throughput   Σ tokens that arrived while all users were busy / that time (from when the last user
                 had begun until the first had finished), all rounds pooled
    per user     Σ tokens after the first chunk / Σ seconds from first to last chunk, over requests:
                 the decode rate that one user sees; 95 % bootstrap interval over prompts
    first token  from sending to the first chunk, the server's queue included: p50 and p95

A server that runs fewer requests at once than there are users lets the others wait; such levels are
marked as queued, and their first token is mostly the queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkling import bench, metrics
from sparkling.errors import ServerError, SparklingError, UsageError
from sparkling.files import Journal
from sparkling.interleave import plan_of
from sparkling.ladder import units
from sparkling.metrics import Summary, summary
from sparkling.order import Block
from sparkling.stats import Interval, bootstrap_ratio_of_sums
from sparkling.wire import Stalled, Unreachable
from sparkling.workloads import Workload

LEVELS = (1, 2, 4, 8, 16)
MOST_USERS = 256
Progress = Callable[[int, int], None]  # (users of the level that is done, its requests)


@dataclass(frozen=True)
class Users:
    """The task of asking one workload at every level, for `interleave.measure`. Each user asks at
    least `each` times, and all of them together every prompt; the levels run from few to many, with
    the prefix cache flushed before each."""

    workload: Workload
    levels: Sequence[int] = LEVELS
    each: int = 3
    stall_s: float = 120.0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        wrong = [n for n in self.levels if not 1 <= n <= MOST_USERS]
        if wrong or not self.levels or list(self.levels) != sorted(set(self.levels)):
            raise UsageError(
                f"Levels are numbers of users from 1 to {MOST_USERS}, each once and rising, not "
                f"{', '.join(map(str, self.levels)) or 'none'}."
            )
        if self.each < 1:
            raise UsageError(f"Each user must ask at least once, not {self.each} times.")

    def plan(self) -> dict[str, Any]:
        return {
            "levels": list(self.levels),
            "each": self.each,
            "workloads": plan_of([self.workload]),
        }

    def __call__(self, server: Any, block: Block, out: Path, facts: Mapping[str, Any]) -> None:
        client = server.client()
        same = {**bench.facts_of(block.arm, server.launch), "limit": limit_of(client), **facts}
        cases = bench.rendered(client, self.workload)
        _request(client, cases[0], self.stall_s)  # a warm-up, thrown away
        for users in self.levels:
            client.flush_cache()
            rows = ask(client, cases, users, self.each, self.stall_s)
            with Journal(out) as journal:
                for row in rows:
                    journal.append({**same, **row})
            if self.progress is not None:
                self.progress(users, len(rows))


def limit_of(client: Any) -> int | None:
    """How many requests the server runs at once, as it says itself; None where it does not."""
    try:
        info = client.server_info()
    except SparklingError:
        return None
    states = [s for s in info.get("internal_states") or () if isinstance(s, Mapping)]
    for place in (*states, info):
        for key in ("effective_max_running_requests_per_dp", "max_running_requests"):
            if isinstance(place.get(key), int) and place[key] > 0:
                return place[key]
    return None


def ask(
    client: Any, cases: Sequence[bench.Case], users: int, each: int, stall_s: float
) -> list[dict[str, Any]]:
    """One level: the rows of all users' requests, in order of user and turn.

    Raises ServerError when the server goes away or stalls; requests that it merely cuts short are
    rows that are not complete.
    """
    turns = max(each, math.ceil(len(cases) / users))

    def user(number: int) -> list[dict[str, Any]]:
        rows = []
        for turn in range(turns):
            row = _request(client, cases[(number + turn * users) % len(cases)], stall_s)
            rows.append({"users": users, "user": number, "turn": turn, **row})
        return rows

    with ThreadPoolExecutor(users, thread_name_prefix="user") as pool:
        try:
            return [row for rows in pool.map(user, range(users)) for row in rows]
        except (Stalled, Unreachable) as error:
            raise ServerError(
                f"With {users} users at once: {error} The levels so far are kept, but their block "
                "is measured again."
            ) from error


def _request(client: Any, case: bench.Case, stall_s: float) -> dict[str, Any]:
    w = case.workload
    reply = client.chat(
        case.text,
        max_tokens=w.max_tokens,
        ignore_eos=w.ignore_eos,
        thinking=w.thinking,
        tools=list(w.tools) or None,
        timeout_s=stall_s,
        **w.sampling,
    )
    return {
        "workload": w.name,
        "prompt": case.prompt.id,
        "case_hash": case.hash,
        "settings": w.settings(),
        **bench.reply_row(reply),
    }


# -- what came of it -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """One arm at one level; see the module for the definitions. `window_s`: the time behind the
    throughput, all rounds together; None with the throughput when all users were never busy."""

    arm: str
    users: int
    requests: int
    failed: int
    throughput: float | None
    by_round: tuple[float, ...]
    window_s: float | None
    per_user: Interval | None
    ttft_s: Summary | None
    accept_length: Interval | None
    limit: int | None

    @property
    def queued(self) -> bool | None:
        """Whether requests had to wait for others; None when the server's limit is unknown."""
        return None if self.limit is None else self.users > self.limit

    def to_json(self) -> dict[str, Any]:
        out = {**self.__dict__, "by_round": list(self.by_round), "queued": self.queued}
        for key in ("per_user", "ttft_s", "accept_length"):
            out[key] = out[key].to_json() if out[key] is not None else None
        return out


def levels(rows: Iterable[Mapping[str, Any]], *, seed: int = 0) -> list[Level]:
    """One for each arm and level, in the order of arms and then of levels."""
    grouped: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["arm"], row["users"]), []).append(row)
    arms = list(dict.fromkeys(arm for arm, _ in grouped))
    out = []
    for arm, users in sorted(grouped, key=lambda k: (arms.index(k[0]), k[1])):
        group = grouped[arm, users]
        good = [r for r in group if r["complete"]]
        parts = [p for p in (_window(part) for part in _by_round(group)) if p is not None]
        tokens, seconds = (sum(p[i] for p in parts) for i in range(2))
        rated = list(units(good).values())
        rate = None
        if rated:
            rate = bootstrap_ratio_of_sums(*zip(*rated, strict=True), seed=seed)
        limits = {r.get("limit") for r in group}
        out.append(
            Level(
                arm=arm,
                users=users,
                requests=len(group),
                failed=len(group) - len(good),
                throughput=tokens / seconds if seconds else None,
                by_round=tuple(n / s for n, s in parts),
                window_s=seconds or None,
                per_user=rate,
                ttft_s=summary(r["ttft_s"] for r in good),
                accept_length=metrics.accept_interval(good, seed=seed),
                limit=limits.pop() if len(limits) == 1 else None,
            )
        )
    return out


def _by_round(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    grouped: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row.get("block"), []).append(row)
    return list(grouped.values())


def _window(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """(tokens, seconds) of one run of one level while all its users were busy; None when that is no
    time at all, or chunks are not counted."""
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}
    for r in rows:
        if not r["complete"]:
            return None
        begun[r["user"]] = min(r["sent_s"], begun.get(r["user"], math.inf))
        ended[r["user"]] = max(r["sent_s"] + r["e2e_s"], ended.get(r["user"], 0.0))
    start, end = max(begun.values()), min(ended.values())
    if end <= start:
        return None
    tokens = 0
    for r in rows:
        before = 0
        for t, count in zip(r["chunk_times_s"], r["chunk_tokens"], strict=True):
            if count is None:
                return None
            if start <= r["sent_s"] + t <= end:
                tokens += count - before
            before = count
    return float(tokens), end - start
