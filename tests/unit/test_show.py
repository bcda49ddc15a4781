"""What is shown reads well as HTML, as text, and as the final state of an executed notebook."""

from __future__ import annotations

import dataclasses
import io
import re
import struct
import sys
import types

import pytest
from IPython.core.formatters import DisplayFormatter
from sparkling import canvas, plots, recipe, recordings, show
from sparkling.ladder import Arm, Gain, Ladder
from sparkling.live import Live, clock, spark
from sparkling.metrics import Summary
from sparkling.proof import prove_recorded, wanted
from sparkling.reply import Reply, SpecCounts
from sparkling.stats import Interval
from sparkling.tools import ToolCall

EVIL = "<script>alert('x')</script> & <b>"


def test_tables_escape_and_line_up():
    view = show.table([{"name": EVIL, "n": 1}, {"name": "b", "n": None}], title=EVIL, caption=EVIL)
    assert "<script>" not in view.html
    assert "&lt;script&gt;" in view.html
    lines = view.text.splitlines()
    assert lines[1].startswith("name")
    assert "n/a" in lines[4]
    column = lines[1].index("n", 4)
    assert lines[3][column] == "1"


def test_values_are_told_apart():
    rows = [["yes", True], ["no", False], ["rate", 0.1234], ["big", 12345.678], ["none", None]]
    text = show.table(rows, ["what", "value"]).text
    for want in ("yes", "no", "0.123", "12,345.68", "n/a"):
        assert want in text


def test_wide_tables_wrap_and_lose_nothing():
    words = " ".join(f"word{i}" for i in range(60))
    view = show.table([["a", words, "z"]], ["x", "long", "end"], width=80)
    assert max(map(len, view.text.splitlines())) <= 80
    assert set(re.findall(r"word\d+", view.text)) == set(words.split())


def test_jupyter_s_style_sheet_moves_no_text():
    """JupyterLab and nbconvert set table cells flush right and `pre` in the font of the prose."""
    view = show.table([("a", "b")], ["x", "y"]) + show.View("<pre>x</pre>", "x")
    html = DisplayFormatter().format(view)[0]["text/html"]
    assert html.count('style="text-align:left"') == 4 == len(re.findall("<t[dh][ >]", html))
    assert re.findall("<pre[^>]*>", html) == [f'<pre style="{show._CODE}">']
    assert "monospace" in show._CODE
    assert view._repr_html_() == html
    assert "style" not in view.html  # the report has a style sheet of its own
    card = show.in_jupyter("<tr><th align='left'>k</th><td>v</td></tr><thead></thead>")
    assert card.count("text-align:left") == 2 and "<thead>" in card


def test_code_and_lines_in_a_sentence_are_shown_as_such():
    assert show.note("do `a <b>`\nnow").html == "<p>do <code>a &lt;b&gt;</code><br>now</p>"
    view = show.table([("+ --x\n+ --y",)], ["z"], caption="`c`")
    assert "<td>+ --x<br>+ --y</td>" in view.html and "<i><code>c</code></i>" in view.html
    assert "`c`" in view.text
    assert show.prose("one ` only") == "one ` only"


def test_every_view_has_both_faces():
    bundle = show.note("hello")._repr_mimebundle_()
    assert bundle == {"text/plain": "hello", "text/html": "<p>hello</p>"}
    both = show.note("a") + show.note("b")
    assert both.text == "a\n\nb"
    assert both.html == "<p>a</p><p>b</p>"


def test_command_and_diff_are_complete(root):
    book = recipe.load("ling-3.0-flash", root=root)
    before, after = (book.render(s, model="/m") for s in ("baseline", "humming"))
    command = show.command(after)
    assert "--moe-runner-backend humming" in command.text
    assert command.text.endswith(after.shell())
    text = show.diff(before, after).text
    for change in recipe.diff(before, after):
        assert change.name in text
    assert "flashinfer_mxfp4" in text
    assert "no difference" in show.diff(before, before).text


def test_a_proof_shows_verdict_evidence_and_every_reading():
    view = show.proof(prove_recorded("h200-nextn"))
    for face in (view.text, view.html):
        assert "✗ not live" in face
        assert "contributes nothing" in face
        assert "/server_info" in face
        assert "1 + kept drafts ÷ rounds" in face
    assert view.html.startswith("<blockquote><b>RECORDING")
    # A mark of its own is explained under the table, and only where it stands.
    assert "?" in [c.strip() for c in re.findall("<td>(.*?)</td>", view.html)]
    assert "?: this place cannot tell." in view.text


def test_what_is_not_there_is_explained_under_the_table():
    bare, whole = (
        " ".join(show.measured([arm("a", interval(40), **more)]).text.split())
        for more in ({"deterministic": None}, {"accept_length": interval(2.7)})
    )
    assert "n/a: no round was counted" in bare and "where nothing was asked twice" in bare
    assert "n/a" not in whole


def test_wishes_are_shown_as_wishes(root):
    book = recipe.load("ling-3.0-flash", root=root)
    text = show.proof(wanted(book.render("nextn", model="/m"))).text
    assert text.startswith("Evidence that stage nextn is asked for")
    assert "found" not in text


@pytest.mark.parametrize("name", recordings.names())
def test_recordings_are_shown_with_label_and_definition(name):
    view = show.recording(name)
    assert view.text.startswith("| RECORDING — not this machine")
    assert "RECORDING" in view.html
    if recordings.load(name).get("timing"):
        assert "not comparable with numbers measured here" in view.text
        assert "n" in view.text


def test_alike_log_lines_are_told_once():
    log = [f"[2026-11-29 18:00:0{i}] Preparing x (layer: {i})" for i in range(9)] + ["[x] other 1"]
    assert show._telling(log, 9) == [log[0] + "   (and 8 more like it)", log[-1]]
    many = [f"[x] {w}" for w in "abcdefghijklmnop"]
    short = show._telling(many, 6)
    assert len(short) == 7
    assert "10 lines left out" in short[3]


def reply(**more) -> Reply:
    return Reply(
        text="18",
        reasoning="17 + 1",
        prompt_tokens=9,
        completion_tokens=36,
        complete=True,
        finish_reason="stop",
        chunk_times_s=[0.1 + 0.03 * i for i in range(12)],
        chunk_tokens=[None] * 12,
        e2e_s=0.43,
        **more,
    )


def test_a_reply_shows_text_reasoning_and_defined_times():
    view = show.reply(reply(spec=SpecCounts(35, 14), warnings=["reasoning parser seems off"]))
    assert "<details><summary>Reasoning" in view.html
    for want in (
        "18",
        "17 + 1",
        "0.100 s",
        "106.1 tokens/s",
        "2.50",
        "14 rounds",
        "9 in, 36 out",
        "stop: the model ended",
        "reasoning parser seems off",
    ):
        assert want in view.text, want


def test_a_broken_reply_says_so_and_has_no_rate():
    cut = Reply(
        text="1",
        completion_tokens=10,
        chunk_times_s=[0.1, 0.2],
        chunk_tokens=[1, 10],
        problem="the connection was closed after 10 tokens",
        tool_calls=[ToolCall("add", "a", {"x": 1})],
        broken_calls=[ToolCall("rm", "b", raw='{"x":', problem="cut")],
    )
    text = show.reply(cut).text
    assert "Not complete: the connection was closed" in text
    assert re.search(r"decode rate +n/a", text)
    assert 'tool call: add({"x": 1})' in text
    assert "broken tool call, not to be run: rm" in text


def test_the_endpoint_never_shows_a_key():
    view = show.endpoint("http://127.0.0.1:30000", "tiny", key=True)
    assert "http://127.0.0.1:30000/v1" in view.text
    assert "$SPARKLING_API_KEY" in view.text
    assert "Authorization" not in show.endpoint("http://h:1/v1", "tiny", key=False).text


@pytest.mark.parametrize("key", [True, False])
def test_the_endpoint_s_python_can_be_pasted(key, monkeypatch, capsys):
    asked = []

    class OpenAI:
        def __init__(self, **options):
            asked.append(options)
            self.chat = self.completions = self

        def create(self, **options):
            asked.append(options)
            message = types.SimpleNamespace(content="Hi.")
            return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message)])

    monkeypatch.setitem(sys.modules, "openai", types.SimpleNamespace(OpenAI=OpenAI))
    monkeypatch.setenv("SPARKLING_API_KEY", "k")
    text = show.endpoint("http://127.0.0.1:30000", "tiny", key=key).text
    exec(text.split("# from Python\n")[1], {})
    assert capsys.readouterr().out == "Hi.\n"
    assert asked[0]["api_key"] == ("k" if key else "none")
    assert asked[1]["messages"][0]["role"] == "user"
    assert ("set SPARKLING_API_KEY to the server's key yourself" in text) == key


# -- the ladder -------------------------------------------------------------------------------------


def interval(value: float, half: float | None = 1.0, n: int = 12) -> Interval:
    low, high = (None, None) if half is None else (value - half, value + half)
    return Interval(value, low, high, n, "bootstrap")


def arm(name: str, rate: Interval | None, **more) -> Arm:
    fields = dict(
        arm=name,
        arm_hash="h",
        workload="all",
        rows=36,
        failed=0,
        prompts=12,
        decode_rate=rate,
        ttft_s=Summary(0.2, 0.2, 0.2, 0.2, 0.2, 36),
        tpot_s=None,
        e2e_s=None,
        peak_rate=None,
        accept_length=None,
        accept_source=None,
        completion_tokens=100.0,
        cached_tokens=0,
        deterministic=True,
    )
    return Arm(**(fields | more))


def steps(*arms: Arm) -> Ladder:
    rungs = [Gain(arms[0], None)]
    rungs += [
        Gain(a, interval(a.decode_rate.value / 40, 0.1) if a.decode_rate else None)
        for a in arms[1:]
    ]
    return Ladder("baseline", "all", tuple(rungs))


FOUR = steps(
    arm("baseline", interval(40)),
    arm("humming", interval(41)),
    arm("fp8-head", interval(60)),
    arm("nextn", interval(80), accept_length=interval(2.7)),
)


def test_the_ladder_is_a_small_png_with_its_definitions():
    view = plots.ladder(FOUR, where="2 CPUs")
    assert view.png is not None
    assert view.png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", view.png[16:24])
    assert width >= 600
    assert height >= 200
    assert len(view.png) <= canvas.MAX_BYTES
    assert set(view._repr_mimebundle_()) == {"text/plain", "image/png"}
    # As IPython hands it on: with HTML beside it, JupyterLab and GitHub would show no picture.
    assert set(DisplayFormatter().format(view)[0]) == {"text/plain", "image/png"}
    assert set(DisplayFormatter().format(show.note("x"))[0]) == {"text/plain", "text/html"}
    for want in (
        "2 CPUs",
        "Decode rate = Σ tokens",
        "paired bootstrap",
        "12 prompts, 36 rows",
        "40.0 [39.0, 41.0]",
        "2.00 [1.90, 2.10]",
        "2.70",
    ):
        assert want in view.text, want


def test_every_label_of_the_ladder_fits_into_the_picture(monkeypatch):
    drawn = {}
    monkeypatch.setattr(canvas, "png", lambda figure: drawn.setdefault("figure", figure) and b"x")
    many = steps(arm("baseline", interval(1234.5, 300)), arm("a-long-name", interval(1300, 250)))
    for summary in (FOUR, many):
        drawn.clear()
        plots.ladder(summary)
        figure = drawn["figure"]
        figure.canvas.draw()
        box = figure.bbox
        texts = [*figure.texts, *figure.axes[0].texts, *figure.axes[0].get_yticklabels()]
        for text in texts:
            extent = text.get_window_extent()
            assert extent.x0 >= box.x0 - 1, text
            assert extent.x1 <= box.x1 + 1, text
            assert extent.y0 >= box.y0 - 1, text
            assert extent.y1 <= box.y1 + 1, text


def test_gains_that_cannot_be_told_from_one_say_so():
    label = plots._label(FOUR["humming"])
    assert label.endswith("not told apart")
    assert "not told apart" not in plots._label(FOUR["nextn"])


def test_a_machine_that_was_not_steady_is_said_wherever_the_ladder_is(monkeypatch):
    rungs = [dataclasses.replace(r, steady=False) for r in FOUR]
    uneven = dataclasses.replace(rungs[1].summary, spread=4.7, unrated=3)
    rungs[1] = dataclasses.replace(rungs[1], summary=uneven)
    made = Ladder("baseline", "all", tuple(rungs))
    seen = {}
    monkeypatch.setattr(canvas, "png", lambda figure: seen.setdefault("figure", figure) and b"x")
    text = " ".join(plots.ladder(made).text.split())
    want = "Machine not steady: repeats of one prompt differ by ×4.7; read no gain from this run."
    assert want in text and "workload: all, machine not steady" in text
    assert (
        show.rows_of(uneven) == "36, 3 without a rate"
        and "3 complete rows without a decode rate" in text
    )
    drawn = [t.get_text() for t in [*seen["figure"].texts, *seen["figure"].axes[0].texts]]
    assert any(want in " ".join(t.split()) for t in drawn)
    assert sum("machine not steady" in t for t in drawn) == 3
    assert want in " ".join(show.measured([uneven]).text.split())
    calm = plots.ladder(FOUR).text + show.measured([FOUR.rungs[0].summary]).text
    assert "steady" not in calm and "without a" not in calm


def test_arms_without_numbers_do_not_draw_and_failed_rows_are_told():
    view = plots.ladder(steps(arm("baseline", None)))
    assert view.png is None
    assert "n/a" in view.text
    some = plots.ladder(
        steps(arm("baseline", interval(40, None), failed=2), arm("x", interval(41)))
    )
    assert "2 rows that were not complete" in " ".join(some.text.split())
    assert "fewer than four prompts" in " ".join(some.text.split())


# -- live views ---------------------------------------------------------------------------------------


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_rewritten_and_the_final_table():
    out = Tty()
    with Live("Measuring", out=out, kernel=False) as live:
        live.min_interval_s = 0.0
        for i in range(3):
            live.update([{"rows": i}], note=f"{i} of 3")
    text = out.getvalue()
    assert text.count("\n") == text[text.rindex("\r") :].count("\n")
    assert "2 of 3" in text.splitlines()[-4]
    assert "\x1b[K" in text


def test_a_pipe_gets_few_lines():
    out = io.StringIO()
    with Live("Measuring", out=out, kernel=False) as live:
        for i in range(500):
            live.update([{"rows": i}], note=f"{i} of 500")
    lines = out.getvalue().splitlines()
    assert len(lines) <= 6
    assert "499 of 500" in out.getvalue()


def test_a_kernel_gets_one_output_updated_at_most_twice_a_second(monkeypatch):
    shown = []

    class Handle:
        def update(self, view):
            shown.append(view)

    def display(view, display_id):
        assert display_id is True
        shown.append(view)
        return Handle()

    now = [0.0]
    timer = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(sys.modules["sparkling.live"], "time", timer)
    monkeypatch.setattr("IPython.display.display", display)
    with Live("Measuring", kernel=True) as live:
        for i in range(1000):
            now[0] = i / 1000
            live.update([{"rows": i}], note=f"{i}")
    assert len(shown) == 3  # the beginning, half a second later, and the end
    assert "999" in shown[-1].text
    assert "…" not in shown[-1].text
    assert "…" in shown[0].text


def test_what_raises_leaves_a_state_that_says_so():
    out = io.StringIO()
    with pytest.raises(ValueError, match="no luck"), Live("Starting", out=out, kernel=False):
        raise ValueError("no luck")
    assert "stopped by ValueError: no luck" in out.getvalue()


def test_progress_of_a_benchmark_is_a_line_per_workload():
    live = Live("Measuring", out=io.StringIO(), kernel=False)
    row = {"arm": "nextn", "workload": "short-turn", "decode_rate": 50.0}
    live.progress(1, 4, row)
    live.progress(2, 4, row | {"decode_rate": None})
    live.progress(3, 4, row | {"workload": "shape"})
    text = live.state().text
    assert "3 of 4" in text
    assert len(text.splitlines()) == 5
    assert "50.0 tokens/s" in text
    assert "n/a" in text


def test_bars_and_clock():
    assert spark([1.0, 2.0, None, 3.0]) == "▁▅█"
    assert spark([2.0, 2.0]) == "▄▄"
    assert spark([]) == ""
    assert len(spark(list(map(float, range(100))))) == 24
    assert [clock(s) for s in (0, 59.6, 61, 3661)] == ["0:00", "1:00", "1:01", "1:01:01"]
