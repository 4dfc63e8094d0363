"""Outliers that grow: both sides of every threshold."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.doctor import Severity, Thresholds
from octavo.doctor.rules.outliers import outlier_growth
from tests.unit.doctor.synthetic_series import FIRST, healthy_sample, looks, renamed

LIMITS = Thresholds()
DOWN = "mlp.down_proj"


def gated(cosines, peaks, count=6):
    sample = renamed(healthy_sample("tensorwise"), {FIRST: DOWN})
    changes = {(DOWN, "input"): {"rms": 1, "amax": peaks}}
    return looks(sample, count=count, casts=changes, modules={"alignment": {"mlp": cosines}})


@pytest.mark.parametrize(
    ("cosines", "peaks", "found"),
    [
        (0.95, [5, 5, 5, 20, 20, 20], 1),
        (0.95, [5, 5, 5, 19, 19, 19], 0),
        (0.94, [5, 5, 5, 20, 20, 20], 0),
        (0.95, 64, 1),
        (0.95, 63, 0),
        (0.99, 5, 1),
        (0.989, 5, 0),
        ([0.95, 0.95, 0.9, 0.95, 0.95, 0.9], 64, 0),
    ],
)
def test_rows_that_align_while_their_product_grows(cosines, peaks, found):
    assert len(list(outlier_growth(gated(cosines, peaks), LIMITS))) == found


def test_aligned_rows_report_their_cosine_and_amax_growth():
    (found,) = outlier_growth(gated(0.97, [5, 5, 5, 20, 40, 80]), LIMITS)
    assert (found.path, found.role, found.severity) == ("mlp", "input", Severity.WARN)
    assert "the same way (cosine 0.970)" in found.cause
    assert "amax of the input of mlp.down_proj is 40x its rms, 8x the ratio at the beginning" in found.cause


@pytest.mark.parametrize(
    ("peaks", "found"),
    [
        (np.geomspace(50, 4000, 6), [Severity.NOTE]),
        ([128, 128, 128, 1024, 1024, 1024], [Severity.NOTE]),
        ([129, 129, 129, 1024, 1024, 1024], []),
        ([100, 100, 100, 1000, 1000, 1000], []),
        ([512, 512, 512, 4096, 4096, 4096], [Severity.WARN]),
        ([8192] * 6, []),
        ([10, 10, 10, 9000, 10, 10], []),
    ],
)
def test_a_peak_that_climbs(peaks, found):
    series = looks(casts={(FIRST, "input"): {"rms": 1, "amax": peaks}})
    assert [one.severity for one in outlier_growth(series, LIMITS)] == found


def test_zeros_have_no_peak():
    assert not list(outlier_growth(looks(casts={(FIRST, "input"): {"rms": 0, "amax": 0}}), LIMITS))


def test_aligned_rows_of_layers_that_do_not_cast():
    sample = replace(healthy_sample("tensorwise"), modules={})
    assert not list(outlier_growth(looks(sample, modules={"alignment": {"other.mlp": 1.0}}), LIMITS))
