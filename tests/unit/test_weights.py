"""Verifying, planning, listing builds, leftovers, and the command: nothing here needs a hub."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sparkling import (
    builds,
    cli,
    hubs,
    machine,
    needs,
    weightcheck,
    weights,
    weights_manifest,
    weights_orphans,
    weights_plan,
    weights_verify,
)
from sparkling.errors import SparklingError
from sparkling.lane import Lane
from sparkling.weightcheck import MANIFEST, WeightsError

sys.path.insert(0, str(Path(__file__).parent / "fakes"))
from fake_hubs import REPO, Hub

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def model(root, tmp_path):
    """A copy of the practice model."""
    return Path(shutil.copytree(root / "models" / "sparklet", tmp_path / "sparklet"))


@pytest.fixture
def fetched(model):
    """The same as a download leaves it: a manifest with sizes and times."""
    names = [p.name for p in model.iterdir() if p.name != MANIFEST]
    rows = {name: weights_manifest.row_of(model, name) for name in names}
    about = {"format": 1, "repo": REPO, "hub": "modelscope", "commit": "a" * 40, "when": "now"}
    weights_manifest.write(model, weights_manifest.Manifest(about, rows))
    return model


@pytest.fixture
def reads(monkeypatch):
    """Names of the files that are hashed, in order."""
    seen, real = [], weights_manifest.digests

    def digests(path, **options):
        seen.append(path.name)
        return real(path, **options)

    monkeypatch.setattr(weights_manifest, "digests", digests)
    return seen


# -- verifying -----------------------------------------------------------------------------------


def test_the_shipped_model_is_verified_in_form_content_and_tensors(root):
    found = weights.verify(root / "models" / "sparklet")
    assert found.ok and found.verified and found.tensors.ok
    assert len(found.hashed) > found.checked.files and not found.trusted
    assert "content verified by SHA-256" in str(found)
    assert found.tensors.expected == found.tensors.found == found.checked.tensors
    assert all(mark in str(found.view()) for mark in ("form", "content", "tensors"))


def test_untouched_files_are_not_read_again_unless_asked(fetched, reads):
    quick = weights.verify(fetched)
    assert reads == [] and quick.verified and len(quick.trusted) > 3
    full = weights.verify(fetched, full=True)
    assert len(reads) == len(quick.trusted) == len(full.hashed) and full.verified


def test_a_touched_file_is_read_again_and_then_trusted(fetched, reads):
    os.utime(fetched / SHARD)
    assert weights.verify(fetched).hashed == (SHARD,)
    assert weights.verify(fetched).hashed == () and reads == [SHARD]


def spoil(path, keep_time=False):
    before = path.stat()
    data = path.read_bytes()
    path.write_bytes(data[:-4096] + bytes(4096))
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_other_content_of_the_right_form_is_found(fetched):
    spoil(fetched / SHARD)
    with pytest.raises(WeightsError, match="right form but not the right content"):
        weights.verify(fetched)
    with pytest.raises(WeightsError, match="right form but not the right content"):
        weightcheck.check(fetched)


def test_damage_that_keeps_size_and_time_needs_the_full_check(fetched):
    spoil(fetched / SHARD, keep_time=True)
    assert "hashed before and untouched" in str(weights.verify(fetched))
    with pytest.raises(WeightsError, match="right content"):
        weights.verify(fetched, full=True)


def test_every_check_before_a_start_reads_only_what_was_touched(fetched, monkeypatch):
    read, real = [], weightcheck.sha256
    monkeypatch.setattr(weightcheck, "sha256", lambda p: read.append(p.name) or real(p))
    assert "verified by SHA-256" in str(weightcheck.check(fetched)) and read == []
    os.utime(fetched / SHARD)
    weightcheck.check(fetched)
    assert read == [SHARD]


def test_without_checksums_nothing_is_called_verified(model):
    (model / MANIFEST).unlink()
    found = weights.verify(model)
    assert not found.verified and found.ok
    assert "content not verified" in str(found) and found.to_json()["verified"] is False


def test_a_file_that_the_manifest_names_is_missed(fetched):
    (fetched / "chat_template.jinja").unlink()
    with pytest.raises(WeightsError, match=r"lacks chat_template\.jinja"):
        weights.verify(fetched)


def test_a_manifest_that_is_none_is_refused(model):
    (model / MANIFEST).write_text("{")
    with pytest.raises(SparklingError, match="not JSON"):
        weights.verify(model)


def test_only_our_downloads_manifest_is_written_to(model, root):
    before = (model / MANIFEST).read_bytes()
    weights.verify(model)
    assert (model / MANIFEST).read_bytes() == before


# -- tensors against the architecture ------------------------------------------------------------


@pytest.fixture
def plain(tmp_path, root):
    """A BF16 checkpoint in several shards, which numpy can rewrite."""
    from sparkling import tiny

    made = tiny.build(tmp_path / "tiny")
    os.rename(made / "model.safetensors", made / SHARD)
    names = weightcheck.header(made / SHARD)
    (made / weightcheck.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SHARD)}))
    (made / MANIFEST).unlink()
    return made


def altered(plain, change):
    """Rewrite the header of a shard: names, dtypes and shapes, with the same bytes."""
    path = plain / SHARD
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    change(entries)
    raw = json.dumps(entries).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])
    names = [name for name in entries if name != "__metadata__"]
    (plain / weightcheck.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SHARD)}))
    return weights.verify(plain)


def test_the_tiny_model_has_the_architectures_tensors(plain):
    assert weights_verify.tensors(plain).ok


def test_a_renamed_tensor_is_missing_and_extra(plain):
    def change(entries):
        entries["model.norm.wieght"] = entries.pop("model.norm.weight")

    found = altered(plain, change)
    assert found.tensors.missing == ("model.norm.weight",)
    assert found.tensors.extra == ("model.norm.wieght",)
    assert not found.ok and found.to_json()["ok"] is False
    assert "SGLang would leave uninitialised" in str(found) and "would skip" in str(found)


@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_another_dtype_or_shape_is_named(plain, what):
    def change(entries):
        entry = entries["lm_head.weight"]
        if what == "dtype":
            entry["dtype"] = "I16"
        else:
            entry["shape"] = [entry["shape"][1], entry["shape"][0]]

    found = altered(plain, change).tensors
    assert len(found.wrong) == 1 and found.wrong[0].startswith("lm_head.weight: ")
    assert "is needed" in found.wrong[0] and not found.missing and not found.extra


def test_an_unknown_architecture_is_said_to_be_unknown(plain):
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "architectures": ["Other"]}))
    found = weights.verify(plain)
    assert found.tensors.ok is None and found.ok
    assert "not compared with an architecture" in str(found)


# -- plans ---------------------------------------------------------------------------------------


def test_a_plan_says_what_is_missing_in_a_copy(model, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(model / "config.json", copy)
    work = copy / ".fetch"
    work.mkdir()
    listing = weights.sample(model, copy).listing
    file = next(f for f in listing.files if f.path == SHARD)
    half = file.size // 2
    (work / f"{SHARD}.part").write_bytes((model / SHARD).read_bytes()[:half])
    weights_plan.State.of(file, None).save(copy)
    plan = weights.sample(model, copy)
    actions = {s.file.path: s.action for s in plan.steps}
    assert actions["config.json"] == "check" and actions[SHARD] == "resume"
    assert set(actions.values()) == {"check", "resume", "fetch"}
    assert plan.needs == listing.size - half - (model / "config.json").stat().st_size
    assert SHARD in plan._repr_html_() and "50 %" in plan._repr_html_()
    assert plan.to_json()["to_fetch"] == plan.needs


def test_patterns_choose_files(model, tmp_path):
    listing = weights.sample(model, tmp_path).listing
    some = weights_plan.plan(listing, tmp_path, include=["*.json"], exclude=["tok*"])
    assert {s.file.path for s in some.steps} >= {"config.json"}
    assert not [s for s in some.steps if s.file.path.startswith("tok")]
    assert SHARD in some.excluded
    with pytest.raises(SparklingError, match="No file of"):
        weights_plan.plan(listing, tmp_path, include=["*.gguf"])


def test_a_stopped_download_to_look_at_is_gone_on_with(root, tmp_path):
    model = root / "models" / "sparklet"
    half = weights.stopped(model, tmp_path / "half")
    actions = [step.action for step in weights.sample(model, half).steps]
    assert actions.count("resume") == 1 and {"check", "fetch"} < set(actions)
    with pytest.raises(SparklingError, match="is not empty"):
        weights.stopped(model, half)
    with pytest.raises(WeightsError):
        weightcheck.check(half)


# -- what a notebook calls -----------------------------------------------------------------------


def lane_of(kind, model, root):
    return Lane(kind, root, Path("python"), Path("recipe"), model, root / "runs", "")


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(
        "sparkling.hub_listing.listing", lambda *a, **k: pytest.fail("a hub was asked")
    )


def test_the_cpu_lane_asks_nobody(offline, root, model):
    assert "needs no download" in str(weights.obtain(lane_of("cpu", model, root)))


def test_a_fetched_checkpoint_is_not_asked_for_again(offline, root, fetched):
    said = str(weights.obtain(lane_of("spark", fetched, root), REPO))
    assert "is complete" in said and "no hub is asked" in said


def test_another_repository_is_not_fetched_over(offline, root, fetched):
    with pytest.raises(SparklingError, match="holds owner/model, not a/b"):
        weights.obtain(lane_of("spark", fetched, root), "a/b")


def test_somebodys_own_checkpoint_is_left_alone(offline, root, model):
    before = {p.name: p.stat().st_mtime_ns for p in model.iterdir()}
    assert "stays as it is" in str(weights.obtain(lane_of("spark", model, root), REPO))
    assert before == {p.name: p.stat().st_mtime_ns for p in model.iterdir()}


@pytest.mark.parametrize("there", ["nothing", "a part", "another revision"])
def test_what_is_not_whole_is_fetched(root, fetched, tmp_path, monkeypatch, there):
    asked = []
    monkeypatch.setattr(weights, "get", lambda *a, **k: asked.append((a, k)))
    model, revision = fetched, None
    if there == "nothing":
        model = tmp_path / "new"
    elif there == "a part":
        (model / SHARD).unlink()
        (model / MANIFEST).unlink()
    else:
        revision = "v2"
    weights.obtain(lane_of("spark", model, root), REPO, hub="modelscope", revision=revision)
    assert asked == [((REPO, model), {"hub": "modelscope", "revision": revision})]


def test_the_disk_needs_no_room_for_what_is_there(root, tmp_path, monkeypatch):
    class Usage:
        free = 20e9

    monkeypatch.setattr("sparkling.needs.shutil.disk_usage", lambda place: Usage)
    model = tmp_path / "models" / "big"
    lane = lane_of("spark", model, root)
    assert needs.check(["disk"], lane)[0].ok is False
    model.mkdir(parents=True)
    with (model / "model.safetensors").open("wb") as sparse:
        sparse.truncate(70_400_000_000)
    found = needs.check(["disk"], lane)[0]
    assert found.ok and found.need == "9.6 GB of free disk"


# -- leftovers -----------------------------------------------------------------------------------


def test_leftovers_of_other_tools_are_named_and_removed_when_idle(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    theirs = folder / ".cache" / "huggingface" / "download" / "abc.incomplete"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(bytes(1000))
    running = folder / "x.parallel_tmp"
    running.write_bytes(bytes(10))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    cached = tmp_path / "hf" / "hub" / "models--owner--model" / "blobs" / "1.incomplete"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(bytes(500))
    for path in (theirs, cached):
        os.utime(path, (time.time() - 7200,) * 2)
    (folder / "config.json").write_text("{}")
    found = {o.path: o for o in weights_orphans.theirs(folder, "owner/model")}
    assert set(found) == {theirs, running, cached}
    assert found[running].busy and not found[theirs].busy
    assert "so it stays" in str(found[running])
    assert weights_orphans.clean(list(found.values())) == 1500
    assert running.exists() and not theirs.exists() and not cached.exists()
    assert (folder / "config.json").exists()


def test_only_what_nothing_goes_on_with_is_ours_to_remove(tmp_path):
    work = tmp_path / ".fetch"
    work.mkdir()
    for name in ("a.part", "a.json", "b.part", "done.jsonl"):
        (work / name).write_bytes(b"xx")
    file = hubs.HubFile("a", 4, "", sha256="0" * 64)
    weights_plan.State.of(file, None).save(tmp_path)
    step = weights_plan.Step(file, "resume", 2, "")
    assert [o.path.name for o in weights_orphans.ours(tmp_path, [step])] == ["b.part"]
    assert [o.path.name for o in weights_orphans.ours(tmp_path)] == ["a.json", "a.part", "b.part"]


# -- builds --------------------------------------------------------------------------------------

GB = 10**9


def test_builds_are_data_with_sources():
    found = {b.repo: b for b in builds.known()}
    assert found[weights.REPO].size == 70_400_000_000
    assert all(b.source for b in found.values() if b.size is not None)
    assert [b for b in found.values() if b.size is None], "an unknown size is said to be unknown"


def test_what_fits_a_spark(monkeypatch, tmp_path):
    spark = machine.Memory(total=121 * GB, available=110 * GB, source="x", unified=True)
    monkeypatch.setattr(machine, "memory", lambda: spark)
    rows = {r["build"]: r for r in weights.builds(tmp_path).rows()}
    assert rows["inclusionAI/Ling-3.0-flash-fp4"]["memory"] == "fits"
    assert rows["inclusionAI/Ling-3.0-flash-fp8"]["memory"] == "too large"
    assert rows["inclusionAI/Ling-3.0-flash"]["memory"] == "too large"
    assert rows["inclusionAI/Ling-3.0-tiny"]["memory"] == "fits"
    unknown = rows["inclusionAI/Ling-3.0-tiny-fp8"]
    assert (unknown["size"], unknown["memory"]) == ("unknown size", "unknown")


def test_the_edges_of_fitting():
    def build(size):
        return builds.Build("a/b", "", size, "", "")

    assert [build(s).fits(100) for s in (68, 69, 99, 100, None)] == [
        "fits",
        "tight",
        "tight",
        "too large",
        "unknown",
    ]


def test_an_unknown_size_is_asked_for_and_a_silent_hub_leaves_it_unknown(tmp_path):
    build = builds.Build("owner/model", "FP8", None, "", "", include=("*.safetensors",))
    files = (hubs.HubFile("a.safetensors", 7, ""), hubs.HubFile("b.png", 5, ""))
    listing = hubs.Listing("modelscope", "owner/model", None, None, files)
    asked = builds.survey(tmp_path, ask=lambda repo: listing, builds=[build]).builds[0]
    assert asked.size == 7 and "ModelScope" in asked.source

    def silent(repo):
        raise hubs.HubError("no")

    assert builds.survey(tmp_path, ask=silent, builds=[build]).builds[0].size is None


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "MODELSCOPE_API_TOKEN", "MODELSCOPE_DOMAIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "ms"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "hf-token"))
    data = {"w": np.zeros(5000, np.float32)}
    save_file(data, tmp_path / "x.safetensors")
    files = {
        "config.json": b'{"architectures": ["Other"]}',
        "tokenizer.json": b"{}",
        "model.safetensors": (tmp_path / "x.safetensors").read_bytes(),
    }
    with Hub(files) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", running.url)
        yield running


def run(capsys, *args):
    code = cli.main(["weights", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_plan_fetch_verify_list_clean(hub, capsys, tmp_path):
    place = str(tmp_path / "new")
    one = ("--hub", "huggingface")
    code, out, _ = run(capsys, "fetch", REPO, "--to", place, *one, "--plan", "--json")
    assert code == 0 and json.loads(out)["to_fetch"] == sum(map(len, hub.files.values()))
    assert not Path(place).exists() and hub.bodies() == 0
    asked = len(hub.asked)
    code, _, err = run(capsys, "fetch", REPO, "--to", place, *one, "--plan", "--jobs", "0")
    assert code == 2 and "--jobs" in err and len(hub.asked) == asked
    code, out, err = run(capsys, "fetch", REPO, "--to", place, *one, "--json")
    value = json.loads(out)
    assert code == 0 and err == "" and value["ok"] and value["commit"] == hub.head
    code, out, _ = run(capsys, "fetch", REPO, "--to", place, *one)
    assert code == 0 and "0 bytes fetched" in out and "is complete" in out
    code, out, _ = run(capsys, "verify", place, "--json")
    assert code == 0 and json.loads(out)["verified"]
    code, out, _ = run(capsys, "list", REPO, *one)
    assert code == 0 and "model.safetensors" in out and hub.head[:12] in out
    code, out, _ = run(capsys, "clean", place)
    assert code == 0 and "Nothing is left behind" in out


def test_builds_are_listed_without_a_hub(capsys, root, monkeypatch):
    monkeypatch.chdir(root)
    code, out, _ = run(capsys, "list", "--offline", "--json")
    found = {b["repo"]: b["bytes"] for b in json.loads(out)["builds"]}
    assert code == 0 and found[weights.REPO] == 70_400_000_000


def test_a_broken_checkpoint_is_one_sentence_and_two(capsys, model):
    (model / SHARD).write_bytes(b"")
    code, out, err = run(capsys, "verify", str(model))
    assert (code, out) == (2, "") and "is empty" in err and err.count("\n") == 1


def test_wrong_tensors_are_a_failed_run(capsys, plain):
    def change(entries):
        entries["x"] = entries.pop("model.norm.weight")

    altered(plain, change)
    code, out, _ = run(capsys, "verify", str(plain))
    assert code == 1 and "model.norm.weight" in out


def test_leftovers_are_removed_when_told(capsys, tmp_path):
    left = tmp_path / "a.incomplete"
    left.write_bytes(b"x" * 10)
    os.utime(left, (1, 1))
    (tmp_path / ".fetch").mkdir()
    (tmp_path / ".fetch" / "m.part").write_bytes(b"y" * 10)
    code, out, _ = run(capsys, "clean", str(tmp_path))
    assert code == 0 and str(left) in out and "--yes" in out and left.exists()
    run(capsys, "clean", str(tmp_path), "--yes")
    assert not left.exists() and (tmp_path / ".fetch" / "m.part").exists()
    run(capsys, "clean", str(tmp_path), "--yes", "--all")
    assert not (tmp_path / ".fetch" / "m.part").exists()


def test_mistakes_are_one_sentence(capsys, tmp_path):
    for args, says in (
        ((), "fetch, verify, list or clean"),
        (("fetch", "nonsense"), "is no repository"),
        (("verify", str(tmp_path / "nowhere")), "There is no checkpoint"),
        (("clean", str(tmp_path / "nowhere")), "There is no folder"),
    ):
        code, out, err = run(capsys, *args)
        assert (code, out) == (2, "") and says in err and err.count("\n") == 1


@pytest.mark.parametrize("jobs", ["0", "-1", "17"])
def test_nobody_is_asked_about_what_cannot_be(capsys, monkeypatch, tmp_path, jobs):
    monkeypatch.setattr(weights.hub_listing, "listing", lambda *_, **__: pytest.fail("asked"))
    code, out, err = run(capsys, "fetch", "a/b", "--to", str(tmp_path / "x"), "--jobs", jobs)
    assert (code, out) == (2, "") and f"{jobs} files at a time are not possible" in err
    (tmp_path / "file").touch()
    code, out, err = run(capsys, "fetch", "a/b", "--to", str(tmp_path / "file"))
    assert (code, out) == (2, "") and "is a file; give the folder" in err
    code, out, err = run(capsys, "list", "--revision", "x")
    assert (code, out) == (2, "") and "name it, as OWNER/NAME" in err
