"""Distillation from the model before quantization, in addition to the next-token loss.

    loss = (1 − weight) · cross-entropy(student, targets)
         + weight · T² · KL(softmax(teacher / T) ‖ softmax(student / T))

A target token is a single outcome; the teacher provides the whole distribution, so a few steps are enough to recover
the model's quality. T² compensates the gradients of the second term, which shrink by 1 / T² as the logits are divided
(Hinton et al., arXiv 1503.02531, section 2).
"""

import math

import torch.nn.functional as F
from torch import Tensor

from octavo.errors import ConfigError
from octavo.training.evaluate import token_loss

__all__ = ["check_distillation", "distillation_loss"]


def distillation_loss(
    student_logits: Tensor, teacher_logits: Tensor, targets: Tensor, *, weight: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """Mean loss over tokens, computed in FP32.

    Args:
        student_logits: [B, T, V].
        teacher_logits: [B, T, V]; detached.
        targets: token ids [B, T].
        weight: weight of the divergence, from 0 to 1; the cross-entropy has 1 − weight.
        temperature: positive; above 1, unlikely tokens count more.

    Raises:
        ConfigError: a weight or temperature out of range, or logits of different shapes.

    Example:
        >>> logits = torch.zeros(1, 2, 4)
        >>> distillation_loss(logits, logits, torch.zeros(1, 2, dtype=torch.long), weight=0.5).item()  # log(4) / 2
        0.6931...
    """
    check_distillation(weight, temperature)
    if student_logits.shape != teacher_logits.shape:
        raise ConfigError(
            f"the student's logits {tuple(student_logits.shape)} and the teacher's {tuple(teacher_logits.shape)} must "
            "have the same shape; use the same tokens and vocabulary for both"
        )
    entropy = token_loss(student_logits, targets)
    if not weight:
        return entropy
    student = F.log_softmax(student_logits.float() / temperature, dim=-1).flatten(0, -2)
    teacher = F.log_softmax(teacher_logits.detach().float() / temperature, dim=-1).flatten(0, -2)
    divergence = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
    return (1 - weight) * entropy + weight * temperature**2 * divergence


def check_distillation(weight: float, temperature: float) -> None:
    """Raise ConfigError unless weight and temperature are in range."""
    if not 0 <= weight <= 1:
        raise ConfigError(f"the weight of distillation must be from 0 to 1, not {weight}")
    if not 0 < temperature < math.inf:
        raise ConfigError(f"the temperature of distillation must be positive and finite, not {temperature}")
