import gc
import weakref

import pytest
import torch
from torch import nn

import octavo
from octavo.convert import choose_layers
from octavo.errors import ConfigError, DataError
from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.quantization.calibration.observers import observe
from tests.tiny_llama import tiny_llama_config

SHAPE = tiny_llama_config(vocab_size=64, max_positions=32)


def llama():
    return LanguageModel(model=Llama(SHAPE, seed=1).eval(), tokenizer=None, context=32, source="test")  # type: ignore[arg-type]


def token_batches(count=5):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(64, (2, 16), generator=generator) for _ in range(count)]


def recorded(module, layers, batches, call):
    """Every input of every layer, kept: what observing must not do."""
    kept: dict[str, list[torch.Tensor]] = {path: [] for path in layers}
    handles = [
        layer.register_forward_pre_hook(lambda _, args, path=path: kept[path].append(args[0].detach().clone()))
        for path, layer in layers.items()
    ]
    with torch.no_grad():
        for batch in batches:
            call(batch)
    for handle in handles:
        handle.remove()
    return kept


def test_amaxes_and_counts_are_those_of_all_inputs_put_together():
    model = llama()
    layers, _ = choose_layers(model.model)
    seen = observe(model, token_batches(), layers)
    kept = recorded(model.model, layers, token_batches(), model.logits)
    assert list(seen.inputs.keys() - kept.keys()) == []
    for path, tensors in kept.items():
        everything = torch.cat([x.flatten() for x in tensors])
        assert torch.equal(seen.inputs[path].counts.amax, everything.abs().amax())
        assert int(seen.inputs[path].counts.counts.sum()) == everything.numel()
        assert seen.inputs[path].calls == len(tensors)
    assert (seen.batches, seen.samples, seen.tokens) == (5, 10, 160)


def test_layers_that_are_given_the_same_tensors_are_found_by_identity():
    model = llama()
    layers, _ = choose_layers(model.model)
    expected = [
        {f"model.layers.{i}.{name}" for name in names}
        for i in range(2)
        for names in (
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["mlp.gate_proj", "mlp.up_proj"],
        )
    ]
    found = [set(group) for group in observe(model, token_batches(), layers).groups()]
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


class Sharing(nn.Module):
    """Two layers given one tensor, or equal ones, or one that is written to between."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), how, 0

    def forward(self, x):
        self.calls += 1
        hidden = x * 2
        y = self.a(hidden)
        if self.how == "equal" or (self.how == "at first" and self.calls > 1):
            hidden = hidden.clone()
        if self.how == "written":
            hidden.mul_(3)
        return y + self.b(hidden)


@pytest.mark.parametrize(
    ("how", "grouped"), [("same", True), ("equal", False), ("written", False), ("at first", False)]
)
def test_only_the_same_tensor_in_every_call_makes_a_group(how, grouped):
    model = Sharing(how)
    seen = observe(model, [torch.randn(3, 4) for _ in range(3)], {"a": model.a, "b": model.b})
    assert seen.groups() == ((("a", "b"),) if grouped else ())
    same = torch.equal(seen.inputs["a"].counts.counts, seen.inputs["b"].counts.counts)
    assert same == (how != "written")


@pytest.mark.long
def test_no_activation_outlives_its_call():
    model, alive = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), []
    layers = {"1": model[1], "3": model[3]}
    for layer in layers.values():
        layer.register_forward_pre_hook(lambda _, args: alive.append(weakref.ref(args[0])))

    def batches():
        for _ in range(3):
            gc.collect()
            assert [ref for ref in alive if ref() is not None] == []
            yield torch.randn(2, 4)

    observe(model, batches(), layers)
    assert len(alive) == 6


def test_modes_hooks_and_gradients_are_left_as_they_were():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    model[1].eval()
    observe(model, [torch.ones(2, 4)] * 2, {"2": model[2]})
    assert [each.training for each in model.modules()] == [True, True, False, True]
    assert not model[2]._forward_pre_hooks
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(DataError):
        observe(model, [torch.full((2, 4), float("nan"))], {"2": model[2]})
    assert [each.training for each in model.modules()] == [True, True, False, True]
    assert not model[2]._forward_pre_hooks
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_batch_is_a_tensor_arguments_or_keywords():
    class TwoLayers(nn.Module):
        layer: nn.Module

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, scale):
            return self.layer(input=x * scale)

    model = TwoLayers()
    x, two = torch.ones(3, 4), torch.tensor(2.0)
    for batch in ((x, two), [x, two], {"x": x, "scale": two}):
        seen = observe(model, [batch], {"layer": model.layer})
        assert seen.inputs["layer"].counts.amax == 2
        assert seen.samples == 3


def test_under_autocast_the_input_is_counted_in_its_dtype():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.full((1, 4), 1.00390625001)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = observe(model, [x], {"0": model[0]})
    assert seen.inputs["0"].counts.amax == x.bfloat16().float().amax() != x.amax()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_batch_is_named_with_its_layer(bad):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers = {"first": model[0], "second": model[1]}
    batches = [torch.ones(2, 4) for _ in range(3)]
    batches[1][0, 2] = bad
    with pytest.raises(DataError, match="in batch 2 layer 'first' received NaN or infinity"):
        observe(model, batches, layers)
    batches[1][0, 2] = 1.0
    with torch.no_grad():
        model.get_parameter("0.weight")[0, 0] = bad
    with pytest.raises(DataError, match="in batch 1 layer 'second' received NaN or infinity"):
        observe(model, batches, layers)


def test_no_batch_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(DataError, match="there is no batch to calibrate on"):
        observe(model, [], {"0": model[0]})


def told_after(model, batches):
    """After how many batches the last quarter was announced."""
    told: list[int] = []

    def note(seen):
        told.append(seen.batches)

    observe(model, batches, {"0": model[0]}, before_the_last_quarter=note)
    return told


def test_the_last_quarter_begins_after_three_of_four():
    model = nn.Sequential(nn.Linear(4, 4))
    for count, expected in ((1, []), (2, [1]), (3, [2]), (4, [3]), (8, [6]), (10, [7]), (128, [96])):
        assert told_after(model, [torch.ones(1, 4)] * count) == expected
    assert told_after(model, iter([torch.ones(1, 4)] * 8)) == []


def test_keys_and_values_are_those_that_attention_reads():
    model = llama()
    seen = observe(model, token_batches(3), {}, kv_cache=True)
    kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {0: [], 1: []}

    def keep(layer, keys, values):
        kept[layer].append((keys.clone(), values.clone()))
        return keys, values

    with torch.no_grad():
        for batch in token_batches(3):
            model.logits(batch, keep)
    for layer, pairs in kept.items():
        keys, values = (torch.cat([pair[i].flatten() for pair in pairs]).abs().amax() for i in (0, 1))
        assert torch.equal(seen.keys_and_values[layer].keys.amax, keys)
        assert torch.equal(seen.keys_and_values[layer].values.amax, values)


def test_keys_and_values_need_a_language_model_and_that_needs_token_ids():
    with pytest.raises(ConfigError, match=r"kv_cache=True needs an octavo.language_model.LanguageModel"):
        observe(nn.Linear(2, 2), [torch.ones(1, 2)], {}, kv_cache=True)
    with pytest.raises(ConfigError, match=r"token ids \[B, T\], not dict"):
        observe(llama(), [{"input_ids": token_batches(1)[0]}], {})


def test_layers_of_octavo_are_observed_too():
    model = nn.Sequential(nn.Linear(4, 4))
    octavo.convert(model)
    assert observe(model, [torch.full((1, 4), 3.0)], {"0": model[0]}).inputs["0"].counts.amax == 3
