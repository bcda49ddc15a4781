"""Every way in which a checkpoint folder can be broken has its own sentence."""

from __future__ import annotations

import hashlib
import json
import random
import re

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from sparkling import tiny, weightcheck
from sparkling.errors import UsageError
from sparkling.weightcheck import WeightsError, check, header

VALID = {
    "a.weight": np.arange(4096, dtype=np.float32).reshape(64, 64) + 1,
    "b.bias": np.full(3, 7, np.float16),
}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"architectures": ["BailingMoeV3ForCausalLM"]}')
    (made / "tokenizer.json").write_text("{}")
    save_file(VALID, made / "model.safetensors", metadata={"format": "pt"})
    return made


def put(folder, data):
    (folder / "model.safetensors").write_bytes(data)


def hashes(folder):
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return {"model.safetensors": digest}


def test_a_whole_checkpoint_passes_and_says_how_deeply_it_was_checked(folder):
    known = hashes(folder)
    plain, hashed = check(folder), check(folder, hashes=known)
    assert (plain.files, plain.tensors, plain.hashed) == (1, 2, ())
    assert "not compared with a checksum" in str(plain)
    assert "verified" not in str(plain)
    assert hashed.hashed == ("model.safetensors",)
    assert "contents verified by SHA-256" in str(hashed)
    assert check(folder, hashes=known, contents=False).hashed == ()


def test_the_header_is_read_as_the_library_reads_it(folder):
    found = header(folder / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        "a.weight": ("F32", (64, 64)),
        "b.bias": ("F16", (3,)),
    }


def zero_tail(data):
    return data[:-4096] + bytes(4096)


def zero_payload(data):
    length = int.from_bytes(data[:8], "little")
    return data[: 8 + length] + bytes(len(data) - 8 - length)


# The eleven files of case 13. The first two have the right size and the right header.
CASE_13 = {
    "zeroed tail": (zero_tail, "right form but not the right content"),
    "zeroed payload": (zero_payload, "right form but not the right content"),
    "cut by one byte": (lambda d: d[:-1], "is short by 1 byte:"),
    "cut inside the header": (lambda d: d[:60], "cut off inside its header (60 of at least"),
    "one byte more": (lambda d: d + b"x", "is 1 byte too long"),
    "doubled": (lambda d: d + d, " bytes too long"),
    "Git LFS pointer": (
        lambda d: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "is a Git LFS pointer",
    ),
    "web page": (lambda d: b"<!DOCTYPE html><html>Sign in</html>", "is a web page"),
    "empty": (lambda d: b"", "is empty"),
    "seven bytes": (lambda d: d[:7], "holds 7 bytes"),
    "absurd header length": (
        lambda d: (1 << 60).to_bytes(8, "little") + d[8:],
        "claims a header of 1,152,921,504,606,846,976 bytes",
    ),
}


@pytest.mark.parametrize("name", CASE_13)
def test_each_broken_file_has_its_own_sentence(folder, name):
    known = hashes(folder)
    spoil, says = CASE_13[name]
    put(folder, spoil((folder / "model.safetensors").read_bytes()))
    with pytest.raises(WeightsError) as caught:
        check(folder, hashes=known)
    message = str(caught.value)
    assert says in message
    assert str(folder / "model.safetensors") in message
    assert "\n" not in message and message.endswith(".")
    others = {says for other, (_, says) in CASE_13.items() if other != name}
    assert not [text for text in others - {says} if text in message and text != " bytes too long"]


def test_right_size_and_header_alone_are_not_called_verified(folder):
    put(folder, zero_tail((folder / "model.safetensors").read_bytes()))
    assert "not compared" in str(check(folder))


def made(entries, data=b"", length=None):
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(start, end, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


HEADERS = {
    "not JSON": (made(b"{broken"), "not JSON"),
    "a list": (made([1]), "not a table"),
    "deep nesting": (made(b"[" * 100_000), "not JSON"),
    "no tensors": (made({"__metadata__": {}}), "holds no tensors"),
    "a name twice": (
        made(b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 4)).encode(),) * 2), bytes(4)),
        "not JSON",
    ),
    "entry without offsets": (made({"a": {"dtype": "F32", "shape": [1]}}), "entry 'a'"),
    "offset is a text": (made({"a": entry("0", 4)}, bytes(4)), "entry 'a'"),
    "offset is true": (made({"a": entry(True, 4)}, bytes(4)), "entry 'a'"),
    "negative offset": (made({"a": entry(-4, 0)}), "entry 'a'"),
    "three offsets": (
        made({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2, 4]}}, bytes(4)),
        "entry 'a'",
    ),
    "wrong byte count": (made({"a": entry(0, 8)}, bytes(8)), "F32 [1] needs 4"),
    "overlap": (made({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6)), "'b' overlaps"),
    "gap": (made({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "'b' leaves a gap"),
    "huge shape": (made({"a": entry(0, 4, (1 << 40, 1 << 40))}, bytes(4)), "needs"),
    "offsets beyond the end": (made({"a": entry(0, 4000, (1000,))}, bytes(4)), "short by 3,996"),
    "length just past the end": (made({"a": entry(0, 4)}, bytes(4), 500), "cut off inside"),
    "length one byte too many": (
        made({"a": entry(0, 4)}, bytes(4), len(json.dumps({"a": entry(0, 4)})) + 5),
        "cut off inside",
    ),
    "length of zero": (made(b"", b"{}      "), "not JSON"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_mangled_header_is_refused_with_its_cause(folder, name):
    data, says = HEADERS[name]
    put(folder, data)
    with pytest.raises(WeightsError) as caught:
        check(folder)
    assert says in str(caught.value)


def test_an_enormous_header_length_is_not_believed(folder, monkeypatch):
    """No read may be as long as a lying header says."""
    put(folder, (90_000_000).to_bytes(8, "little") + b"{" + bytes(100))
    with pytest.raises(WeightsError, match="cut off inside its header"):
        header(folder / "model.safetensors")


def test_whatever_the_library_refuses_we_refuse(folder):
    """Random single-byte damage to length and header: never milder than safetensors itself."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    generator = random.Random(0)
    refused = 0
    for _ in range(1500):
        spoiled = bytearray(whole)
        spoiled[generator.randrange(head)] = generator.randrange(256)
        path.write_bytes(spoiled)
        try:
            with safe_open(path, "np") as opened:
                list(opened.keys())
        except (SafetensorError, UnicodeDecodeError):
            refused += 1
            with pytest.raises(WeightsError):
                header(path)
    assert refused > 500


def test_folder_level_faults(folder, tmp_path):
    def says(place):
        with pytest.raises(UsageError) as caught:
            check(place)
        return str(caught.value)

    assert "There is no checkpoint at" in says(tmp_path / "nowhere")
    assert "sparkling weights fetch" in says(tmp_path / "nowhere")
    tiny_place = tmp_path / ".cache" / "models" / "tiny-ling"
    assert "sparkling tiny" in says(tiny_place) and "fetch" not in says(tiny_place)
    (tmp_path / "env" / "recipes").mkdir(parents=True)
    assert "git checkout -- models/sparklet" in says(tmp_path / "models" / "sparklet")
    (tmp_path / "models" / "sparklet").mkdir(parents=True)
    (tmp_path / "models" / "sparklet" / "config.json").write_text('{"architectures": ["X"]}')
    assert "git checkout -- models/sparklet" in says(tmp_path / "models" / "sparklet")
    assert "is a file" in says(folder / "config.json")
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json" in says(folder)
    (folder / "config.json").write_text("{}")
    assert "names no architecture" in says(folder)
    (folder / "config.json").write_text("{")
    assert "not readable JSON" in says(folder)
    (folder / "config.json").write_text("[]")
    assert "does not hold a table" in says(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in says(folder)


def test_no_weights_at_all(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="holds no weights"):
        check(folder)


def test_several_files_without_an_index_are_fine_unless_they_are_shards(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "extra.safetensors").write_bytes(whole)
    assert check(folder).files == 2
    (folder / "extra.safetensors").unlink()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert check(folder).files == 1


@pytest.mark.parametrize(
    ("dtype", "count", "size"),
    [(name, 8, bits) for name, bits in weightcheck._BITS.items()]
    + [("F6_E3M2", 3, 3), ("F4", 3, 2)],
)
def test_the_size_of_every_dtype_is_known(folder, dtype, count, size):
    """Eight of a kind take as many bytes as one has bits; odd counts are rounded up."""
    put(folder, made({"a": entry(0, size, (count,), dtype)}, bytes(size)))
    assert check(folder).tensors == 1
    put(folder, made({"a": entry(0, size + 1, (count,), dtype)}, bytes(size + 1)))
    with pytest.raises(WeightsError, match="needs"):
        check(folder)
    assert re.search(r"\d+", dtype) is None or weightcheck._BITS[dtype] == int(
        re.search(r"\d+", dtype)[0]
    )


def test_an_index_is_held_to_its_word(folder):
    index = folder / weightcheck.INDEX
    names = [f"model-{i:05}-of-00005.safetensors" for i in range(1, 6)]
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / names[0]).write_bytes(whole)
    (folder / names[1]).write_bytes(whole)

    def says(mapping):
        index.write_text(json.dumps({"weight_map": mapping}))
        with pytest.raises(WeightsError) as caught:
            check(folder)
        return str(caught.value)

    absent = says({f"t{i}": name for i, name in enumerate(names)} | {"a.weight": names[0]})
    assert "lacks 3 of 5 weight files" in absent and "00003" in absent
    assert "lacks 3 of 5" in absent and "more" not in absent
    assert "does not hold 'c'" in says({"a.weight": names[0], "c": names[1]})
    assert "outside its folder" in says({"a.weight": "../../other.safetensors"})
    assert "lists no weights" in says({})
    index.write_text("nonsense")
    with pytest.raises(WeightsError, match="not readable JSON"):
        check(folder)
    index.write_text(json.dumps({"weight_map": {"a.weight": names[0], "b.bias": names[1]}}))
    assert check(folder).files == 2
    index.unlink()
    with pytest.raises(WeightsError, match=r"2 weight files but no model.safetensors.index.json"):
        check(folder)


def test_the_folders_own_manifest_is_used(folder):
    manifest = folder / weightcheck.MANIFEST
    manifest.write_text(json.dumps({"sha256": hashes(folder)}))
    assert check(folder).hashed == ("model.safetensors",)
    manifest.write_text(json.dumps({"sha256": {"gone.json": "0"}}))
    with pytest.raises(WeightsError, match=r"lacks gone\.json"):
        check(folder)


def test_the_inventory_accounts_for_every_byte(tmp_path):
    made = tiny.build(tmp_path / "tiny")
    rows = weightcheck.inventory(made)
    parts = {row["part"]: row for row in rows}
    assert set(parts) == {
        "embedding",
        "LM head",
        "norms",
        "KDA attention",
        "MLA attention",
        "dense MLP",
        "routed experts",
        "shared expert",
        "router",
        "NEXTN layer",
    }
    found = header(made / "model.safetensors")
    assert sum(row["tensors"] for row in rows) == len(found)
    assert sum(row["%"] for row in rows) == pytest.approx(100)
    size = sum(t.end - t.start for t in found.values())
    assert sum(row["MB"] for row in rows) == pytest.approx(size / 1e6)
    assert rows == sorted(rows, key=lambda row: -row["MB"])
    # 3 expert layers of 8 experts, three matrices of 192 x 64, two bytes each.
    assert parts["routed experts"]["MB"] == pytest.approx(3 * 8 * 3 * 192 * 64 * 2 / 1e6)
    assert parts["routed experts"]["tensors"] == 72
    assert parts["router"]["dtype"] == "F32" and parts["LM head"]["dtype"] == "BF16"
