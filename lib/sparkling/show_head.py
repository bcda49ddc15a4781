"""Head agreement to look at: tables with n, intervals and definitions."""

from __future__ import annotations

from collections.abc import Sequence

from sparkling.head import HeadReport
from sparkling.head_live import ForcedAgreement, FreeRun
from sparkling.show import View, note, table


def report(found: HeadReport) -> View:
    """Every scheme against the BF16 head, on all positions and on rare tokens."""
    rows = [
        {
            "scheme": one.scheme,
            "positions": one.group,
            "same first choice": one.first.text(4).split(" (n=")[0],
            **{f"top {k}": f"{100 * share:.2f} %" for k, share in one.top.items() if k > 1},
            "KL mean": f"{one.kl_mean:.2g}",
            "KL p99": f"{one.kl_p99:.2g}",
            "log-prob shift": f"{one.shift_mean:+.2g} (size {one.shift_size:.2g})",
            "weights off": f"{100 * found.weight_error[one.scheme]:.2f} %",
            "MB": f"{found.bytes[one.scheme] / 1e6:,.2f}",
            "n": one.n,
        }
        for one in found.agreements
    ]
    caption = (
        f"{found.head} (BF16: {found.bytes['BF16'] / 1e6:,.2f} MB). Hidden states: {found.states}. "
        "Same first choice: share of positions whose likeliest token is the same, 95 % Wilson "
        "interval; top k: mean share of the k likeliest tokens kept; KL(BF16 || FP8) in nats; shift: "
        "change of the log-probability of the token that followed, mean and (size) mean without its sign. "
        "Rare: positions whose token is "
        "among the least frequent of the text, up to a tenth of it. Weights off: root mean square error "
        "of the weights over their own root mean square. The largest entry of a row differs by a factor "
        f"of {found.row_spread:,.1f} from row to row: what one scale for all rows has to span."
    )
    return table(rows, title="FP8 heads against the BF16 head", caption=caption)


def forced(found: Sequence[ForcedAgreement], first: str = "first", second: str = "second") -> View:
    """Teacher-forced agreement of two servers."""
    rows = [
        {
            "positions": one.group,
            "same first choice": one.first.text(4).split(" (n=")[0],
            "top k kept": f"{100 * one.overlap:.2f} %",
            "KL, at least": f"{one.kl:.2g}",
            "log-prob shift": f"{one.shift_mean:+.2g} (size {one.shift_size:.2g}, most {one.shift_max:.2g})",
            "n": one.n,
        }
        for one in found
    ]
    caption = (
        f"{second} against {first}, both reading the same tokens. KL over the likeliest tokens that "
        "both list, the rest as one outcome: a lower bound, in nats. Whatever differs between the two "
        "servers is in it."
    )
    return table(rows, title="Teacher-forced log-probabilities", caption=caption)


def free(found: FreeRun) -> View:
    """Free-running answers of two servers, one line."""
    where = ""
    if found.first_difference:
        where = (
            f"; the others first differ at token {min(found.first_difference)} to "
            f"{max(found.first_difference)}, median {found.median_difference:g}"
        )
    return note(
        f"Free-running, greedy, at most {found.max_tokens} tokens: "
        f"{found.n - len(found.first_difference)} of {found.n} answers identical "
        f"({found.identical.text(2)}){where}."
    )
