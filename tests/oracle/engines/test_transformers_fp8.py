"""transformers' own quantization of weights to fine-grained FP8 against its profile."""

from types import SimpleNamespace

import torch
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from octavo.engines import get, quantize_as
from tests.oracle.engines.adversarial import same_codes, tensor
from tests.oracle.engines.compared import every_tensor

CONFIG = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")


@every_tensor("transformers-fp8", "weight")
def test_weights(name, dtype):
    x = tensor(name, dtype).repeat(16, 1)  # whole blocks
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=CONFIG)).convert({"a.weight": x})  # type: ignore[arg-type]  # it takes a dict, whatever its annotation
    ours = quantize_as(x, get("transformers-fp8").weight)
    assert same_codes(ours.data, theirs["a.weight"])
    assert torch.equal(ours.scale.nan_to_num(-1), theirs["a.weight_scale_inv"].nan_to_num(-1))
