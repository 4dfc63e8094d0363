import math

import pytest
import torch

from octavo.errors import ConfigError
from octavo.quantization import distillation_loss


def logits(seed: int, *, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(seed))


TARGETS = torch.tensor([[0, 3, 6], [1, 1, 5]])


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_distillation_loss_is_the_sum_of_both_terms_per_token(weight, temperature):
    student, teacher = logits(0), logits(1)
    total = 0.0
    for s, t, target in zip(
        student.double().flatten(0, 1), teacher.double().flatten(0, 1), TARGETS.flatten().tolist(), strict=True
    ):
        p, q = (v.exp() / v.exp().sum() for v in (t / temperature, s / temperature))
        divergence = sum(float(a) * math.log(a / b) for a, b in zip(p, q, strict=True))
        entropy = -math.log(s.exp()[target] / s.exp().sum())
        total += (1 - weight) * entropy + weight * temperature**2 * divergence
    found = distillation_loss(student, teacher, TARGETS, weight=weight, temperature=temperature)
    assert found.item() == pytest.approx(total / 6, rel=1e-5)


def test_the_teacher_takes_no_gradient_and_agreement_gives_none():
    student, teacher = logits(0).requires_grad_(), logits(0).requires_grad_()
    distillation_loss(student, teacher, TARGETS, weight=1.0, temperature=3.0).backward()
    assert teacher.grad is None
    assert student.grad is not None
    torch.testing.assert_close(student.grad, torch.zeros_like(student), atol=1e-6, rtol=0)


def test_temperature_does_not_change_the_size_of_small_gradients():
    """Hinton's T²: near agreement the gradient is (student − teacher) / V, whatever T."""
    teacher = torch.zeros(1, 1, 5)
    for temperature in (1.0, 10.0):
        student = torch.tensor([[[0.01, -0.01, 0.0, 0.0, 0.0]]], requires_grad=True)
        distillation_loss(student, teacher, torch.zeros(1, 1, dtype=torch.long), weight=1.0, temperature=temperature
        ).backward()  # fmt: skip
        assert student.grad is not None
        torch.testing.assert_close(student.grad, student.detach() / 5, rtol=0.02, atol=2e-5)


def test_half_precision_logits_are_widened():
    found = distillation_loss(logits(0).bfloat16(), logits(1).bfloat16(), TARGETS)
    assert found.dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight": -0.1}, "weight"),
        ({"weight": 1.1}, "weight"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
    ],
)
def test_values_out_of_range(options, words):
    with pytest.raises(ConfigError, match=words):
        distillation_loss(logits(0), logits(1), TARGETS, **options)


def test_other_vocabularies_are_refused():
    with pytest.raises(ConfigError, match="the same shape"):
        distillation_loss(logits(0), logits(1)[..., :5], TARGETS)
