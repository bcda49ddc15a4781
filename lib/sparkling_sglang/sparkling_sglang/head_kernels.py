"""Compile and launch ``head_kernel.cu``: the FP8 head's product for up to 16 tokens on a GPU.

NVRTC and the driver are called through ``cuda.bindings``, which SGLang installs; the source is
compiled for the device and the shape in about a second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("head_kernel.cu")
ENTRY = b"fp8_head"
TILE_ROWS = 16


class KernelError(RuntimeError):
    """The kernel cannot be compiled or launched here; the message says why."""


@dataclass(frozen=True)
class Config:
    """How the kernel is built; each is described in ``head_kernel.cu``."""

    warps: int
    blocks: int
    groups: int = 1
    prefetch: int = 128

    def defines(self, hidden: int) -> dict[str, int]:
        """The macros that ``head_kernel.cu`` is compiled with."""
        return {
            "K": hidden,
            "WARPS": self.warps,
            "GROUPS": self.groups,
            "BLOCKS": self.blocks,
            "PREFETCH": self.prefetch,
        }

    def shared(self) -> int:
        """Bytes of shared memory that a block takes."""
        pitch = 20 if self.groups == 1 else 18
        return self.warps * self.groups * 8 * (2 * pitch + 1) * 4


def compile_kernel(config: Config, hidden: int, architecture: str) -> bytes:
    """The cubin for ``architecture`` such as ``sm_90``; needs no GPU.

    Raises:
        KernelError: NVRTC is missing or refuses; ends with the beginning of its log.
    """
    options = [f"-D{name}={value}" for name, value in config.defines(hidden).items()]
    return compile_source(SOURCE.read_bytes(), options, architecture)


def compile_source(source: bytes, options: list[str], architecture: str) -> bytes:
    """The cubin of any CUDA source; raises as :func:`compile_kernel`."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise KernelError(f"cuda.bindings cannot be imported: {error}") from error
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *options]

    def checked(result: tuple) -> object:
        code, *values = result
        if int(code) != 0:
            raise KernelError(f"NVRTC: {code}")
        return values[0] if values else None

    program = checked(nvrtc.nvrtcCreateProgram(source, b"kernel.cu", 0, [], []))
    try:
        encoded = [o.encode() for o in options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if int(code) != 0:
            # NVRTC writes into the object, and Python shares all byte strings of length 1.
            log = b" " * max(2, int(checked(nvrtc.nvrtcGetProgramLogSize(program))))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            text = log.decode(errors="replace").strip("\0 \n")
            raise KernelError(f"NVRTC {code}: {text[:2000]}")
        cubin = b" " * int(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _driver(result: tuple) -> object:
    code, *values = result
    if int(code) != 0:
        raise KernelError(f"CUDA driver: {code}")
    return values[0] if values else None


class Module:
    """A loaded cubin and its functions, in the current device's primary context."""

    def __init__(self, cubin: bytes) -> None:
        from cuda.bindings import driver

        self._api = driver
        self._module = _driver(driver.cuModuleLoadData(cubin))

    def function(self, name: bytes) -> object:
        """The kernel ``name``."""
        return _driver(self._api.cuModuleGetFunction(self._module, name))


def launch(
    function: object,
    grid: int,
    threads: int,
    stream: int,
    values: Iterable[int],
    types: Iterable[type],
) -> None:
    """Launch on ``stream`` (a ``cudaStream_t`` as a number); may be captured in a CUDA graph."""
    from cuda.bindings import driver

    _driver(
        driver.cuLaunchKernel(
            function, grid, 1, 1, threads, 1, 1, 0, stream,
            (tuple(values), tuple(types)), 0,
        )
    )  # fmt: skip


class HeadKernel:
    """The product for one device, shape and configuration.

    Args:
        cubin: what :func:`compile_kernel` made for ``config``.
        rows: of the head.
        multiprocessors: of the device.
        device: where ``q``, ``scale`` and every ``x`` are; the current one if None.
    """

    TYPES = (*(ctypes.c_void_p,) * 4, *(ctypes.c_int,) * 4)

    def __init__(
        self, cubin: bytes, config: Config, rows: int, multiprocessors: int, device=None
    ) -> None:
        import torch

        self.config, self.rows = config, rows
        with torch.cuda.device(device):
            self._module = Module(cubin)
        self._function = self._module.function(ENTRY)
        blocks = min(multiprocessors * config.blocks, -(-rows // TILE_ROWS))
        self._block_rows = -(-rows // blocks)
        self._grid = -(-rows // self._block_rows)

    def __call__(self, x, q, scale):
        """Logits [tokens, rows] bfloat16 of ``x`` [tokens <= 8 * groups, hidden] bfloat16."""
        import torch

        out = torch.empty(x.shape[0], self.rows, dtype=torch.bfloat16, device=x.device)
        values = (
            q.data_ptr(),
            scale.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            self.rows,
            x.stride(0),
            self._block_rows,
        )
        with torch.cuda.device(x.device):
            stream = torch.cuda.current_stream().cuda_stream
            threads = self.config.warps * 32
            launch(self._function, self._grid, threads, stream, values, self.TYPES)
        return out
