"""Export of a converted language model to a checkpoint folder (``octavo.save_quantized``).

| file                                      | content                                                                |
|-------------------------------------------|------------------------------------------------------------------------|
| model.safetensors, or shards and an index | codes, FP32 scales, and every other tensor in ``dtype``                |
| config.json                               | the model's own, with the ``quantization_config``                      |
| tokenizer.json and other model files      | ``octavo.export.model_files``                                           |
| files of the format                       | hf_quant_config.json (modelopt), recipe-1.toml … (octavo)              |
| octavo.sha256                             | SHA-256 of all files (``octavo.checksums``)                            |

The folder is written and verified under a temporary name, then renamed: it is complete and verified, or absent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from octavo.checkpoints import (
    FORMATS,
    CodedTable,
    Contents,
    FileFormat,
    KVScales,
    attention_path,
    contents_of,
    written_configuration,
)
from octavo.checkpoints.merged_layers import of_several_schemes
from octavo.checkpoints.schemes import scheme_of
from octavo.checkpoints.tensor_files import write_json, write_tensors
from octavo.checksums import write_sums
from octavo.convert import file_names
from octavo.errors import ConfigError
from octavo.export.emulation import emulated, layers_in_high_precision
from octavo.export.lockstep import LockstepAgreement, make_probe
from octavo.export.model_files import Companions, companions_of
from octavo.export.reload import OCTAVO
from octavo.export.verification import decoded_layers, flattened_layers, reader_notes, reader_of, verify
from octavo.files import claimed_folder, hidden_path, replacing_folder
from octavo.language_model import LanguageModel
from octavo.nn.arguments import check_whole
from octavo.numerics.cast_spec import check_member
from octavo.quantization.windows import text_windows
from octavo.text.corpus import Split
from octavo.text.sources import BUILTIN

__all__ = ["DTYPES", "SavedCheckpoint", "save_quantized"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WINDOWS, PROMPT, GREEDY = 2, 32, 64
OnPhase = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """Result of :func:`save_quantized`.

    Attributes:
        folder: the written folder.
        format: name of the format.
        schemes: number of layers by scheme.
        left_out: paths of linear layers in high precision.
        notes: differences between the recipe and the computation of a server.
        nbytes: size of the weights' files.
        bf16_nbytes: size of the same weights in BF16.
        reader: program that read the folder back; "" without verification.
        agreement: result of the verification; None without.
    """

    folder: Path
    format: str
    schemes: Mapping[str, int]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    nbytes: int
    bf16_nbytes: int
    reader: str = ""
    agreement: LockstepAgreement | None = None


def save_quantized(
    model: LanguageModel,
    folder: str | Path,
    *,
    format: str = "compressed-tensors",  # noqa: A002 (the common name)
    kv_scales: Mapping[int, KVScales] | None = None,
    tables: Mapping[str, CodedTable] | None = None,
    dtype: str = "bf16",
    max_shard_bytes: int = 5_000_000_000,
    fnuz: bool = False,
    verify_folder: bool = True,
    on_phase: OnPhase = lambda _label, _done, _total: None,
) -> SavedCheckpoint:
    """Write a language model whose layers run FP8 recipes to a checkpoint folder for other programs.

    Args:
        model: converted, with stored codes or weights in high precision; not changed.
        folder: new or empty.
        format: "compressed-tensors", "hf-fp8", "modelopt" or "octavo".
        kv_scales: scales of keys and of values by decoder layer, such as a calibration's; written in FP32.
        tables: embeddings stored as rows of codes, by path; the model holds the decoded rows. Only "octavo" supports
            them.
        dtype: of every other tensor: "bf16", "fp16" or "fp32".
        max_shard_bytes: maximum size of a file of weights.
        fnuz: write the codes of AMD's MI300 (:mod:`octavo.numerics.fnuz`), which decode to the same weights.
        verify_folder: read the folder back in a fresh process and compare, before it is renamed.
        on_phase: called with a phase's name, the number of steps done and their total.

    Raises:
        TypeError: ``model`` is a bare module, without its tokenizer.
        ConfigError: the folder is not empty, no layer is in FP8, or the format cannot describe the model.
        CheckpointError: the verification failed; the folder is removed.
        OSError: the folder cannot be written; nothing is left behind.

    Example:
        >>> import octavo
        >>> from octavo.language_model import load_language_model
        >>> model = load_language_model("model.gguf")  # doctest: +SKIP
        >>> octavo.convert(model.model, "rowwise")  # doctest: +SKIP
        >>> octavo.save_quantized(model, "served").agreement.logits_error < 1e-3  # doctest: +SKIP
        True
    """
    _check_language_model(model)
    folder = Path(folder)
    check_member("format", format, tuple(FORMATS))
    check_member("dtype", dtype, tuple(DTYPES))
    check_whole("max_shard_bytes", max_shard_bytes, least=1)
    fmt = FORMATS[format]
    contents = contents_of(model.model, kv_scales, tables)
    if (reason := fmt.unsupported_reason(contents)) is not None:
        raise ConfigError(reason)
    writer = _CheckpointWriter(
        model=model, contents=contents, fmt=fmt, dtype=DTYPES[dtype], most=max_shard_bytes, fnuz=fnuz, on_phase=on_phase
    )
    with claimed_folder(folder), replacing_folder(folder) as temporary:
        on_phase("write", 0, 1)
        writer.write(temporary)
        nbytes = sum(path.stat().st_size for path in temporary.glob("*.safetensors"))
        reader = (OCTAVO if fnuz else reader_of(fmt, contents)) if verify_folder else ""
        agreement, flattened = writer.verify(temporary, reader, beside=folder) if verify_folder else (None, ())
    return SavedCheckpoint(
        folder=folder,
        format=format,
        schemes=writer.schemes(),
        left_out=contents.left_out,
        notes=writer.notes() + (() if fnuz else reader_notes(fmt, contents, reader, flattened)),
        nbytes=nbytes,
        bf16_nbytes=writer.bf16_nbytes(),
        reader=reader,
        agreement=agreement,
    )


def _check_language_model(model: object) -> None:
    if isinstance(model, torch.nn.Module) and not hasattr(model, "config"):
        raise TypeError(
            f"save_quantized takes a language model with its tokenizer, not {type(model).__name__}; write other "
            "modules with safetensors.torch.save_file(model.state_dict(), file), after octavo.convert(model, "
            "frozen='fp8') with FP8 codes in place of frozen weights"
        )
    if not isinstance(model, LanguageModel):
        raise TypeError(
            f"save_quantized takes a language model with its tokenizer, not {type(model).__name__}; call "
            "save_quantized(octavo.language_model.LanguageModel(model=model, tokenizer=tokenizer.backend_tokenizer, "
            'context=model.config.max_position_embeddings, source=""), folder), with the tokenizer of '
            "transformers.AutoTokenizer"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckpointWriter:
    """Writer of one model in one format."""

    model: LanguageModel
    contents: Contents
    fmt: FileFormat
    dtype: torch.dtype
    most: int
    fnuz: bool
    on_phase: OnPhase = field(repr=False)

    def write(self, folder: Path) -> None:
        """Write all files."""
        companions = companions_of(self.model)
        for name, content in companions.files.items():
            (folder / name).write_bytes(content)
        contents = self.contents.renamed(file_names(self.model.model))
        contents = contents.in_fnuz() if self.fnuz else contents
        for name, text in self.fmt.other_files(contents).items():
            (folder / name).write_text(text, encoding="utf-8")
        write_json(folder / "config.json", self._config(companions, contents))
        floats = {name: self.dtype for name, tensor in contents.rest.items() if tensor.is_floating_point()}
        write_tensors(folder, self._tensors(contents), floats, self.most)
        write_sums(folder)

    def verify(self, folder: Path, reader: str, *, beside: Path) -> tuple[LockstepAgreement, tuple[str, ...]]:
        """Verify the written folder in a fresh process, and by octavo too where the reader does not cast all inputs.

        Returns:
            The reader's agreement, and the paths of :func:`~octavo.export.verification.flattened_layers`.
        """
        verification = self._verify_by(reader, folder, beside=beside)
        if decoded_layers(self.contents, reader):
            self._verify_by(OCTAVO, folder, beside=beside)
        return verification

    def _verify_by(self, reader: str, folder: Path, *, beside: Path) -> tuple[LockstepAgreement, tuple[str, ...]]:
        decoded = decoded_layers(self.contents, reader)
        paths = [path for path in self.contents.layers if path not in set(decoded)]
        length = min(PROMPT + GREEDY, self.model.context)
        text = text_windows(self.model, BUILTIN, Split.TEST, count=WINDOWS, length=length)
        text = text.to(next(self.model.model.parameters()).device)
        with emulated(
            self.model, self.contents, dtype=self.dtype, served=self.fmt.served, decoded=set(decoded)
        ) as logits:
            probe = make_probe(
                logits,
                self.model.model,
                paths,
                text,
                prompt=max(1, min(PROMPT, length // 2)),  # with a context of 1 no token is generated
                on_token=lambda done, total: self.on_phase("emulate", done, total),
            )
        self.on_phase("read back", 0, 1)
        with hidden_path(beside, "probe") as scratch:
            agreement = verify(folder, probe, reader=reader, scratch=scratch)
        return agreement, flattened_layers(self.contents, reader, probe)

    def schemes(self) -> dict[str, int]:
        """Number of layers by scheme."""
        counts: dict[str, int] = {}
        for layer in self.contents.layers.values():
            name = layer.recipe.name if self.fmt.schemes is None else str(scheme_of(layer.recipe))
            counts[name] = counts.get(name, 0) + 1
        return counts

    def notes(self) -> tuple[str, ...]:
        """One sentence for each recipe whose input cast differs on a server, and for experts and a cache."""
        sentences = []
        if self.fnuz:
            sentences.append(
                "codes are FNUZ, with scales twice as large: for programs that load them as they are on an MI300; read "
                "back by octavo alone"
            )
        if self.contents.kv_scales:
            sentences.append(
                f"keys and values of {len(self.contents.kv_scales)} layers have scales; a server uses them if it is "
                "told to keep an FP8 cache (vllm serve ... --kv-cache-dtype fp8), octavo's own engine does not"
            )
        if others := layers_in_high_precision(self.model.model):
            sentences.append(
                f"{others[0].path!r} and {len(others) - 1} more weights of experts or Conv1D run FP8 recipes here and "
                "are written in high precision; a verification computes so too"
            )
        if self.fmt.schemes is not None and (refused := of_several_schemes(self._scheme_of_each())):
            sentences.append(
                f"vLLM and SGLang refuse this folder: they merge q, k, v; gate, up; and a layer's experts, which in "
                f"{refused[0]!r} and {len(refused) - 1} more modules have several schemes; give them one recipe, or "
                "skip them together; octavo sensitivity makes a mix that servers run if it is given the --format of "
                "the export"
            )
        for recipe in {layer.recipe.name: layer.recipe for layer in self.contents.layers.values()}.values():
            served_recipe = self.fmt.served(recipe)
            if recipe.output.a is not None and served_recipe.output.a != recipe.output.a:
                sentences.append(
                    f"recipe {recipe.name!r} casts inputs in a way that {self.fmt.name} cannot describe: servers cast "
                    f"them {scheme_of(recipe).inputs}, from their own amax; a verification computes so too"
                )
        return tuple(sentences)

    def _scheme_of_each(self) -> dict[str, str]:
        """Schemes of the linear layers by path."""
        schemes = {path: str(scheme_of(layer.recipe)) for path, layer in self.contents.layers.items()}
        return dict.fromkeys(self.contents.left_out, "high precision") | schemes

    def bf16_nbytes(self) -> int:
        """Size of the model in BF16."""
        weights = sum(layer.weight.data.numel() for layer in self.contents.layers.values())
        rows = sum(table.shape[0] * table.shape[1] for table in self.contents.tables.values())
        return 2 * (weights + rows + sum(tensor.numel() for tensor in self.contents.rest.values()))

    def _config(self, companions: Companions, contents: Contents) -> dict[str, object]:
        plain = {key: value for key, value in companions.config.items() if key not in ("dtype", "torch_dtype")}
        dtype = str(self.dtype).removeprefix("torch.")
        return written_configuration(self.fmt, {**plain, "dtype": dtype}, self.fmt.configuration(contents))

    def _tensors(self, contents: Contents) -> dict[str, Tensor]:
        """All tensors in the model's order, each layer's scales after its weight."""
        names, tensors = self.fmt.names, dict[str, Tensor]()
        for path, layer in contents.layers.items():
            tensors[f"{path}.weight"] = layer.weight.data
            tensors[f"{path}.{names.weight}"] = names.written(layer.weight.scale)
            if layer.input_scale is not None:
                tensors[f"{path}.{names.input}"] = names.written(layer.input_scale)
        for index, (key, value) in contents.kv_scales.items():
            attention = attention_path(self.model.model, index)
            tensors[f"{attention}.{names.key}"] = names.written(key)
            tensors[f"{attention}.{names.value}"] = names.written(value)
        for path, table in contents.tables.items():
            tensors |= table.tensors(path)
        return tensors | dict(contents.rest)
