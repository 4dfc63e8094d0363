"""Compile for Hopper, on a machine without a GPU, every kernel that a list of calls would launch.

    python -m tests.triton.hopper_build [MODULE OF CALLS ...]

Triton brings its assembler along, so all but the launch can happen anywhere. The calls run as they are, with tensors
on the CPU; a launch compiles its kernel for compute capability 9.0 and does nothing more. Prints a line of JSON for
each: the call, the kernel, a thread's registers, its threads, stack and shared memory in bytes, its tensor-core
instructions, what it writes to and how, where 32-bit products lead to, what Triton reduces wrongly, and, if it converts
to FP8, where stored bytes come from.
A stack means that registers were spilled or an array is indexed at run time.
"""

import importlib
import json
import pkgutil
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from octavo.kernels.triton import codes, launching
from tests.triton import calls, ptx_addresses, sass_bytes, ttgir_reductions

HOPPER = GPUTarget("cuda", 90, 32)
_BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"


class NoDevice:
    """The little of a driver that compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def instead_of_launching() -> Iterator[list[Any]]:
    """Collects the kernels that would have been launched, compiled."""
    compiled: list[Any] = []
    run, tuned = JITFunction.run, Autotuner.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, **(kwargs | {"warmup": True})))
        return compiled[-1]

    def every_config(self: Any, *args: Any, **kwargs: Any) -> None:
        for config in self.configs:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    def as_triton_does(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        kernel[grid](*arguments, **constants)

    triton.runtime.driver.set_active(NoDevice())
    JITFunction.run, Autotuner.run = compile_only, every_config
    launch, launching.launch = launching.launch, as_triton_does
    try:
        yield compiled
    finally:
        JITFunction.run, Autotuner.run = run, tuned
        launching.launch = launch


def resources(kernel: Any, sass: str) -> dict[str, Any]:
    """What the kernel takes of a multiprocessor, its tensor-core instructions, and what it does to memory."""
    stored_bytes, stored_codes = sass_bytes.stored(sass)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_BINARIES / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"\b{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    products = sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S*", kernel.asm["ptx"])))
    threads = kernel.metadata.num_warps * 32
    return {
        "registers": registers,
        "threads": threads,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "tensor_core": products,
        "written": ptx_addresses.written(kernel.asm["ptx"], kernel.src.signature),
        "narrow_factors": ptx_addresses.narrow_factors(kernel.asm["ptx"], kernel.src.signature),
        "gaps": ttgir_reductions.with_gaps(kernel.asm["ttgir"]),
        "stored_bytes": stored_bytes,
        "stored_codes": stored_codes,
    }


def disassembled(kernels: list[Any]) -> Iterator[str]:
    """SASS of the kernels that convert to FP8, nothing of others.

    nvdisasm takes most of a second to start, whatever it is given. So it is given the instructions of all kernels at
    once, as if they were one kernel's; an instruction is 16 bytes, and a line.
    """
    texts = [_instructions(kernel.asm["cubin"]) if "satfinite" in kernel.asm["ptx"] else b"" for kernel in kernels]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(texts))
        file.flush()
        command = [str(_BINARIES / "nvdisasm"), "--binary", "SM90", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = (line for line in printed.splitlines() if "/*" in line)
    for text in texts:
        yield "\n".join(next(lines) for _ in range(len(text) // 16))


def _instructions(cubin: bytes) -> bytes:
    """The executable sections of an ELF file."""
    [table] = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<2H", cubin, 0x3A)
    sections = [struct.unpack_from("<2I4Q", cubin, table + size * index) for index in range(count)]
    return b"".join(cubin[start : start + length] for _, _, flags, _, start, length in sections if flags & 4)


def all_calls(modules: list[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    names = modules or [module.name for module in pkgutil.iter_modules(calls.__path__)]
    for name in names:
        module = importlib.import_module(f"tests.triton.calls.{name}")
        for call, function in module.CALLS.items():
            yield f"{name}: {call}", function


def main() -> None:
    codes._capability = lambda device: (9, 0)  # type: ignore[assignment]
    calls_of_kernels, kernels = [], []
    for call, function in all_calls(sys.argv[1:]):
        with instead_of_launching() as compiled:
            function()
        kernels += compiled
        calls_of_kernels += [call] * len(compiled)
    for call, kernel, sass in zip(calls_of_kernels, kernels, disassembled(kernels), strict=True):
        print(json.dumps({"call": call, "kernel": kernel.metadata.name} | resources(kernel, sass)))


if __name__ == "__main__":
    main()
