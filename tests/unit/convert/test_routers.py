"""Routers stay in high precision whatever they are made of, and the report says that they are routers."""

import warnings

import pytest
import torch
from torch import nn

import octavo
from octavo.convert import choose_layers, heads_of
from octavo.errors import ConfigError

E, D, F = 4, 32, 48


def experts():
    return nn.ModuleList([nn.Sequential(nn.Linear(D, F), nn.Linear(F, D)) for _ in range(E)])


class Router(nn.Module):
    """A router in two layers and one that scores more than the experts, as Zaya and Longcat have them."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.classifier = nn.Linear(D, 8, bias=False), nn.Linear(8, E + 2, bias=False)


class Cosine(nn.Module):
    """A router that compares tokens with a column of each expert, as Tutel's and Soft-MoE's cosine gates."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.columns = nn.Linear(D, 8), nn.Parameter(torch.randn(8, E))


BLOCKS = {
    "gate": lambda: {"experts": experts(), "gate": nn.Linear(D, E), "up_gate": nn.Linear(D, D)},
    "router": lambda: {"local_experts": experts(), "router": Router()},
    "choice": lambda: {"experts": experts(), "choice": nn.Linear(D, E), "shared_gate": nn.Linear(D, 1)},
    "gating": lambda: {
        "experts": experts(),
        "gating": nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, E)),
        "attention": nn.ModuleDict({"qkv": nn.Linear(D, E), "out": nn.Linear(D, D)}),
        "shared_mlp": nn.Sequential(nn.Linear(D, F), nn.Linear(F, E)),
    },
    "gate_net": lambda: {"experts": experts(), "gate_net": nn.ModuleDict({"fc": nn.Linear(D, E)})},
    "wg": lambda: {"experts": experts(), "gating": nn.ModuleDict({"wg": nn.ModuleDict({"proj": nn.Linear(D, E)})})},
    "cosine": lambda: {"experts": experts(), "choice": Cosine()},
    "share": lambda: {"experts": experts(), "shared_share": nn.Sequential(nn.Linear(D, 8), nn.Linear(8, 1))},
    "unnamed": lambda: {"mlps": experts(), "router": nn.Linear(D, E)},
}
ROUTERS = {
    "gate": {"0.gate"},
    "router": {"0.router.down", "0.router.classifier"},
    "choice": {"0.choice", "0.shared_gate"},
    "gating": {"0.gating.0", "0.gating.2"},
    "gate_net": {"0.gate_net.fc"},
    "wg": {"0.gating.wg.proj"},
    "cosine": {"0.choice.project"},
    "share": {"0.shared_share.0", "0.shared_share.1"},
    "unnamed": {"0.router"},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_router_beside_a_list_of_experts_stays(name):
    model = nn.ModuleList([nn.ModuleDict(BLOCKS[name]())])
    report = octavo.convert(model, convert_head=True)
    reasons = {path for path, reason in report.skipped.items() if reason.startswith("router: ")}
    assert reasons == report.skipped.keys() == ROUTERS[name]
    assert len(report.converted) == 2 * E + {"gate": 1, "gating": 4}.get(name, 0)


def test_no_other_layer_is_taken_for_a_router():
    model = nn.ModuleDict({"layers": experts(), "head": nn.Linear(D, E), "shared_experts": experts()})
    model["mlp"] = nn.ModuleDict({"gate": nn.Linear(D, F), "up": nn.Linear(D, F)})
    assert octavo.convert(model).skipped == {}


def built(name, **options):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{name}Config")(**options)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)


SPARSE = {
    "vocab_size": 64, "d_model": D, "d_kv": 8, "d_ff": F, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "num_experts": E,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SwitchTransformers", {**SPARSE, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}),
        (
            "NllbMoe",
            {
                "vocab_size": 64,
                "d_model": D,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "num_experts": E,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": F,
                "decoder_ffn_dim": F,
                "encoder_sparse_step": 2,
                "decoder_sparse_step": 2,
            },
        ),
    ],
)
def test_routers_that_are_called_classifier_are_no_heads(name, options):
    model = built(name, **options)
    named = [path for path, _ in model.named_modules() if path.endswith("router.classifier")]
    assert len(named) >= 2
    assert heads_of(model) == ("lm_head",)
    for head in (False, True):
        chosen, left = choose_layers(model, convert_head=head)
        assert all(left[path].startswith("router: ") for path in named)
        assert ("lm_head" in chosen) is head
    report = octavo.convert(model)
    assert all(
        f"{path.rpartition('.')[0].rpartition('.')[0]}.experts.expert_0" in " ".join(report.converted) for path in named
    )


def test_dbrx_routers_stay_and_its_experts_are_called_so():
    dbrx = pytest.importorskip("transformers.models.dbrx.modeling_dbrx", reason="transformers is not installed")
    ffn = {"ffn_hidden_size": F, "moe_num_experts": E, "hidden_size": D, "moe_top_k": 2}
    model = nn.ModuleDict({"ffn": dbrx.DbrxFFN(dbrx.DbrxConfig(ffn_config=ffn)), "proj": nn.Linear(D, D)})
    report = octavo.convert(model)
    assert report.converted == ("proj",)
    assert report.skipped["ffn.router.layer"].startswith("router: ")
    words = "experts of a class that octavo does not know, a parameter of DbrxExpertGLU, which is not nn.Linear"
    assert report.parameters["ffn.experts.mlp.w1"] == f"stays as it is: {words}"


class Choosing(nn.Linear):
    """A router that is a linear layer and returns two tensors, as those of Llama 4 and Phi-MoE."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return logits, logits.topk(2).indices


class Two(nn.Linear):
    """A layer that takes two tensors."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + y


def test_a_router_of_a_class_of_its_own_is_called_a_router():
    model = nn.ModuleList([nn.ModuleDict({"experts": experts(), "router": Choosing(D, E)})])
    report = octavo.convert(model)
    assert report.skipped["0.router"].startswith("router: ")
    assert "linear_classes" not in str(report)


@pytest.mark.parametrize("kind", [Choosing, Two])
def test_classes_that_return_or_take_something_else_are_refused_in_a_sentence(kind):
    model = nn.ModuleDict({"odd": kind(D, E), "plain": nn.Linear(D, D)})
    with pytest.raises(ConfigError, match=f"names {kind.__name__}, but odd is no plain linear layer"):
        octavo.convert(model, linear_classes=[kind])
    assert type(model["plain"]) is nn.Linear
