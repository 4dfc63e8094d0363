"""What the variants of the parts do in a call: the work they claim, the inputs they read, what they leave."""

from functools import partial
from itertools import cycle

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.hopper.model import random_llama
from benchmarks.hopper.parts import card, gemms, linears, training
from benchmarks.hopper.runner import PARTS
from benchmarks.hopper.session import Rotation, Timings, Variant
from benchmarks.hopper.steps import Memory, TrainingStep, leaf, memory_of


def operations(entry):
    """Additions and multiplications of one call, as torch counts them."""
    run = entry.build()
    with FlopCounterMode(display=False) as counted:
        run()
    return counted.get_total_flops()


@pytest.mark.parametrize("how", [linears.EAGER, linears.GRAPH, linears.COMPILED])
def test_work_of_a_linear_is_what_torch_counts(session, how):
    for case in session.sizes.linears:
        variants = linears._variants(session, case, torch.nn.Parameter(session.randn(case.n, case.k)), how)
        assert {round(entry.work * 1e12) for entry in variants.values()} == {operations(variants[linears._base(how)])}
        assert {entry.unit for entry in variants.values()} == {"TFLOP"}


def test_every_input_of_a_linear_is_a_graph_of_its_own(session, monkeypatch):
    captured: list[TrainingStep] = []
    replayed: list[TrainingStep] = []

    def graphed(_, run):
        captured.append(run)
        return partial(replayed.append, run)

    monkeypatch.setattr(type(session), "graphed", graphed)
    counts = cycle([2, 3])  # of inputs, of the outputs' gradients
    monkeypatch.setattr(type(session), "rotation", lambda _, make, __: Rotation([make() for _ in range(next(counts))]))
    case = session.sizes.linears[0]
    weight = torch.nn.Parameter(session.randn(case.n, case.k))
    for variant in linears._variants(session, case, weight, linears.GRAPH).values():
        run = variant.build()
        assert replayed == captured
        replayed.clear()
        for _ in range(6):
            run()
        assert len({step.inputs().data_ptr() for step in captured}) == 2
        assert len({step.grads().data_ptr() for step in captured}) == 3
        assert replayed[:3] == replayed[3:]
        assert set(replayed) == set(captured)
        captured.clear()
        replayed.clear()


def test_work_of_a_product_is_what_torch_counts(session):
    product = card._product(session, card._bf16)
    assert round(product.work * 1e12) == operations(product)
    m, k, n = session.sizes.gemms[0]
    bf16, fp8 = gemms._bf16(session, m, k, n), gemms._fp8(session, "tensorwise", m, k, n)
    assert round(bf16.work * 1e12) == round(fp8.work * 1e12) == operations(bf16)


def test_work_of_a_copy_is_the_bytes_of_both_sides(session):
    copy = card._copy(session)
    both = copy.build()()
    assert isinstance(both, torch.Tensor)
    assert round(copy.work * 1e9) == 2 * both.nbytes


def test_work_of_steps_is_tokens(session, monkeypatch):
    variants: dict[str, Variant] = {}

    def compare(_, given, **__):
        variants.update({f"{len(variants)}, {name}": entry for name, entry in given.items()})
        return Timings({}, {}, {}, ())

    monkeypatch.setattr(type(session), "compare", compare)
    tokens = {}
    for name in ("layer", "training"):
        variants.clear()
        (part,) = (part for part in PARTS if part.name == name)
        list(part.measure(session))
        tokens[name] = {entry.work for entry in variants.values()}
    assert tokens["layer"] == {2 * 16}  # sequences of so many positions
    assert tokens["training"] == {2 * 16}


def test_a_step_leaves_no_gradient(session):
    module = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    inputs, grads = (session.rotation(make, 1) for make in (lambda: leaf(session, 2, 8), lambda: session.randn(2, 4)))
    seen = []
    module.weight.register_hook(lambda grad: seen.append(grad.shape))
    step = TrainingStep(module, list(module.parameters()), inputs, grads)
    step()
    assert memory_of(session, step) == Memory(0, 0)
    assert seen == [(4, 8)] * 3
    assert module.weight.grad is None
    assert all(x.grad is None for x in inputs.items)


def test_failed_step_leaves_no_gradient_on_a_shared_weight(session):
    module = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    inputs, grads = (session.rotation(make, 1) for make in (lambda: leaf(session, 2, 8), lambda: session.randn(2, 4)))

    class Failing(torch.autograd.Function):
        """Its input's gradient needs more memory than there is."""

        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, grad):
            assert module.weight.grad is not None
            raise torch.cuda.OutOfMemoryError("no memory")

    def run(x):
        return module(Failing.apply(x))

    with pytest.raises(torch.cuda.OutOfMemoryError):
        TrainingStep(run, list(module.parameters()), inputs, grads)()
    assert module.weight.grad is None
    assert module.bias.grad is None


def test_variants_of_a_training_step_share_every_tensor(session):
    model = random_llama(session)
    copied = training.sharing_copy(model)
    assert copied is not model
    assert copied.model.layers[0] is not model.model.layers[0]
    for own, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert own is other
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
