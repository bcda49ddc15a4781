"""The FP8 head's CUDA kernel: its arithmetic on a CPU, and how it is launched."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sparkling_sglang import head_kernels, head_trial
from sparkling_sglang.head_kernels import Config

HIDDEN = 640


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """``compile(config)`` -> the kernel as a function on CPU tensors."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile the kernel for a CPU")
    folder = tmp_path_factory.mktemp("kernel")

    @cache
    def compiled(config: Config):
        library = folder / f"{config.warps}-{config.groups}.so"
        defines = [f"-D{name}={value}" for name, value in config.defines(HIDDEN).items()]
        subprocess.run(
            [compiler, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *defines,
             f'-DHEAD_KERNEL="{head_kernels.SOURCE}"', "-o", str(library),
             str(Path(__file__).with_name("head_kernel_host.cpp")), "-lpthread"],
            check=True,
        )  # fmt: skip
        run = ctypes.CDLL(str(library)).run
        run.argtypes = [*(ctypes.c_void_p,) * 4, *(ctypes.c_int,) * 4]

        def product(x, q, scale, rows_per_block):
            out = torch.full((len(x), len(q)), float("nan"), dtype=torch.bfloat16)
            run(q.data_ptr(), scale.data_ptr(), x.data_ptr(), out.data_ptr(), len(x), len(q),
                x.stride(0), rows_per_block)  # fmt: skip
            return out

        return product

    return compiled


@pytest.mark.parametrize(
    ("config", "cases"),
    [
        # Rows that end within a tile, blocks that do not begin at one, every number of tokens.
        (Config(warps=2, blocks=1), [(1, 83, 83), (3, 50, 17), (8, 33, 33)]),
        (Config(warps=5, blocks=1, groups=2), [(9, 33, 20), (16, 20, 20)]),
    ],
)
def test_the_kernel_computes_the_dequantized_product(on_cpu, config, cases):
    product = on_cpu(config)
    for tokens, rows, rows_per_block in cases:
        q, scale = head_trial.random_head(rows, HIDDEN, torch.device("cpu"))
        # Tokens of very different size, and one of zeros: each has a scale of its own.
        x = torch.randn(tokens, HIDDEN + 8, generator=torch.Generator().manual_seed(tokens))
        x *= torch.logspace(-20, 15, tokens).unsqueeze(1)
        x[tokens // 2] *= tokens == 1
        x = x.bfloat16()[:, :HIDDEN]
        got = product(x, q, scale, rows_per_block)
        exact = x.double() @ (q.double() * scale.double().unsqueeze(1)).T
        sizes = x.double().abs() @ (q.double().abs() * scale.double().unsqueeze(1)).T
        # One rounding to BF16; the sums are float32's.
        assert bool(((got.double() - exact).abs() <= exact.abs() * 2**-8 + sizes * 1e-6).all())


def test_infinite_activations_do_not_become_finite_logits(on_cpu):
    product = on_cpu(Config(warps=2, blocks=1))
    q, scale = head_trial.random_head(16, HIDDEN, torch.device("cpu"))
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    x[1, 5] = float("inf")
    got = product(x, q, scale, 16)
    assert bool(got[0].isfinite().all()) and not bool(got[1].isfinite().any())


def test_numbers_at_both_ends_of_bf16_and_nan(on_cpu):
    """The power of two that brings a token's largest value to a half's is not always one."""
    product = on_cpu(Config(warps=2, blocks=1))
    q, scale = head_trial.random_head(20, HIDDEN, torch.device("cpu"))
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(5))
    x *= torch.tensor([2.0**-131, 2.0**-124, 2.0**108, 1.0]).unsqueeze(1)
    x = x.bfloat16()
    assert x[0].abs().max() < 2.0**-126 and x[0].any()  # subnormal
    x[3, 9] = float("nan")
    got = product(x, q, scale, 20)
    exact = (x.double() @ (q.double() * scale.double().unsqueeze(1)).T)[:3]
    sizes = (x.double().abs() @ (q.double().abs() * scale.double().unsqueeze(1)).T)[:3]
    # The smallest step of BF16 is 2**-133.
    bound = exact.abs() * 2**-8 + sizes * 1e-6 + 2**-134
    assert bool(((got[:3].double() - exact).abs() <= bound).all())
    assert bool(got[3].isnan().all())
    q.view(torch.uint8)[7, 100] = 0x7F  # a weight that is NaN: its row's logits alone
    got = product(torch.ones(2, HIDDEN, dtype=torch.bfloat16), q, scale, 20)
    assert got.isnan().any(dim=0).nonzero().flatten().tolist() == [7]


def test_shared_memory_is_what_the_source_declares():
    text = head_kernels.SOURCE.read_text(encoding="utf-8")
    assert "__shared__ float partial[2][WARPS][TOKENS][PITCH];" in text
    assert "__shared__ float largest[WARPS][TOKENS];" in text
    assert text.count("__shared__") == 2 and "(GROUPS == 1 ? 20 : 18)" in text
    # As ptxas reports it for sm_90.
    assert [Config(20, 1).shared(), Config(20, 1, groups=2).shared()] == [26_240, 47_360]


def test_the_kernel_is_loaded_and_launched_on_the_devices_own_context(monkeypatch):
    """SGLang's worker has its device current; a script on a machine with two may not."""
    current, seen = [], []

    @contextmanager
    def device(which):
        current.append(which)
        yield
        current.pop()

    class Module:
        def __init__(self, cubin):
            seen.append(("load", *current))

        def function(self, name):
            return "function"

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(head_kernels, "Module", Module)
    monkeypatch.setattr(
        head_kernels, "launch", lambda *told: seen.append(("launch", *current, *told[1:4]))
    )
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    kernel = head_kernels.HeadKernel(b"", Config(2, 1), 100, 4, "mine")
    assert kernel(x, x, x).shape == (3, 100)
    assert seen == [("load", "mine"), ("launch", x.device, 4, 64, 7)]
