"""Steps that are saved, and the matrix of pairs against their KL one by one."""

from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch

from benchmarks.engine_agreement import first_layer, matrix, trials
from benchmarks.engine_agreement.folders import folder_table
from benchmarks.engine_agreement.heat_map import FAMILIES, family_of, heat_map
from benchmarks.engine_agreement.saved_steps import SavedSteps, read_known, write_known
from octavo.engines import PROFILES, agree, model_as, try_changes
from octavo.engines.agreement import mean_of
from octavo.engines.summary import in_nats
from octavo.engines.suspects import EXACT
from octavo.models import Llama
from tests.unit.quantization.tiny_models import language_model, windows

SVG = "{http://www.w3.org/2000/svg}"


def test_a_finished_step_is_not_run_again(tmp_path):
    steps = SavedSteps("some", tmp_path)
    assert steps.step("a", lambda: [1.5]) == [1.5]
    again = SavedSteps("some", tmp_path)
    assert again.step("a", lambda: pytest.fail("run again")) == [1.5]


def test_steps_go_on_in_another_folder(tmp_path):
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "known.json.gz"
    SavedSteps("some", here).step("a", lambda: [1.5])
    (here / "some.before.json").write_text("{}")
    write_known(file, here)
    SavedSteps("other", there).step("b", lambda: 2)
    read_known(file, there)
    assert SavedSteps("some", there).step("a", lambda: pytest.fail("run again")) == [1.5]
    assert {path.name for path in there.iterdir()} == {"some.json", "other.json"}


def test_steps_under_other_profiles_are_put_aside(tmp_path, monkeypatch, capsys):
    SavedSteps("some", tmp_path).step("first", lambda: 1)
    before = (tmp_path / "some.json").read_text()
    changed = {**PROFILES, "vllm-token": replace(PROFILES["vllm-token"], output=torch.float32)}
    monkeypatch.setattr("benchmarks.engine_agreement.saved_steps.PROFILES", changed)
    assert SavedSteps("some", tmp_path).step("first", lambda: 2) == 2
    assert (tmp_path / "some.before.json").read_text() == before
    assert "other profiles" in capsys.readouterr().out


def test_the_matrix_has_the_kl_of_each_pair(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "SavedSteps", lambda name: SavedSteps(name, tmp_path))
    names = ("bf16", "te-block", "vllm-token", "octavo-token", "vllm-block-ue8m0")
    monkeypatch.setattr(matrix, "NAMES", names)
    monkeypatch.setattr(matrix, "PROFILES", {name: PROFILES[name] for name in names[1:]})
    model, tokens = language_model(), windows(2, 20)
    by_window = matrix.pair_matrices(model, tokens)
    found = {what: each.mean(0) for what, each in by_window.items()}
    result = agree(model, "te-block", "vllm-token", tokens)
    assert float(found["kl"][2, 1]) == pytest.approx(result.kl.estimate, rel=1e-9, abs=1e-13)
    delta = torch.cat([scores.delta.abs() for scores in result.scores]).mean()
    assert float(found["delta"][1, 2]) == pytest.approx(float(delta))
    assert not found["kl"].diagonal().any()
    assert found["kl"][1, 4] == found["kl"][4, 1] == 0  # te-block gives the numbers of vllm-block-ue8m0
    assert found["kl"][0, 1:].min() > 0
    assert matrix.largest_pairs(found["kl"], 1)[0] in {("te-block", "vllm-token"), ("te-block", "octavo-token")}


def test_a_floor_is_the_profile_with_other_last_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "SavedSteps", lambda name: SavedSteps(name, tmp_path))
    monkeypatch.setattr(matrix, "FLOORS", ("vllm-token",))
    model, tokens = language_model(), windows(2, 20)
    ((name, floor),) = matrix.floor_rows(model, tokens)
    assert name == "vllm-token"
    assert floor == in_nats(mean_of(agree(model, "vllm-token", "vllm-token", tokens).floor, "reverse_kl"))


def test_scales_are_compared_by_window(monkeypatch):
    monkeypatch.setattr(matrix, "NAMES", ("bf16", "a", "b"))
    monkeypatch.setattr(matrix, "UE8M0", (("a", "b"),))
    kl = torch.zeros(2, 3, 3)
    kl[:, 1, 0], kl[:, 2, 0] = torch.tensor([1.0, 3.0]), torch.tensor([1.5, 3.5])
    ((first, second, ours, theirs, difference),) = matrix.scale_rows(kl)
    assert (first, second, ours[:7], theirs[:7]) == ("a", "b", "2.00000", "2.50000")
    assert difference == "0.50000 ± 0"


def test_of_equal_profiles_the_first_is_in_the_largest_pairs(monkeypatch):
    monkeypatch.setattr(matrix, "NAMES", ("bf16", "a", "b", "equal to a", "c"))
    kl = torch.tensor([[0, 9, 9, 9, 9], [9, 0, 1, 0, 4], [9, 1, 0, 1, 3], [9, 0, 1, 0, 4], [9, 2, 5, 2, 0]])
    assert matrix.largest_pairs(kl, 9) == [("b", "c"), ("c", "a"), ("a", "b")]


def test_a_table_of_readers_is_paired_with_octavo():
    rows = folder_table({"octavo": [1.0, 2.0], "transformers with compressed-tensors": [1.5, 2.0], "other": [1.5, 2.5]})
    assert rows[0] == ["octavo", "4.4817", "", "2", "1"]
    assert rows[2][2:] == ["+0.50000 ± 0.00000", "0", "1"]


@pytest.mark.long
def test_trials_name_the_fault_and_go_on_where_they_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "SavedSteps", lambda name: SavedSteps(name, tmp_path))
    monkeypatch.setattr(trials, "CLAIMED", ("vllm-token",))
    model, (window,) = language_model(), windows(1, 40)
    first = next(trials.trial_rows(model, window))
    rows = list(trials.trial_rows(model, window, trials=2))
    assert rows[0] == first
    assert [row[2] for row in rows] == ["yes", "yes"]
    assert all(row[1] in row[3] for row in rows)
    for row in rows:  # another server's last bits: no match is exact, and the nearest profile decides
        assert float(row[7]) > EXACT
        assert row[5] == "no" or row[1] in row[6]
    monkeypatch.setattr(trials, "try_changes", lambda *_: pytest.fail("run again"))
    assert list(trials.trial_rows(model, window, trials=2)) == rows


@pytest.mark.long
def test_a_fault_that_shares_its_numbers_with_another_is_not_named(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "SavedSteps", lambda name: SavedSteps(name, tmp_path))
    monkeypatch.setattr(trials, "CLAIMED", ("vllm-token",))

    def shared(*arguments):
        tried = try_changes(*arguments)
        groups = tuple(((*changes, ("output", "float32")), ours) for changes, ours in tried.groups)
        return replace(tried, groups=groups)

    monkeypatch.setattr(trials, "try_changes", shared)
    model, (window,) = language_model(), windows(1, 40)
    assert next(trials.trial_rows(model, window))[2] == "no"


@pytest.mark.long
def test_a_server_of_the_first_layer_with_other_kernels_is_found_out(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(first_layer, "SavedSteps", lambda name: SavedSteps(name, tmp_path))
    monkeypatch.setattr(first_layer, "CLAIMED", ("vllm-token",))
    rows = list(first_layer.first_layer_rows(language_model(), windows(4, 40), trials=2))
    assert [row[2] for row in rows] == [*first_layer.NORMS] * 2
    for claimed, fault, _, named, possible, among, first, delta, behind in rows:
        assert claimed == "vllm-token"
        assert float(delta) > EXACT  # no match is exact
        assert among == "yes"
        assert (named, possible, behind) == ("yes", "1", "0 ± 0")  # 156 tokens of a small model suffice for these two
        assert fault in first


def test_other_kernels_have_the_same_codes_and_other_sums():
    pytest.importorskip("transformers")
    ours, tokens = language_model().model, windows(1, 24)
    assert isinstance(ours, Llama)
    profile = PROFILES["vllm-token"]
    theirs = first_layer.read_by_transformers(ours)
    assert [*theirs] == [*first_layer.NORMS]
    expected = model_as(ours, profile)
    server = first_layer.other_kernels(theirs["after the weight"], profile, tokens)
    for path, layer in expected.layers.items():
        other = server.model.get_submodule(path)
        assert isinstance(other, first_layer.ReorderedLinear)
        assert torch.equal(other.codes.data.view(torch.uint8), layer.codes.data.view(torch.uint8)[:, other.order])
        assert torch.equal(other.order.sort().values, torch.arange(len(other.order)))
        x = torch.randn(9, len(other.order), generator=torch.Generator().manual_seed(0)).bfloat16()
        torch.testing.assert_close(other(x), layer(x), rtol=2**-7, atol=1e-3)  # a last bit of BF16
    found, right = server(tokens).float(), expected(tokens).float()
    assert not torch.equal(found, right)
    assert (found - right).norm() < 0.1 * right.norm()


def test_the_picture_has_a_cell_a_pair_and_families_together():
    names = ("bf16", "vllm-block", "te-current", "sglang-block", "vllm-block-ue8m0")
    kl = np.zeros((5, 5))
    kl[1, 3], kl[2, 4] = 0.0164, 0.066
    picture = ET.fromstring(heat_map(names, kl))
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert [text for text in texts if text in names][::2] == [
        "bf16", "te-current", "vllm-block-ue8m0", "vllm-block", "sglang-block",
    ]  # fmt: skip
    cells = [text for text in texts if text and text.isdigit()]
    assert len(cells) == 25
    assert (cells[5 + 2], cells[3 * 5 + 4]) == ("66", "16")
    fills = [each.get("fill") for each in picture.iter(f"{SVG}rect")]
    assert fills.count("#c2410c") == 1  # the largest
    assert fills.count("#ffffff") == 23


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_has_a_family(name):
    assert family_of(PROFILES[name]) in FAMILIES[1:]
