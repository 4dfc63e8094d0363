"""Rows of published measurements: a CSV file's columns, read into the jobs that the planner predicts.

Columns, of which any but ``id``, ``kind``, ``model`` and ``hardware`` may be empty: ``gpus``, ``tp``, ``pp``, ``cp``,
``dp_or_fsdp`` ("fsdp32", "dp4 (ep2)"), ``seq`` ("8192"; "128/2048" is a prompt and an answer), ``global_batch``,
``micro_batch``, ``precision``, ``metric``, ``value``, ``bf16_value`` and ``notes`` ("VP 5; EP 8; full AC"). A setting
that a row leaves out gets its usual value: the least recomputation and the largest micro-batch that fit into memory.
"""

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.errors import ConfigError, DataError
from octavo.planning.hardware import find_hardware
from octavo.planning.jobs import (
    Framework,
    GemmJob,
    GemmPass,
    Layout,
    Recompute,
    ServingJob,
    Sharding,
    TrainingJob,
)
from octavo.planning.model_names import find_model
from octavo.planning.model_shapes import ModelShape
from octavo.planning.precision import find_precision
from octavo.planning.training_memory import training_memory

__all__ = ["Row", "gemm_job", "read_rows", "serving_job", "training_job"]

MOST_BYTES = 64 << 20
REQUIRED = ("id", "kind", "model", "hardware")
NUMBER = r"\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?(?:e[+-]?\d+)?"
TE_LAYER = ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384))  # N and K of QKV, projection, MLP at width 4096


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, as text by column; missing columns are empty."""

    cells: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells.get(column, "")

    def number(self, column: str, default: float = 0.0) -> float:
        """The number of a cell, of several ("128/256") the last; the default if it has none ("n/a", ">1").

        Raises:
            ConfigError: the cell is a negative number, or has a number that cannot be told.
        """
        text = self[column]
        if re.match(r"\s*-\s*\d", text):
            raise ConfigError(f"{column} must not be negative, as {text.strip()!r} is")
        plain = re.sub(r"\([^)]*\)", "", text)
        if not re.search(r"\d", plain) or plain.lstrip().startswith(">"):
            return default
        return _numbers(column, text)[-1]

    def integer(self, column: str, default: int = 0) -> int:
        """A cell as an integer."""
        return int(self.number(column, default))

    @property
    def notes(self) -> str:
        """Everything that the row says in words, in lower case."""
        return " ; ".join((self["notes"], self["model"], self["dp_or_fsdp"], self["precision"])).lower()

    @property
    def kind(self) -> str:
        """The kind of measurement in one spelling: train, infer, gemm or layer; others as they are."""
        kind = self["kind"].strip().lower()
        return {"training": "train", "inference": "infer", "serving": "infer"}.get(kind, kind)

    @property
    def source(self) -> str:
        """Repository or page that published it."""
        return self["source_repo_or_doc"]

    def noted(self, name: str, default: int = 1) -> int:
        """A number in the notes, such as that of "VP 5"; "n/a" and silence are the default."""
        match = re.search(rf"\b{name} ?(\d+)\b", self.notes)
        return int(match.group(1)) if match and int(match.group(1)) else default


def _numbers(column: str, text: str) -> list[float]:
    """Numbers of a cell, divided by a slash: "8192", "8,192", "8k" (of 1,024), "128/256", "16 (2 per GPU)"."""
    cells = re.sub(r"\([^)]*\)", "", text.lower()).split("/")
    matches = [re.fullmatch(rf"\s*(?:in|out|isl|osl)?[ =]*({NUMBER}) ?(k?)\s*", cell) for cell in cells]
    if not all(matches):
        raise ConfigError(f"{column} {text.strip()[:40]!r} is not a number such as 8192, 8,192, 8k, or 128/256")
    return [float(match[1].replace(",", "")) * (1024 if match[2] else 1) for match in matches if match]


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a CSV file.

    Raises:
        OSError: the file cannot be opened.
        DataError: it is not CSV in UTF-8, is too large, or lacks a column that every row needs.
    """
    if path.stat().st_size > MOST_BYTES:
        raise DataError(f"{str(path)!r} has more than {MOST_BYTES >> 20} MB; split it")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"{str(path)!r} has no column {missing[0]!r}; its first line must name the columns")
            rows = [
                {
                    key: (value or "") if key == "id" else (value or "").strip()
                    for key, value in row.items()
                    if isinstance(key, str)
                }
                for row in reader
            ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{str(path)!r} is not CSV in UTF-8: {error}") from error
    return [Row(cells) for cells in rows]


def framework_of(row: Row) -> Framework:
    """Return the program that ran a row, by its source and its notes."""
    text = f"{row.source} {row['source_path_or_url']} {row.notes}".lower()
    patterns = (
        (r"maxtext|paxml|\bjax\b", Framework.JAX),
        (r"tensorrt-?llm", Framework.TRTLLM),
        (r"vllm|sglang", Framework.VLLM),
        (r"megatron|nemo|dgxc|primus", Framework.MEGATRON),
        (r"llm-foundry|composer|mosaic", Framework.COMPOSER),
        (r"coat|eager|huggingface|te-mixtral", Framework.EAGER),
    )
    if "automodel" in text:  # FSDP2 around Transformer Engine's and DeepEP's kernels
        return Framework.MEGATRON
    return next((framework for pattern, framework in patterns if re.search(pattern, text)), Framework.TITAN)


def release_of(row: Row) -> float:
    """Return the year and month of the program's release: 2026.5 for NeMo 26.06; 0 if the row does not say."""
    match = re.search(r"\b(?:nemo |v)(2\d)\.(\d\d)\b", f"{row['source_path_or_url']} {row['notes']}".lower())
    return 2000 + int(match.group(1)) + (int(match.group(2)) - 1) / 12 if match else 0.0


def training_job(row: Row) -> TrainingJob:
    """Return the training step that a row measured.

    Raises:
        ConfigError: its model or hardware is unknown, or its layout is impossible.
    """
    model, hardware = find_model(row["model"]), find_hardware(row["hardware"])
    layout = _layout(row)
    precision = find_precision(row["precision"], has_mx=hardware.has_mx)
    if precision.weight_bits:
        raise ConfigError("weights alone in fewer bits are for inference; a training on frozen ones is not modelled")
    seq = row.integer("seq", 2048 if "nanochat" in row.notes else 4096)
    micro = _micro_batch(row, layout)
    job = TrainingJob(
        model=model,
        hardware=hardware,
        layout=layout,
        seq=seq,
        micro_batch=max(1, micro),
        global_batch=max(1, row.integer("global_batch", max(1, micro) * layout.dp * _usual_micro_batches(layout))),
        precision=precision,
        recompute=_recompute(row),
        framework=framework_of(row),
        release=release_of(row),
        frozen=bool(re.search(r"\blora\b|peft", row.notes)),
        token_drop="tokendrop" in row.notes or "token drop" in row.notes,
        overlaps_tp=_overlaps_tp(row),
        bf16_states="automodel" in row.source.lower(),
    )
    return job if micro else _with_micro_batch(job, has_global=bool(row["global_batch"]))


def _micro_batch(row: Row, layout: Layout) -> int:
    """Sequences of a micro-batch, 0 if the row does not say.

    A pipeline computes several micro-batches: a cell that leaves one of them names a rank's whole batch, as torchtitan
    does, whose pipelines compute one sequence at a time.
    """
    micro = row.integer("micro_batch")
    is_whole = layout.pp > 1 and row.integer("global_batch") == micro * layout.dp
    return min(1, micro) if is_whole else micro


def _usual_micro_batches(layout: Layout) -> int:
    """Micro-batches of a step whose global batch is not stated: a pipeline needs many to be full."""
    return 8 * layout.pp if layout.pp > 1 else 1


def _with_micro_batch(job: TrainingJob, *, has_global: bool) -> TrainingJob:
    """The job with the largest power of two as its micro-batch that fits into memory, up to 32,768 tokens a rank."""
    room, best = 0.95 * job.hardware.memory * 1e9, job
    size = 1
    while size * job.seq // job.layout.cp <= 32768:
        batch = job.global_batch if has_global else size * job.layout.dp * _usual_micro_batches(job.layout)
        bigger = replace(job, micro_batch=size, global_batch=batch)
        policy = job.recompute or Recompute.FULL
        if training_memory(bigger, policy).total > room:
            break
        best = bigger
        size *= 2
    return best


def _overlaps_tp(row: Row) -> bool:
    """Whether the notes say so; the name of a group of rows, some with and some without, says nothing."""
    text = re.sub(r"group=[^;]*", "", row.notes)
    return bool(re.search(r"(?<!no )(?<!without )\basync(?:hronous)? ?-?tp\b", text))


def _layout(row: Row) -> Layout:
    text = row.notes
    gpus = row.integer("gpus", 1) or 1
    tp, pp, cp = (row.integer(name, 1) or 1 for name in ("tp", "pp", "cp"))
    if gpus % (tp * pp * cp):
        cp = 1
    return Layout(
        gpus=gpus,
        tp=tp,
        pp=pp,
        cp=cp,
        vp=row.noted("vpp?"),
        ep=min(row.noted("ep"), gpus // pp),
        etp=row.noted("etp", tp if 0 < release_of(row) < 2025.3 and row.noted("ep") > 1 else 1),
        shard=_shard(row, dp=gpus // (tp * pp * cp)) * cp,
        sharding=_sharding(text),
    )


def _sharding(text: str) -> Sharding:
    """What is divided among data-parallel ranks; Megatron's distributed optimizer if nothing is said."""
    patterns = (
        (r"shard_grad_op|zero[- ]?(?:stage[- ]?)?2\b", Sharding.ZERO2),
        (r"[fh]sdp|full_shard|zero[- ]?(?:stage[- ]?)?3\b", Sharding.FSDP),
        (r"zero[- ]?(?:stage[- ]?)?1\b", Sharding.ZERO1),
        (r"\bddp\b", Sharding.DDP),
    )
    return next((sharding for pattern, sharding in patterns if re.search(pattern, text)), Sharding.ZERO1)


def _shard(row: Row, *, dp: int) -> int:
    """Data-parallel ranks that FSDP divides weights among, context-parallel ones left out; 0 for all.

    FSDP1 and FSDP2 are also the names of PyTorch's programs, and count where they are all ranks, or have replicas.
    """
    text = row["dp_or_fsdp"].lower()
    found = re.search(r"fsdp ?(\d+)", text)
    shard = int(found.group(1)) if found else 0
    is_number = shard > 2 or shard == dp or re.search(r"\b(?:x|×) ?dp|hsdp", text)
    return shard if is_number else 0


def _recompute(row: Row) -> Recompute | None:
    text = row.notes
    patterns = (
        (r"(?:ac|checkpoint(?:ing)?|recompute) none|activation ckpt false|no (?:ac|recompute)\b", Recompute.NONE),
        (r"selective (?:ac|op|recompute|activation)|sac\b", Recompute.SELECTIVE),
        (r"full (?:ac|recompute|activation)|activation ckpt true|ac full", Recompute.FULL),
    )
    stated = next((policy for pattern, policy in patterns if re.search(pattern, text)), None)
    if stated is None and framework_of(row) == Framework.JAX:
        return Recompute.FULL  # the default of MaxText and of Paxml
    return stated


def serving_job(row: Row) -> ServingJob:
    """Return the service that a row measured: one replica, and how many of them there are.

    Raises:
        ConfigError: its model or hardware is unknown, it has no prompt and answer lengths, or a layout that is not
            modelled.
    """
    model, hardware = find_model(row["model"]), find_hardware(row["hardware"])
    lengths = _numbers("seq", row["seq"]) if row["seq"] else []
    if len(lengths) != 2:
        raise ConfigError("a service needs the lengths of prompts and answers in seq, as 1024/128")
    gpus = max(1, row.integer("gpus", 1))
    tp = max(1, row.integer("tp", gpus))
    if row.integer("pp", 1) > 1:
        raise ConfigError("pipelines of inference are not modelled; tensor and expert parallelism and replicas are")
    divides_experts = _divides_experts(row, model)
    of_replica = max(tp, row.noted("d?ep", tp if model.kv_rank else gpus)) if divides_experts else tp
    if gpus % of_replica:
        raise ConfigError(f"{gpus} GPUs are not a multiple of the {of_replica} that a replica has")
    replicas = gpus // of_replica
    return ServingJob(
        model=model,
        hardware=hardware,
        gpus=of_replica,
        tp=tp,
        prompt=max(1, int(lengths[0])),
        answer=max(1, int(lengths[1])),
        precision=find_precision(row["precision"], has_mx=hardware.has_mx),
        requests=row.integer("micro_batch") or -(-row.integer("global_batch") // replicas),
        framework=framework_of(row),
        divides_experts=divides_experts and of_replica > 1,
        release=release_of(row),
        replicas=replicas,
    )


def _divides_experts(row: Row, model: ModelShape) -> bool:
    """Whether ranks attend to different requests: where notes say so, and for latent attention unless they deny it.

    Latent keys cannot be divided among tensor-parallel ranks, so that servers' recipes give each rank its requests.
    """
    if re.search(r"\btp[ -]?attention|attention[ -]tp\b|no attention dp", row.notes):
        return False
    return model.is_latent_mixture or bool(re.search(r"\bdep\d+|\bep\d+|attention dp", row.notes))


def gemm_job(row: Row) -> GemmJob:
    """Return the linear layers that a row measured.

    Raises:
        ConfigError: its hardware is unknown, or its model names no sizes.
    """
    text, hardware = row["model"], find_hardware(row["hardware"])
    precision = find_precision(row["precision"], has_mx=hardware.has_mx)
    groups = _size(text, "G") or 1
    shapes, attention = _shapes(text, groups), None
    if "TransformerLayer" in text:
        hidden, ffn, heads = (_size(text, name) or 0 for name in ("h", "ffn", "heads"))
        seq = _size(text, "seq") or 2048
        tokens = seq * (_size(text, "batch") or 1)
        if min(hidden, ffn, heads) < 1:
            raise ConfigError("a TransformerLayer needs h, ffn and heads in its name")
        shapes = tuple(
            (tokens, n, k) for n, k in ((3 * hidden, hidden), (hidden, hidden), (ffn, hidden), (hidden, ffn))
        )
        attention = (tokens, heads, hidden // heads, seq)
    if not shapes or any(min(shape) < 1 for shape in shapes):
        raise ConfigError(f"the sizes M, N and K of {text!r} are not known")
    ranks = row.integer("tp", 1) or 1
    copies = max(1, row.integer("gpus", 1) // ranks)
    shapes = tuple((max(1, m // copies), n, k) for m, n, k in shapes)
    return GemmJob(
        shapes=shapes,
        groups=groups,
        passes=_passes(row),
        hardware=hardware,
        precision=precision,
        attention=attention,
        ranks=ranks,
        weight_cached="inference" in row["source_path_or_url"],
        is_grouped="grouped" in text.lower(),
    )


def _size(text: str, name: str) -> int | None:
    """A size such as that of "M=4096" or, of small letters alone, "m4096"."""
    match = re.search(rf"\b{name} ?= ?(\d+)", text) or re.search(rf"\b{name.lower()} ?=? ?(\d+)", text)
    return int(match.group(1)) if match else None


def _shapes(text: str, groups: int) -> tuple[tuple[int, int, int], ...]:
    """M (of a group), N and K of every product a name lists."""
    text = re.sub(r"\bM ?= ?N ?= ?K ?= ?(\d+)", r"M=\1 N=\1 K=\1", text)
    text = re.sub(r"\(M, ?N, ?K\) ?= ?\((\d+), ?(\d+), ?(\d+)\)", r"M=\1 N=\2 K=\3", text)
    if match := re.search(r"h=(\d+) ffn=(\d+) M=(\d+)", text):
        hidden, ffn, m = map(int, match.groups())
        return tuple((m, n, k) for n, k in ((3 * hidden, hidden), (hidden, hidden), (ffn, hidden), (hidden, ffn)))
    if match := re.search(r"(\d+) ?-> ?(\d+), batch (\d+) x (\d+)", text):
        k, n, batch, seq = map(int, match.groups())
        return ((batch * seq, n, k),)
    if match := re.search(r"\b(\d{2,})[x×](\d{2,})[x×](\d{2,})\b", text):
        m, n, k = map(int, match.groups())
        return ((m, n, k),)
    if match := re.search(r"\b(\d{3,})(?:³|\^3| cubed)", text):
        return ((int(match.group(1)),) * 3,)
    of_group = re.search(r"M/group ?= ?(\d+)", text)
    sizes = [_size(text, name) or 0 for name in ("M", "N", "K")]
    if of_group:
        return ((int(of_group.group(1)), sizes[1], sizes[2]),)
    return ((sizes[0] // groups, sizes[1], sizes[2]),)


def _passes(row: Row) -> GemmPass:
    patterns = (
        (r"\btotal\b", GemmPass.SUM),
        (r"fwd ?\+ ?bwd|fwd_bwd|transformerlayer|forward ?(?:\+|and) ?backward", GemmPass.ALL),
        (r"dgrad|grad_input", GemmPass.GRAD_INPUT),
        (r"wgrad|grad_weight", GemmPass.GRAD_WEIGHT),
        (r"fprop|forward|\bfwd\b", GemmPass.FORWARD),
    )
    for text in (f"{row['model']} {row['metric']}".lower(), row["notes"].lower()):
        for pattern, name in patterns:
            if re.search(pattern, text):
                return name
    return GemmPass.FORWARD
