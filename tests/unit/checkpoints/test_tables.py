"""Tables of codes: cast as ml_dtypes casts, written, read back to the byte, and refused where they are damaged."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoints import load_quantized
from octavo.checkpoints.tables import CodedTable, table_names
from octavo.checksums import SUMS
from octavo.errors import CheckpointError, ConfigError
from octavo.export import save_quantized
from octavo.export.sources import ExportSource
from octavo.language_model import load_language_model
from octavo.quantization.sensitivity.mix import Mix
from octavo.quantization.sensitivity.units import bytes_of, decoded_table, units_of
from tests.unit.checkpoints.folders import verdict
from tests.unit.quantization.tiny_models import VOCABULARY, language_model, windows

PATH, ROWS = "model.embed_tokens", (0, 3, 17, 299)
CODES, SCALE, BF16, NUMBERS = table_names(PATH)


@pytest.mark.parametrize("rows", [[], [0], [1, 4, 6], list(range(7))])
def test_rows_are_cast_one_by_one(rows):
    """Beside ml_dtypes; a row's largest magnitude becomes 448."""
    table = torch.randn(7, 12, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    made = CodedTable.of(table, torch.tensor(rows, dtype=torch.int64))
    wanted = table.numpy().copy()
    for i in {*range(7)} - {*rows}:
        encode = np.float32(448) / np.abs(wanted[i]).max()
        codes = (wanted[i] * encode).astype(ml_dtypes.float8_e4m3fn)
        wanted[i] = codes.astype(np.float32) * (np.float32(1) / encode)
    np.testing.assert_array_equal(made.decoded().numpy(), wanted)
    assert torch.equal(made.decoded()[rows], table[rows])
    assert made.codes.data.shape == (7 - len(rows), 12)
    assert made.shape == (7, 12)


@pytest.mark.parametrize("rows", [(), (3, 0), (3, 3), tuple(range(VOCABULARY))])
def test_a_mix_by_hand_names_rows_as_it_likes(rows):
    """None, all, in any order or twice."""
    model, mix = language_model(), Mix(overrides={"*_proj": "tensorwise"}, tables={PATH: rows})
    weight = model.model.get_parameter(f"{PATH}.weight").detach().bfloat16().float()
    wanted = decoded_table(weight, torch.tensor(sorted({*rows}), dtype=torch.int64))
    mix.apply(model.model)
    assert torch.equal(model.model.get_parameter(f"{PATH}.weight"), wanted)


def test_a_model_in_bf16_is_written_too(tmp_path):
    source = language_model()
    source.model.bfloat16()
    mix = Mix(overrides={"*_proj": "tensorwise"}, tables={PATH: ROWS})
    tables = mix.coded_tables(source.model)
    mix.apply(source.model, cache_weights=False)
    save_quantized(source, tmp_path / "m", format="octavo", tables=tables, verify_folder=False)
    assert load_quantized(tmp_path / "m").tables[PATH].shape == (VOCABULARY, 64)
    with pytest.raises(ConfigError, match="the rows of 'nope' differ from its decoded codes"):
        save_quantized(source, tmp_path / "n", format="octavo", tables={"nope": tables[PATH]}, verify_folder=False)


def mixed(*, tied: bool) -> ExportSource:
    """A tiny model with every block in FP8 and a table of codes."""
    model, mix = language_model(tied=tied), Mix(overrides={"*_proj": "tensorwise"}, tables={PATH: ROWS})
    tables = mix.coded_tables(model.model)
    mix.apply(model.model, cache_weights=False)
    return ExportSource(language_model=model, tables=tables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tables") / "tied"
    source = mixed(tied=True)
    save_quantized(source.language_model, place, format="octavo", tables=source.tables, verify_folder=False)
    return place


@pytest.mark.long
@pytest.mark.usefixtures("forked_verification")
@pytest.mark.parametrize("tied", [False, True])
def test_a_mix_is_written_in_the_bytes_that_it_counts_and_reads_back_as_it_computes(tied, tmp_path):
    source = mixed(tied=tied)
    plain = language_model(tied=tied).model
    saved = save_quantized(source.language_model, tmp_path / "m", format="octavo", tables=source.tables)
    assert verdict(saved).within(1e-3)
    assert saved.bf16_nbytes == 2 * sum(parameter.numel() for parameter in plain.parameters())
    units = units_of(plain, ["tensorwise", "weight_only"])
    chosen = {unit.path: "tensorwise" for unit in units if not (unit.is_table or unit.is_head)}
    blocks = bytes_of(plain, units, chosen) - 2 * VOCABULARY * 64
    table = (VOCABULARY - len(ROWS)) * (64 + 4) + len(ROWS) * (2 * 64 + 4)
    found = load_file(tmp_path / "m" / "model.safetensors")
    assert sum(tensor.nbytes for tensor in found.values()) == blocks + table
    read = load_quantized(tmp_path / "m")
    for name, tensor in read.tables[PATH].tensors(PATH).items():
        assert torch.equal(tensor.view(torch.uint8), found[name].view(torch.uint8))
    for own, loaded in (
        (source.language_model.model, read.model),
        (read.model, load_language_model(tmp_path / "m").model),
    ):
        weights = (each.get_submodule(PATH).get_parameter("weight") for each in (own, loaded))
        assert torch.equal(*weights)
    with torch.no_grad():
        logits = read.model(windows())
        error = (logits - source.language_model.logits(windows())).norm() / logits.norm()
    assert error < 0.02  # other tensors were rounded to BF16 on the way


def test_rewriting_a_loaded_model_gives_identical_tensors(folder, tmp_path):
    read = load_quantized(folder)
    model = load_language_model(folder)
    save_quantized(model, tmp_path / "again", format="octavo", tables=read.tables, verify_folder=False)
    first, second = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "again"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor.float(), second[name].float()), name


@pytest.mark.parametrize("fmt", ["compressed-tensors", "hf-fp8", "modelopt"])
def test_no_other_format_has_tables(fmt, tmp_path):
    source = mixed(tied=True)
    with pytest.raises(ConfigError, match=r"rows of 'model\.embed_tokens' are FP8 codes, which"):
        save_quantized(source.language_model, tmp_path / "m", format=fmt, tables=source.tables)
    assert not (tmp_path / "m").exists()


def test_a_table_of_another_model_is_refused(tmp_path):
    source = mixed(tied=True)
    with torch.no_grad():
        source.language_model.model.get_submodule(PATH).get_parameter("weight")[5] += 1
    with pytest.raises(ConfigError, match=r"the rows of 'model\.embed_tokens' differ from its decoded codes"):
        save_quantized(source.language_model, tmp_path / "m", format="octavo", tables=source.tables)


def removed(tensors):
    del tensors[SCALE]


def disordered(tensors):
    tensors[NUMBERS] = tensors[NUMBERS].flip(0)


def outside(tensors):
    tensors[NUMBERS] = tensors[NUMBERS] + 1


def shortened(tensors):
    tensors[CODES] = tensors[CODES][1:].clone()


def as_nan(tensors):
    tensors[CODES].view(torch.uint8)[0, 0] = 0x7F


def negative(tensors):
    tensors[SCALE][0] = -1


def widened(tensors):
    tensors[BF16] = tensors[BF16].float()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (removed, "has no model.embed_tokens.table.scale"),
        (disordered, "are not ascending numbers of its 300 rows"),
        (outside, "are not ascending numbers of its 300 rows"),
        (shortened, r"table.codes is torch.float8_e4m3fn \[295, 64\], or not finite; it has to be"),
        (as_nan, "table.codes is .* or not finite"),
        (negative, "model.embed_tokens.table.scale"),
        (widened, "table.bf16 is torch.float32"),
    ],
)
def test_a_damaged_table_is_refused(folder, tmp_path, fault, words):
    broken = shutil.copytree(folder, tmp_path / "broken", ignore=shutil.ignore_patterns(SUMS))
    tensors = load_file(broken / "model.safetensors")
    fault(tensors)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        load_quantized(broken)


@pytest.mark.parametrize("named", [[], ["model.layers.0"], ["model.norm"]])
def test_a_configuration_and_its_tables_agree(folder, tmp_path, named):
    broken = shutil.copytree(folder, tmp_path / "broken", ignore=shutil.ignore_patterns(SUMS))
    record = json.loads((broken / "config.json").read_text())
    record["quantization_config"]["tables"] = named
    (broken / "config.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"FP8 codes of no linear layer|is not a table of codes"):
        load_quantized(broken)
