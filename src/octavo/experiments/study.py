"""Study of one model in several precisions, everything else equal.

``run_study`` trains the model once for each recipe, from the same initial weights on the same batches, evaluates every
run on the same held-out windows, and measures gradient noise at the baseline's final weights. The comparisons are in
:mod:`octavo.training.comparison` and :mod:`octavo.training.gradient_noise`.

    out_dir/
      fp32/ bf16/ tensorwise/   one run folder each, with measures.json once it is evaluated
      study.json                the whole study, written last

A second call skips finished runs and resumes the others: measures.json marks a finished run, study.json a finished
study.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from octavo.checksums import sealed, unsealed
from octavo.errors import ConfigError, DataError, NonFiniteLossError
from octavo.files import write_atomically
from octavo.models import Llama, generate
from octavo.models.sources import has_run
from octavo.nn.scaling_state import update_scales
from octavo.parsing import read_object
from octavo.text.corpus import Split
from octavo.text.sources import is_unicode
from octavo.text.tokens import TokenData
from octavo.training.comparison import RunMeasures, Study, run_from_json
from octavo.training.config import RunConfig, config_from_dict
from octavo.training.evaluate import evaluate, token_loss, unigram_entropy
from octavo.training.events import Event, StepDone
from octavo.training.gradient_noise import GradientNoise, GradientProbe, gradient_noise
from octavo.training.held_out import BATCH_WINDOWS, batches_of, watching_forwards
from octavo.training.loop import train
from octavo.training.memory import fitting_in_memory
from octavo.training.metrics import read_metrics
from octavo.training.precision import apply_recipe, resolve_device, surroundings
from octavo.training.run_folder import TrainedRun, load_run
from octavo.training.setup import check_data
from octavo.training.signals import StoppedBySignal
from octavo.training.study_facts import facts_of
from octavo.training.threads import using_threads

__all__ = [
    "DEFAULT_RECIPES",
    "MEASURES",
    "STUDY",
    "OnPhase",
    "Phase",
    "check_prompt",
    "check_study_data",
    "configs_of",
    "run_study",
]

DEFAULT_RECIPES = ("fp32", "bf16", "tensorwise")
STUDY, MEASURES = "study.json", "measures.json"
NOISE_BATCHES = 16
SAMPLE_TOKENS = 96
SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 0.7, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Progress of a phase: ``done`` of ``total``."""

    name: str
    done: float
    total: float
    note: str = ""


OnPhase = Callable[[Phase], None]


def run_study(
    config: RunConfig,
    out_dir: str | Path,
    *,
    data: TokenData,
    recipes: Sequence[str] = DEFAULT_RECIPES,
    prompt: str | None = None,
    test_tokens: int | None = None,
    on_phase: OnPhase = lambda _: None,
) -> Study:
    """Train, evaluate and compare a model in several precisions; see the module.

    Args:
        config: configuration of the runs; its recipe is replaced, and its ``recipe_options`` apply to that recipe.
        out_dir: the study's folder; created if missing.
        data: the token files.
        recipes: recipes of the runs, baseline first.
        prompt: prompt for the final models; None for the beginning of the test text.
        test_tokens: maximum number of tokens of the final evaluation; None for the whole test split.
        on_phase: called as phases progress.

    Raises:
        ConfigError: no recipe, one twice, or an unknown one; the folder holds runs of another configuration; or a
            micro-batch does not fit in memory.
        StoppedBySignal: a signal stopped a run; it has saved a checkpoint, and the same call resumes it.
    """
    folder = Path(out_dir)
    configs = configs_of(config, recipes)
    check_study_data(data, config)
    prompt = prompt or _beginning_of_test(data)
    check_prompt(prompt)
    finished = _finished_study(folder, config, recipes, data)
    windows = len(data.windows(config.training.context, split=Split.TEST, max_tokens=test_tokens)[0])
    if finished is not None and finished.prompt == prompt and len(finished.runs[0].window_nats) == windows:
        return finished
    with using_threads(config.training.threads), fitting_in_memory(config.training):
        study = _studied(config, folder, configs, data, prompt=prompt, test_tokens=test_tokens, report=on_phase)
    write_atomically(folder / STUDY, study.to_json())
    return study


def _studied(
    config: RunConfig,
    folder: Path,
    configs: Mapping[str, RunConfig],
    data: TokenData,
    *,
    prompt: str,
    test_tokens: int | None,
    report: OnPhase,
) -> Study:
    """Finish the study's runs and measure all of them."""
    recipes = list(configs)
    runs = [_measured(folder / recipe, configs[recipe], data, test_tokens, report) for recipe in recipes]
    noise = _gradient_noise(folder / recipes[0], configs, data, report)
    baseline = load_run(folder / recipes[0])
    return Study(
        runs=tuple(_with_noise(run, noise[run.recipe]) for run in runs),
        config=config.to_dict(),
        facts=facts_of(config, data, parameters=sum(p.numel() for p in baseline.model.parameters())),
        unigram_nats=unigram_entropy(data, Split.VALIDATION),
        prompt=prompt,
        samples=_samples(folder, recipes, prompt, report),
    )


def configs_of(config: RunConfig, recipes: Sequence[str]) -> dict[str, RunConfig]:
    """The configuration of each run.

    Raises:
        ConfigError: no recipe, one twice, or an unknown one.
    """
    if not recipes or len(set(recipes)) != len(recipes):
        raise ConfigError(f"a study needs recipes, each once; got {', '.join(recipes) or 'none'}")
    training = config.training
    options = {training.recipe: training.recipe_options}
    return {recipe: config.with_recipe(recipe, **options.get(recipe, {})) for recipe in recipes}


def check_study_data(data: TokenData, config: RunConfig) -> None:
    """Check that no split of the data is shorter than the context.

    Raises:
        DataError: a split is shorter than the context.
    """
    check_data(data, config)
    data.windows(config.training.context, split=Split.TEST, max_tokens=1)


def check_prompt(prompt: str) -> None:
    """Raise ConfigError for a prompt that is not UTF-8."""
    if not is_unicode(prompt):
        raise ConfigError(f"the prompt {prompt!r} is not UTF-8; write it in UTF-8")


def _finished_study(folder: Path, config: RunConfig, recipes: Sequence[str], data: TokenData) -> Study | None:
    """The finished study in the folder; None for a different study or none."""
    if not (folder / STUDY).exists():
        return None
    try:
        study = Study.from_json((folder / STUDY).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, DataError) as error:
        raise DataError(f"{str(folder / STUDY)!r} cannot be read: {error}") from error
    same = (
        tuple(run.recipe for run in study.runs) == tuple(recipes)
        and study.facts.get("content hash") == data.content_hash
        and config_from_dict(dict(study.config)).config_hash() == config.config_hash()
    )
    return study if same else None


def _measured(
    run_dir: Path, config: RunConfig, data: TokenData, test_tokens: int | None, report: OnPhase
) -> RunMeasures:
    """Train or resume one run and evaluate it, or read the measures of an earlier call."""
    identity = {"config": config.config_hash(), "data": data.content_hash, "test_tokens": test_tokens}
    known = _known_measures(run_dir / MEASURES, identity)
    if known is not None:
        return known
    recipe = config.training.recipe
    result = train(config, run_dir, data=data, resume=has_run(run_dir), on_event=_as_phase(f"train {recipe}", report))
    if result.stopped_by is not None:
        raise StoppedBySignal(result.stopped_by)
    window_nats = _window_nats(load_run(run_dir), data, test_tokens, report)
    if not all(map(math.isfinite, window_nats)):
        raise NonFiniteLossError(f"the held-out loss of {str(run_dir)!r} is not finite; lower the learning rate")
    measures = RunMeasures(
        recipe=recipe,
        steps=result.step,
        train_curve=result.train_curve,
        validation_curve=result.validation_curve,
        window_nats=window_nats,
        tokens_per_second=_tokens_per_second(run_dir, config),
        peak_memory_bytes=result.peak_memory_bytes,
        threads=_threads(run_dir),
    )
    write_atomically(
        run_dir / MEASURES, json.dumps(sealed({**identity, "run": asdict(measures)}), allow_nan=False) + "\n"
    )
    return measures


def _known_measures(path: Path, identity: Mapping[str, object]) -> RunMeasures | None:
    if not path.exists():
        return None
    try:
        content = unsealed(read_object(path))
        same = all(content[key] == value for key, value in identity.items())
        return run_from_json(content["run"]) if same else None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{str(path)!r} is damaged ({error}); delete it and run the study again") from error


def _as_phase(name: str, report: OnPhase) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        if isinstance(event, StepDone):
            note = f"loss {event.loss:.3f}, {event.tokens_per_second:,.0f} tokens/s"
            report(Phase(name=name, done=event.step, total=event.steps, note=note))

    return on_event


def _window_nats(run: TrainedRun, data: TokenData, test_tokens: int | None, report: OnPhase) -> tuple[float, ...]:
    training = run.config.training
    total = batches_of(data, training.context, max_tokens=test_tokens)

    def on_forward(done: int) -> None:
        report(Phase(name=f"evaluate {training.recipe}", done=done, total=total))

    with watching_forwards(run.model, on_forward):
        evaluation = evaluate(
            run.model,
            data,
            context=training.context,
            split=Split.TEST,
            max_tokens=test_tokens,
            batch_size=BATCH_WINDOWS,
            surroundings=run.surroundings,
        )
    return evaluation.window_nats


def _tokens_per_second(run_dir: Path, config: RunConfig) -> float:
    """Tokens of an update over the median duration of all updates of the run, including those before a resume."""
    seconds = [float(line["seconds"]) for line in read_metrics(run_dir) if line["kind"] == "step"]
    typical: float = statistics.median(seconds)
    return config.training.tokens_per_step / max(typical, 1e-4)


def _threads(run_dir: Path) -> tuple[int, ...]:
    """Distinct numbers of CPU threads in the run's steps."""
    return tuple(sorted({int(line["threads"]) for line in read_metrics(run_dir) if "threads" in line}))


def _gradient_noise(
    baseline_dir: Path, configs: Mapping[str, RunConfig], data: TokenData, report: OnPhase
) -> dict[str, GradientNoise]:
    """Noise under every recipe at the baseline's final weights, on the micro-batches after the last step."""
    weights = load_run(baseline_dir).model
    probes = {recipe: _probe(weights, config) for recipe, config in configs.items()}
    first = next(iter(configs.values())).training
    start = first.steps * first.grad_accumulation
    batches = [
        torch.stack(data.batch(step, batch_size=first.batch_size, context=first.context, seed=first.seed))
        for step in range(start, start + NOISE_BATCHES)
    ]

    def on_batch(done: int) -> None:
        report(Phase(name="gradient noise", done=done, total=NOISE_BATCHES))

    return gradient_noise(probes, batches, on_batch=on_batch)


def _probe(weights: Llama, config: RunConfig) -> GradientProbe:
    device = resolve_device(config.training.device)
    model = Llama(weights.config).to(device)
    model.load_state_dict(weights.state_dict())
    apply_recipe(model, config.training, step=config.training.steps)
    context = surroundings(config.training, device)

    def loss(batch: Tensor) -> Tensor:
        update_scales(model)  # a delayed recipe computes its scales from the previous batch
        inputs, targets = batch.to(device)
        with context:
            return token_loss(model(inputs), targets)

    return GradientProbe(model=model, loss=loss)


def _with_noise(run: RunMeasures, noise: GradientNoise) -> RunMeasures:
    """The measures with their noise; None for numbers that overflowed, as they may in a diverged run."""
    variance, error = (value if math.isfinite(value) else None for value in (noise.variance, noise.error))
    return replace(run, gradient_variance=variance, gradient_error=error)


def _samples(folder: Path, recipes: Sequence[str], prompt: str, report: OnPhase) -> dict[str, str]:
    """Each final model's continuation of the prompt, with the same random numbers."""
    samples = {}
    for done, recipe in enumerate(recipes):
        report(Phase(name="generate", done=done, total=len(recipes)))
        samples[recipe] = _sample(load_run(folder / recipe), prompt)
    return samples


def _sample(run: TrainedRun, prompt: str) -> str:
    with run.surroundings:
        new_tokens = generate(
            run.model,
            run.tokenizer.encode(prompt, add_special_tokens=False).ids,
            max_new_tokens=SAMPLE_TOKENS,
            temperature=SAMPLE_TEMPERATURE,
            top_k=SAMPLE_TOP_K,
            generator=torch.Generator().manual_seed(run.config.training.seed),
            context=run.config.training.context,
        )
        ids = list(new_tokens)
    return str(run.tokenizer.decode(ids))


def _beginning_of_test(data: TokenData, tokens: int = 12) -> str:
    return str(data.tokenizer().decode([int(token) for token in data.splits[Split.TEST][:tokens]]))
