"""What the NEXTN draft model needs beside its kernels."""

from __future__ import annotations

import torch


def set_embed_and_head(self, embed: torch.nn.Parameter, head: torch.nn.Parameter) -> None:
    """Give the draft the target's embedding and LM-head weights.

    Same as ``BailingMoeForCausalLMNextN.set_embed_and_head`` without its two unconditional
    ``torch.cuda`` calls, of which ``synchronize`` raises where there is no CUDA.
    """
    del self.model.word_embeddings.weight
    del self.lm_head.weight
    self.model.word_embeddings.weight = embed
    self.lm_head.weight = head
