"""A run that never was: numbers as a training leaves them, with faults at known places."""

from dataclasses import replace

import numpy as np

from octavo.doctor import Finding, Sample, Series, Severity, series_of
from octavo.doctor.findings import Remedy
from octavo.doctor.series import PARAMETER_FIELDS, CastKey, ProductKey
from octavo.doctor.statistics import CAST_FIELDS, PRODUCT_FIELDS

PARTS = (
    "attention.q_proj",
    "attention.k_proj",
    "attention.v_proj",
    "attention.o_proj",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
)
ROLES = (("input", "output"), ("weight", "output"), ("grad_output", "grad_input"))
MAX = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


def paths(layers):
    names = [f"layers.{index // len(PARTS)}.{PARTS[index % len(PARTS)]}" for index in range(layers)]
    return [*names[:-1], 'head<b>&"x"']  # the last one's name holds what HTML and plotly must not read as markup


def samples(layers=21, looks=60, interval=10, seed=0, faulty=True):
    """Looks at steps 1, 10, 20, … with underflow in one layer and a stale scale in another, from the middle on."""
    rng, names = np.random.default_rng(seed), paths(layers)
    for look in range(looks):
        share = look / max(1, looks - 1)
        numbers = rng.normal(size=(layers, len(ROLES), len(CAST_FIELDS)))
        casts = {
            CastKey(path, role, gemm): cast(
                numbers[i, j], role, i / layers, share, faulty * fault(i, role, share, layers)
            )
            for j, (role, gemm) in enumerate(ROLES)
            for i, path in enumerate(names)
        }
        products = {
            ProductKey(path, gemm): np.array([27 + rng.normal() - (gemm != "output") * 3, rng.normal() * 1e-3])
            for gemm in ("output", "grad_input", "grad_weight")
            for path in names
        }
        assert len(PRODUCT_FIELDS) == 2
        parameters = {f"{path}.weight": np.exp(rng.normal(size=3) * 0.2 - [0, 4, 6 + share]) for path in names}
        assert len(PARAMETER_FIELDS) == 3
        yield Sample(
            step=max(1, look * interval),
            casts=casts,
            products=products,
            parameters=parameters,
            modules={"alignment": {f"layers.{n}.mlp": 0.2 + 0.3 * share for n in range(layers // len(PARTS))}},
            layers={
                path: {"recipe": "delayed", "history_length": 16, "in_features": 128, "out_features": 512}
                for path in names
            },
        )


def fault(index, role, share, layers):
    """1 where the gradients of layers.1.mlp.down underflow, 2 where the input scale of layers.2.mlp.up is stale."""
    if share > 0.55 and role == "grad_output" and index == min(13, layers - 1):
        return 1
    return 2 if 0.3 < share < 0.7 and role == "input" and index == min(19, layers - 1) else 0


def cast(noise, role, depth, share, kind):
    amax = np.exp(2 * depth + 0.5 * share + noise[0] * 0.15) * (1e-3 if role == "grad_output" else 1.0)
    ratio = np.exp(noise[1] * 0.05 - 0.1) * (3.4 if kind == 2 else 1)
    found = {
        "amax": amax,
        "rms": amax / 12,
        "kurtosis": 3 + abs(noise[2]) + 4 * depth,
        "nonfinite": 0,
        "zero_fraction": 0.02 * depth,
        "saturation_fraction": 0.02 if kind == 2 else 0.0,
        "underflow_fraction": 0.42 + 0.1 * abs(noise[3]) if kind == 1 else 0.004 * np.exp(noise[3]),
        "flushed_energy": 1e-6,
        "sqnr_db": (25.4 if role == "grad_output" else 31.3) + 0.2 * noise[4] - 13 * (kind == 2),
        "cosine": 0.9996,
        "signed_error": 1e-4 * noise[5],
        "scale": amax / ratio / MAX[role],
        "stale_ratio": ratio,
        "least_stale_ratio": ratio,
        "code_mismatch": 0.0,
    }
    return np.array([found[name] for name in CAST_FIELDS], dtype=np.float64)


def steps(count, seed=0, worse=0.0):
    rng = np.random.default_rng(seed)
    for step in range(1, count + 1):
        loss = 3.1 + 4.4 * np.exp(-step / (count / 6)) + rng.normal() * 0.05 + worse * max(0, step / count - 0.5)
        yield {"kind": "step", "step": step, "loss": float(loss), "lr": 1e-3}
        if step % max(1, count // 8) == 0:
            yield {"kind": "evaluation", "step": step, "nats": float(loss) + 0.02}


def run(**settings) -> Series:
    taken = list(samples(**settings))
    return series_of(steps(taken[-1].step, worse=0.25), taken)


def long_run(*, layers, looks) -> Series:
    """As many looks as wanted, made of two by noise; nothing is wrong."""
    rng, short = np.random.default_rng(1), run(layers=layers, looks=2, faulty=False)
    at = np.arange(looks) * 10.0

    def stretched(table):
        noise = np.exp(0.05 * rng.normal(size=(looks, *table.values.shape[1:])))
        return replace(table, steps=at, values=table.values[np.arange(looks) % 2] * noise)

    tables = {name: stretched(getattr(short, name)) for name in ("casts", "products", "parameters")}
    lines = series_of(steps(int(at[-1])))
    modules = {name: stretched(table) for name, table in short.modules.items()}
    return replace(short, **tables, modules=modules, curves=lines.curves)


def remedy(text, error_removed, time_ratio, bytes_ratio):
    return Remedy(text=text, changes={}, error_removed=error_removed, time_ratio=time_ratio, bytes_ratio=bytes_ratio)


REPLAYED = (
    remedy("cast this layer's gradient row by row", 0.93, 1.04, 1.01),
    remedy("1×128 blocks for this layer", 0.97, 1.31, 1.03),
    remedy("run this layer in BF16", 1.0, 1.92, 2.0),
    remedy("E4M3 instead of E5M2 for gradients", -0.2, 1.0, 1.0),
)


def findings() -> list[Finding]:
    """What the faults deserve, and one of each other severity; best first is worst first."""
    return [
        Finding(
            code="gradient-underflow",
            severity=Severity.FAIL,
            path="layers.1.mlp.down",
            role="grad_output",
            first_step=330,
            last_step=590,
            evidence={"underflow_fraction": 0.534, "sqnr_db": 25.5},
            cause="53 % of this gradient's nonzeros become zero, since a few large values set the scale of all",
            remedies=REPLAYED,
        ),
        Finding(
            code="stale-scale",
            severity=Severity.WARN,
            path="layers.2.mlp.up",
            role="input",
            first_step=180,
            last_step=410,
            evidence={"stale_ratio": 3.4, "saturation_fraction": 0.02},
            cause="the amax is 3.4 times what the scale was made for; the history is too long for how fast it grows",
            remedies=(remedy("a history of 4 instead of <16>", None, None, None),),
        ),
        Finding(
            code="loss-gap",
            severity=Severity.WARN,
            first_step=400,
            last_step=590,
            evidence={"gap_nats": 0.061},
            cause="the loss leaves that of the reference run by 0.06 nats, and the distance grows",
        ),
        Finding(
            code="sensitive-module",
            severity=Severity.NOTE,
            path='head<b>&"x"',
            role="weight",
            first_step=1,
            last_step=590,
            cause='the output head <b>runs</b> in FP8 & is "sensitive"',
        ),
    ]
