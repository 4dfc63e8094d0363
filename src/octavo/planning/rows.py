"""Rows of published measurements: a CSV file's columns, read into the jobs that the planner predicts.

Columns, of which any but ``id``, ``kind``, ``model`` and ``hardware`` may be empty: ``gpus``, ``tp``, ``pp``, ``cp``,
``dp_or_fsdp`` ("fsdp32", "dp4 (ep2)"), ``seq`` ("8192"; "128/2048" is a prompt and an answer), ``global_batch``,
``micro_batch``, ``precision``, ``metric``, ``value``, ``bf16_value`` and ``notes`` ("VP 5; EP 8; full AC"). A setting
that a row leaves out gets its usual value. Without a micro-batch that is the least recomputation with which a sequence
fits into memory, then the largest micro-batch, both of BF16: published comparisons change the precision alone.
"""

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.errors import ConfigError, DataError
from octavo.planning.hardware import find_hardware
from octavo.planning.jobs import DIVIDED_AS, Framework, Layout, Recompute, ServingJob, Sharding, TrainingJob
from octavo.planning.model_names import find_model
from octavo.planning.model_shapes import ModelShape
from octavo.planning.precision import BF16, find_precision
from octavo.planning.row_words import numbers_of, says, setting
from octavo.planning.training_memory import training_memory

__all__ = ["Row", "read_rows", "serving_job", "training_job"]

MOST_BYTES = 64 << 20
MOST_COUNT = 1e12
REQUIRED = ("id", "kind", "model", "hardware")


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
        return numbers_of(column, text)[-1]

    def integer(self, column: str, default: int = 0) -> int:
        """A cell as an integer.

        Raises:
            ConfigError: it is not whole, or beyond ``MOST_COUNT``.
        """
        number = self.number(column, default)
        if number != number // 1 or number > MOST_COUNT:
            raise ConfigError(f"{column} {self[column].strip()[:40]!r} is not a whole number up to {MOST_COUNT:.0e}")
        return int(number)

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
        return setting(self.notes, name, default)


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


# Programs that notes name beside the one that ran: what it is compared with, and what gave it data.
BESIDE = re.compile(
    r"\b(?:vs\.?|versus|than|compared (?:with|to)) \w+|\b\w+(?: mode)? (?:baseline|tokenizer|datasets?|checkpoint)s?\b"
)


def framework_of(row: Row) -> Framework:
    """Return the program that ran a row, by its source and its notes."""
    notes = BESIDE.sub("", row.notes)
    text = f"{row.source} {row['source_path_or_url']} {notes}".lower()
    patterns = (
        (r"maxtext|paxml|\bjax\b", Framework.JAX),
        (r"tensorrt-?llm|\btrt-?llm", Framework.TRTLLM),
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
    if re.search(r"\d ?k? *(?:[/+]|, )", re.sub(r"\([^)]*\)", "", row["seq"].lower())):
        raise ConfigError(f"seq {row['seq'][:40]!r} has several lengths; a training's sequences have one")
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
        frozen=says(row.notes, r"\bq?lora\b|\bpeft\b") is True,
        token_drop=says(row.notes, r"token[ -]?drop\b") is True,
        overlaps_tp=_overlaps_tp(row),
        bf16_states="automodel" in row.source.lower(),
    )
    _refuse_what_does_not_divide(job, row.noted(EXPERT_RANKS))
    if not _names_sharding(row) and training_memory(job, Recompute.FULL).total > 1e9 * hardware.memory:
        job = replace(job, layout=replace(layout, sharding=Sharding.FSDP))  # what ran must have fitted
    return job if micro else _with_micro_batch(job, has_global=row.integer("global_batch") > 0)


EXPERT_RANKS = "ep|expert[ -]parallel(?:ism)?"


def _refuse_what_does_not_divide(job: TrainingJob, expert_ranks: int) -> None:
    """Refuse more ranks than there is to divide among them."""
    model, layout = job.model, job.layout
    most = {
        "tensor-parallel ranks, heads": (layout.tp, model.heads if model.attention_count else layout.tp),
        "pipeline stages, layers": (layout.pp, model.layers + model.mtp_layers),
        "expert-parallel ranks, experts": (expert_ranks, model.experts or expert_ranks),
        "data-parallel ranks, sequences in a batch": (layout.dp, job.global_batch),
    }
    for names, (ranks, parts) in most.items():
        if ranks > parts:
            divided, whole = names.split(", ")
            raise ConfigError(f"{ranks:,} {divided} are more than the {parts:,} {whole}")


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
    """The job with the least recomputation that lets it fit, and the largest micro-batch that fits with it, in BF16.

    That is a power of two up to 32,768 tokens a rank. It divides a rank's share of a stated batch, into as many
    micro-batches as are usual.
    """
    room, dp, sizes = 0.95 * job.hardware.memory * 1e9, job.layout.dp, [1]
    usual = dp * _usual_micro_batches(job.layout)
    while sizes[-1] * 2 * job.seq // job.layout.cp <= 32768:
        sizes.append(2 * sizes[-1])
    if has_global:
        batch = job.global_batch
        sizes = [size for size in sizes if size == 1 or (batch % (size * dp) == 0 and size * usual <= batch)]
    jobs = [
        replace(job, micro_batch=size, global_batch=job.global_batch if has_global else size * usual) for size in sizes
    ]
    policies = [job.recompute] if job.recompute else list(Recompute)
    for policy in policies:
        fitting = [each for each in jobs if training_memory(each.at(BF16), policy).total <= room]
        if fitting:
            return replace(fitting[-1], recompute=policy)
    return replace(jobs[0], recompute=policies[-1])


def _overlaps_tp(row: Row) -> bool:
    """Whether the notes say so; the name of a group of rows, some with and some without, says nothing."""
    text = re.sub(r"group=[^;]*", "", row.notes)
    return says(text, r"\basync(?:hronous)? ?-?tp\b") is True


# FSDP1 and FSDP2 are names of programs; one data-parallel rank is no number of GPUs.
DATA_RANKS = re.compile(r"(?:^|\bd?dp ?)(?!1\b)\d+|\bfsdp ?(?![12]\b)\d+")


def _layout(row: Row) -> Layout:
    text = row.notes
    tp, pp, cp = (row.integer(name, 1) or 1 for name in ("tp", "pp", "cp"))
    gpus = row.integer("gpus")
    if not gpus and tp * pp * cp > 1:
        raise ConfigError(f"the row leaves out its number of GPUs, of which TP {tp} × PP {pp} × CP {cp} are one copy")
    if not gpus and (ranks := DATA_RANKS.search(row["dp_or_fsdp"].lower())):
        raise ConfigError(f"the row leaves out its number of GPUs, of which {ranks[0]!r} are data-parallel ranks")
    gpus, ep = gpus or 1, row.noted(EXPERT_RANKS)
    return Layout(
        gpus=gpus,
        tp=tp,
        pp=pp,
        cp=cp,
        vp=row.noted("vpp?", 2 if pp > 1 and says(text, r"\binterleaved") else 1),  # torchtitan's number
        ep=max(1, min(ep, gpus // pp)),
        etp=row.noted("etp", tp if 0 < release_of(row) < 2025.3 and ep > 1 else 1),
        shard=_shard(row, dp=gpus // (tp * pp * cp)) * cp,
        sharding=_sharding(row),
    )


SHARDINGS = (
    (r"shard_grad_op|zero[- ]?(?:stage[- ]?)?2\b", Sharding.ZERO2),
    (r"[fh]sdp(?:[12]\b)?|full_shard|zero[- ]?(?:stage[- ]?)?3\b", Sharding.FSDP),
    (r"zero[- ]?(?:stage[- ]?)?1\b", Sharding.ZERO1),
    (r"\bddp\b", Sharding.DDP),
)


def _sharding(row: Row) -> Sharding:
    """Division of states among data-parallel ranks: as a row names it, or as its program's published trainings have it.

    A number of ranks, or a way that is denied, leaves Megatron's distributed optimizer.
    """
    named = next((sharding for pattern, sharding in SHARDINGS if says(row.notes, pattern)), None)
    is_usual = Sharding.ZERO1 in DIVIDED_AS.get(framework_of(row), ())
    return named or (Sharding.ZERO1 if is_usual or _names_sharding(row) else Sharding.FSDP)


def _names_sharding(row: Row) -> bool:
    """Whether a row says how states are divided, if only by denying a way, or by its number of ranks."""
    has_number = re.search(r"\d", row["dp_or_fsdp"]) is not None
    return has_number or any(says(row.notes, pattern) is not None for pattern, _ in SHARDINGS)


def _shard(row: Row, *, dp: int) -> int:
    """Data-parallel ranks that FSDP divides weights among, context-parallel ones left out; 0 for all.

    FSDP1 and FSDP2 are also the names of PyTorch's programs, and count where they are all ranks, or have replicas.
    """
    text = row["dp_or_fsdp"].lower()
    found = re.search(r"fsdp ?(\d+)", text)
    shard = int(found.group(1)) if found else 0
    is_number = shard > 2 or shard == dp or re.search(r"\b(?:x|×) ?dp|hsdp", text)
    return shard if is_number else 0


RECOMPUTED = r"(?:activation |gradient )?(?:checkpoint(?:ing|s)?|ckpt)|(?:activation )?recomput(?:e|ation)|ac"
POLICIES = {"full": Recompute.FULL, "true": Recompute.FULL, "on": Recompute.FULL, "selective": Recompute.SELECTIVE}


def _recompute(row: Row) -> Recompute | None:
    """The policy that notes name before or after the word: "full AC", "recompute=selective", "no checkpointing"."""
    text = row.notes.replace("-", " ")
    before = re.search(rf"\b(full|selective|no|without) (?:op )?(?:activation )?(?:{RECOMPUTED})\b", text)
    after = re.search(
        rf"\b(?:{RECOMPUTED})(?: granularity)?[ =:(]*(full|selective|none|off|disabled|false|true|on|no)\b", text
    )
    found = before or after
    if found:
        return POLICIES.get(found[1], Recompute.NONE)
    if re.search(r"\bsac\b|selective (?:op|activation)|per op (?:ac|sac)", text):
        return Recompute.SELECTIVE
    return Recompute.FULL if framework_of(row) == Framework.JAX else None  # the default of MaxText and of Paxml


def serving_job(row: Row) -> ServingJob:
    """Return the service that a row measured: one replica, and how many of them there are.

    Raises:
        ConfigError: its model or hardware is unknown, it has no prompt and answer lengths, or a layout that is not
            modelled.
    """
    model, hardware = find_model(row["model"]), find_hardware(row["hardware"])
    lengths = numbers_of("seq", row["seq"]) if row["seq"] else []
    if len(lengths) != 2:
        raise ConfigError("a service needs the lengths of prompts and answers in seq, as 1024/128")
    if lengths[0] < 1:
        raise ConfigError(f"seq {row['seq'][:40]!r} has a prompt of no tokens; a service needs one or more")
    gpus = row.integer("gpus") or row.integer("tp") or 1
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
    of_ranks = says(row.notes, r"\battention dp\b|\bdep\d+|\bep\d+")
    if of_ranks is False or says(row.notes, r"\btp[ -]?attention|attention[ -]tp\b"):
        return False
    return model.is_latent_mixture or of_ranks is True
