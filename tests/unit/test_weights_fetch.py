"""A download that breaks in every way: never a wrong "complete", never a byte again without need.

The hubs are `fakes/fake_hubs.py`, spoken to by the real client libraries; bytes are counted by them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save
from sparkling import hub_listing, hubs, weights, weights_manifest, weights_plan, weights_stream
from sparkling.errors import SparklingError, UsageError
from sparkling.hubs import HubError, HubRefusal
from sparkling.weightcheck import MANIFEST
from sparkling.weights_fetch import fetch

sys.path.insert(0, str(Path(__file__).parent / "fakes"))
from fake_hubs import REPO, Hub, Trouble, commit_of, git_sha1

BIG = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
TINY = "config.json"
HUBS = ("huggingface", "modelscope")


def shard(seed: int, size: int = 100_000) -> bytes:
    values = np.random.default_rng(seed).standard_normal(size // 4).astype(np.float32)
    return save({f"w{seed}": values})


def checkpoint() -> dict[str, bytes]:
    index = {"weight_map": {"w1": BIG, "w2": SECOND}}
    return {
        TINY: b'{"architectures": ["SomethingElse"]}',
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        BIG: shard(1, 200_000),
        SECOND: shard(2),
        ".gitattributes": b"* text\n",
        "nested/notes.txt": b"n" * 5000,
    }


@pytest.fixture(autouse=True)
def _private_homes(monkeypatch, tmp_path_factory):
    """No test sees the user's login, caches or proxies."""
    for name in ("HF_TOKEN", "HF_ENDPOINT", "MODELSCOPE_API_TOKEN", "MODELSCOPE_DOMAIN"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(home / "hf-token"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(home / "ms"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(home / "ms-cache"))


@pytest.fixture(params=HUBS)
def kind(request):
    return request.param


@pytest.fixture
def hub(monkeypatch):
    with Hub(checkpoint()) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", running.url)
        yield running


def listed(kind, revision=None):
    return hub_listing.listing(REPO, hub=kind, revision=revision)


def get(kind, folder, revision=None, **options):
    return fetch(listed(kind, revision), folder, backoff_s=0.001, **options)


def whole(folder, hub):
    """Every wanted file is there with the hub's bytes, and nothing else."""
    found = {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.name != MANIFEST
    }
    assert found == {k: v for k, v in hub.files.items() if k != ".gitattributes"}


def unfinished(folder):
    """Nothing says that this folder is complete."""
    assert not (folder / MANIFEST).exists()
    return sorted(p.name for p in (folder / ".fetch").glob("*.part"))


WANTED = sum(len(v) for k, v in checkpoint().items() if k != ".gitattributes")


# -- what goes well ------------------------------------------------------------------------------


def test_a_repository_is_fetched_whole_and_signed_off_last(hub, kind, tmp_path):
    place = tmp_path / "model"
    done = get(kind, place)
    whole(place, hub)
    assert done.fetched == WANTED == hub.bodies()
    assert done.files == done.compared == 6
    manifest = json.loads((place / MANIFEST).read_text())
    assert manifest["repo"] == REPO and manifest["hub"] == kind
    assert manifest["commit"] == hub.head
    assert manifest["sha256"] == {
        k: hashlib.sha256(v).hexdigest() for k, v in hub.files.items() if k != ".gitattributes"
    }
    assert {row["compared"] for row in manifest["files"]} <= {"sha256", "git-sha1"}
    assert not (place / ".fetch").exists()
    assert "every file equals the hub's checksum" in str(done)


def test_the_second_time_nothing_is_fetched_or_read(hub, kind, tmp_path, monkeypatch):
    get(kind, tmp_path)
    before = hub.bodies()
    monkeypatch.setattr(weights_manifest, "digests", lambda *a, **k: pytest.fail("read again"))
    again = get(kind, tmp_path)
    assert (again.fetched, again.kept, hub.bodies()) == (0, WANTED, before)


def test_progress_ends_at_the_whole_and_names_what_is_worked_on(hub, tmp_path):
    hub.trouble[BIG] = Trouble("held")
    seen = []

    def see(progress):
        seen.append(progress)
        if BIG in {row["file"] for row in progress.rows()}:
            hub.go_on.set()

    get("huggingface", tmp_path, progress=see, interval_s=0.01)
    assert seen[-1].done == seen[-1].total == seen[-1].fetched == WANTED
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    active = {row["file"] for p in seen for row in p.rows()}
    assert BIG in active
    some = next(p for p in seen if p.rate)
    assert "/s" in str(some) and " left" in str(some)


def test_the_hubs_own_library_gets_the_same_file(hub, tmp_path, monkeypatch):
    """The fake hub is enough for hf_hub_download, so what we compare with is the real protocol."""
    from huggingface_hub import hf_hub_download

    with hubs.direct_to_loopback(hub.url):
        path = hf_hub_download(
            REPO, BIG, endpoint=hub.url, local_dir=tmp_path / "theirs", token=False
        )
    assert Path(path).read_bytes() == hub.files[BIG]


def test_a_part_of_a_repository_can_be_fetched_and_added_to(hub, tmp_path):
    get("huggingface", tmp_path, include=["*.json"])
    first = json.loads((tmp_path / MANIFEST).read_text())
    assert BIG in first["excluded"] and TINY in first["sha256"]
    done = get("huggingface", tmp_path, include=["*.safetensors"])
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert done.fetched == len(hub.files[BIG]) + len(hub.files[SECOND])
    assert {BIG, SECOND, TINY} <= set(manifest["sha256"])
    assert BIG not in manifest["excluded"] and "nested/notes.txt" in manifest["excluded"]


# -- broken connections --------------------------------------------------------------------------


def test_a_cut_connection_is_gone_on_with_where_it_stopped(hub, kind, tmp_path):
    hub.trouble[BIG] = Trouble("cut", after=50_000, times=3)
    done = get(kind, tmp_path)
    whole(tmp_path, hub)
    assert done.fetched == WANTED
    asked = [r.get("Range") for r in hub.requests(f"/cdn/{hub.head}/{BIG}")]
    assert asked[0] is None and len(asked) == 4
    starts = [int(r.removeprefix("bytes=").rstrip("-")) for r in asked[1:]]
    assert starts == sorted(starts) and starts[0] > 0
    # What was on the way when the connection broke is all that came twice.
    assert hub.sent[BIG] - len(hub.files[BIG]) < 3 * 64 << 10


def test_a_file_that_never_comes_is_given_up_and_the_rest_is_kept(hub, kind, tmp_path):
    hub.trouble[BIG] = Trouble("500" if kind == "huggingface" else "503")
    with pytest.raises(SparklingError) as caught:
        get(kind, tmp_path)
    said = str(caught.value)
    assert BIG in said and f"{weights_stream.TRIES} requests in a row" in said
    assert "5 of 6 files are complete" in said
    assert unfinished(tmp_path) == []
    served = hub.bodies()
    hub.trouble.clear()
    assert get(kind, tmp_path).fetched == len(hub.files[BIG]) == hub.bodies() - served
    whole(tmp_path, hub)


KILLED = """
import sys
from sparkling import hub_listing
from sparkling.weights_fetch import fetch
found = hub_listing.listing({repo!r}, hub={kind!r})
fetch(found, {place!r}, jobs=1, progress=lambda p: print(p.done, flush=True), interval_s=0.01)
"""


def test_after_a_kill_only_the_missing_bytes_are_asked_for(hub, kind, tmp_path):
    place = tmp_path / "model"
    hub.trouble[BIG] = Trouble("held", after=64 << 10)
    code = KILLED.format(repo=REPO, kind=kind, place=str(place))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    part = weights_plan.part_of(place, BIG)
    limit = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 60_000):
        assert child.poll() is None and time.monotonic() < limit
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert unfinished(place) == [part.name]
    have = part.stat().st_size
    assert 60_000 < have < len(hub.files[BIG])
    hub.trouble.clear()
    hub.go_on.set()
    hub.quiet()
    served = hub.sent[BIG]
    done = get(kind, place)
    whole(place, hub)
    assert hub.sent[BIG] - served == len(hub.files[BIG]) - have
    assert hub.requests(f"/cdn/{hub.head}/{BIG}")[-1]["Range"] == f"bytes={have}-"
    assert done.kept >= have
    assert not (place / ".fetch").exists()


def test_ten_stops_leave_no_more_than_one_file_each(hub, tmp_path):
    """Disk use does not grow with the number of tries (case 1)."""
    for _ in range(10):
        hub.trouble[BIG] = Trouble("cut", after=16 << 10, times=1)
        hub.trouble[SECOND] = Trouble("404")

        class Enough(Exception):
            pass

        def stop(progress, Enough=Enough):
            if progress.fetched:
                raise Enough

        with pytest.raises((Enough, SparklingError)):
            get("huggingface", tmp_path, jobs=1, progress=stop, interval_s=0.0)
        kept = [p for p in (tmp_path / ".fetch").iterdir() if p.suffix == ".part"]
        assert len(kept) <= 2
        total = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
        assert total < 1.2 * WANTED
    hub.trouble.clear()
    get("huggingface", tmp_path)
    whole(tmp_path, hub)


def test_ctrl_c_loses_nothing(hub, tmp_path):
    hub.trouble[BIG] = Trouble("held", after=32 << 10)

    def stop(progress):
        if progress.fetched > 40_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get("huggingface", tmp_path, progress=stop, interval_s=0.0)
    unfinished(tmp_path)
    hub.trouble.clear()
    hub.go_on.set()
    done = get("huggingface", tmp_path)
    whole(tmp_path, hub)
    assert done.kept > 20_000


def test_a_server_without_ranges_is_said_to_start_over(hub, tmp_path):
    hub.ranges = False
    hub.trouble[BIG] = Trouble("cut", after=50_000, times=1)
    done = get("huggingface", tmp_path)
    whole(tmp_path, hub)
    assert any("starts over: the server sent all of it" in note for note in done.notes)


# -- wrong bytes ---------------------------------------------------------------------------------


def test_a_flipped_byte_is_noticed_and_fetched_once_more(hub, kind, tmp_path):
    hub.trouble[BIG] = Trouble("flip", after=150_000, times=1)
    done = get(kind, tmp_path)
    whole(tmp_path, hub)
    assert any("wrong checksum" in note for note in done.notes)
    assert hub.sent[BIG] == 2 * len(hub.files[BIG])


def test_a_file_that_is_always_wrong_is_never_complete(hub, kind, tmp_path):
    hub.trouble[BIG] = Trouble("flip", after=150_000)
    with pytest.raises(SparklingError, match="twice with a content whose checksum is not the one"):
        get(kind, tmp_path)
    assert unfinished(tmp_path) == []
    assert not (tmp_path / BIG).exists()


def test_damage_in_the_bytes_from_before_the_stop_is_noticed(hub, tmp_path):
    """The hash is of the whole file, not of what came last (case 45)."""
    begin("huggingface", tmp_path, bytes(70_000))  # none of them right
    done = get("huggingface", tmp_path)
    whole(tmp_path, hub)
    assert any("wrong checksum" in note for note in done.notes)


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        (Trouble("short", after=90_000), "lists model-00001"),
        (Trouble("long", after=10), "lists model-00001"),
        (Trouble("page"), "A web page came instead of"),
    ],
    ids=["short", "long", "page"],
)
def test_wrong_lengths_have_their_own_sentence(hub, kind, tmp_path, trouble, says):
    hub.trouble[BIG] = trouble
    with pytest.raises(SparklingError, match=says):
        get(kind, tmp_path)
    assert unfinished(tmp_path) == []
    assert not (tmp_path / BIG).exists()


@pytest.mark.parametrize("path", [BIG, TINY])
def test_a_sign_in_page_without_a_length_is_named_at_once(hub, kind, tmp_path, path):
    hub.lengths = False
    hub.trouble[path] = Trouble("page")
    with pytest.raises(HubRefusal, match="A web page came instead of"):
        get(kind, tmp_path)
    assert unfinished(tmp_path) == []
    assert hub.trouble[path].times == 10**9 - 1  # asked once


def test_more_bytes_than_announced_are_not_kept(hub, tmp_path):
    hub.lengths = False
    hub.trouble[BIG] = Trouble("long", after=10)
    with pytest.raises(SparklingError, match="sends more of"):
        get("huggingface", tmp_path)
    assert not (tmp_path / BIG).exists()


def test_a_compressed_answer_is_not_taken_for_the_file(hub, tmp_path):
    hub.trouble[BIG] = Trouble("gzip")
    with pytest.raises(SparklingError, match="came compressed"):
        get("huggingface", tmp_path)
    assert all(r["Accept-Encoding"] == "identity" for r in hub.requests("/cdn/"))


# -- the hub says no -----------------------------------------------------------------------------


def test_a_shard_that_is_not_there_is_named_and_the_rest_comes(hub, kind, tmp_path):
    hub.trouble[SECOND] = Trouble("404")
    with pytest.raises(HubRefusal) as caught:
        get(kind, tmp_path)
    assert f"does not hold {SECOND} (404)" in str(caught.value)
    assert "5 of 6 files are complete" in str(caught.value)
    assert (tmp_path / BIG).read_bytes() == hub.files[BIG]
    assert unfinished(tmp_path) == []


@pytest.mark.parametrize(("status", "says"), [("401", "wants a login"), ("403", "denies access")])
def test_a_refusal_keeps_what_was_fetched(hub, kind, tmp_path, status, says):
    hub.trouble[BIG] = Trouble(status)
    with pytest.raises(HubRefusal, match=says):
        get(kind, tmp_path)
    assert unfinished(tmp_path) == []


def test_an_expired_token_is_told_from_a_missing_one_and_never_shown(
    hub, kind, tmp_path, monkeypatch
):
    secret = "hf_" + "x" * 20 + "OLD" if kind == "huggingface" else "ms-0123456789-OLD"
    monkeypatch.setenv(hubs.TOKENS[kind], secret)
    hub.wants = "another"
    with pytest.raises(HubRefusal) as caught:
        listed(kind)
    assert "refuses your token" in str(caught.value) and "expired" in str(caught.value)
    assert secret not in str(caught.value)
    monkeypatch.delenv(hubs.TOKENS[kind])
    with pytest.raises(SparklingError) as caught:
        listed(kind)
    assert "log" in str(caught.value) and "refuses your token" not in str(caught.value)


def test_a_token_that_expires_on_the_way_loses_nothing(hub, kind, tmp_path, monkeypatch):
    secret = "hf_abcdefghijklmnopqrstuvwxyz012345678"
    monkeypatch.setenv(hubs.TOKENS[kind], secret)
    hub.wants = secret
    found = listed(kind)
    hub.wants = "renewed"
    with pytest.raises(HubRefusal, match="refuses your token"):
        fetch(found, tmp_path, backoff_s=0.001)
    hub.wants = secret
    get(kind, tmp_path)
    whole(tmp_path, hub)


def test_a_token_goes_to_the_hub_only_and_into_no_file(hub, kind, tmp_path, monkeypatch):
    secret = "hf_abcdefghijklmnopqrstuvwxyz012345678"
    monkeypatch.setenv(hubs.TOKENS[kind], secret)
    hub.wants = secret
    hub.trouble[BIG] = Trouble("cut", after=50_000, times=1)
    done = get(kind, tmp_path)
    for headers in hub.requests("/cdn/"):
        assert not [value for value in headers.values() if secret in value]
    for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
        assert secret.encode() not in path.read_bytes() and b"s3cret" not in path.read_bytes()
    assert secret not in str(done) and "s3cret" not in str(done)


@pytest.mark.parametrize("kind", HUBS)
def test_what_is_not_there_is_said(hub, kind):
    with pytest.raises(HubRefusal, match=r"has no nobody/nothing"):
        hub_listing.listing("nobody/nothing", hub=kind)
    with pytest.raises(HubRefusal, match=r"has no revision 'v9'"):
        listed(kind, revision="v9")


def test_bad_requests_are_refused_before_anybody_is_asked(monkeypatch):
    monkeypatch.setattr(hub_listing, "reachable", lambda *a: pytest.fail("asked"))
    for repo in ("", "x", "a/b/c", "../x/y", "a/..", "https://x/y"):
        with pytest.raises(UsageError, match="is no repository"):
            hub_listing.listing(repo)
    with pytest.raises(UsageError, match="There is no hub 'github'"):
        hub_listing.listing("a/b", hub="github")


# -- the origin moves ----------------------------------------------------------------------------


def test_a_branch_that_moves_between_two_files_cannot_mix(hub, kind, tmp_path):
    first = dict(hub.files)
    moved = {**first, BIG: shard(3, 200_000), SECOND: shard(4)}
    hub.on_listing = lambda: hub.commit(moved)  # right after the listing, before any byte
    found = listed(kind)
    fetch(found, tmp_path, backoff_s=0.001)
    assert (tmp_path / BIG).read_bytes() == first[BIG]
    assert (tmp_path / SECOND).read_bytes() == first[SECOND]
    assert json.loads((tmp_path / MANIFEST).read_text())["commit"] == commit_of(first)


def test_a_new_commit_replaces_what_changed_and_keeps_the_rest(hub, kind, tmp_path):
    get(kind, tmp_path)
    hub.commit({**hub.files, SECOND: shard(5)})
    served = hub.bodies()
    done = get(kind, tmp_path)
    assert hub.bodies() - served == done.fetched == len(hub.files[SECOND])
    whole(tmp_path, hub)
    assert json.loads((tmp_path / MANIFEST).read_text())["commit"] == hub.head


def begin(kind, folder, data, path=BIG):
    """Leave a partial file behind, as a download that was killed does."""
    file = next(f for f in listed(kind).files if f.path == path)
    weights_plan.part_of(folder, path).parent.mkdir(parents=True, exist_ok=True)
    weights_plan.part_of(folder, path).write_bytes(data)
    weights_plan.State.of(file, None).save(folder)


def test_a_partial_file_of_other_content_starts_over_and_is_removed(hub, kind, tmp_path):
    begin(kind, tmp_path, hub.files[BIG][:50_000])
    hub.commit({**hub.files, BIG: shard(6, 200_000)})
    found = weights_plan.plan(listed(kind), tmp_path)
    step = next(s for s in found.steps if s.file.path == BIG)
    assert (step.action, step.have) == ("fetch", 0) and "other content now" in step.why
    done = get(kind, tmp_path)
    whole(tmp_path, hub)
    assert any("Removed 1 partial file" in note for note in done.notes)


@pytest.mark.parametrize("signed", [True, False], ids=["fetched", "from elsewhere"])
def test_a_stopped_update_of_equal_size_is_gone_on_with(hub, kind, tmp_path, signed):
    """New weights usually have the old ones' size: the old file must not cost the partial one."""
    get(kind, tmp_path)
    hub.commit({**hub.files, BIG: shard(7, 200_000)})
    if not signed:
        (tmp_path / MANIFEST).unlink()
    begin(kind, tmp_path, hub.files[BIG][:90_000])
    before, read = hub.sent[BIG], []
    real = weights_manifest.digests
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            weights_manifest, "digests", lambda p, **k: read.append(p.name) or real(p, **k)
        )
        get(kind, tmp_path)
    whole(tmp_path, hub)
    assert hub.sent[BIG] - before == len(hub.files[BIG]) - 90_000
    assert (BIG in read) is not signed  # what is known to differ is not read to find out


def without_hashes(hub, tmp_path, etag):
    """A file of which the hub tells no checksum, half here, with the tag it had."""
    hub.hashes = False
    file = next(f for f in listed("huggingface").files if f.path == BIG)
    weights_plan.part_of(tmp_path, BIG).parent.mkdir(parents=True)
    weights_plan.part_of(tmp_path, BIG).write_bytes(hub.files[BIG][:80_000])
    weights_plan.State.of(file, etag).save(tmp_path)


def test_without_a_checksum_the_entity_tag_decides(hub, tmp_path):
    tag = f'"{hashlib.md5(hub.files[BIG]).hexdigest()}"'
    without_hashes(hub, tmp_path, tag)
    done = get("huggingface", tmp_path)
    whole(tmp_path, hub)
    assert hub.sent[BIG] == len(hub.files[BIG]) - 80_000
    assert hub.requests(f"/cdn/{hub.head}/{BIG}")[0]["If-Range"] == tag
    assert done.compared == 0 and "gives none" in str(done)


def test_a_changed_entity_tag_starts_over(hub, tmp_path):
    without_hashes(hub, tmp_path, '"the-old-one"')
    get("huggingface", tmp_path)
    whole(tmp_path, hub)
    assert hub.sent[BIG] == len(hub.files[BIG])  # the server sees If-Range and sends all of it


def test_a_server_that_overlooks_a_changed_entity_tag_is_not_believed(hub, tmp_path):
    hub.heeds_if_range = False
    without_hashes(hub, tmp_path, '"the-old-one"')
    get("huggingface", tmp_path)
    whole(tmp_path, hub)
    assert hub.requests(f"/cdn/{hub.head}/{BIG}")[-1].get("Range") is None


# -- edges of the partial file -------------------------------------------------------------------


def test_a_partial_file_of_full_size_is_hashed_and_moved(hub, kind, tmp_path):
    begin(kind, tmp_path, hub.files[BIG])
    get(kind, tmp_path)
    whole(tmp_path, hub)
    assert hub.sent[BIG] == 0


@pytest.mark.parametrize("right", [True, False])
def test_416_on_a_file_of_unknown_size(hub, tmp_path, right):
    """The server says that nothing is behind our bytes: the checksum says whether that is right."""
    hub.sizes = False
    file = next(f for f in listed("huggingface").files if f.path == "nested/notes.txt")
    assert file.size == 5000  # large files tell theirs with the checksum
    unknown = hubs.HubFile(file.path, None, file.url, sha256=file.sha256)
    listing = hubs.Listing("huggingface", REPO, None, hub.head, (unknown,))
    weights_plan.part_of(tmp_path, file.path).parent.mkdir(parents=True)
    data = hub.files[file.path]
    weights_plan.part_of(tmp_path, file.path).write_bytes(data if right else b"m" * len(data))
    weights_plan.State.of(unknown, None).save(tmp_path)
    fetch(listing, tmp_path, backoff_s=0.001)
    assert (tmp_path / file.path).read_bytes() == data
    assert hub.sent[file.path] == (0 if right else len(data))


def test_a_partial_file_longer_than_the_file_starts_over(hub, tmp_path):
    begin("huggingface", tmp_path, hub.files[BIG] + b"x")
    get("huggingface", tmp_path)
    whole(tmp_path, hub)


def test_neither_size_nor_checksum_is_never_complete(hub, tmp_path):
    hub.sizes = hub.hashes = hub.lengths = False
    with pytest.raises(SparklingError, match="tells neither the size nor a checksum"):
        get("huggingface", tmp_path)
    unfinished(tmp_path)
    assert not [p for p in tmp_path.rglob("*.safetensors")]


def test_an_unknown_size_with_a_checksum_is_decided_by_the_checksum(hub, tmp_path):
    hub.sizes = hub.lengths = False
    data = hub.files[BIG]
    url = next(f.url for f in listed("huggingface").files if f.path == BIG)
    right = hubs.HubFile(BIG, None, url, sha256=hashlib.sha256(data).hexdigest())
    fetch(hubs.Listing("huggingface", REPO, None, hub.head, (right,)), tmp_path, backoff_s=0.001)
    assert (tmp_path / BIG).read_bytes() == data
    wrong = hubs.HubFile(BIG, None, url, sha256="0" * 64)
    other = hubs.Listing("huggingface", REPO, None, hub.head, (wrong,))
    with pytest.raises(SparklingError, match="checksum is not the one"):
        fetch(other, tmp_path / "other", backoff_s=0.001)


def test_empty_files_are_fetched_too(hub, kind, tmp_path):
    hub.commit({**hub.files, "empty.txt": b""})
    get(kind, tmp_path)
    whole(tmp_path, hub)
    assert get(kind, tmp_path).fetched == 0


def test_modelscopes_zero_is_unknown_where_the_checksum_says_so():
    full, nothing = {"Size": 0, "Sha256": "a" * 64}, {"Size": 0, "Sha256": hub_listing.EMPTY}
    assert hub_listing._size(full) is None and hub_listing._size(nothing) == 0
    assert hub_listing._size({"Size": 0}) == 0 and hub_listing._size({}) is None


def test_a_login_since_is_seen(hub, monkeypatch):
    """The ModelScope library keeps one configuration for the process; ours is read anew."""
    hub.wants = "ms-the-new-token-0123"
    with pytest.raises(SparklingError):
        listed("modelscope")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms-an-old-token-0123")
    with pytest.raises(HubRefusal, match="refuses your token"):
        listed("modelscope")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", hub.wants)
    assert listed("modelscope").files


def test_a_file_that_is_there_already_is_read_and_not_fetched(hub, kind, tmp_path):
    """What another tool fetched into the folder counts, if its content is right."""
    (tmp_path / BIG).write_bytes(hub.files[BIG])
    (tmp_path / SECOND).write_bytes(bytes(len(hub.files[SECOND])))
    done = get(kind, tmp_path)
    whole(tmp_path, hub)
    assert hub.sent[BIG] == 0 and hub.sent[SECOND] == len(hub.files[SECOND])
    assert any("other content" in note for note in done.notes)


# -- the disk ------------------------------------------------------------------------------------


def test_a_disk_that_cannot_hold_it_is_refused_before_a_byte(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(weights_plan, "_free", lambda folder: WANTED)
    with pytest.raises(UsageError) as caught:
        get("huggingface", tmp_path / "new")
    said = str(caught.value)
    assert "Not enough disk" in said and str(tmp_path / "new") in said and "are free" in said
    assert hub.bodies() == 0 and not (tmp_path / "new").exists()


def test_a_disk_that_fills_up_stops_all_and_loses_nothing(hub, kind, tmp_path, monkeypatch):
    written, real, lock = [0], weights_stream._write, threading.Lock()

    def write(fd, data):
        with lock:  # two files at once
            if written[0] + len(data) > 120_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written[0] += len(data)
        real(fd, data)

    monkeypatch.setattr(weights_stream, "_write", write)
    with pytest.raises(SparklingError) as caught:
        get(kind, tmp_path, jobs=2)
    assert "The disk is full" in str(caught.value)
    unfinished(tmp_path)
    monkeypatch.setattr(weights_stream, "_write", real)
    done = get(kind, tmp_path)
    whole(tmp_path, hub)
    assert done.kept == written[0]
    assert done.fetched == WANTED - written[0]


LIMITED = """
import resource, sys
from sparkling import hub_listing
from sparkling.errors import SparklingError
from sparkling.weights_fetch import fetch
found = hub_listing.listing({repo!r}, hub="huggingface")
resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, 120_000))
try:
    fetch(found, {place!r})
except SparklingError as error:
    sys.exit(str(error))
"""


def test_a_write_that_the_system_refuses_loses_nothing(hub, tmp_path):
    """A real refusal, in the middle of a file: no file may be larger than 120,000 bytes."""
    place = tmp_path / "model"
    code = LIMITED.format(repo=REPO, place=str(place))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "The disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    assert weights_plan.part_of(place, BIG).name in unfinished(place)  # beside what it stopped
    assert weights_plan.part_of(place, BIG).stat().st_size == 120_000
    hub.quiet()
    served = hub.sent[BIG]
    get("huggingface", place)
    whole(place, hub)
    assert hub.sent[BIG] - served == len(hub.files[BIG]) - 120_000


def test_a_folder_belongs_to_one_process_at_a_time(hub, tmp_path):
    from sparkling.files import Journal

    (tmp_path / ".fetch").mkdir()
    with Journal(tmp_path / ".fetch" / "done.jsonl"):
        with pytest.raises(UsageError, match="being written by another process"):
            get("huggingface", tmp_path)


# -- which hub -----------------------------------------------------------------------------------


def test_the_reachable_hub_is_taken(hub, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert hub_listing.listing(REPO).hub == "modelscope"
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    assert hub_listing.listing(REPO).hub == "huggingface"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError) as caught:
        hub_listing.listing(REPO)
    assert "ModelScope" in str(caught.value) and "Hugging Face" in str(caught.value)


def test_a_hub_that_lacks_it_is_passed_over(hub, monkeypatch):
    with Hub({}, branch="main") as empty:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", empty.url)
        assert hub_listing.listing(REPO).hub == "huggingface"


def test_bytes_of_one_hub_are_gone_on_with_at_the_other(hub, tmp_path):
    """Both hubs tell the SHA-256 of large files, so the content is known to be the same."""
    begin("huggingface", tmp_path, hub.files[BIG][:70_000])
    get("modelscope", tmp_path)
    whole(tmp_path, hub)
    assert hub.sent[BIG] == len(hub.files[BIG]) - 70_000


def test_this_machine_is_never_reached_through_a_proxy(hub, kind, tmp_path, monkeypatch):
    """Case 41: the environment's proxy is for others."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    get(kind, tmp_path)
    whole(tmp_path, hub)
    with hubs.client() as http:
        patterns = [str(pattern.pattern) for pattern in http._mounts]
    assert any(pattern.startswith("http://") or pattern == "all://" for pattern in patterns)


def test_paths_out_of_the_folder_are_refused(hub, kind, tmp_path):
    hub.commit({**hub.files, "../evil": b"x"})
    with pytest.raises(HubRefusal, match="outside of its folder"):
        listed(kind)


def test_the_checksums_are_the_hubs_own(hub):
    files = {f.path: f for f in listed("huggingface").files}
    assert files[TINY].git_sha1 == git_sha1(hub.files[TINY]) and files[TINY].sha256 is None
    assert files[BIG].sha256 == hashlib.sha256(hub.files[BIG]).hexdigest()
    assert files[BIG].url.endswith(f"/resolve/{hub.head}/{BIG}")
    both = {f.path: f for f in listed("modelscope").files}
    assert both[BIG].sha256 == files[BIG].sha256
    assert hub.head in both[BIG].url


# -- the facade ----------------------------------------------------------------------------------


def test_getting_ends_with_a_check(hub, tmp_path):
    got = weights.get(REPO, tmp_path, hub="huggingface", live=False)
    assert got.verified.verified and not got.verified.hashed  # just hashed, so not read again
    assert got.ok and "not compared with an architecture" in str(got)
    assert got.to_json()["verified"]["verified"] is True
