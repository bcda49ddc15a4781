"""Recipes that ship: the exact command of every stage, the ladder's deltas, the reasons."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from sparkling import recipe
from sparkling.errors import UsageError
from sparkling.recipe import Change, Launch, diff, load, locate

FLASH, TINY = "ling-3.0-flash", "tiny-ling"
SHIPPED = (FLASH, TINY)

# The published shared block (research: recipes.md 2.1), then what is ours.
SHARED = """
--trust-remote-code --dtype bfloat16 --tp-size 1 --ep-size 1 --mem-fraction-static 0.68
--max-running-requests 1 --max-mamba-cache-size 64 --chunked-prefill-size 8192
--max-prefill-tokens 16384 --page-size 64 --context-length 262144
--cuda-graph-backend-decode full --cuda-graph-max-bs-decode 1 --cuda-graph-bs-decode 1
--cuda-graph-backend-prefill disabled --random-seed 308534008 --attention-backend flashinfer
--disable-flashinfer-autotune --fp8-gemm-backend cutlass --flashinfer-mxfp4-moe-precision default
--disable-shared-experts-fusion --reasoning-parser ling3 --tool-call-parser ling3
--enable-metrics --enable-cache-report
""".split()
HEAD = """
-m sglang.launch_server --model-path /m/ling --served-model-name ling-3.0-flash
--host 127.0.0.1 --port 30000
""".split()
NEXTN = """
--speculative-algorithm NEXTN --speculative-draft-model-path /m/ling --speculative-num-steps 3
--speculative-eagle-topk 1 --speculative-num-draft-tokens 4
""".split()
SHARED_ENV = {
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_DSV4_FP4_DEQUANT": "0",
    "SGLANG_FP8_IGNORED_LAYERS": "",
    "SGLANG_EXPOSE_OWN_ENV_VARS": "1",
    "SPARKLING_SWIGLU_CLAMP": "1",
}
HUMMING_ENV = {"HUMMING_COMPILER": "nvrtc", "HUMMING_CACHE_DIR": "/c/humming"}
YARN = (
    '{"max_position_embeddings":262144,"rope_scaling":{"rope_type":"yarn","factor":2.0,'
    '"rope_theta":6000000,"partial_rotary_factor":0.5,"original_max_position_embeddings":131072}}'
)


@pytest.fixture(scope="module")
def flash(root):
    return load(FLASH, root=root)


@pytest.fixture(scope="module")
def tiny(root):
    return load(TINY, root=root)


def render(
    book: recipe.Recipe, stage: str, variant: str | None = None, edition: str | None = None
) -> Launch:
    needed = book.variant(variant).edition if variant else None
    chosen = book.with_edition(edition or needed)
    return chosen.render(stage, model="/m/ling", cache="/c", variant=variant)


# -- the published ladder, to the letter ---------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "own", "env", "on"),
    [
        (
            "baseline",
            ["--moe-runner-backend", "flashinfer_mxfp4", "--enable-fp32-lm-head"],
            SHARED_ENV,
            set(),
        ),
        (
            "humming",
            ["--moe-runner-backend", "humming", "--enable-fp32-lm-head"],
            {**SHARED_ENV, **HUMMING_ENV},
            {"humming"},
        ),
        (
            "fp8-head",
            ["--moe-runner-backend", "humming"],
            {**SHARED_ENV, **HUMMING_ENV, "SPARKLING_FP8_LM_HEAD": "1"},
            {"humming", "fp8-head"},
        ),
        (
            "nextn",
            ["--moe-runner-backend", "humming", *NEXTN],
            {**SHARED_ENV, **HUMMING_ENV, "SPARKLING_FP8_LM_HEAD": "1"},
            {"humming", "fp8-head", "nextn"},
        ),
    ],
)
def test_the_ladder_of_the_spark(flash, stage, own, env, on):
    launch = render(flash, stage)
    assert list(launch.argv) == [*HEAD, *SHARED, *own]
    assert launch.env == env and list(launch.env) == list(env)
    assert launch.switches == {name: name in on for name in ("humming", "fp8-head", "nextn")}
    assert (launch.recipe, launch.stage, launch.variant) == (FLASH, stage, None)
    assert (launch.served_name, launch.host, launch.port) == (FLASH, "127.0.0.1", 30000)


@pytest.mark.parametrize(
    ("stage", "own", "env"),
    [
        ("baseline", [], {}),
        ("fp8-head", [], {"SPARKLING_FP8_LM_HEAD": "1"}),
        ("nextn", NEXTN, {"SPARKLING_FP8_LM_HEAD": "1"}),
    ],
)
def test_the_ladder_of_the_cpu_lane(tiny, stage, own, env):
    launch = render(tiny, stage)
    argv = shlex.split(
        "-m sglang.launch_server --model-path /m/ling --served-model-name tiny-ling "
        "--host 127.0.0.1 --port 30000 --device cpu"
    )
    assert list(launch.argv[: len(argv)]) == argv
    assert list(launch.argv[len(launch.argv) - len(own) :]) == own
    assert "--enable-fp32-lm-head" not in launch.argv
    for switch in ("--disable-overlap-schedule", "--enable-metrics", "--enable-cache-report"):
        assert launch.words(switch) == ()
    assert launch.value("mamba-radix-cache-strategy") == "no_buffer"
    assert launch.value("reasoning-parser") == launch.value("tool-call-parser") == "ling3"
    assert {k: v for k, v in launch.env.items() if k.startswith("SPARKLING_")} == env
    assert launch.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert launch.env["SGLANG_EXPOSE_OWN_ENV_VARS"] == "1"


def test_humming_is_declared_but_not_available_on_the_cpu_lane(tiny):
    reason = "Humming's kernels are compiled for NVIDIA GPUs, and this lane has none."
    assert tiny.available("humming") == reason
    assert tiny.ladder == ("baseline", "fp8-head", "nextn")
    assert all(tiny.available(stage) is None for stage in tiny.ladder)
    with pytest.raises(UsageError) as caught:
        render(tiny, "humming")
    assert str(caught.value) == (
        f"env/recipes/tiny-ling.toml, table [stages.humming]: not available here: {reason}"
    )


def test_the_workloads_fit_the_context(flash, tiny):
    for book in (flash, tiny):
        longest = book.sizes["shape_input"] + book.sizes["shape_output"]
        context = int(render(book, "baseline").value("context-length") or 0)
        assert longest <= context
        assert book.sizes["shape_input"] == 16 * book.sizes["shape_output"]
    assert int(render(tiny, "baseline").value("context-length") or 0) >= 2048


def test_the_memory_fraction_weighs_every_published_value(flash):
    assert "0.75" in flash.why["mem-fraction-static"] and "0.68" in flash.why["mem-fraction-static"]
    for published in ("0.65", "0.8 ", "0.85"):
        assert published in flash.why["mem-fraction-static"]


@pytest.mark.parametrize(
    "name",
    ["reasoning-parser", "tool-call-parser", "json-model-override-args", "mem-fraction-static"],
)
def test_disputed_values_have_their_reason(flash, name):
    assert len(flash.why[name]) > 60


def test_what_changes_nothing_on_a_spark_is_kept_and_marked(flash):
    launch = render(flash, "nextn")
    for name in ("fp8-gemm-backend", "flashinfer-mxfp4-moe-precision", "ep-size"):
        assert name in flash.noop and launch.words(name) is not None
    assert "SGLANG_DSV4_FP4_DEQUANT" in flash.noop
    # The published block's only attention choice is not the default on a GB10.
    assert "attention-backend" not in flash.noop


# -- parent + delta ------------------------------------------------------------------------------


def every(book: recipe.Recipe):
    return [name for name in book.stages if book.available(name) is None]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_stage_differs_from_its_parent_by_its_declared_delta(root, name):
    book = load(name, root=root)
    for stage in (book.stage(s) for s in every(book)):
        if stage.parent is None:
            continue
        before, after = render(book, stage.parent), render(book, stage.name)
        declared = {f"--{flag}" for flag in (*stage.delta.flags, *stage.delta.unset_flags)}
        declared |= {*stage.delta.env, *stage.delta.unset_env}
        changes = diff(before, after)
        assert {change.name for change in changes} == declared
        for change in changes:
            gone = change.name.removeprefix("--") in stage.delta.unset_flags
            assert (change.after is None) == (gone or change.name in stage.delta.unset_env)
        # and it turns on exactly what it says
        on = {s for s, is_on in after.switches.items() if is_on and not before.switches[s]}
        assert on == ({stage.switch} if stage.switch else set())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_variant_changes_only_what_it_declares(root, name):
    book = load(name, root=root)
    for variant in book.variants.values():
        chain, layer = [], variant
        while layer is not None:
            chain.append(layer)
            layer = book.variants.get(layer.parent or "")
        declared: set[str] = set()
        for layer in chain:
            for part in (layer.delta, *layer.with_.values(), *layer.without.values()):
                declared |= {f"--{flag}" for flag in (*part.flags, *part.unset_flags)}
                declared |= {*part.env, *part.unset_env}
        seen: set[str] = set()
        for stage in every(book):
            plain = render(book, stage, edition=variant.edition)
            changes = diff(plain, render(book, stage, variant.name))
            seen |= {change.name for change in changes}
            # A switch stays as it is, unless the variant says that it has to go without it.
            kept = render(book, stage).switches
            for switch, part in variant.with_.items():
                if {"SPARKLING_FP8_LM_HEAD"} & set(part.unset_env):
                    kept = {**kept, switch: False}
            assert render(book, stage, variant.name).switches == kept
        assert seen == declared, variant.name


@pytest.mark.parametrize("name", SHIPPED)
def test_rendering_is_pure(root, name):
    book, again = load(name, root=root), load(name, root=root)
    for stage in every(book):
        for variant in (None, *book.variants):
            assert render(book, stage, variant) == render(again, stage, variant)


def test_rendering_does_not_look_at_the_environment(flash, monkeypatch, tmp_path):
    before = render(flash, "nextn")
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "SPARKLING_MODEL", "SGLANG_ENABLE_JIT_DEEPGEMM", "HUMMING_CACHE_DIR"):
        monkeypatch.setenv(name, "/elsewhere")
    assert render(flash, "nextn") == before


@pytest.mark.parametrize("name", SHIPPED)
def test_every_rendered_flag_is_known_and_given_once(root, name):
    book = load(name, root=root)
    known = recipe._flags.known(book.sglang)
    assert known is not None
    for stage in every(book):
        for variant in (None, *book.variants):
            words = [w for w in render(book, stage, variant).argv[2:] if w.startswith("--")]
            assert len(set(words)) == len(words)
            assert all(w.removeprefix("--") in known.flags for w in words)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_stage_says_what_a_proof_wants_of_every_switch(root, name):
    book = load(name, root=root)
    for stage in every(book):
        expect, on = book.stage(stage).expect, render(book, stage).switches
        assert set(expect) == set(on)
        log = "Online FP8 quantization enabled for lm_head"
        assert (log in expect["fp8-head"].log) == on["fp8-head"]
        assert (log in expect["fp8-head"].log_absent) == (not on["fp8-head"])
        assert (expect["nextn"].arguments.get("speculative_algorithm") == "EAGLE") == on["nextn"]
        wanted = expect["humming"].arguments["moe_runner_backend"]
        assert (wanted == "humming") == on["humming"]


# -- variants ------------------------------------------------------------------------------------


def test_the_fork_takes_its_own_variable_in_place_of_ours(flash):
    for stage in flash.ladder:
        launch, stock = render(flash, stage, edition="fork"), render(flash, stage)
        on = launch.switches["fp8-head"]
        assert launch.switches == stock.switches
        assert ("SGLANG_ENABLE_FP8_LM_HEAD" in launch.env) == on
        assert "SPARKLING_FP8_LM_HEAD" not in launch.env
        assert ("SPARKLING_FP8_LM_HEAD" in stock.env) == on
        assert (launch.edition, stock.edition) == ("fork", "stock")
        assert launch.argv == stock.argv and launch.digest() != stock.digest()
        assert Launch.from_json(launch.to_json()) == launch


def test_an_edition_names_its_environment_and_its_pins(flash, tiny, root):
    environments = {e.environment for e in flash.editions.values()}
    assert set(flash.editions) == {"stock", "fork"} and len(environments) == 2
    for edition in flash.editions.values():
        assert (root / edition.requirements).is_file()
        assert set(edition.switches) == {"humming", "fp8-head", "nextn"}
    assert flash.built.name == "stock" and flash.with_edition("fork").built.build
    assert flash.with_edition(None) is flash.with_edition("stock") is flash
    assert tiny.built == recipe.Edition() and tiny.built.environment == ".venv-server"


def test_an_edition_that_there_is_not(flash, tiny):
    with pytest.raises(UsageError, match=r"has no edition 'frok' .*did you mean fork\?"):
        flash.with_edition("frok")
    with pytest.raises(UsageError, match=r"has no edition 'fork' \(editions: stock\)"):
        tiny.with_edition("fork")


def test_a_variant_of_another_edition_is_refused(flash):
    with pytest.raises(
        UsageError, match="variant as-published is for edition fork, and this is st"
    ):
        flash.render("nextn", model="/m", variant="as-published")


def test_an_edition_without_a_switch_refuses_its_stages(root, tmp_path):
    text = (root / "env" / "recipes" / f"{FLASH}.toml").read_text()
    path = tmp_path / "r.toml"
    before, at, after = text.partition("[editions.fork]")
    path.write_text(
        before
        + at
        + after.replace('["humming", "fp8-head", "nextn"]', '["humming", "fp8-head"]', 1)
    )
    book = load(path, root=root).with_edition("fork")
    assert book.render("fp8-head", model="/m").edition == "fork"
    with pytest.raises(UsageError, match="edition fork has no switch nextn, which stage nextn tur"):
        book.render("nextn", model="/m")


def test_two_gpus_are_another_regime(flash):
    launch, one = render(flash, "nextn", "two-gpu"), render(flash, "nextn")
    assert launch.value("tp-size") == "2"
    assert launch.value("context-length") == "262144"
    assert launch.value("max-running-requests") == "64"
    assert launch.words("mem-fraction-static") is None
    assert "two GPUs" in launch.regime and launch.regime != one.regime == flash.regime
    # The plugin's head works on one device: it refuses, so the recipe does not ask for it.
    assert "SPARKLING_FP8_LM_HEAD" not in launch.env
    assert launch.switches == {"humming": True, "fp8-head": False, "nextn": True}


def test_yarn_is_off_and_can_be_turned_on(flash):
    for stage in flash.ladder:
        assert render(flash, stage).words("json-model-override-args") is None
        assert render(flash, stage, "yarn").words("json-model-override-args") == (YARN,)
    assert json.loads(YARN)["rope_scaling"]["factor"] == 2.0
    assert render(flash, "baseline", "yarn").regime != flash.regime


def test_as_published(flash):
    launch = render(flash, "nextn", "as-published")
    assert launch.value("reasoning-parser") == "deepseek-r1"
    assert launch.value("tool-call-parser") == "qwen25"
    assert launch.words("json-model-override-args") == (YARN,)
    assert launch.words("enable-metrics") is None
    assert launch.env["SGLANG_ENABLE_FP8_LM_HEAD"] == "1"  # its edition's
    assert not any(name.startswith("SPARKLING_") for name in launch.env)  # it has no plugin


def test_bf16_logits_only_where_the_head_is_bf16(flash):
    for stage in flash.ladder:
        assert render(flash, stage, "bf16-logits").words("enable-fp32-lm-head") is None
    assert diff(render(flash, "nextn"), render(flash, "nextn", "bf16-logits")) == []


# -- launches ------------------------------------------------------------------------------------


def test_a_launch_knows_its_flags(flash):
    launch = render(flash, "nextn")
    assert launch.words("trust-remote-code") == () and launch.value("--tp-size") == "1"
    assert launch.words("cuda-graph-bs-decode") == ("1",)
    assert launch.words("kv-cache-dtype") is None and launch.value("kv-cache-dtype") is None
    assert launch.model == "/m/ling"


def test_another_port(flash):
    launch = flash.render("baseline", model="/m", port=0)
    assert launch.port == 0
    moved = launch.with_port(31111)
    assert moved.port == 31111
    assert diff(launch, moved) == [Change("flag", "--port", "0", "31111")]
    assert moved.digest() == launch.digest()
    assert launch.port == 0, "a launch is never changed"


def test_the_digest_tells_arms_apart(flash):
    digests = {render(flash, s, v).digest() for s in flash.ladder for v in (None, "yarn")}
    digests |= {render(flash, s, edition="fork").digest() for s in flash.ladder}
    assert len(digests) == 4 * 3
    other = flash.render("baseline", model="/other", cache="/c")
    assert other.digest() != render(flash, "baseline").digest()


@pytest.mark.parametrize("port", [-1, 65536, "30000", 1.0, True, None])
def test_a_bad_port(flash, port):
    with pytest.raises(UsageError, match="is not a whole number from 0 to 65535"):
        flash.render("baseline", model="/m", port=port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5", "spark.local"])
def test_only_loopback(flash, host):
    with pytest.raises(UsageError, match=r"the server binds 127\.0\.0\.1 only"):
        flash.render("baseline", model="/m", host=host)


def test_an_empty_model(flash):
    with pytest.raises(UsageError, match="the model path is empty"):
        flash.render("baseline", model=" ")


@pytest.mark.parametrize("model", ["/m/ling", '/m/with space/it\'s "$HOME"', "/m/ünï`x`"])
@pytest.mark.parametrize("variant", [None, "yarn"])
def test_the_shell_form_starts_the_same_command(flash, tmp_path, model, variant):
    launch = flash.render("nextn", model=model, cache=tmp_path / "a b", variant=variant)
    stub = tmp_path / "py thon"
    stub.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))"
    )
    stub.chmod(0o755)
    script = launch.shell(python=str(stub))
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env={})
    argv, env = json.loads(done.stdout)
    assert tuple(argv) == launch.argv
    assert {name: env[name] for name in launch.env} == launch.env


def test_the_shell_form_has_one_flag_a_line(flash):
    lines = render(flash, "baseline").shell().splitlines()
    assert all(line.endswith(" \\") for line in lines[:-1]) and not lines[-1].endswith("\\")
    assert "python -m sglang.launch_server \\" in lines
    flags = [line for line in lines if line.startswith("  --")]
    assert len(flags) == sum(w.startswith("--") for w in render(flash, "baseline").argv)


def test_json_and_back(flash):
    launch = render(flash, "nextn", "two-gpu")
    data = json.loads(json.dumps(launch.to_json()))
    assert data["argv"] == list(launch.argv) and data["digest"] == launch.digest()
    assert Launch.from_json(data) == launch


def test_diff_says_what_came_went_and_changed(flash):
    changes = diff(render(flash, "humming"), render(flash, "nextn", "many-users"))
    by_name = {change.name: change for change in changes}
    users = "--max-running-requests"
    assert by_name[users] == Change("flag", users, "1", "16")
    assert by_name["--enable-fp32-lm-head"] == Change("flag", "--enable-fp32-lm-head", "", None)
    assert by_name["SPARKLING_FP8_LM_HEAD"] == Change("env", "SPARKLING_FP8_LM_HEAD", None, "1")
    assert str(by_name[users]) == "~ --max-running-requests 1 -> 16"
    assert str(by_name["--enable-fp32-lm-head"]) == "- --enable-fp32-lm-head"
    assert str(by_name["SPARKLING_FP8_LM_HEAD"]) == "+ SPARKLING_FP8_LM_HEAD=1"
    assert [change.kind for change in changes] == sorted(
        (change.kind for change in changes), reverse=True
    )


def test_a_stage_does_not_differ_from_itself(flash):
    assert diff(render(flash, "nextn"), render(flash, "nextn")) == []


# -- finding recipes -----------------------------------------------------------------------------


def test_a_name_is_looked_up_in_the_repository(root):
    assert locate(TINY, root=root) == root / "env" / "recipes" / "tiny-ling.toml"
    assert locate("a/b.toml", root=root) == Path.cwd() / "a" / "b.toml"
    assert locate(Path("/x/y"), root=root) == Path("/x/y")


def test_an_unknown_name_is_helped(root):
    with pytest.raises(UsageError) as caught:
        load("tiny-lin", root=root)
    assert str(caught.value) == (
        "recipe 'tiny-lin' is unknown (recipes: ling-3.0-flash, sparklet, sparklet-gpu, tiny-ling; or give a "
        ".toml file); did you mean tiny-ling?"
    )


def test_the_flag_list_is_of_the_pinned_version(root):
    for name in SHIPPED:
        assert load(name, root=root).sglang == "0.5.23"
    known = recipe._flags.known("0.5.23")
    assert known is not None
    assert known.flags["tensor-parallel-size"].name == "tp-size"
    assert "ling3" in known.flags["tool-call-parser"].choices
    assert known.flags["cuda-graph-bs-decode"].arity == "+"
    assert "SGLANG_ENABLE_FP8_LM_HEAD" not in known.env


@pytest.mark.parametrize("name", ["sparklet", "tiny-ling"])
def test_every_setting_of_the_cpu_baselines_says_why(name):
    book = recipe.load(name)
    launch = book.render("baseline", model="m")
    names = {*launch.env, *(word[2:] for word in launch.argv if word.startswith("--"))}
    given = {"model-path", "served-model-name", "host", "port"}
    assert names - given - set(book.why) - set(book.noop) == set()


@pytest.mark.parametrize("name", ["sparklet", "sparklet-gpu", "tiny-ling", "ling-3.0-flash"])
def test_the_trap_is_set_where_there_is_a_draft_and_nowhere_else(name, root):
    book = recipe.load(name, root=root)
    for stage in book.ladder:
        plain, trap = (book.render(stage, model="m", variant=v) for v in (None, "trap"))
        changes = [str(c) for c in recipe.diff(plain, trap)]
        assert changes == (["+ SPARKLING_TRAP=tensor-only"] if stage == "nextn" else [])
        assert plain.switches == trap.switches and plain.regime == trap.regime


def test_sparklet_on_a_gpu_has_the_whole_ladder(root):
    book = recipe.load("sparklet-gpu", root=root)
    assert book.ladder == ("baseline", "humming", "fp8-head", "nextn")
    assert book.model == recipe.load("sparklet", root=root).model and book.texts == "practice"
    launch = book.render("nextn", model="m")
    assert launch.value("moe-runner-backend") == "humming" and launch.words("device") is None
    assert all(launch.switches.values())


def test_every_recipe_for_a_gpu_has_an_environment_with_cuda(root):
    for name in ("sparklet-gpu", "ling-3.0-flash"):
        for edition in recipe.load(name, root=root).editions.values():
            assert edition.environment.startswith(".venv-server-spark"), name
            assert edition.requirements is not None, name
