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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from octavo.checksums import sealed
from octavo.errors import ConfigError, DataError, NonFiniteLossError
from octavo.experiments.run_measures import MEASURES, OnPhase, Phase, known_measures, measures_of, noise_at, on_step
from octavo.files import write_atomically
from octavo.models import generate
from octavo.models.sources import has_run
from octavo.text.corpus import Split
from octavo.text.sources import is_unicode
from octavo.text.tokens import TokenData
from octavo.training.comparison import RunMeasures, Study, run_from_json
from octavo.training.config import RunConfig, config_from_dict
from octavo.training.evaluate import unigram_entropy
from octavo.training.gradient_noise import GradientNoise
from octavo.training.loop import train
from octavo.training.memory import fitting_in_memory
from octavo.training.run_folder import TrainedRun, load_run
from octavo.training.setup import check_data
from octavo.training.signals import StoppedBySignal
from octavo.training.study_facts import facts_of
from octavo.training.threads import using_threads

__all__ = ["DEFAULT_RECIPES", "STUDY", "check_prompt", "check_study_data", "configs_of", "run_study"]

DEFAULT_RECIPES = ("fp32", "bf16", "tensorwise")
STUDY = "study.json"
NOISE_BATCHES = 16
SAMPLE_TOKENS = 96
SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 0.7, 40


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
    noise = noise_at(folder / recipes[0], configs, data, batches=NOISE_BATCHES, report=report)
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

    def read(content: dict[str, Any]) -> RunMeasures | None:
        same = all(content[key] == value for key, value in identity.items())
        return run_from_json(content["run"]) if same else None

    known = known_measures(run_dir / MEASURES, read)
    if known is not None:
        return known
    on_event = on_step(f"train {config.training.recipe}", report)
    result = train(config, run_dir, data=data, resume=has_run(run_dir), on_event=on_event)
    if result.stopped_by is not None:
        raise StoppedBySignal(result.stopped_by)
    measures = measures_of(result, config, data, test_tokens=test_tokens, report=report)
    if not all(map(math.isfinite, measures.window_nats)):
        raise NonFiniteLossError(f"the held-out loss of {str(run_dir)!r} is not finite; lower the learning rate")
    write_atomically(
        run_dir / MEASURES, json.dumps(sealed({**identity, "run": asdict(measures)}), allow_nan=False) + "\n"
    )
    return measures


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
