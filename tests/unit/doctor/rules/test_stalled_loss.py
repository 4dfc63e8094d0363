"""A loss that no longer falls: both sides of every threshold, what it follows from, and real runs."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.doctor import Severity, Thresholds, diagnose, series_of
from octavo.doctor.rules.stalled_loss import stalled_loss
from octavo.experiments import short_run
from octavo.text.corpus import Split
from octavo.training.evaluate import unigram_entropy
from tests.unit.doctor.synthetic_series import FIRST, SECOND, looks, steps
from tests.unit.training.tiny_runs import tiny_config

LIMITS = Thresholds()
FLAT = [7.6, 6.8, *[6.4] * 58]


def series(losses, *, unigram=6.3, lr=1e-3):
    return replace(series_of(steps(losses, lr=lr)), unigram_nats=unigram)


@pytest.mark.parametrize(
    ("losses", "unigram", "count"),
    [
        (FLAT, 7.1, 1),
        (FLAT, 7.2, 0),  # a converged model: well below token frequencies
        (FLAT, 2.0, 1),  # it knows not even those
        (FLAT, None, 0),
        (FLAT[:59], 6.3, 0),
        ([7.6, 6.8, *np.linspace(6.8, 6.2, 58)], 6.3, 0),
        ([7.6, 6.8, *[3.7] * 58], 3.7, 0),  # far below its beginning
        ([*[7.6] * 20, *[6.4] * 40], 6.3, 1),
        ([*[7.6] * 40, *[6.4] * 20], 6.3, 0),  # it fell late
    ],
)
def test_a_flat_loss_near_the_unigram_entropy(losses, unigram, count):
    assert len(list(stalled_loss(series(losses, unigram=unigram), LIMITS))) == count


def test_it_says_what_the_curve_shows():
    (found,) = diagnose(series(FLAT))
    assert (found.code, found.severity, found.first_step, found.last_step) == ("stalled-loss", Severity.WARN, 3, 60)
    assert found.evidence == {"stalled_loss": 6.4, "unigram_nats": 6.3}
    assert found.cause == (
        "the loss has not fallen since step 3 and stays at 6.4, near the unigram entropy of 6.3: the model predicts "
        "little more than token frequencies; the learning rate was up to 0.001"
    )
    assert found.remedies[0].changes == {"lr": pytest.approx(1e-3 / 3)}


def test_it_follows_from_a_rate_that_is_too_large_and_from_codes_of_another_tensor():
    grown = {(path, "weight"): {"rms": 0.1 * 3.0 ** np.linspace(0, 1, 6)} for path in (FIRST, SECOND)}
    stale = {(FIRST, "weight"): {"code_mismatch": [0.5] * 6}}
    for casts, code in ((grown, "learning-rate"), (stale, "stale-weight")):
        watched = looks(count=6, interval=1, casts=casts, lines=steps(FLAT, lr=0.01))
        (found,) = diagnose(replace(watched, unigram_nats=6.3))
        assert found.code == code
        assert found.consequences == {"stalled-loss": 1}


def test_the_reference_says_whether_fp8_is_the_cause():
    falls = series(list(np.linspace(7.6, 4.0, 60)))
    for reference, said in ((series(FLAT), "so FP8 is not the cause"), (falls, "the reference does not")):
        (found,) = [one for one in diagnose(series(FLAT), reference=reference) if one.code == "stalled-loss"]
        assert said in found.cause


@pytest.mark.long
@pytest.mark.parametrize(("lr", "codes"), [(0.1, ["learning-rate"]), (0.01, []), (0.03, [])])
def test_real_runs_at_a_rate_that_stalls_and_at_two_that_learn(lr, codes, data):
    config = tiny_config(
        recipe="tensorwise",
        steps=150,
        statistics_interval=10,
        lr=lr,
        min_lr=lr / 10,
        warmup=5,
        batch_size=4,
        context=32,
    )
    run, _ = short_run(config, data, steps=150)
    known = replace(run.series, unigram_nats=unigram_entropy(data, Split.TRAIN))
    assert [one.code for one in diagnose(known)] == codes
