"""A model's layers compiled one by one share a graph: what the training part rests on."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from benchmarks.hopper.model import random_llama
from benchmarks.hopper.parts.training import sharing_copy
from octavo.convert import convert


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise"])
def test_layers_compiled_one_by_one_share_a_graph(recipe, session):
    torch.compiler.reset()
    model = sharing_copy(random_llama(session, layers=4))
    if recipe != "bf16":
        convert(model, recipe)
    counter = CompileCounter()
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False, backend=counter)
    tokens = torch.randint(session.sizes.model.vocabulary, (2, 16))
    for _ in range(2):
        model(tokens).float().sum().backward()
    assert counter.frame_count == 1
