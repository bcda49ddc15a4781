"""How the FP8 head's kernel is configured, tried and kept, and falling back."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sparkling_sglang import fp8_head, head_choice, head_kernels, head_trial
from sparkling_sglang.head_choice import Limits
from sparkling_sglang.head_kernels import Config, KernelError

HIDDEN = 640
H200 = Limits("NVIDIA H200", "sm_90", 132, 232_448, 233_472, 2048)
GB10 = Limits("NVIDIA GB10", "sm_121", 48, 101_376, 102_400, 1536)


# -------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize("limits", [H200, GB10])
@pytest.mark.parametrize("groups", [1, 2])
def test_candidates_fit_the_device(limits, groups):
    made = head_choice.candidates(2560, groups, limits)
    assert len(made) >= 4 and len(set(made)) == len(made)
    for config in made:
        assert config.groups == groups and 2560 % (64 * config.warps) == 0
        assert config.shared() <= 48 * 1024
        assert config.blocks * config.warps * 32 <= limits.threads
    assert Config(20, 1, groups) in made


def test_a_small_device_gets_fewer_candidates():
    tight = replace(GB10, threads=512, shared=20_000)
    made = head_choice.candidates(2560, 1, tight)
    assert {(config.warps, config.blocks) for config in made} == {(10, 1), (8, 1), (5, 2)}
    assert head_choice.candidates(2560 + 32, 1, GB10) == []
    assert head_choice.candidates(2560, 1, replace(GB10, architecture="sm_86")) == []
    assert head_choice.candidates(2560, 1, replace(GB10, architecture="sm_89"))


# ------------------------------------------------------------------------------------ the trial


def test_the_fastest_correct_configuration_wins():
    first, wrong, slow, broken = (Config(w, 1) for w in (20, 10, 8, 5))
    times = {first: 3.0, wrong: 1.0, slow: 9.0}

    def build(config):
        if config == broken:
            raise KernelError("refused")
        return config

    def best(*configs):
        return head_trial.fastest(
            list(configs), build, lambda k: 7 if k == wrong else 0, times.__getitem__
        )

    assert best(broken, slow, wrong, first) == (first, 3.0)
    with pytest.raises(KernelError, match="of 2 configurations none works: refused"):
        best(broken, wrong)
    with pytest.raises(KernelError, match="no configuration suits"):
        best()


def test_wrong_logits_are_counted():
    wanted = torch.randn(4, 1000)
    assert head_choice.wrong(wanted.bfloat16(), wanted) == 0
    spoilt = wanted.bfloat16()
    spoilt[2, 7] += 1
    spoilt[3, 0] = float("nan")
    assert head_choice.wrong(spoilt, wanted) == 2


def test_a_random_head_holds_every_code_but_nan():
    q, scale = head_trial.random_head(300, HIDDEN, torch.device("cpu"))
    assert bool(q.float().isfinite().all()) and q.view(torch.uint8).unique().numel() == 254
    assert bool((scale > 0).all())


# ------------------------------------------------------------------------- the cache and the choice


def test_a_choice_is_remembered_for_this_device_and_shape(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = head_choice.cache_file(H200, 157_184, 2560)
    assert path.is_relative_to(tmp_path / "sparkling")
    others = [
        head_choice.cache_file(GB10, 157_184, 2560),
        head_choice.cache_file(H200, 157_184, 4096),
    ]
    monkeypatch.setattr(torch, "__version__", "0.0")
    others.append(head_choice.cache_file(H200, 157_184, 2560))
    assert len({path, *others}) == 4
    assert head_choice.remembered(path, 2560, H200) is None
    chosen = {1: (Config(20, 1), 90.57), 2: (Config(20, 1, groups=2), 93.0)}
    head_choice.keep(path, chosen)
    assert head_choice.remembered(path, 2560, H200) == {1: (Config(20, 1), 90.6), 2: chosen[2]}
    # A relative folder counts as unset.
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert head_choice.cache_file(H200, 1, 1).is_relative_to(tmp_path / "home" / ".cache")


ENTRY = '{"config": {"warps": 20, "blocks": 1, "groups": 1, "prefetch": 128}, "us": 9.5}'


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "\xff", '{"1": {}}', '{"2": {"config": {}, "us": 1}}', '{"1": {"config": 3}}',
        # Well formed, but nothing that a trial would have chosen: it would compute nonsense.
        '{"1": ' + ENTRY.replace("20", "3") + "}",
        '{"1": ' + ENTRY.replace("9.5", "NaN") + "}",
        '{"0": ' + ENTRY + "}",
        '{"1": ' + ENTRY + ', "2": ' + ENTRY + "}",
    ],
)  # fmt: skip
def test_a_spoilt_cache_is_not_believed(tmp_path, text):
    path = tmp_path / "choice.json"
    path.write_text(text, encoding="latin-1")
    assert head_choice.remembered(path, 2560, H200) is None
    path.write_text('{"1": ' + ENTRY + "}")
    assert head_choice.remembered(path, 2560, H200) == {1: (Config(20, 1), 9.5)}


@pytest.mark.parametrize("where", ["file", "relative"])
def test_a_folder_that_cannot_be_written_costs_a_line_and_no_more(tmp_path, where, caplog):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x.json" if where == "file" else Path("~/.cache/x.json")
    head_choice.keep(path, {1: (Config(20, 1), 9.5)})
    (line,) = caplog.messages
    assert "cannot be kept" in line and not Path("~").exists()


def test_the_trial_runs_in_a_process_of_its_own():
    # Without a CUDA device it fails, and says why in one line.
    with pytest.raises(KernelError, match="the trial ended with 1: torch finds no CUDA"):
        head_choice.run_trial(64, HIDDEN, torch.device("cuda", 0))


def test_the_trial_prints_what_the_choice_understands(monkeypatch, capsys):
    chosen = {1: (Config(20, 1), 90.0), 2: (Config(10, 1, groups=2), 93.0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        head_trial, "trial", lambda *told: told == (9, 2560, torch.device("cuda", 3)) and chosen
    )
    head_trial.main(["9", "2560", "3"])
    assert head_choice.understood(capsys.readouterr().out, 2560, GB10) == chosen

    def fail(*_):
        raise KernelError("no\nwork")

    monkeypatch.setattr(head_trial, "trial", fail)
    with pytest.raises(SystemExit, match=r"^no work$"):
        head_trial.main(["9", "2560", "3"])


def test_the_trials_last_line_is_its_answer(monkeypatch):
    done = SimpleNamespace(returncode=0, stdout='a note\n{"1": 2}\n', stderr="a warning\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert head_choice.run_trial(64, HIDDEN, torch.device("cuda", 0)) == '{"1": 2}'
    done.stdout = ""
    assert head_choice.run_trial(64, HIDDEN, torch.device("cuda", 0)) == ""


def test_a_trial_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(head_choice, "TRIAL_S", 0.2)
    monkeypatch.setattr(sys, "executable", shutil.which("cat"))
    monkeypatch.setattr(
        subprocess, "run",
        lambda command, real=subprocess.run, **more: real(["sleep", "600"], **more),
    )  # fmt: skip
    with pytest.raises(KernelError, match=r"more than 0\.2 s"):
        head_choice.run_trial(64, HIDDEN, torch.device("cuda", 0))


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    """A device on which each kernel computes in torch; returns what was compiled."""
    compiled = []

    class Kernel:
        def __init__(self, cubin, config, rows, multiprocessors, device):
            assert (
                device.type == "cpu"
                and cubin == b"cubin"
                and multiprocessors == H200.multiprocessors
            )
            self.config = config

        def __call__(self, x, q, scale):
            assert x.shape[0] <= 8 * self.config.groups
            return fp8_head.dequantized_product(x, q, scale).bfloat16()

    def compile_kernel(config, hidden, architecture):
        compiled.append((config, hidden, architecture))
        return b"cubin"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Limits, "of", lambda device: H200)
    monkeypatch.setattr(head_kernels, "compile_kernel", compile_kernel)
    for module in (head_choice, head_trial):
        monkeypatch.setattr(module, "HeadKernel", Kernel)
    times = iter(range(100, 0, -1))  # the last one tried is the fastest
    monkeypatch.setattr(head_trial, "microseconds", lambda call: call() is None or next(times))

    def in_this_process(rows, hidden, device):
        return head_choice.as_text(head_trial.trial(rows, hidden, device))

    monkeypatch.setattr(head_choice, "run_trial", in_this_process)
    return compiled


def test_the_first_start_tries_and_the_next_remembers(pretended):
    q, scale = fp8_head.quantize_rows(torch.randn(100, 2560))
    first = head_choice.tuned(q, scale, fp8_head.dequantized_product)
    last = {g: head_choice.candidates(2560, g, H200)[-1] for g in (1, 2)}
    assert first.name == "sparkling-cuda" and first.details["kernel_from"] == "trial"
    assert first.details["kernel_config"]["8"]["warps"] == last[1].warps
    assert first.details["kernel_us"] == {"8": 95.0, "16": 91.0}
    assert len(pretended) == 6 + 4 + 2 and {p[1:] for p in pretended} == {(2560, "sm_90")}
    pretended.clear()
    again = head_choice.tuned(q, scale, fp8_head.dequantized_product)
    assert again.details["kernel_from"] == "cache"
    assert [config for config, *_ in pretended] == [last[1], last[2]]
    for tokens in (1, 16, 40):
        x = torch.randn(tokens, 2560).bfloat16()
        wanted = fp8_head.dequantized_product(x, q, scale)
        assert head_choice.wrong(again.product(x, q, scale), wanted) == 0


def test_a_kernel_that_fails_on_the_real_weights_is_not_used(pretended, monkeypatch):
    q, scale = fp8_head.quantize_rows(torch.randn(100, 2560))
    real = head_choice.HeadKernel.__call__
    monkeypatch.setattr(
        head_choice.HeadKernel,
        "__call__",
        lambda self, x, w, s: real(self, x, w, s) * (2 if w is q else 1),
    )
    with pytest.raises(KernelError, match="logits are wrong with Config"):
        head_choice.tuned(q, scale, fp8_head.dequantized_product)
    assert not list(head_choice.cache_file(H200, 100, 2560).parent.glob("*"))


def test_a_kept_choice_that_does_not_work_any_more_is_tried_anew(pretended, monkeypatch, caplog):
    q, scale = fp8_head.quantize_rows(torch.randn(100, 2560))
    path = head_choice.cache_file(H200, 100, 2560)
    kept = Config(10, 2)
    head_choice.keep(path, {1: (kept, 1.0)})
    real = head_choice.HeadKernel.__call__
    monkeypatch.setattr(
        head_choice.HeadKernel,
        "__call__",
        lambda self, *args: real(self, *args) * (2 if self.config == kept else 1),
    )
    choice = head_choice.tuned(q, scale, fp8_head.dequantized_product)
    assert choice.name == "sparkling-cuda" and choice.details["kernel_from"] == "trial"
    (line,) = caplog.messages
    assert "tried anew" in line and "logits are wrong with Config(warps=10" in line
    again = head_choice.remembered(path, 2560, H200)
    assert again[1][0] != kept and 2 in again


def test_without_a_folder_for_the_cache_the_kernel_serves_all_the_same(
    pretended, monkeypatch, tmp_path, caplog
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    q, scale = fp8_head.quantize_rows(torch.randn(100, 2560))
    for _ in range(2):
        choice = head_choice.tuned(q, scale, fp8_head.dequantized_product)
        assert choice.name == "sparkling-cuda" and choice.details["kernel_from"] == "trial"
    assert "cannot be kept" in caplog.text


def test_a_device_without_e4m3_starts_no_trial(pretended, monkeypatch):
    monkeypatch.setattr(Limits, "of", lambda device: replace(H200, architecture="sm_80"))
    monkeypatch.setattr(head_choice, "run_trial", lambda *_: pytest.fail("tried"))
    q, scale = fp8_head.quantize_rows(torch.randn(100, 2560))
    with pytest.raises(KernelError, match="no configuration suits sm_80 and 2560 columns"):
        head_choice.tuned(q, scale, fp8_head.dequantized_product)


class OnGpu:
    """Stands for a tensor on a GPU, as far as the choice looks at it."""

    def __init__(self, real: torch.Tensor) -> None:
        self.real, self.shape = real, real.shape
        self.device = SimpleNamespace(type="cuda", index=0)


def test_whatever_fails_torchs_product_serves(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no such\ndevice")

    monkeypatch.setattr(head_choice, "tuned", fail)
    monkeypatch.setattr(head_choice, "bf16_works", lambda *_: True)
    exact, fast = object(), object()
    with caplog.at_level(logging.WARNING, logger="sparkling_sglang"):
        choice = head_choice.choose(OnGpu(torch.zeros(2, 64)), torch.ones(2), exact, fast)
    assert choice.name == "torch-dequantize" and choice.product is fast
    assert choice.details == {"kernel_note": "RuntimeError: no such device"}
    assert json.dumps(choice.details)
    (line,) = caplog.messages
    assert "falls back to torch's product" in line and "\n" not in line
    monkeypatch.setattr(head_choice, "bf16_works", fail)
    choice = head_choice.choose(OnGpu(torch.zeros(2, 64)), None, exact, fast)
    assert choice.product is exact
    assert choice.details == {"kernel_note": "; ".join(["RuntimeError: no such device"] * 2)}


def test_our_kernel_does_not_need_torchs_product_of_bf16_matrices(monkeypatch, caplog):
    exact, fast = object(), object()
    monkeypatch.setattr(head_choice, "bf16_works", lambda *_: False)
    monkeypatch.setattr(
        head_choice, "tuned", lambda q, scale, plain: head_choice.Choice(head_choice.OURS, plain)
    )
    choice = head_choice.choose(OnGpu(torch.zeros(2, 64)), None, exact, fast)
    assert (choice.name, choice.product) == (head_choice.OURS, exact)
    assert "BF16 matrices is wrong" in choice.details["kernel_note"]
    assert "many tokens stays in float32" in caplog.text


def test_the_kernel_takes_16_tokens_at_a_time_and_torch_very_many():
    calls = []

    def named(name):
        def product(x, q, scale):
            calls.append((name, len(x), x.stride(0)))
            return x[:, :1]

        return product

    product = head_choice.FewTokens(named("narrow"), named("wide"), named("plain"))
    for tokens in (0, 1, 8, 9, 16, 128, 17, 129):
        product(torch.zeros(tokens, 64, dtype=torch.bfloat16), None, None)
    assert [name for name, *_ in calls] == ["plain", "narrow", "narrow", "wide", "wide"] + (
        ["wide"] * 8 + ["wide"] * 2 + ["plain"]
    )
    assert [tokens for _, tokens, _ in calls[-3:]] == [16, 1, 129]
    calls.clear()
    x = torch.arange(40.0).unsqueeze(1).expand(40, 64).bfloat16().contiguous()
    assert torch.equal(product(x, None, None), x[:, :1])
    assert [tokens for _, tokens, _ in calls] == [16, 16, 8]
    calls.clear()
    product(torch.zeros(2, 64), None, None)
    assert calls[0][0] == "plain"
    calls.clear()
    # A slice that is not aligned to 16 bytes is copied, one that is is not.
    product(torch.zeros(2, 72, dtype=torch.bfloat16)[:, 8:], None, None)
    product(torch.zeros(2, 68, dtype=torch.bfloat16)[:, :64], None, None)
    assert [call[2] for call in calls] == [72, 64]
    product = head_choice.FewTokens(named("narrow"), None, named("plain"))
    calls.clear()
    product(torch.zeros(9, 64, dtype=torch.bfloat16), None, None)
    assert calls[0][0] == "plain"


def test_the_details_reach_the_status_file(monkeypatch):
    details = {"kernel_us": {"8": 90.6}, "kernel_from": "cache"}
    monkeypatch.setattr(
        head_choice,
        "choose",
        lambda q, scale, exact, fast: head_choice.Choice("sparkling-cuda", exact, details),
    )
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.randn(32, 64), requires_grad=False)
    fp8_head.quantize_head(module)
    assert module.quant_method.kernel == "sparkling-cuda"
    assert module.quant_method.details is details
