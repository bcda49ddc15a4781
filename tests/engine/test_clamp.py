"""Ling's SwiGLU limit where SGLang's runners drop it: the number, the way it travels, the report.

No GPU here, so the two products are stand-ins; everything between them is SGLang's own code with
this plugin's hooks on it. What a GPU computes was recorded (``tests/data/h200/swiglu-clamp.json``).
"""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sparkling_sglang import clamp, limits, plugin, status, switches
from torch import nn

ROWS, WIDE = 6, 32
LIMIT = 4.0


def values(rows: int = ROWS, columns: int = WIDE, dtype=torch.float32) -> torch.Tensor:
    noise = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, 2 * columns, generator=noise) * 4).to(dtype)


def wanted(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Ling's definition in float64: the limit after SiLU, on both signs of up."""
    gate, up = gate_up.double().chunk(2, -1)
    gate = gate / (1 + torch.exp(-gate))
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * up


def config(**changes) -> SimpleNamespace:
    fields = {
        "layer_id": 41,
        "gemm1_alpha": None,
        "gemm1_clamp_limit": 4,
        "swiglu_limit": None,
        "activation": "silu",
        "is_gated": True,
        "runner_backend": None,
    }
    return SimpleNamespace(**{**fields, **changes})


# -- the number ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_limit_applies_after_silu_and_is_rounded_once(dtype):
    gate_up = values(dtype=dtype)
    out = torch.full((ROWS, WIDE), 7.0, dtype=dtype)
    clamp.swiglu(gate_up, out, LIMIT)
    right = wanted(gate_up, LIMIT)
    assert torch.equal(out, right.to(dtype)) or dtype == torch.float32
    torch.testing.assert_close(out.double(), right, atol=1e-6, rtol=2**-8)
    # It matters here: without the limit, and with DeepSeek-V4's before SiLU, it is something else.
    assert (right - wanted(gate_up, None)).abs().max() > 1
    gate, up = gate_up.double().chunk(2, -1)
    before = wanted(torch.cat([gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)], -1), None)
    assert (right - before).abs().max() > 0.05


def test_what_is_not_a_number_stays_so():
    gate_up = torch.tensor([[float("nan"), 1.0, 100.0, 1.0, float("nan"), 100.0]])
    out = torch.zeros(1, 3)
    clamp.swiglu(gate_up, out, LIMIT)
    assert out[0, :2].isnan().all() and out[0, 2] == 16


def interpreted(code: str) -> str:
    """Run ``code`` with Triton's interpreter, which knows no GPU."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_the_kernel_computes_the_same():
    """Rows that do not fill a block, NaN and all; in the exact form, which the interpreter knows."""
    pytest.importorskip("triton")
    said = interpreted(
        """
import torch
from sparkling_sglang import clamp, clamp_kernel
clamp_kernel.FAST = False
for rows, columns in ((1, 768), (5, 300), (3, 16), (0, 16)):
    noise = torch.Generator().manual_seed(columns)
    x = torch.randn(rows, 2 * columns, generator=noise) * 4
    if rows:
        x[0, 3] = float("nan")
    got, right = torch.full((2, rows, columns), 9.0)
    clamp_kernel.launch(x, got, 4.0)
    clamp.swiglu(x, right, 4.0)
    torch.testing.assert_close(got, right, atol=1e-6, rtol=1e-6, equal_nan=True)
    assert not rows or (got.isnan().sum() == 1 and got[~got.isnan()].abs().max() <= 16)
print("done")
"""
    )
    assert said == "done"


@pytest.mark.parametrize("architecture", [90, 121])
def test_the_kernel_compiles_for_hopper_and_for_a_spark(architecture):
    triton = pytest.importorskip("triton")
    from sparkling_sglang import clamp_kernel
    from triton.backends.compiler import GPUTarget

    source = triton.compiler.ASTSource(
        fn=clamp_kernel._kernel,
        signature={
            "gate_up": "*bf16",
            "out": "*bf16",
            "columns": "i32",
            "limit": "fp32",
            "BLOCK": "constexpr",
            "FAST": "constexpr",
        },
        constexprs={"BLOCK": clamp_kernel.BLOCK, "FAST": True},
        attrs={(at,): [["tt.divisibility", 16]] for at in range(3)},
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 1}
    )
    # 16 bytes at a time, and the approximations of nvcc's --use_fast_math as in SGLang's kernel.
    ptx = made.asm["ptx"]
    assert f".target sm_{architecture}" in ptx
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    assert "ex2.approx.ftz.f32" in ptx and "div.approx.ftz.f32" in ptx


# -- the way it travels --------------------------------------------------------------------------


def test_only_the_clamp_after_silu_is_wanted():
    assert clamp.wanted(config()) == 4.0
    assert clamp.wanted(config(gemm1_clamp_limit=None)) is None
    assert clamp.wanted(config(gemm1_clamp_limit=0)) is None
    assert clamp.wanted(config(gemm1_alpha=1.702)) is None  # GPT-OSS
    assert clamp.wanted(config(swiglu_limit=10.0, gemm1_clamp_limit=None)) is None  # DeepSeek-V4
    assert clamp.wanted(config(activation="situ")) is None  # Kimi, whose factor may lack an alpha


@pytest.mark.parametrize("runner", ["humming", "marlin"])
def test_the_two_runners_that_drop_it_get_it_as_a_negative_number(runner):
    made = config()
    for _ in range(2):  # a configuration that is built twice
        clamp.mark(made, runner)
        assert made.swiglu_limit == -4.0
    # A layer without a limit is left exactly as it was.
    for plain in (config(gemm1_clamp_limit=None), config(gemm1_alpha=1.702, swiglu_limit=7.0)):
        before = vars(plain).copy()
        clamp.mark(plain, runner, lora=True, standard=False)
        assert vars(plain) == before


@pytest.mark.parametrize("runner", ["triton", "flashinfer_mxfp4", "deep_gemm"])
def test_other_runners_are_left_alone(runner):
    made = config()
    clamp.mark(made, runner)
    assert made.swiglu_limit is None


@pytest.mark.parametrize(
    ("changes", "how", "said"),
    [
        ({"swiglu_limit": 10.0}, {}, "has another limit of 10 before SiLU"),
        ({"activation": "gelu"}, {}, "is to run the activation gelu"),
        ({"is_gated": False}, {}, "is to run the activation silu ungated: start a model whose"),
        ({}, {"lora": True}, "applies none with LoRA: start without LoRA on the experts, or unset"),
        ({}, {"standard": False}, "an all-to-all backend: start without --moe-a2a-backend, or"),
    ],
)
def test_what_would_not_be_applied_is_refused_in_one_sentence(changes, how, said):
    made = config(**changes)
    with pytest.raises(clamp.ClampError) as error:
        clamp.mark(made, "marlin", **how)
    text = str(error.value)
    assert said in text and "Layer 41 limits its experts' SwiGLU to 4" in text
    assert text.count(". ") == 0 and text.endswith(".")
    assert made.swiglu_limit == changes.get("swiglu_limit")  # nothing half done


@pytest.fixture
def hooked(monkeypatch):
    """SGLang's functions with this plugin's hooks, put back afterwards."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # noqa: F401  (import order)
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    wrapped = []

    class Now:
        def hook(self, name, target, fn, kind):
            import pkgutil

            place, _, attribute = target.rpartition(".")
            owner = pkgutil.resolve_name(place)
            original = getattr(owner, attribute)
            monkeypatch.setattr(owner, attribute, _wrap_fn(original, fn, HookType(kind)))
            wrapped.append((name, target))

    clamp.register(Now())
    assert {name for name, _ in wrapped} == {"clamp"} and len(wrapped) == 3


def runner_config(limit: float | None):
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    return MoeRunnerConfig(
        num_experts=4, num_local_experts=4, layer_id=35, gemm1_clamp_limit=limit, top_k=2
    )


def products(monkeypatch, seen: list[torch.Tensor]):
    """Humming's core with stand-ins for its two products; ``seen`` gets what the second is given."""
    from sglang.srt.layers.moe.moe_runner import humming

    gate_up = values()

    def forward_layer(*, inputs, outputs, sublayer_name, **_):
        if sublayer_name == "w13":
            outputs.copy_(gate_up)
        else:
            seen.append(inputs.clone())
            outputs.zero_()

    method = SimpleNamespace(
        forward_layer=forward_layer, may_quant_input=lambda *, inputs, **_: (inputs, None)
    )
    monkeypatch.setattr(humming, "HummingMethod", method, raising=False)
    monkeypatch.setattr(
        humming, "HummingGemmType", SimpleNamespace(INDEXED="indexed"), raising=False
    )
    monkeypatch.setattr(humming, "moe_fused_mul_sum", lambda **_: None)
    core = humming.HummingRunnerCore
    buffers = {
        "gate_up_output": torch.empty(ROWS, 2 * WIDE),
        "activation_output": torch.empty(ROWS, WIDE),
        "down_output": torch.empty(ROWS, 8),
        "output": torch.empty(3, 8),
    }
    monkeypatch.setattr(core, "prepare_buffers", lambda *_, **__: buffers)
    monkeypatch.setattr(core, "_prepare_indexed_gemm_kwargs", lambda *_: ({}, {}))
    return gate_up


def stock_silu(monkeypatch) -> list[int]:
    """A stand-in for sgl_kernel's silu_and_mul on a GPU; counts its calls."""
    import sgl_kernel

    calls = []

    def silu_and_mul(inputs, outputs):
        calls.append(1)
        outputs.copy_(wanted(inputs, None))

    monkeypatch.setattr(sgl_kernel, "silu_and_mul", silu_and_mul, raising=False)
    return calls


def run_humming(monkeypatch, limit):
    """(what the second product got, the first product's output, calls of stock's activation)."""
    from sglang.srt.layers.moe.moe_runner.humming import HummingRunnerCore
    from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    seen: list[torch.Tensor] = []
    gate_up, calls = products(monkeypatch, seen), stock_silu(monkeypatch)
    asked = runner_config(limit)
    MoeRunner(MoeRunnerBackend.HUMMING, asked)
    core = HummingRunnerCore(asked)  # SGLang makes one for every call
    core.layer = SimpleNamespace()
    ids = torch.zeros(3, 2, dtype=torch.int32)
    core._run_indexed_gemm(torch.zeros(3, 8), torch.ones(3, 2), ids)
    return seen[0].double(), gate_up, len(calls)


def test_stock_humming_drops_the_limit(monkeypatch, engine_context):
    got, gate_up, calls = run_humming(monkeypatch, 4.0)
    torch.testing.assert_close(got, wanted(gate_up, None), atol=1e-5, rtol=1e-5)
    assert calls == 1


def test_hooked_humming_applies_it_between_the_products(monkeypatch, engine_context, hooked):
    got, gate_up, calls = run_humming(monkeypatch, 4.0)
    torch.testing.assert_close(got, wanted(gate_up, 4.0), atol=1e-5, rtol=1e-5)
    assert calls == 0 and (got - wanted(gate_up, None)).abs().max() > 1


def test_hooked_humming_without_a_limit_runs_stock_code(monkeypatch, engine_context, hooked):
    got, gate_up, calls = run_humming(monkeypatch, None)
    torch.testing.assert_close(got, wanted(gate_up, None), atol=1e-5, rtol=1e-5)
    assert calls == 1


def run_marlin(monkeypatch, limit):
    """(the activation's output, its input) with the limit that Marlin's operator is handed."""
    from sglang.srt.layers.moe.fused_moe_triton import fused_marlin_moe as module
    from sglang.srt.layers.moe.moe_runner import marlin
    from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    module = sys.modules[getattr(module, "__module__", None) or module.__name__]
    handed = {}

    def operator(hidden_states, **arguments):
        handed.update(arguments)
        return hidden_states

    monkeypatch.setattr(module, "fused_marlin_moe", operator)
    monkeypatch.setattr(
        "sglang.srt.layers.quantization.marlin_utils.marlin_make_workspace", lambda *_, **__: None
    )
    asked = runner_config(limit)
    MoeRunner(MoeRunnerBackend.MARLIN, asked)
    x = torch.zeros(3, 8)
    topk = StandardTopKOutput(torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32), x)
    given = {name: None for name in inspect.signature(marlin.MarlinMoeQuantInfo).parameters}
    given |= {"w13_scales": x, "w2_scales": x, "weight_bits": 4}
    dispatched = StandardDispatchOutput(
        **{"hidden_states": x, "hidden_states_scale": None, "topk_output": topk}
    )
    marlin.fused_experts_none_to_marlin(dispatched, marlin.MarlinMoeQuantInfo(**given), asked)
    return module, handed["clamp_limit"], handed["gemm1_alpha"]


def test_stock_marlin_hands_no_limit_to_its_operator(monkeypatch, engine_context):
    assert run_marlin(monkeypatch, 4.0)[1:] == (None, None)


def test_hooked_marlin_applies_it_in_its_activation(monkeypatch, engine_context, hooked):
    module, limit, alpha = run_marlin(monkeypatch, 4.0)
    assert (limit, alpha) == (-4.0, None)
    gate_up, out = values(), torch.empty(ROWS, WIDE)
    module.swiglu_limit_func(out, gate_up, limit)
    torch.testing.assert_close(out.double(), wanted(gate_up, 4.0), atol=1e-5, rtol=1e-5)
    # DeepSeek-V4's positive limit, before SiLU, stays SGLang's.
    module.swiglu_limit_func(out, gate_up, 4.0)
    gate, up = gate_up.double().chunk(2, -1)
    theirs = wanted(torch.cat([gate.clamp(max=4), up.clamp(-4, 4)], -1), None)
    torch.testing.assert_close(out.double(), theirs, atol=1e-5, rtol=1e-5)
    assert run_marlin(monkeypatch, None)[1:] == (None, None)


def test_the_places_that_are_hooked_look_as_they_did():
    """What the hooks rely on in SGLang beyond the names that the patches check by themselves."""
    from sglang.srt.layers.moe.moe_runner import humming, runner

    module = sys.modules["sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe"]
    names = list(inspect.signature(runner.MoeRunner.__init__).parameters)
    assert names == ["self", "runner_backend", "config", "lora_enabled"]
    assert list(inspect.signature(humming.HummingRunnerCore.apply_activation).parameters) == [
        "self",
        "inputs",
        "outputs",
    ]
    assert list(inspect.signature(module.swiglu_limit_func).parameters) == [
        "output",
        "input",
        "swiglu_limit",
    ]
    text = inspect.getsource(module)
    assert 'activation == "silu" and is_gated and clamp_limit is not None' in text
    text = inspect.getsource(humming)
    assert "self.swiglu_limit = config.swiglu_limit" in text
    assert text.count("self.apply_activation(") == 3  # indexed, grouped and masked


# -- the report ----------------------------------------------------------------------------------


def layer(runner: str | None, number: int = 41, limit=4, **changes) -> nn.Module:
    made = nn.Module()
    backend = None if runner is None else SimpleNamespace(value=runner)
    made.moe_runner_config = config(
        layer_id=number, gemm1_clamp_limit=limit, runner_backend=backend, **changes
    )
    made.layer_name = f"model.layers.{number}.mlp.experts"
    made.quant_method = SimpleNamespace()
    return made


def test_who_applies_a_limit():
    assert limits.applied(layer("humming")) == (None, None)
    assert limits.applied(layer("marlin", swiglu_limit=-4.0)) == (4.0, "sparkling")
    assert limits.applied(layer("triton")) == (4.0, "sglang")
    assert limits.applied(layer("deep_gemm")) == (None, None)
    assert limits.applied(layer("humming", limit=None)) == (None, None)
    cutlass = layer("flashinfer_mxfp4")
    assert limits.applied(cutlass) == (None, None)
    cutlass.quant_method._use_swiglu_step = True  # what its method says on SM90 and SM120
    assert limits.applied(cutlass) == (4.0, "sglang")
    ours = layer("triton")
    ours.w13_weight = torch.zeros(1)
    assert limits.applied(ours) == (4.0, "sparkling") and limits.runner_of(ours) == "cpu"


LISTS = SimpleNamespace(
    expert_swiglu_limit_list=[0] * 35 + [4] * 7,
    share_expert_swiglu_limit_list=[0] * 34 + [5] * 6 + [7] * 2,
)


def flash(runner: str, *, clamped: bool = False, fused: int = 0) -> nn.Module:
    """The MoE layers of Ling-3.0-flash, as far as a survey looks at them."""
    model = nn.Module()
    model.layers = nn.ModuleList()
    for number in range(42):
        block = nn.Module()
        model.layers.append(block)
        if number < 2:
            continue
        limit = limits.listed(LISTS.expert_swiglu_limit_list, number)
        block.mlp = nn.Module()
        block.mlp.experts = layer(runner, number, limit)
        block.mlp.experts.num_fused_shared_experts = fused
        if clamped:
            clamp.mark(block.mlp.experts.moe_runner_config, runner)
        if not fused:
            block.mlp.shared_experts = nn.Module()
            block.mlp.shared_experts.swiglu_limit = limits.listed(
                LISTS.share_expert_swiglu_limit_list, number
            )
    return model


def test_every_layer_of_flash_is_reported():
    found = limits.survey(flash("humming", clamped=True), LISTS)
    assert limits.problems(found) == []
    assert list(found["limits"]) == [str(n) for n in range(2, 42)] == list(found["shared_limits"])
    assert found["limits"]["34"]["wanted"] is None
    assert found["limits"]["35"] == {
        "wanted": 4.0,
        "applied": 4.0,
        "by": "sparkling",
        "runner": "humming",
    }
    shared = {n: found["shared_limits"][str(n)]["applied"] for n in (33, 34, 39, 40, 41)}
    assert shared == {33: None, 34: 5.0, 39: 5.0, 40: 7.0, 41: 7.0}


def test_stocks_silence_is_named():
    found = limits.survey(flash("marlin"), LISTS)
    assert limits.problems(found) == [
        "layers 35 to 41 want 4 for the routed experts and marlin applies none"
    ]


def test_a_fused_shared_expert_computes_with_the_routed_experts_limit():
    said = limits.problems(limits.survey(flash("triton", fused=1), LISTS))
    assert said == [
        "layer 34 wants 5 for the shared experts and fused applies none",
        "layers 35 to 39 want 5 for the shared experts and fused applies 4",
        "layers 40 to 41 want 7 for the shared experts and fused applies 4",
    ]


@pytest.fixture
def blocks(engine_context):
    """SGLang's own block, as layer ``number`` of a checkpoint, built as layer ``layer_id``."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.bailing_moe_v3 import BailingMoE

    ling = ModelConfig.from_server_args(engine_context).hf_config

    def make(*pairs: tuple[int, int]) -> nn.Module:
        model = nn.Module()
        for number, layer_id in pairs:
            part = nn.Module()
            part.mlp = BailingMoE(ling, layer_id=layer_id, prefix=f"model.layers.{number}.mlp")
            setattr(model, f"part{number}", part)
        return model

    return make, ling


def test_sglangs_own_layers_are_read(blocks):
    make, ling = blocks
    found = limits.survey(make((1, 1), (2, 2), (3, 3)), ling)
    assert {n: e["applied"] for n, e in found["limits"].items()} == {"1": 0.4, "2": None, "3": 0.4}
    shared = {n: e["applied"] for n, e in found["shared_limits"].items()}
    assert shared == {"1": 0.6, "2": 0.6, "3": None}
    assert found["limits"]["3"]["by"] == "sparkling" and found["limits"]["3"]["runner"] == "cpu"
    assert found["shared_limits"]["1"]["by"] == "sglang"
    assert limits.problems(found) == []


def test_the_nextn_layer_goes_by_its_number_and_is_read_as_entry_0(blocks):
    """With lists that begin with 0, as Ling's do, entry 0 says the same as a list that has ended."""
    make, ling = blocks
    found = limits.survey(make((4, 0)), ling)
    assert found["limits"]["4"]["wanted"] is None and found["limits"]["4"]["applied"] == 0.7
    assert limits.problems(found) == [
        "layer 4 wants none for the routed experts and cpu applies 0.7",
        "layer 4 wants none for the shared experts and BailingMLP applies 0.9",
    ]
    assert limits.listed(LISTS.expert_swiglu_limit_list, 42) is None
    assert limits.listed(LISTS.expert_swiglu_limit_list, 0) is None


def loaded(model: nn.Module, *, strict: bool):
    model_config = SimpleNamespace(hf_text_config=LISTS, hf_config=None)
    limits._loaded(strict, SimpleNamespace(model=model, model_config=model_config))


def test_with_the_switch_a_dropped_limit_stops_the_server():
    loaded(flash("humming", clamped=True), strict=True)
    with pytest.raises(clamp.ClampError) as error:
        loaded(flash("deep_gemm"), strict=True)
    text = str(error.value)
    assert text.startswith("SwiGLU limits are not the checkpoint's: layers 35 to 41 want 4 for the")
    assert "deep_gemm applies none: start with" in text and text.count(". ") == 0


def test_without_it_the_status_file_and_one_warning_say_so(tmp_path, monkeypatch, caplog):
    kept = status.Status(tmp_path / "status.json", {"moe": None})
    monkeypatch.setattr(status, "current", kept)
    with caplog.at_level(logging.WARNING, "sparkling_sglang"):
        loaded(flash("humming"), strict=False)
        draft = nn.Module()  # the second model of the process: nothing of the first is lost
        draft.mlp = nn.Module()
        draft.mlp.experts = layer("humming", 42, None)
        loaded(draft, strict=False)
        loaded(nn.Linear(2, 2), strict=False)  # a model without experts
    told = kept.get("moe")["limits"]
    assert list(told) == [str(n) for n in range(2, 43)]
    assert told["41"] == {"wanted": 4.0, "applied": None, "by": None, "runner": "humming"}
    assert told["42"]["wanted"] is None
    assert len(caplog.records) == 1
    assert "humming applies none. SPARKLING_SWIGLU_CLAMP=1 applies them." in caplog.text


# -- the switch ----------------------------------------------------------------------------------


class Noted:
    """Takes the place of ``Patches``: remembers what is asked for and changes nothing."""

    def __init__(self):
        self.names, self.hooks = [], []

    def hook(self, name, target, fn, kind="replace"):
        self.hooks.append((name, target))


@pytest.mark.parametrize(
    ("env", "clamps", "reports"),
    [
        ({}, 0, 0),
        ({"SPARKLING_SWIGLU_CLAMP": "1"}, 3, 1),
        ({"SPARKLING_SWIGLU_CLAMP": "0", "SPARKLING_SHARE_HEAD": "1"}, 0, 0),
        ({"SPARKLING_STATUS_FILE": "status.json"}, 0, 1),
    ],
)
def test_what_the_scheduler_gets(env, clamps, reports, tmp_path, monkeypatch):
    monkeypatch.setattr(status, "current", None)
    if "SPARKLING_STATUS_FILE" in env:
        env = {"SPARKLING_STATUS_FILE": str(tmp_path / "status.json")}
    wants = switches.read(env)
    assert wants.idle == (not env)
    noted = Noted()
    plugin._register_scheduler(noted, wants)
    names = [name for name, _ in noted.hooks]
    assert (names.count("clamp"), names.count("limits")) == (clamps, reports)
    assert wants.ids().get("swiglu-clamp", False) == bool(clamps)
