"""When the plugin patches, when it does not, and that every patch finds its target."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from sglang.srt.plugins.hook_registry import HookRegistry
from sparkling_sglang import patches, plugin, switches


def python(code: str, *, python_options: tuple[str, ...] = (), **env: str) -> str:
    """Run ``code`` in a fresh interpreter whose environment holds ``env`` and no switch of ours."""
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SPARKLING_", "SGLANG_", "TORCHDYNAMO_"))
    }
    done = subprocess.run(
        [sys.executable, *python_options, "-c", textwrap.dedent(code)],
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_without_a_switch_nothing_is_imported():
    out = python(
        """
        import sys, sparkling_sglang
        sparkling_sglang.register()
        of = lambda *names: sorted(m for m in sys.modules if m.split(".")[0] in names)
        print(of("torch", "sglang", "numpy"), [m.rpartition(".")[2] for m in of("sparkling_sglang")])
        """
    )
    # The environment is read by three small modules; no part of the plugin is loaded.
    assert out == "[] ['sparkling_sglang', 'patches', 'plugin', 'switches']"


def test_without_a_switch_sglang_keeps_every_function():
    """The plugin is discovered and executed by SGLang itself, and registers no hook."""
    out = python(
        """
        from sglang.srt.plugins import load_plugins, load_plugins_by_group
        from sglang.srt.plugins.hook_registry import HookRegistry
        found = "sparkling" in load_plugins_by_group("sglang.srt.plugins")
        load_plugins()
        print(found, dict(HookRegistry._hooks), HookRegistry._patched)
        """
    )
    assert out == "True {} set()"


@pytest.mark.parametrize("role", ["main", "scheduler"])
@pytest.mark.parametrize("found", ["0.5.20", "0.5.23.post1", "0.6.0"])
def test_an_unknown_sglang_is_refused_in_one_line(found, role, monkeypatch, caplog):
    import sglang.version

    monkeypatch.setattr(sglang.version, "__version__", found)
    monkeypatch.setenv("SPARKLING_FP8_LM_HEAD", "1")
    monkeypatch.setattr(plugin, "role", lambda: role)
    hooks = dict(HookRegistry._hooks)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert dict(HookRegistry._hooks) == hooks
    assert len(caplog.messages) == (role == "main")
    for line in caplog.messages:
        assert "\n" not in line and found in line and "0.5.23" in line


def test_the_installed_sglang_is_known():
    from sglang.version import __version__ as found

    assert plugin.refusal(found) is None


@pytest.mark.parametrize(
    "name", [switches.FP8_HEAD, switches.FORK_FP8_HEAD, switches.SHARE_HEAD, switches.CLAMP]
)
def test_a_switch_is_on_or_off_and_nothing_else(name, monkeypatch):
    read = [switches.read({name: word}) for word in ("1", "Yes", " on ", "0", "No", "off", "false")]
    assert read[0] == read[1] == read[2] != read[3] == read[4] == read[5] == read[6]
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(SystemExit, match=f"error: {name} is 'maybe': set it to 1 or 0") as caught:
        plugin.register()
    assert "\n" not in str(caught.value)


def test_versions_are_known_part_by_part():
    assert plugin.refusal("0.5.22", ["fp8-head", "share-head", "status"]) is None
    reason = plugin.refusal("0.5.22", ["cpu-engine", "fp8-head"])
    assert "found SGLang 0.5.22, knows 0.5.23 for cpu-engine; nothing patched." in reason
    everything = switches.read(
        {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SPARKLING_FP8_LM_HEAD": "1",
            "SPARKLING_SHARE_HEAD": "1",
            "SPARKLING_TRAP": "tensor-only",
            "SPARKLING_SWIGLU_CLAMP": "1",
            "SPARKLING_KEEP_ALIVE_S": "5",
            "SPARKLING_STATUS_FILE": "x",
        }
    )
    assert set(everything.parts) == set(plugin.KNOWN_SGLANG)
    assert switches.read({}).parts == ()


def test_in_the_scheduler_every_patch_takes():
    """All targets exist in this SGLang, names bound elsewhere included."""
    out = python(
        """
        import json
        import sglang.srt.managers.scheduler
        from sparkling_sglang import plugin, patches
        plugin.role = lambda: "scheduler"
        kept = []
        apply = patches.Patches.apply
        patches.Patches.apply = lambda self: (kept.append(self), apply(self))
        plugin.register()
        from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
        from sglang.srt.layers.attention.linear import kda_backend
        from sglang.srt.layers.attention.linear import gdn_backend
        from sglang.srt.speculative import draft_utils, eagle_worker_v2
        from sglang.srt.models.registry import ModelRegistry
        from sparkling_sglang.cpu import kda
        print(json.dumps([
            kept[0].names,
            sorted(ModelRegistry.models),
            kda_backend.TritonKDAKernel is kda.TorchKDAKernel,
            kda_backend.causal_conv1d_fn.__wrapped__.__module__,
            kda_backend.causal_conv1d_update.__module__,
            hybrid.scatter_mamba_states_after_mtp_verify.__wrapped__.__module__,
        ]))
        """,
        SGLANG_USE_CPU_ENGINE="1",
        TORCHDYNAMO_DISABLE="1",
        SGLANG_EXTERNAL_MODEL_PACKAGE="sparkling_sglang.cpu.models",
    )
    names, models, same, conv, update, scatter = json.loads(out)
    assert models == ["BailingMoeForCausalLMNextN", "BailingMoeV3ForCausalLM"]
    assert {
        "kda",
        "causal-conv",
        "gated-norm",
        "state-scatter",
        "nextn-embed-and-head",
        "moe",
        "sampling",
        "share-head",
    } <= set(names)
    assert same and update == "sgl_kernel.mamba"
    assert conv.startswith("sglang.") and scatter.startswith("sglang.")


def test_in_the_main_process_the_amx_backend_stays_chosen():
    out = python(
        """
        import os, sys
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.arg_groups import attention_hook, overrides
        class View:
            attention_backend, device = "intel_amx", "cpu"
        print(attention_hook._attention_backend_platform_fallbacks(View()),
              overrides._attention_backend_platform_fallbacks(View()),
              "sglang.srt.managers.scheduler" in sys.modules,
              "sglang.srt.models.bailing_moe_nextn" in sys.modules,
              os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"])
        """,
        SGLANG_USE_CPU_ENGINE="1",
        TORCHDYNAMO_DISABLE="1",
    )
    assert out == "{} {} False False sparkling_sglang.cpu.models"


def test_a_patch_that_does_not_take_ends_the_process(monkeypatch, caplog):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setattr(plugin, "role", lambda: "main")

    def broken(collected, wanted):
        collected.hook("x", "sglang.srt.arg_groups.overrides.no_such_function", print)

    monkeypatch.setattr(plugin, "_register_main", broken)
    try:
        with pytest.raises(SystemExit, match=r"cannot patch SGLang 0\.5\.23: .*no_such_function"):
            plugin.register()
    finally:
        HookRegistry._hooks.pop("sglang.srt.arg_groups.overrides.no_such_function", None)


def test_a_name_that_is_missing_can_be_set_but_not_on_a_missing_module():
    collected = patches.Patches()
    collected.assign("x", "sgl_kernel.mamba.added_by_a_test", 5)
    import sgl_kernel

    assert sgl_kernel.mamba.added_by_a_test == 5 and collected.names == ["x"]
    del sgl_kernel.mamba.added_by_a_test
    with pytest.raises(patches.PatchError, match=r"sgl_kernel\.absent\.name"):
        collected.assign("y", "sgl_kernel.absent.name", 5)
    assert collected.names == ["x"]


@pytest.mark.parametrize("value, on", [("1", True), ("true", True), ("0", False), ("", False)])
def test_switches(value, on):
    read = switches.read({"SPARKLING_FP8_LM_HEAD": value})
    assert read.fp8_head is on and read.share_head is on and read.idle is not on
    assert switches.read({}).idle
    trap = switches.read({"SPARKLING_FP8_LM_HEAD": "1", "SPARKLING_SHARE_HEAD": "0"})
    assert trap.fp8_head and not trap.share_head


def test_role_is_main_here():
    assert plugin.role() == "main"


def test_the_embedding_and_head_are_handed_over_without_cuda():
    from sglang.srt.models.bailing_moe_nextn import BailingMoeForCausalLMNextN
    from sparkling_sglang.cpu import draft

    model = torch.nn.Module()
    model.model, model.lm_head = torch.nn.Module(), torch.nn.Linear(2, 3, bias=False)
    model.model.word_embeddings = torch.nn.Embedding(3, 2)
    embed, head = (torch.nn.Parameter(torch.randn(3, 2)) for _ in range(2))
    assert hasattr(BailingMoeForCausalLMNextN, "set_embed_and_head")
    draft.set_embed_and_head(model, embed, head)
    assert model.model.word_embeddings.weight is embed and model.lm_head.weight is head
