"""What ``octavo doctor --env`` says of a machine: this one, one without native kernels, one with a GPU."""

import json

import pytest
import torch

from octavo.cli.doctor import environment as machine
from octavo.errors import BackendError
from octavo.formats import E4M3
from octavo.kernels import native_bindings, scaled_mm
from octavo.kernels.dispatch import BACKENDS
from octavo.numerics import Accumulate, PerBlock, PerRow, PerTensor, QuantizedTensor, quantize

ABSENCE = "No module named 'octavo.kernels._native'"
GRANULARITIES = {
    "tensorwise": (PerTensor(), PerTensor()),
    "rowwise": (PerRow(), PerRow()),
    "blockwise": (PerBlock(1, 128), PerBlock(128, 128)),
    "mxfp8": (PerBlock(1, 32), PerBlock(1, 32)),
    "hopper-fast": (PerTensor(), PerTensor()),
}


@pytest.fixture
def unbuilt(monkeypatch):
    monkeypatch.setattr(native_bindings, "_absence", ABSENCE)


def environment(octavo):
    return json.loads(octavo("doctor", "--env", "--json").stdout)


def test_facts_are_those_of_this_process(octavo):
    facts = environment(octavo)["environment"]
    assert facts["torch"] == torch.__version__
    assert facts["devices"][0] == "cpu"
    assert facts["torch_threads"] == torch.get_num_threads()
    assert facts["native_levels"] == list(native_bindings.levels())
    assert facts["native_absence"] == native_bindings.why_absent()


@pytest.mark.skipif(bool(native_bindings.why_absent()), reason=f"no native kernels: {native_bindings.why_absent()}")
def test_native_kernels_use_as_many_threads_as_torch(octavo):
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            facts = environment(octavo)["environment"]
            assert facts["torch_threads"] == facts["native_threads"] == count
            assert f"{count} in torch, {count} in native kernels" in octavo("doctor", "--env").stdout
    finally:
        torch.set_num_threads(before)
    assert facts["native_level"] == native_bindings.levels()[-1]
    assert f"{native_bindings.levels()[-1]} is used" in octavo("doctor", "--env").stdout


@pytest.mark.parametrize("name", GRANULARITIES)
def test_selected_backend_matches_dispatch(octavo, name):
    """Every backend named as able multiplies such operands, and no other does."""
    products = environment(octavo)["products"]
    product = next(each for each in products if (each["problem"], each["device"]) == (name, "cpu"))
    a, b = (operand(granularity) for granularity in GRANULARITIES[name])
    how = Accumulate.HOPPER_FAST if name == "hopper-fast" else Accumulate.FP32
    able = [backend.name for backend in BACKENDS if multiplies(backend.name, a, b, how)]
    assert product["able"] == able
    assert product["backend"] == able[0]
    before = [backend.name for backend in BACKENDS]
    assert list(product["passed_over"]) == before[: before.index(able[0])]


def operand(granularity) -> QuantizedTensor:
    return quantize(torch.ones(8, 256), E4M3, granularity=granularity)


def multiplies(backend: str, a: QuantizedTensor, b: QuantizedTensor, how: Accumulate) -> bool:
    try:
        scaled_mm(a, b, backend=backend, accumulate=how)
    except BackendError:
        return False
    return True


@pytest.mark.usefixtures("unbuilt")
def test_absence_of_native_kernels_has_a_reason(octavo):
    found = environment(octavo)
    facts, printed = found["environment"], " ".join(octavo("doctor", "--env").stdout.split())
    assert (facts["native_level"], facts["native_levels"], facts["native_threads"]) == (None, [], 0)
    assert facts["native_absence"] == ABSENCE
    assert f"none, {ABSENCE}" in printed
    assert "more passes over memory" in printed
    for problems, backend in (("products", "torch_cpu"), ("casts", "reference")):
        tensorwise = found[problems][0]
        assert tensorwise["backend"] == backend
        assert ABSENCE in tensorwise["passed_over"]["native"]


def test_a_gpu_is_named_and_has_its_own_rows(octavo, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found = environment(octavo)
    assert found["environment"]["devices"] == ["cpu", "NVIDIA H100"]
    chosen = {each["problem"]: each for each in found["products"] if each["device"] == "cuda"}
    assert chosen["tensorwise"]["backend"] == "torch_cuda"
    assert chosen["tensorwise"]["passed_over"] == {}
    assert chosen["hopper-fast"]["backend"] == "torch_cuda"
    assert "not other block scales" in chosen["mxfp8"]["passed_over"]["torch_cuda"]


def test_the_table_names_every_problem_and_its_reasons(octavo):
    printed = " ".join(octavo("doctor", "--env").stdout.split())
    assert all(f"{name} cpu" in printed for name in machine.PROBLEMS | machine.CASTS)
    assert "native: it rounds to nearest" in printed
    assert "torch_cuda: it runs on CUDA, and the operands are on cpu" in printed
