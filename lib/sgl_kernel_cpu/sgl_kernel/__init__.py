"""Pure PyTorch stand-in for the CPU build of ``sgl-kernel``, which no registry offers.

SGLang 0.5.23 with ``SGLANG_USE_CPU_ENGINE=1`` imports the names below from ``sgl_kernel`` and calls
the operators that :mod:`sgl_kernel.operators` registers under ``torch.ops.sgl_kernel``. Only what
Ling-3.0 needs is here. An operator that is absent stays absent: SGLang takes the presence of
``torch.ops.sgl_kernel.convert_weight_packed`` as its sign that Intel AMX kernels exist, so leaving
it out keeps every CPU, AMX or not, on the same plain path.
"""

from __future__ import annotations

from sgl_kernel import mamba, operators
from sgl_kernel.kvcache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
)
from sgl_kernel.speculative import (
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.1.0"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "mamba",
    "operators",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
