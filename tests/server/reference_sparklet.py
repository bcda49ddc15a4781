"""Log-probabilities of recorded answers by the plain PyTorch model, in float32 and in BF16.

Run with the server environment's Python. stdin: {"root", "model", "rows": [{"prompt", "ids",
"top": [[[value, token], ...], ...]}, ...]} as scripts/record_sparklet.py writes them; stdout, for
"float32" and "bfloat16": for each row, for each answered token, [log-probability of the token, those
of the tokens in `top`...].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    asked = json.load(sys.stdin)
    sys.path.insert(0, str(Path(asked["root"]) / "lib"))
    import torch
    from sparklet import export

    torch.set_num_threads(1)
    model, _ = export.load(Path(asked["model"]))
    out: dict[str, list[list[list[float]]]] = {}
    with torch.no_grad():
        for name in ("float32", "bfloat16"):
            model.prepare(getattr(torch, name))
            out[name] = []
            for row in asked["rows"]:
                table = model.logits(model(torch.tensor([row["prompt"] + row["ids"]])))[0]
                table = table.log_softmax(-1)[len(row["prompt"]) - 1 : -1]
                some = [
                    [token, *(other for _, other in top)]
                    for token, top in zip(row["ids"], row["top"], strict=True)
                ]
                out[name].append(table.gather(1, torch.tensor(some)).tolist())
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
