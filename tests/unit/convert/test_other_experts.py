"""Experts outside of transformers' interface: torchtitan's run in FP8; DBRX's and Megatron's grouped are named."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

import octavo
from octavo import recipes
from octavo.convert.routers import routers
from octavo.functional import fp8_linear

E, D, F = 4, 32, 48
COUNTS = (5, 0, 1, 8)
RELEASES = {
    "0.2": ("torchtitan.models.moe.moe", ("w1", "w2", "w3")),
    "0.3": ("torchtitan.models.common.moe", ("w1_EFD", "w2_EDF", "w3_EFD")),
}
each_release = pytest.mark.parametrize("release", RELEASES)


def titans_experts(release: str) -> nn.Module:
    """Experts with the names, shapes and forward pass of torchtitan's ``GroupedExperts``, which needs a GPU's packages.

    SiLU(x w1ᵀ) · (x w3ᵀ), times w2ᵀ, of the rows of each expert; the rest of the rows become 0.
    """
    module, names = RELEASES[release]

    class GroupedExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            for name, shape in zip(names, [(F, D), (D, F), (F, D)], strict=True):
                setattr(self, name, nn.Parameter(torch.randn(E, *shape) / 8))

        def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
            w1, w2, w3 = (self.get_parameter(name) for name in names)
            numbers = num_tokens_per_expert.tolist()
            parts = x.split([*numbers, len(x) - sum(numbers)])
            outputs = [
                (nn.functional.silu(part @ w1[e].t()) * (part @ w3[e].t())) @ w2[e].t()
                for e, part in enumerate(parts[:-1])
            ]
            return torch.cat([*outputs, torch.zeros_like(parts[-1])])

    GroupedExperts.__module__, GroupedExperts.__qualname__ = module, "GroupedExperts"
    return GroupedExperts()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows more than the experts have, as torchtitan pads them."""
    torch.manual_seed(1)
    return torch.randn(sum(COUNTS) + 2, D), torch.tensor(COUNTS, dtype=torch.int32)


@each_release
def test_torchtitans_experts_are_a_linear_layer_for_each_expert(release):
    module, (x, counts) = titans_experts(release), rows()
    w1, w2, w3 = (weight.detach() for weight in module.parameters())
    report = octavo.convert(module, "rowwise")
    assert report.weights == RELEASES[release][1]
    assert report.shares.multiplications == 1.0
    recipe, expected = recipes.get("rowwise"), torch.zeros(len(x), D)
    for expert, part in enumerate(torch.arange(len(x))[: sum(COUNTS)].split(COUNTS)):
        if len(part):
            gate, up = (fp8_linear(x[part], weight[expert], None, recipe) for weight in (w1, w3))
            expected[part] = fp8_linear(nn.functional.silu(gate) * up, w2[expert], None, recipe)
    assert torch.equal(module(x, counts), expected)


@each_release
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8"])
def test_torchtitans_experts_train_near_the_plain_ones_and_are_restored(release, recipe):
    module, (x, counts) = titans_experts(release), rows()
    plain, kind = copy.deepcopy(module), type(module)
    octavo.convert(module, recipe)
    assert module.state_dict().keys() == plain.state_dict().keys()
    grad = torch.randn_like(x)
    for each in (plain, module):
        each(x, counts).backward(grad)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert 0 < (ours.grad - theirs.grad).norm() < 0.12 * theirs.grad.norm()
        assert not ours.grad[1].any()
    with octavo.autocast(enabled=False):
        assert torch.equal(module(x, counts), plain(x, counts))
    octavo.restore(module)
    assert type(module) is kind
    assert torch.equal(module(x, counts), plain(x, counts))


def test_a_router_that_stands_further_out_than_its_experts_stays():
    """As torchtitan 0.3 has them: a module around the experts that dispatches tokens, with the router beside it."""
    block = nn.ModuleDict(
        {
            "routed_experts": nn.ModuleDict({"inner_experts": titans_experts("0.3")}),
            "router": nn.ModuleDict({"gate": nn.Linear(D, E, bias=False)}),
            "shared_experts": nn.ModuleDict({"w1": nn.Linear(D, E, bias=False)}),
        }
    )
    assert list(routers(block)) == ["router.gate.weight"]
    report = octavo.convert(nn.ModuleList([block]))
    assert report.converted == ("0.shared_experts.w1",)
    assert "router" in report.skipped["0.router.gate"]


def test_dbrx_experts_are_named_with_the_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dbrx = pytest.importorskip("transformers.models.dbrx.modeling_dbrx", reason="transformers is not installed")
        config = dbrx.DbrxConfig(ffn_config={"ffn_hidden_size": F, "moe_num_experts": E, "hidden_size": D}).ffn_config
        experts = dbrx.DbrxExperts(config)
    with pytest.warns(UserWarning, match="changed nothing"):
        report = octavo.convert(experts)
    assert set(report.parameters) == {"mlp.w1", "mlp.v1", "mlp.w2"}
    assert report.parameters["mlp.w1"] == "stays as it is: a parameter of DbrxExpertGLU, which is not nn.Linear"


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("GroupedMLP", {"weight1": (D, E * 2 * F), "weight2": (E * F, D)}),
        ("TEColumnParallelGroupedLinear", {f"weight{expert}": (F, D) for expert in range(E)}),
    ],
)
def test_megatrons_grouped_experts_are_named_with_the_reason(name, shapes):
    """Megatron-Core's ``GroupedMLP`` needs the package grouped_gemm, the other Transformer Engine: both need a GPU."""
    parameters = nn.ParameterDict({weight: torch.zeros(shape) for weight, shape in shapes.items()})
    parameters.__class__ = type(name, (nn.ParameterDict,), {})
    report = octavo.convert(nn.ModuleDict({"experts": parameters, "linear_proj": nn.Linear(D, D)}))
    assert report.converted == ("linear_proj",)
    reason = (
        f"stays as it is: experts of a class that octavo does not know, a parameter of {name}, which is not nn.Linear"
    )
    assert report.parameters == {f"experts.{weight}": reason for weight in shapes}


@pytest.fixture
def megatron_groups():
    """Megatron-Core's process groups of one rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_state = pytest.importorskip("megatron.core.parallel_state", reason="megatron-core is not installed")
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, expert_model_parallel_size=1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")  # Megatron-Core's, of its own defaults
@pytest.mark.usefixtures("megatron_groups")
def test_megatrons_experts_of_separate_layers_are_converted_by_its_own_function():
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from octavo.compat import megatron

    sizes = {
        "num_layers": 1,
        "hidden_size": D,
        "num_attention_heads": 2,
        "ffn_hidden_size": F,
        "moe_ffn_hidden_size": F,
    }
    config = TransformerConfig(
        **sizes,
        num_moe_experts=E,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
    )
    layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = SequentialMLP(E, config, layers, get_default_pg_collection())
    names = megatron.convert(experts, "rowwise")
    assert names == tuple(f"local_experts.{e}.linear_fc{each}" for e in range(E) for each in (1, 2))
    x, recipe, parts = rows()[0][: sum(COUNTS)], recipes.get("rowwise"), []
    for expert, part in zip(experts.local_experts, x.split(COUNTS), strict=True):
        gate, up = fp8_linear(part, expert.linear_fc1.weight, None, recipe).chunk(2, dim=-1)
        parts.append(fp8_linear(nn.functional.silu(gate) * up, expert.linear_fc2.weight, None, recipe))
    found, _ = experts(x, torch.tensor(COUNTS), torch.ones(len(x)))
    assert torch.equal(found, torch.cat(parts))
