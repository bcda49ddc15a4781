"""Sparklet: a trained practice model in the on-disk format of Ling-3.0-flash-fp4.

`config` the sizes, `kda` and `model` the network in plain PyTorch, `quantize` MXFP4 and FP8,
`words` and `tasks` what it learns, `chat` and `tokenizer` how that becomes tokens, `batches` and
`training` how it learns, `questions`, `decode` and `evaluate` how it is measured, `export` how it is
stored.

Nothing here imports SGLang. Of this package the notebooks' library uses `questions` only, which
needs no torch.
"""

__version__ = "0.1.0"
