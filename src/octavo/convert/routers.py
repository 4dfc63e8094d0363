"""Routers, which choose among the experts beside them; they stay in high precision.

They decide which experts run on differences smaller than FP8's steps. So does a weight of one row beside experts, which
decides the share of the expert that every token goes to, as in Qwen2-MoE.
"""

import torch

from octavo.convert.experts import is_experts
from octavo.convert.unfused_experts import UnfusedExperts

__all__ = ["routers"]

_ROUTER = "router: it decides which experts a token is sent to, and stays in high precision"


def routers(model: torch.nn.Module) -> dict[str, str]:
    """Names of the weights of two dimensions that choose among experts, with the reason why they stay.

    Such a weight has a row for each expert, or one for the share of an expert that every token goes to, and is its
    module's own beside the experts, or beside a module that holds nothing else, or in what is called a router.
    """
    found = {}
    for path, module in model.named_modules():
        experts = _number_of_experts(module)
        if experts is None:
            continue
        block = _block_of(model, path)
        inside = f"{block}." if block else ""
        for name, parameter in model.get_submodule(block).named_parameters():
            own = f"{inside}{name}"
            sibling, *rest = name.split(".")
            beside = len(rest) == 1 or sibling in ("router", "gate")
            if parameter.ndim == 2 and parameter.shape[0] in (experts, 1) and beside and not own.startswith(f"{path}."):
                found[own] = _ROUTER
    return found


def _block_of(model: torch.nn.Module, path: str) -> str:
    """The innermost module around experts that has other parameters too; torchtitan's dispatcher of tokens has none."""
    own = len(list(model.get_submodule(path).parameters()))
    block = path.rpartition(".")[0]
    while block and len(list(model.get_submodule(block).parameters())) == own:
        block = block.rpartition(".")[0]
    return block


def _number_of_experts(module: torch.nn.Module) -> int | None:
    if isinstance(module, UnfusedExperts):
        return module.num_experts
    stacks = (parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.ndim == 3)
    return next(stacks, None) if is_experts(module) else None
