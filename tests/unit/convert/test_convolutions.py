"""Convolutions that are products: against torch's own, and against a linear layer of the patches, bit for bit."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import octavo
from octavo.convert.convolutions import is_product
from octavo.errors import ConfigError
from tests.contract.gemm_oracle import recorded_products

PRODUCTS = {
    "pointwise": (nn.Conv1d(8, 12, 1), (3, 8, 7)),
    "pointwise, every second place": (nn.Conv2d(8, 12, 1, stride=2, bias=False), (2, 8, 6, 5)),
    "patches, with a rest": (nn.Conv2d(3, 16, (2, 4), (2, 4)), (2, 3, 7, 9)),
    "patches with gaps between them": (nn.Conv2d(3, 16, 2, 3), (2, 3, 9, 9)),
    "frames": (nn.Conv3d(3, 16, (2, 4, 4), (2, 4, 4), padding="valid"), (2, 3, 4, 8, 8)),
    "one image": (nn.Conv2d(3, 16, 4, 4), (3, 8, 8)),
}
OTHERS = {
    "overlapping": nn.Conv2d(3, 8, 3),
    "padded": nn.Conv2d(3, 8, 2, 2, padding=1),
    "same": nn.Conv1d(8, 8, 1, padding="same"),
    "dilated": nn.Conv2d(3, 8, 2, 4, dilation=2),
    "grouped": nn.Conv1d(8, 8, 1, groups=2),
    "transposed": nn.ConvTranspose2d(8, 3, 2, 2),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_output_is_a_kernel_times_a_patch(name):
    """With every cast left out, the converted convolution is torch's; with casts, it is a linear layer's of patches."""
    torch.manual_seed(0)
    original, shape = PRODUCTS[name]
    plain = nn.Sequential(copy.deepcopy(original))
    model, x = copy.deepcopy(plain), torch.randn(shape)
    assert octavo.convert(model, convolutions=True).weights == ("0.weight",)
    y, exact = model(x), plain(x)
    assert y.shape == exact.shape
    assert torch.allclose(y, exact, atol=0.2)
    kernel = original.weight.flatten(1)
    linear = nn.Sequential(nn.Linear(kernel.shape[1], len(kernel), bias=original.bias is not None))
    linear.load_state_dict({"0.weight": kernel} | ({"0.bias": original.bias} if original.bias is not None else {}))
    octavo.convert(linear)
    assert torch.equal(y.movedim(len(shape) - len(original.kernel_size) - 1, -1), linear(_patches(original, x)))


def _patches(convolution, x):
    """The places where a kernel of ones at one input finds it: torch's own convolution by an identity."""
    channels, sizes = convolution.in_channels, convolution.kernel_size
    count = channels * torch.Size(sizes).numel()
    identity = torch.eye(count).reshape(count, channels, *sizes)
    functions = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
    return functions[len(sizes)](x, identity, stride=convolution.stride).movedim(x.ndim - len(sizes) - 1, -1)


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_stay(name):
    assert not is_product(OTHERS[name])
    model = nn.Sequential(copy.deepcopy(OTHERS[name]), nn.Linear(4, 4))
    report = octavo.convert(model, convolutions=True)
    assert "the kernel of a convolution" in report.parameters["0.weight"]
    assert report.gains == {}


def test_training_runs_three_products_and_restores_the_convolution():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.Conv2d(16, 8, 1))
    state, x = {key: value.clone() for key, value in model.state_dict().items()}, torch.randn(2, 3, 8, 8)
    exact = model(x)
    with pytest.warns(UserWarning, match="changed nothing"):
        plain = octavo.convert(model)
    assert plain.gains == {"convolutions=True": 1.0}
    report = octavo.convert(model, "delayed", convolutions=True)
    assert report.shares.multiplications == 1
    assert list(model.state_dict()) == list(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        with recorded_products() as products:
            model(x).square().mean().backward()
        optimizer.step()
    assert len(products) == 5, "x takes no gradient"
    assert all(parameter.grad is not None for parameter in model.parameters())
    saved = io.BytesIO()
    torch.save(copy.deepcopy(model), saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved, weights_only=False)(x), model(x))
    assert octavo.restore(model) == ("0", "2")
    assert [type(layer) for layer in model] == [nn.Conv2d, nn.GELU, nn.Conv2d]
    assert torch.equal(model(x), exact)


def test_patterns_and_sizes_choose_among_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Conv2d(16, 8, 1))
    assert octavo.convert(model, convolutions=True, skip=["0"]).weights == ("1.weight",)
    octavo.restore(model)
    assert octavo.convert(model, convolutions=True, min_weight_elements=200).weights == ("0.weight",)
    octavo.restore(model)
    with pytest.raises(ConfigError, match="pattern '0' matches no layer"):
        octavo.convert(nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Linear(4, 4)), skip=["0"])
