"""Which layers are captured while a model trains, and when."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from octavo.doctor.capture import Capture, Captures
from octavo.doctor.findings import Finding, Severity
from octavo.doctor.statistics import evenly
from octavo.nn import Linear
from octavo.recipes import Recipe
from octavo.scaling import LayerWatch, Operand, Operands

__all__ = ["Captor", "captured"]

TOKENS, OUTPUTS = 512, 2048  # of M and of N
LAYERS_PER_LOOK = 4  # captured in one step
LOOKS_BEFORE_ANOTHER = 20  # until a layer with the same findings is captured again
ASK_ALWAYS, ASK_EVERY = 8, 8  # looks
ANY = ""  # finding: which one a capture was made for is not written


class Captor:
    """Who decides, for a watcher, which layers are captured in the next step that is looked at.

    A layer is captured for a finding of ``warn`` or ``fail``, of at most four layers in one step, worst first; for the
    same finding again after 20 looks, and for any finding 20 looks after what the run has left before it was resumed.
    A finding of a module stands for the layers in it, one of most layers for the worst of them.

    Args:
        captures: where they go.
        layers: of the model, by path.
        interval: steps from one look to the next.
    """

    def __init__(self, captures: Captures, layers: dict[str, Linear], *, interval: int = 1) -> None:
        self.captures, self.layers = captures, layers
        self._apart = LOOKS_BEFORE_ANOTHER * interval
        self.wanted: tuple[str, ...] = ()
        self._looks = 0
        self._last: dict[tuple[str, str], int] = {}

    def look(self, findings: Callable[[], Iterable[Finding]], step: int) -> None:
        """After the look at a step: choose for the next one by what is found, worst first, in the samples so far.

        Asking costs a hundredth of a step or more: the first eight looks ask, then every eighth.
        """
        if not self._looks:
            self._last = {(path, ANY): step for path, step in self.captures.steps().items()}
        self._looks += 1
        is_asked = self._looks <= ASK_ALWAYS or self._looks % ASK_EVERY == 0
        self.wanted = self._chosen(findings(), step) if is_asked else ()

    def _chosen(self, findings: Iterable[Finding], step: int) -> tuple[str, ...]:
        wanted: dict[str, None] = {}
        for finding in findings:
            for path in self._meant(finding):
                if self._is_due(path, finding.code, step) and (path in wanted or len(wanted) < LAYERS_PER_LOOK):
                    wanted[path] = None
                    self._last[path, finding.code] = step
        return tuple(wanted)

    def _is_due(self, path: str, code: str, step: int) -> bool:
        """Whether no capture is young; one of a later step is another training's."""
        last = (self._last[path, one] for one in (code, ANY) if (path, one) in self._last)
        return not any(0 <= step - one < self._apart for one in last)

    @contextmanager
    def capturing(self, paths: Iterable[str], step: int) -> Iterator[None]:
        """A forward and a backward pass in which the layers at, or in, these paths are captured, four at most."""
        newest = self.captures.steps()
        found = dict.fromkeys(layer for path in paths for layer in self._at(path) if newest.get(layer) != step)
        meant = list(found)[:LAYERS_PER_LOOK]
        for path in meant:
            self.layers[path].watch = CapturingWatch(None, self.layers[path], path, step, self.captures)
        try:
            yield
        finally:
            for path in meant:
                self.layers[path].watch = None
        self.wanted = tuple(path for path in self.wanted if path not in meant)

    def around(self, watch: LayerWatch, path: str, step: int) -> LayerWatch:
        """``watch``, and where the layer is wanted somebody who captures it too."""
        return CapturingWatch(watch, self.layers[path], path, step, self.captures) if path in self.wanted else watch

    def _meant(self, finding: Finding) -> Collection[str]:
        if finding.severity == Severity.NOTE:
            return ()
        if finding.path not in self.layers and finding.places:
            return finding.places[:1]
        return self._at(finding.path)

    def _at(self, path: str) -> Collection[str]:
        if path in self.layers:
            return (path,)
        return [layer for layer in self.layers if path and layer.startswith(f"{path}.")]


class CapturingWatch:
    """Lets ``watch`` look at a layer's calls, and captures the first one that has a forward and a backward.

    Args:
        watch: measures; None where nothing does.
        layer: whose history is kept too.
        path: the layer's.
        step: the step's number.
        captures: where they go.
    """

    def __init__(self, watch: LayerWatch | None, layer: Linear, path: str, step: int, captures: Captures) -> None:
        self.watch, self.layer, self.path, self.step, self.captures = watch, layer, path, step, captures
        self.is_done = False
        self._forward: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        recipe: Recipe,
        x: Tensor,
        weight: Tensor,
        operands: Operands,
        kept: tuple[Operand | None, Operand | None],
    ) -> None:
        """See :class:`octavo.scaling.LayerWatch`."""
        if self.watch is not None:
            self.watch.forward(recipe, x, weight, operands, kept)
        held = self.layer.held_weight()
        self._forward = (x.detach(), weight.detach() if held is None else held.dequantize())

    def backward(
        self, recipe: Recipe, grad_output: Tensor, grad_input: Operands | None, grad_weight: Operands | None
    ) -> None:
        """See :class:`octavo.scaling.LayerWatch`."""
        if self.watch is not None:
            self.watch.backward(recipe, grad_output, grad_input, grad_weight)
        if self.is_done or self._forward is None or self._forward[0].shape[0] != grad_output.shape[0]:
            return
        if not all(tensor.numel() for tensor in (*self._forward, grad_output)):
            return
        self.is_done = True
        (x, weight), self._forward = self._forward, None
        self.captures.add(captured(self.path, self.step, recipe, (x, weight, grad_output), self.layer))


@torch.no_grad()
def captured(path: str, step: int, recipe: Recipe, tensors: tuple[Tensor, Tensor, Tensor], layer: Linear) -> Capture:
    """A capture on the CPU of (input, weight, grad_output) and the layer's history, M and N sampled where large."""
    x, weight, grad_output = tensors
    row, output = _place_of_largest(grad_output)
    rows = _with_these(x.shape[0], TOKENS, row, _place_of_largest(x)[0]).to(x.device)
    outputs = _with_these(weight.shape[0], OUTPUTS, output, _place_of_largest(weight)[0]).to(x.device)
    history = layer.amax_history if recipe.is_delayed else None
    return Capture(
        path=path,
        step=step,
        recipe=recipe,
        input=x[rows].cpu(),
        weight=weight[outputs].cpu(),
        grad_output=grad_output[rows][:, outputs].cpu(),
        window=None if history is None else history.window.cpu().clone(),
        amax=None if history is None else history.amax.cpu().clone(),
        input_scale=layer.input_scale.cpu().clone() if recipe.has_static_input else None,
    )


def _place_of_largest(x: Tensor) -> tuple[int, int]:
    """Row and column of the largest finite magnitude."""
    place = int(x.abs().nan_to_num(nan=0.0, posinf=0.0).argmax())
    return place // x.shape[1], place % x.shape[1]


def _with_these(size: int, most: int, *these: int) -> Tensor:
    """At most ``most`` indices below ``size``, rising: these, and others evenly spread."""
    if size <= most:
        return torch.arange(size)
    spread = evenly(size, most - len(these), torch.device("cpu"))
    rows: Tensor = torch.cat([spread, torch.tensor(these)]).unique()
    return rows
