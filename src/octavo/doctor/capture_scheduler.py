"""Schedule of layer captures while a model trains."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from octavo.doctor.capture import Capture, Captures
from octavo.doctor.findings import Finding, Severity
from octavo.doctor.statistics import spread_indices
from octavo.nn.scaled_layer import ScaledLayer
from octavo.recipes import Recipe
from octavo.scaling import LayerWatch, Operand, Operands

__all__ = ["CaptureScheduler", "capture_layer"]

MAX_TOKENS, MAX_OUTPUTS = 512, 2048  # sampled of M and of N
LAYERS_PER_STEP = 4  # captured in one step
SAMPLES_BETWEEN_CAPTURES = 20  # of one layer for the same finding
ALWAYS_DIAGNOSED, DIAGNOSED_EVERY = 8, 8  # sampled steps
ANY = ""  # stands for every finding: a capture file does not record the one that it was made for


class CaptureScheduler:
    """Selects the layers that a watcher captures in its next sampled step.

    Layers with a finding of severity ``warn`` or ``fail`` are captured, at most four per step, worst first. A layer is
    captured again for the same finding after 20 sampled steps, and for any finding 20 sampled steps after a capture
    from before the run was resumed. A finding about a module selects the layers in it; a finding about most layers
    selects the worst of them.

    Args:
        captures: the folder that captures are written to.
        layers: the model's layers by path.
        interval: steps between sampled steps.
    """

    def __init__(self, captures: Captures, layers: Mapping[str, ScaledLayer], *, interval: int = 1) -> None:
        self.captures, self.layers = captures, layers
        self._min_distance = SAMPLES_BETWEEN_CAPTURES * interval
        self.selected: tuple[str, ...] = ()
        self._sample_count = 0
        self._last: dict[tuple[str, str], int] = {}

    def update(self, findings: Callable[[], Iterable[Finding]], step: int) -> None:
        """Select layers for the next sampled step, after the sampled step ``step``.

        ``findings`` returns the findings in the samples so far, worst first. It costs a hundredth of a step or more, so
        it is called after the first eight sampled steps and then after every eighth.
        """
        if not self._sample_count:
            self._last = {(path, ANY): step for path, step in self.captures.steps().items()}
        self._sample_count += 1
        is_due = self._sample_count <= ALWAYS_DIAGNOSED or self._sample_count % DIAGNOSED_EVERY == 0
        self.selected = self._select(findings(), step) if is_due else ()

    def _select(self, findings: Iterable[Finding], step: int) -> tuple[str, ...]:
        selected: dict[str, None] = {}
        for finding in findings:
            for path in self._layers_of(finding):
                if self._is_due(path, finding.code, step) and (path in selected or len(selected) < LAYERS_PER_STEP):
                    selected[path] = None
                    self._last[path, finding.code] = step
        return tuple(selected)

    def _is_due(self, path: str, code: str, step: int) -> bool:
        """True without a recent capture; captures of later steps belong to another run and are ignored."""
        last = (self._last[path, one] for one in (code, ANY) if (path, one) in self._last)
        return not any(0 <= step - one < self._min_distance for one in last)

    @contextmanager
    def capturing(self, paths: Iterable[str], step: int) -> Iterator[None]:
        """Capture the layers at or below these paths, four at most, in one forward and backward pass."""
        newest = self.captures.steps()
        candidates = dict.fromkeys(
            layer for path in paths for layer in self._layers_at(path) if newest.get(layer) != step
        )
        selected = list(candidates)[:LAYERS_PER_STEP]
        for path in selected:
            self.layers[path].watch = CapturingWatch(None, self.layers[path], path, step, self.captures)
        try:
            yield
        finally:
            for path in selected:
                self.layers[path].watch = None
        self.selected = tuple(path for path in self.selected if path not in selected)

    def wrap(self, watch: LayerWatch, path: str, step: int) -> LayerWatch:
        """``watch`` itself, or a watch that also captures the layer if it is selected."""
        return CapturingWatch(watch, self.layers[path], path, step, self.captures) if path in self.selected else watch

    def _layers_of(self, finding: Finding) -> Collection[str]:
        if finding.severity == Severity.NOTE:
            return ()
        if finding.path not in self.layers and finding.places:
            return finding.places[:1]
        return self._layers_at(finding.path)

    def _layers_at(self, path: str) -> Collection[str]:
        if path in self.layers:
            return (path,)
        return [layer for layer in self.layers if path and layer.startswith(f"{path}.")]


class CapturingWatch:
    """Forwards a layer's calls to ``watch`` and captures the first one that runs forward and backward.

    Args:
        watch: the watch that measures; None to capture only.
        layer: the layer, whose amax history is captured too.
        path: the layer's path.
        step: the step's number.
        captures: the folder that captures are written to.
    """

    def __init__(self, watch: LayerWatch | None, layer: ScaledLayer, path: str, step: int, captures: Captures) -> None:
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
        quantized_weight = self.layer.stored_codes()
        self._forward = (x.detach(), weight.detach() if quantized_weight is None else quantized_weight.dequantize())

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
        self.captures.add(capture_layer(self.path, self.step, recipe, (x, weight, grad_output), self.layer))


@torch.no_grad()
def capture_layer(
    path: str, step: int, recipe: Recipe, tensors: tuple[Tensor, Tensor, Tensor], layer: ScaledLayer
) -> Capture:
    """Copy (input, weight, grad_output) and the layer's history to the CPU; large M and N are sampled."""
    x, weight, grad_output = tensors
    row, output = _index_of_largest(grad_output)
    rows = _sample_rows(x.shape[0], MAX_TOKENS, row, _index_of_largest(x)[0]).to(x.device)
    outputs = _sample_rows(weight.shape[0], MAX_OUTPUTS, output, _index_of_largest(weight)[0]).to(x.device)
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


def _index_of_largest(x: Tensor) -> tuple[int, int]:
    """Row and column of the largest finite magnitude."""
    index = int(x.abs().nan_to_num(nan=0.0, posinf=0.0).argmax())
    return index // x.shape[1], index % x.shape[1]


def _sample_rows(size: int, max_rows: int, *required: int) -> Tensor:
    """At most ``max_rows`` ascending indices below ``size``: ``required`` and evenly spread others."""
    if size <= max_rows:
        return torch.arange(size)
    evenly_spread = spread_indices(size, max_rows - len(required), torch.device("cpu"))
    rows: Tensor = torch.cat([evenly_spread, torch.tensor(required)]).unique()
    return rows
