"""The sum that decides whether a server is started, checked against what SGLang logged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from sparkling import inventory, log, memory, recipe
from sparkling.errors import UsageError
from sparkling.machine import Memory
from sparkling.memory import GIB, NoMemory

SPARK = Memory(
    total=int(119.7 * GIB), available=115 * GIB, source="/proc/meminfo", unified=True, gpu="GB10"
)
H200 = Memory(
    total=120 * GIB,
    available=110 * GIB,
    source="/proc/meminfo",
    gpu="H200",
    gpu_total=140 * GIB,
    gpu_available=int(139.04 * GIB),
)


@pytest.fixture(scope="module")
def flash() -> recipe.Recipe:
    return recipe.load("ling-3.0-flash")


def logged(data: Path, name: str) -> dict[type, list]:
    found: dict[type, list] = {}
    for event in log.parse(data / "logs" / name):
        found.setdefault(type(event), []).append(event)
    return found


def as_logged(events: dict[type, list], flash: recipe.Recipe, stage: str) -> memory.Need:
    """The need of the launch that the recorded server had, from its own arguments."""
    arguments = events[log.ServerArgs][0].args
    launch = flash.render(stage, model="/none")
    flags = {
        "--context-length": arguments["context_length"],
        "--mem-fraction-static": arguments["mem_fraction_static"],
        "--max-mamba-cache-size": arguments["max_mamba_cache_size"],
        "--max-running-requests": arguments["max_running_requests"],
    }
    argv = list(launch.argv)
    for name, value in flags.items():
        argv[argv.index(name) + 1] = str(value)
    return memory.need_of(dataclasses.replace(launch, argv=tuple(argv)), memory=H200)


def part(need: memory.Need, name: str) -> float:
    return next(one.bytes for one in need.parts if one.name == name) / GIB


@pytest.mark.parametrize(
    ("name", "stage"), [("h200-humming.log", "humming"), ("h200-humming-nextn.log", "nextn")]
)
def test_the_parts_are_those_that_sglang_logged(
    data: Path, flash: recipe.Recipe, name: str, stage: str
) -> None:
    events = logged(data, name)
    need = as_logged(events, flash, stage)
    target = events[log.WeightsLoaded][0]
    assert target.model_class == "BailingMoeV3ForCausalLM"
    assert part(need, "weights") == pytest.approx(target.used_gb, rel=0.01)
    pool = events[log.MambaPool][0]
    assert part(need, "KDA states") == pytest.approx(pool.ssm_gb + pool.conv_gb, abs=0.01)
    kv = events[log.KvPool]
    per_token = sum(one.gb for one in kv) * GIB / kv[0].tokens
    expected = 8064 if stage == "humming" else 9216
    assert per_token == pytest.approx(expected, rel=0.001)
    assert f"of {expected:,} bytes" in next(o.why for o in need.parts if o.name == "KV cache")
    # SGLang's rule for the size of the pool, against the pool it made.
    assert need.kv_tokens == pytest.approx(kv[0].tokens, rel=0.01)
    if stage == "nextn":
        draft = events[log.WeightsLoaded][1]
        assert part(need, "draft") == pytest.approx(draft.used_gb, rel=0.01)
        logged_states = pool.intermediate_ssm_gb + pool.intermediate_conv_gb
        assert part(need, "states of drafts") == pytest.approx(logged_states, abs=0.01)
    used = sum(one.used_gb or 0 for one in events[log.GraphCapture] if one.phase == "end")
    assert 0 < used <= part(need, "graphs")


def test_every_stage_fits_a_quiet_spark_and_the_sum_is_the_published_gate(
    flash: recipe.Recipe,
) -> None:
    for stage in flash.ladder:
        need = memory.need(flash, stage, memory=SPARK)
        assert need.ok, need.problems
        assert need.kind == "unified"
        assert need.kv_tokens > need.context == 262144
        need.require()
    # 0xBakeer/ling3-flash-spark asks for 85 GiB before a start.
    assert need.total / GIB == pytest.approx(85, abs=0.5)
    text = str(need)
    for word in ("weights", "KV cache", "KDA states", "graphs", "draft", "reserve", "sum", "fits"):
        assert word in text
    assert json.loads(json.dumps(need.to_json()))["total"] == need.total
    assert need.line().startswith("needs 84.9 of 115.0 GiB available (weights 65.3, KV cache 2.2,")
    part = dataclasses.replace(need.parts[0], bytes=8_018_744)  # Sparklet's weights are not 0.0 GiB
    assert "(weights < 0.1)" in dataclasses.replace(need, parts=(part,)).line()


def test_what_does_not_fit_is_refused_with_the_sum(flash: recipe.Recipe) -> None:
    full = dataclasses.replace(SPARK, available=80 * GIB)
    need = memory.need(flash, "nextn", memory=full)
    assert not need.ok
    with pytest.raises(
        NoMemory, match=r"needs 84\.9 GiB \(weights 65\.3 GiB, .* and 80\.0 GiB are"
    ):
        need.require()
    assert "does not fit" in str(need)


def test_a_gpu_of_which_nothing_is_told_starts_nothing(flash: recipe.Recipe) -> None:
    silent = dataclasses.replace(H200, gpu_total=None, gpu_available=None)
    found = memory.need(flash, "baseline", memory=silent, consent=True)
    assert found.kind == "gpu" and not found.ok and len(found.problems) == 1
    with pytest.raises(NoMemory, match="memory H200 has is not known, for nvidia-smi does not"):
        found.require()
    # Known, and what is in use of it is not: as with a GPU cut into parts.
    found = memory.need(flash, "baseline", memory=dataclasses.replace(H200, gpu_available=None))
    assert found.ok and found.available == H200.gpu_total
    assert "taken as nothing" in found.remarks[-1]


def test_humming_takes_more_while_it_loads_than_when_it_serves(flash: recipe.Recipe) -> None:
    assert memory.need(flash, "baseline", memory=SPARK).loading is None
    need = memory.need(flash, "humming", memory=SPARK)
    # 40 layers × 512 experts × 3 × 2560 × 768 weights, one scale for 32, three bytes more.
    scales = 40 * 512 * 3 * 2560 * 768 // 32
    assert need.loading.bytes == pytest.approx(
        65.13 * GIB + 3 * scales + memory.RESERVE["unified"], rel=0.01
    )
    assert need.peak == need.loading.bytes > need.total
    between = dataclasses.replace(SPARK, available=(need.peak + need.total) // 2)
    assert (
        "while its weights are loaded" in memory.need(flash, "humming", memory=between).problems[0]
    )


def test_a_pool_too_small_for_the_promised_context_is_refused(flash: recipe.Recipe) -> None:
    # At the same fraction less is left of less available memory.
    tight = dataclasses.replace(SPARK, available=108 * GIB)
    need = memory.need(flash, "nextn", memory=tight)
    assert need.total < tight.available
    assert need.kv_tokens < 262144
    with pytest.raises(
        NoMemory, match=r"KV cache would hold [\d,]+ tokens and .* promises 262,144"
    ):
        need.require()
    assert "raise --mem-fraction-static" not in need.problems[0]  # 0.68 is the most


def test_max_total_tokens_is_checked_against_the_context(tmp_path: Path) -> None:
    tiny = recipe.load("tiny-ling")
    launch = tiny.render("nextn", model=model(tmp_path, 4096))
    here = Memory(total=24 * GIB, available=20 * GIB, source="/proc/meminfo")
    need = memory.need_of(launch, memory=here)
    assert need.ok and need.kind == "cpu" and need.kv_tokens == 8192
    argv = list(launch.argv)
    argv[argv.index("--max-total-tokens") + 1] = "4095"
    short = memory.need_of(dataclasses.replace(launch, argv=tuple(argv)), memory=here)
    assert "would hold 4,095 tokens" in short.problems[0]
    assert "raise --max-total-tokens" in short.problems[0]


def model(folder: Path, context: int) -> Path:
    """The full-size configuration made small, without weights."""
    config = inventory.flash_config() | {
        "num_hidden_layers": 6,
        "num_experts": 8,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "vocab_size": 1024,
        "max_position_embeddings": context,
    }
    for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- the fraction --------------------------------------------------------------------------------


def with_fraction(flash: recipe.Recipe, value: str | None):
    launch = flash.render("humming", model="/none")
    argv = list(launch.argv)
    at = argv.index("--mem-fraction-static")
    argv[at : at + 2] = ["--mem-fraction-static", value] if value else []
    return dataclasses.replace(launch, argv=tuple(argv))


@pytest.mark.parametrize("value", ["0.69", "0.75", "0.85", None])
def test_a_high_fraction_on_a_spark_needs_a_yes_and_says_what_happened_to_others(
    flash: recipe.Recipe, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    launch = with_fraction(flash, value)
    refused = memory.need_of(launch, memory=SPARK)
    sentence = " ".join(refused.problems)
    for word in ("power button", "lost the driver", memory.I_KNOW):
        assert word in sentence
    agreed = memory.need_of(launch, memory=SPARK, consent=True)
    assert agreed.ok and any("power button" in line for line in agreed.remarks)
    monkeypatch.setenv(memory.I_KNOW, "1")
    assert memory.need_of(launch, memory=SPARK).ok
    monkeypatch.setenv(memory.I_KNOW, "no")
    assert not memory.need_of(launch, memory=SPARK).ok


def test_a_high_fraction_elsewhere_and_a_safe_one_here_need_none(flash: recipe.Recipe) -> None:
    assert memory.need_of(with_fraction(flash, "0.85"), memory=H200).ok
    safe = memory.need_of(with_fraction(flash, "0.68"), memory=SPARK)
    assert safe.ok and not any("power button" in line for line in safe.remarks)


def test_a_model_whose_sizes_are_unknown_is_not_judged(
    flash: recipe.Recipe, tmp_path: Path
) -> None:
    launch = flash.render("humming", model="/none")
    other = dataclasses.replace(launch, recipe="another")
    assert memory.need_of(other, memory=SPARK) is None
    tiny = recipe.load("tiny-ling")
    with pytest.raises(UsageError, match="cannot be reckoned"):
        memory.need(tiny, "baseline", model=tmp_path / "none", memory=SPARK)


# -- the watchdog's limits -----------------------------------------------------------------------


def reader(total_gib: float, limit_gib: float | None = None):
    kib = int(total_gib * 2**20)
    files = {"/proc/meminfo": f"MemTotal: {kib} kB\nMemAvailable: {kib // 2} kB\n"}
    if limit_gib is not None:
        files |= {
            "/proc/self/cgroup": "0::/box\n",
            "/sys/fs/cgroup/box/memory.max": f"{int(limit_gib * GIB)}\n",
            "/sys/fs/cgroup/box/memory.current": "1000\n",
        }
    return files.get


@pytest.mark.parametrize(
    ("total", "limit", "end"),
    [(119.7, None, 5.985), (24, None, 1.2), (4, None, 0.25), (500, None, 6), (119.7, 32, 1.6)],
)
def test_the_limit_is_a_share_of_the_memory_or_of_the_container(
    total: float, limit: float | None, end: float
) -> None:
    found = memory.watch_limits(read=reader(total, limit), env={})
    assert found.end / GIB == pytest.approx(end, rel=0.01)
    assert found.warn == 2 * found.end
    assert found.groups == (() if limit is None else (("/sys/fs/cgroup/box", 2, 32 * GIB),))


def test_the_limit_can_be_set_and_nonsense_is_refused() -> None:
    read = reader(24)
    assert memory.watch_limits(read=read, env={memory.FLOOR: "3.5"}).end == int(3.5 * GIB)
    assert memory.watch_limits(read=read, env={memory.FLOOR: "0"}).end == 0
    for bad in ("much", "-1", "24", "nan"):
        with pytest.raises(UsageError, match=memory.FLOOR):
            memory.watch_limits(read=read, env={memory.FLOOR: bad})
    assert memory.watch_limits(read=lambda path: None, env={}) is None
