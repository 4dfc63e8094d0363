"""The trace of a covariance against numpy's, and the error against a known perturbation."""

import copy

import numpy as np
import pytest
import torch

import octavo
from octavo.training.gradient_noise import GradientProbe, gradient_noise


def probe(model):
    return GradientProbe(model=model, loss=lambda batch: model(batch[:, :4]).sub(batch[:, 4:]).square().mean())


@pytest.fixture
def batches():
    return list(torch.randn(8, 16, 7, generator=torch.Generator().manual_seed(3)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


def gradients(model, batches):
    rows = []
    for batch in batches:
        loss = model(batch[:, :4]).sub(batch[:, 4:]).square().mean()
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]).double())
    return torch.stack(rows).numpy()


def test_variance_is_the_trace_of_numpys_covariance(model, batches):
    noise = gradient_noise({"fp32": probe(model)}, batches)["fp32"]
    assert noise.variance == pytest.approx(np.trace(np.cov(gradients(model, batches), rowvar=False)), rel=1e-9)
    assert noise.error == 0.0


def test_error_is_relative_to_the_first_probe(model, batches):
    """A loss twice as large has gradients twice as large: error exactly 1, variance four times."""
    twice = GradientProbe(model=model, loss=lambda batch: 2 * probe(model).loss(batch))
    noise = gradient_noise({"fp32": probe(model), "twice": twice}, batches)
    assert noise["twice"].error == pytest.approx(1.0, rel=1e-6)
    assert noise["twice"].variance == pytest.approx(4 * noise["fp32"].variance, rel=1e-6)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_fp8_gradients_differ_a_little(batches, recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.SiLU(), torch.nn.Linear(64, 3))
    converted = copy.deepcopy(model)
    octavo.convert(converted, recipe)
    noise = gradient_noise({"fp32": probe(model), recipe: probe(converted)}, batches)
    assert 0.005 < noise[recipe].error < 0.2
    assert noise[recipe].variance == pytest.approx(noise["fp32"].variance, rel=0.1)


def test_models_hold_no_gradient_afterwards(model, batches):
    gradient_noise({"fp32": probe(model)}, batches)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_batch_has_no_spread(model, batches):
    with pytest.raises(ValueError, match="2 batches"):
        gradient_noise({"fp32": probe(model)}, batches[:1])
