"""Routers, which choose among the experts beside them; they stay in high precision.

They decide which experts run on differences smaller than FP8's steps. So does a weight of one row beside experts, which
decides the share of the expert that every token goes to, as in Qwen2-MoE.

Experts are modules that octavo can convert, whatever is called "experts" (those of DBRX, of Switch, a list of one's
own), and any list of modules beside which stands a router with a row for each.
"""

import torch

from octavo.convert.experts import is_experts
from octavo.convert.unfused_experts import UnfusedExperts

__all__ = ["experts_in", "routers"]

_ROUTER = "router: it decides which experts a token is sent to, and stays in high precision"
_NAMES = ("router", "gate")
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def routers(model: torch.nn.Module) -> dict[str, str]:
    """Names of the weights of two dimensions that choose among experts, with the reason why they stay.

    Beside experts, or beside a module that holds nothing else, these are all weights in what is called a router or a
    gate, and the weights that have a row for each expert, or one for the share of an expert that every token goes to.
    A module in which such weights lie deeper is a router if its last matrix has a row for each expert, or one; those
    called shared have a row only by chance, and those that map as many features as there are experts. It is one too if
    it compares tokens with a vector of each expert, a matrix of its own [experts, D] or [D, experts].

    Example:
        >>> experts = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(4)])
        >>> list(routers(torch.nn.ModuleDict({"experts": experts, "gate": torch.nn.Linear(8, 4)})))
        ['gate.weight']
    """
    found = {}
    mixtures = experts_in(model)
    lists = {path: len(module) for path, module in model.named_modules() if path and isinstance(module, _LISTS)}
    for path, experts in (lists | mixtures).items():
        block = _block_of(model, path)
        nested = _nested_routers(model.get_submodule(block), experts) if path in mixtures else set()
        for name, parameter in model.get_submodule(block).named_parameters():
            own = f"{block}.{name}" if block else name
            sibling, *rest = name.split(".")
            has_a_row_each = parameter.shape[:1] == (experts,)
            if path not in mixtures:
                chooses = sibling in _NAMES and has_a_row_each
            else:
                chooses = sibling in nested or (len(rest) == 1 and (has_a_row_each or parameter.shape[:1] == (1,)))
            if chooses and parameter.ndim == 2 and not own.startswith(f"{path}."):
                found[own] = _ROUTER
    return found


def _nested_routers(block: torch.nn.Module, experts: int | None) -> set[str]:
    """Names of the modules beside experts that are routers: by their name, or by the shapes of their matrices."""
    found = set(_NAMES)
    for name, module in block.named_children():
        shapes = [parameter.shape for parameter in module.parameters() if parameter.ndim == 2]
        if not shapes or isinstance(module, torch.nn.Linear):
            continue
        ends_in_a_row_each = shapes[-1][0] == experts != shapes[0][1] and "shared" not in name.split("_")
        compares = any(experts in each.shape for each in module.parameters(recurse=False) if each.ndim == 2)
        if ends_in_a_row_each or compares or shapes[-1][0] == 1:
            found.add(name)
    return found


def experts_in(model: torch.nn.Module) -> dict[str, int | None]:
    """Paths of a mixture's experts, and how many they are; None where their module does not say.

    Example:
        >>> experts_in(torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(8, 8)])}))
        {'experts': 1}
    """
    found: dict[str, int | None] = {}
    for path, module in model.named_modules():
        words = path.rpartition(".")[2].split("_")
        number = _number_of_experts(module)
        if number is not None or ("experts" in words and "shared" not in words):
            found[path] = len(module) if number is None and isinstance(module, _LISTS) else number
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
