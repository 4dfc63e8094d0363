"""``octavo doctor --env``: versions, devices, native kernels, and backends selected for typical casts and GEMMs."""

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from octavo._lazy import own_version
from octavo.cli.console import print_json, print_table
from octavo.formats import E4M3
from octavo.kernels import explain, native_bindings, triton_bindings
from octavo.kernels.backend import Backend, CastBackend, CastProblem, MatmulProblem
from octavo.kernels.dispatch import BACKENDS, CAST_BACKENDS
from octavo.kernels.threads import count_threads
from octavo.numerics import Accumulate, PerBlock, PerRow, PerTensor, Rounding
from octavo.training.study_facts import processor_name

__all__ = ["CASTS", "PROBLEMS", "show_environment"]

ABSENT = "none, {}; torch's operations give the same numbers, with more passes over memory"

_TENSORWISE = MatmulProblem(
    m=1024,
    n=1024,
    k=1024,
    device="cpu",
    a_dtype=E4M3.torch_dtype,
    b_dtype=E4M3.torch_dtype,
    a_granularity=PerTensor(),
    b_granularity=PerTensor(),
    out_dtype=torch.bfloat16,
    bias=False,
    accumulate=Accumulate.FP32,
)
PROBLEMS = {
    "tensorwise": _TENSORWISE,
    "rowwise": _TENSORWISE._replace(a_granularity=PerRow(), b_granularity=PerRow()),
    "blockwise": _TENSORWISE._replace(a_granularity=PerBlock(1, 128), b_granularity=PerBlock(128, 128)),
    "mxfp8": _TENSORWISE._replace(a_granularity=PerBlock(1, 32), b_granularity=PerBlock(1, 32)),
    "hopper-fast": _TENSORWISE._replace(accumulate=Accumulate.HOPPER_FAST),
}
_TENSORWISE_CAST = CastProblem(
    shape=torch.Size((1024, 1024)), dtype=torch.bfloat16, device="cpu", format=E4M3, granularity=PerTensor()
)
CASTS = {
    "tensorwise": _TENSORWISE_CAST,
    "rowwise": _TENSORWISE_CAST._replace(granularity=PerRow()),
    "blockwise": _TENSORWISE_CAST._replace(granularity=PerBlock(1, 128)),
    "mxfp8": _TENSORWISE_CAST._replace(granularity=PerBlock(1, 32)),
    "stochastic": _TENSORWISE_CAST._replace(rounding=Rounding.STOCHASTIC),
    "decoding": _TENSORWISE_CAST._replace(decodes=True),
}


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Selected backend of a typical cast or GEMM, all backends that support it, and why faster ones do not."""

    problem: str
    device: str
    backend: str
    able: tuple[str, ...]
    passed_over: dict[str, str]


def show_environment(*, as_json: bool) -> None:
    """Print versions, devices, native kernels and the selected backends."""
    facts, devices = environment(), _device_types()
    casts, gemms = list(choices(CASTS, CAST_BACKENDS, devices)), list(choices(PROBLEMS, BACKENDS, devices))
    if as_json:
        print_json({"environment": facts, "casts": list(map(asdict, casts)), "products": list(map(asdict, gemms))})
        return
    print_table("Environment", ["", ""], _fact_rows(facts), left=2)
    columns = ["device", "backend", "alternatives", "rejected because"]
    for title, first, table in (
        ("Cast backend of bfloat16 to E4M3, 1024 x 1024", "scales", casts),
        ("GEMM backend of E4M3 x E4M3, 1024 x 1024 x 1024", "scales or sums", gemms),
    ):
        print_table(title, [first, *columns], map(_cells, table), left=1 + len(columns))


def environment() -> dict[str, Any]:
    """Facts about the machine, for JSON.

    ``native_threads`` is the number of threads of native kernels. Without native kernels, ``native_level`` is None and
    ``native_absence`` is the reason. ``triton_absence`` is the reason why no Triton kernel casts, or None.
    """
    return {
        "octavo": own_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "devices": _devices(),
        "cpu": processor_name(),
        "torch_threads": torch.get_num_threads(),
        "native_threads": count_threads(),
        "native_levels": list(native_bindings.levels()),
        "native_level": next(reversed(native_bindings.levels()), None),
        "native_absence": native_bindings.why_absent(),
        "triton_absence": triton_bindings.why_absent(),
    }


def choices(
    problems: Mapping[str, Any], backends: tuple[Backend, ...] | tuple[CastBackend, ...], devices: tuple[str, ...]
) -> Iterator[BackendChoice]:
    """Yield the choice among ``backends`` for each typical problem on each type of device."""
    unsupported: dict[str, Callable[[Any], str | None]] = {each.name: each.unsupported_reason for each in backends}
    for device in devices:
        for name, typical in problems.items():
            problem = typical._replace(device=device)
            selection = explain(problem)
            able = tuple(backend for backend, reason in unsupported.items() if reason(problem) is None)
            yield BackendChoice(name, device, selection.backend, able, dict(selection.rejected))


def _devices() -> list[str]:
    return ["cpu", *(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))]


def _device_types() -> tuple[str, ...]:
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def _fact_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("octavo", "torch", "python"):
        yield name, facts[name]
    yield "devices", ", ".join(facts["devices"])
    yield "CPU", facts["cpu"]
    yield "threads", f"{facts['torch_threads']} in torch, {facts['native_threads']} in native kernels"
    yield "native kernels", _native(facts)
    absence = facts["triton_absence"]
    yield "casts on GPU", "Triton kernels" if absence is None else f"none, {absence}"


def _native(facts: dict[str, Any]) -> str:
    if (absence := facts["native_absence"]) is not None:
        return ABSENT.format(absence)
    return f"{facts['native_level']} is used, of {', '.join(facts['native_levels'])}"


def _cells(choice: BackendChoice) -> list[str]:
    other_backends = [name for name in choice.able if name != choice.backend]
    reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.passed_over.items())
    return [choice.problem, choice.device, choice.backend, ", ".join(other_backends) or "–", reasons or "–"]
