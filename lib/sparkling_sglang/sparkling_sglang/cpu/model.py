"""Patches that the scheduler process needs, where the model runs."""

from __future__ import annotations

from sparkling_sglang.patches import Patches


def register(patches: Patches) -> None:
    """Everything KDA, latent attention and NEXTN call on a CPU. Imports SGLang's model modules."""
    from sgl_kernel.mamba import causal_conv1d_fn_cpu

    from sparkling_sglang.cpu import draft, kda, norm, scatter

    linear = "sglang.srt.layers.attention.linear."
    patches.hook("kda", linear + "kernels.kda_triton.TritonKDAKernel", kda.TorchKDAKernel)
    patches.hook("causal-conv", linear + "kda_backend.causal_conv1d_fn", causal_conv1d_fn_cpu)
    patches.hook(
        "gated-norm",
        "sglang.kernels.ops.attention.fla.fused_norm_gate.rms_norm_gated",
        norm.rms_norm_gated,
    )
    patches.hook(
        "state-scatter",
        "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify",
        scatter.scatter_mamba_states_after_mtp_verify,
    )
    patches.hook(
        "nextn-embed-and-head",
        "sglang.srt.models.bailing_moe_nextn.BailingMoeForCausalLMNextN.set_embed_and_head",
        draft.set_embed_and_head,
    )
