"""What each switch of this plugin needs of SGLang: functions, their parameters, and fields.

Data only, with nothing imported, so that an SGLang that is merely unpacked can be held against it
(:mod:`sparkling_sglang.drift`). A test asserts that every hook which the plugin registers stands
here under its switch; beside them stand the things that a hook relies on without touching them.
"""

from __future__ import annotations

from dataclasses import dataclass

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
DRAFT_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
LOGITS = "sglang.srt.layers.logits_processor"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
MOE = "sglang.srt.layers.moe"
EAGLE = "sglang.srt.speculative.eagle_utils"
LINEAR = "sglang.srt.layers.attention.linear"
NEXTN = "sglang.srt.models.bailing_moe_nextn.BailingMoeForCausalLMNextN"
TARGET = "sglang.srt.models.bailing_moe_v3.BailingMoeV3ForCausalLM"


@dataclass(frozen=True)
class Need:
    """One thing that must be in SGLang as it is here.

    Args:
        target: dotted path of a module, class, function or name.
        parameters: names of a function's parameters, in order, ``*`` before those that go by
            keyword only; None where they do not matter.
        mentions: names or texts that must stand in its source.
        binds: attributes that a class must define or assign.
        lacks: attributes that it must not have.
    """

    target: str
    parameters: tuple[str, ...] | None = None
    mentions: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


def _function(target: str, parameters: str = "", mentions: str = "") -> Need:
    return Need(target, tuple(parameters.split()), tuple(mentions.split()))


def _class(target: str, binds: str = "", lacks: str = "") -> Need:
    return Need(target, binds=tuple(binds.split()), lacks=tuple(lacks.split()))


_PLUGIN = (
    _class("sglang.srt.plugins.hook_registry.HookRegistry", "register apply_hooks _patched _hooks"),
    _class("sglang.srt.plugins.hook_registry.HookType", "BEFORE AFTER AROUND REPLACE"),
    # The processes that load plugins, and how the scheduler's is told from the others.
    Need("sglang.srt.managers.scheduler.run_scheduler_process", mentions=("load_plugins",)),
    Need("sglang.srt.entrypoints.engine", mentions=("load_plugins", "run_scheduler_process")),
    Need("sglang.version.__version__"),
)
_LOADED = (
    _function(f"{RUNNER}.load_model", "self", "model"),
    _class(RUNNER, "is_draft_worker model device server_args"),
)
_LIMITS = (
    # What Ling's layers are told of their limits, and where it can be read from a loaded model.
    Need(
        "sglang.srt.models.bailing_moe_v3",
        mentions=(
            "gemm1_clamp_limit",
            "expert_swiglu_limit_list",
            "share_expert_swiglu_limit_list",
            "swiglu_limit",
        ),
    ),
    _class(f"{MOE}.fused_moe_triton.layer.FusedMoE", "moe_runner_config layer_name quant_method"),
    _class(RUNNER, "model_config"),
)
_CHECKED = (_function("sglang.srt.server_args.ServerArgs.check_server_args", "self"),)
_UPDATES = "_unsupported_derived_weight_cache_error"

NEEDS: dict[str, tuple[Need, ...]] = {
    "fp8-head": (
        *_PLUGIN,
        *_CHECKED,
        *_LOADED,
        Need(
            "sglang.srt.arg_groups.field_order",
            mentions=(
                "enable_fp32_lm_head",
                "tp_size",
                "pp_size",
                "enable_lora",
                "lora_paths",
                "enable_multi_layer_eagle",
                "speculative_algorithm",
                "speculative_token_map",
                "startup_weight_load_mode",
                "weight_cache_mode",
                "remote_instance_weight_loader_start_seed_via_transfer_engine",
                "rl_on_policy_target",
            ),
        ),
        _function(f"{LOGITS}.should_apply_lm_head_quant_method", "lm_head quant_method", "apply"),
        Need(
            f"{LOGITS}.LogitsProcessor._compute_lm_head",
            mentions=("should_apply_lm_head_quant_method", "quant_method", "apply"),
        ),
        Need(f"{LOGITS}.LogitsProcessor._get_logits", mentions=("_compute_lm_head",)),
        # Updates of the weights at run time are refused by SGLang itself: see head_refusals.
        _function(f"{UPDATER}.{_UPDATES}", "model", "_derived_weight_cache_error"),
        *(
            Need(f"{UPDATER}.WeightUpdater.{way}", mentions=(_UPDATES,))
            for way in (
                "update_weights_from_disk",
                "load_weights_from_distributed",
                "update_weights_from_tensor",
                "update_weights_from_ipc",
            )
        ),
    ),
    "share-head": (
        *_PLUGIN,
        _function(
            f"{DRAFT_WORKER}.init_lm_head",
            "self",
            "set_lm_head_from_target set_embed_and_head draft_runner target_worker model_runner",
        ),
        _function("sglang.srt.lora.layers.unwrap_lora_layer", "module"),
        # Once SGLang defines the method itself, the handover of this plugin can go.
        _class(NEXTN, "lm_head set_embed_and_head", lacks="set_lm_head_from_target"),
    ),
    "trap": (
        *_PLUGIN,
        *_CHECKED,
        _function(f"{DRAFT_WORKER}.init_lm_head", "self"),
        Need("sglang.srt.arg_groups.field_order", mentions=("speculative_algorithm",)),
    ),
    "clamp": (
        *_PLUGIN,
        *_LOADED,
        _function(
            f"{MOE}.moe_runner.runner.MoeRunner.__init__", "self runner_backend config lora_enabled"
        ),
        _function(
            f"{MOE}.moe_runner.humming.HummingRunnerCore.apply_activation", "self inputs outputs"
        ),
        _class(f"{MOE}.moe_runner.humming.HummingRunnerCore", "swiglu_limit"),
        _function(
            f"{MOE}.fused_moe_triton.fused_marlin_moe.swiglu_limit_func",
            "output input swiglu_limit",
        ),
        _class(
            f"{MOE}.moe_runner.base.MoeRunnerConfig",
            "layer_id activation is_gated gemm1_alpha gemm1_clamp_limit swiglu_limit",
        ),
        _function(f"{MOE}.utils.get_moe_a2a_backend"),
        *_LIMITS,
    ),
    "keep-alive": (
        *_PLUGIN,
        _function(
            "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
            "server_args tokenizer_manager template_manager port_args scheduler_infos "
            "subprocess_watchdog execute_warmup_func launch_callback",
        ),
        Need("sglang.srt.entrypoints.http_server.app"),
    ),
    "status": (
        *_PLUGIN,
        *_LOADED,
        _function(
            "sglang.srt.managers.scheduler.Scheduler.process_batch_result", "self batch result"
        ),
        _function("sglang.srt.runtime_context.get_parallel"),
        Need("sglang.srt.runtime_context", mentions=("tp_rank", "dp_rank")),
        *_LIMITS,
    ),
    "cpu-engine": (
        *_PLUGIN,
        _function("sglang.srt.arg_groups.overrides._attention_backend_platform_fallbacks", "view"),
        _function(
            "sglang.srt.model_loader.loader._get_quantization_config", "model_config load_config"
        ),
        _function(f"{TARGET}.load_weights", "self weights is_nextn"),
        _class(
            f"{LINEAR}.kernels.kda_triton.TritonKDAKernel",
            "packed_decode decode target_verify extend",
        ),
        Need(f"{LINEAR}.kda_backend.causal_conv1d_fn"),
        _function(
            "sglang.kernels.ops.attention.fla.fused_norm_gate.rms_norm_gated",
            "x g weight bias activation residual prenorm residual_in_fp32 eps",
        ),
        _function(
            "sglang.kernels.ops.mamba.mamba_state_scatter_triton."
            "scatter_mamba_states_after_mtp_verify",
            "mamba_caches state_indices_tensor last_correct_step_indices mamba_track_indices "
            "mamba_steps_to_track src_indices_raw",
        ),
        _function(f"{NEXTN}.set_embed_and_head", "self embed head"),
        _function(
            f"{MOE}.fused_moe_native.moe_forward_native", "layer x topk_output moe_runner_config"
        ),
        _class(
            f"{MOE}.moe_runner.base.MoeRunnerConfig",
            "activation gemm1_alpha gemm1_clamp_limit routed_scaling_factor "
            "apply_router_weight_on_input",
        ),
        Need("sglang.srt.speculative.spec_utils.row_argmax"),
        *(
            Need(f"{EAGLE}.{name}")
            for name in (
                "top_k_renorm_prob",
                "top_p_renorm_prob",
                "tree_speculative_sampling_target_only",
                "chain_speculative_sampling_triton",
            )
        ),
        _function(
            f"{EAGLE}._verify_uses_greedy",
            "* is_all_greedy is_cpu is_hip is_xpu use_rejection_sampling",
        ),
        _function(
            f"{EAGLE}.eagle_sample",
            "verify_input batch logits_output grammar_mask uno_target_max_top_k * watermark_state "
            "watermark_full_mask",
        ),
    ),
}
"""Switch (as in :data:`sparkling_sglang.plugin.KNOWN_SGLANG`) to what it needs."""
