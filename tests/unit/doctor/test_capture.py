import os
import re
import shutil
import warnings

import pytest
import torch
from safetensors.torch import save_file

from octavo import recipes
from octavo.doctor import Capture, Captures, load_capture
from octavo.doctor.capture import remove_captures
from octavo.errors import ConfigError, DataError


def some_capture(*, path="layers.0.q_proj", step=7, recipe="tensorwise", m=4, n=3, k=8, **more) -> Capture:
    return Capture(
        path=path,
        step=step,
        recipe=recipes.get(recipe),
        input=torch.randn(m, k, dtype=torch.bfloat16),
        weight=torch.randn(n, k),
        grad_output=torch.randn(m, n, dtype=torch.bfloat16),
        **more,
    )


@pytest.mark.parametrize("path", ["layers.0.q_proj", "", "a/b c%", "ö.1"])
def test_capture_round_trips_through_its_file(tmp_path, path):
    capture = some_capture(path=path, recipe="delayed", window=torch.full((3, 16), -1.0), amax=torch.rand(3))
    file = Captures(tmp_path).add(capture)
    assert file is not None
    back = load_capture(file)
    assert (back.path, back.step, back.recipe) == (path, 7, capture.recipe)
    assert back.tensors.keys() == {"input", "weight", "grad_output", "window", "amax"}
    for name, tensor in capture.tensors.items():
        assert torch.equal(back.tensors[name], tensor), name
        assert back.tensors[name].dtype is tensor.dtype
    (again,) = Captures(tmp_path).of(path)
    assert again is not None
    assert torch.equal(again.input, capture.input)


def test_the_captures_of_a_layer_are_given_the_latest_step_first(tmp_path):
    captures = Captures(tmp_path)
    for step, path in ((10, "a"), (20, "a"), (30, "b"), (30, "a.b")):
        captures.add(some_capture(path=path, step=step))
    os.utime(captures.files()[0], ns=(2**62, 2**62))  # as a copy of the folder may have it
    assert [capture.step for capture in captures.of("a")] == [20, 10]
    assert captures.of("c") == []
    assert captures.steps() == {"a": 20, "b": 30, "a.b": 30}


def test_a_capture_that_is_removed_while_the_folder_is_read_is_left_out(tmp_path, monkeypatch):
    captures = Captures(tmp_path)
    for step in (10, 20):
        captures.add(some_capture(path="a", step=step))
    listed = captures.files()
    monkeypatch.setattr(captures, "files", lambda: listed)
    listed[1].unlink()
    assert [capture.step for capture in captures.of("a")] == [10]


def test_captures_of_steps_that_are_trained_again_are_removed(tmp_path):
    captures = Captures(tmp_path)
    for step in (10, 20, 30):
        captures.add(some_capture(step=step))
    remove_captures(tmp_path, after_step=20)
    assert [capture.step for capture in captures.of("layers.0.q_proj")] == [20, 10]


def test_the_same_step_of_a_layer_is_one_file(tmp_path):
    captures = Captures(tmp_path)
    captures.add(some_capture())
    captures.add(some_capture(m=5))
    assert len(captures.files()) == 1
    assert load_capture(captures.files()[0]).input.shape == (5, 8)


def test_the_oldest_files_make_room(tmp_path):
    captures = Captures(tmp_path, max_files=3)
    for step in (50, 10, 40, 20, 30):  # after a resumption steps begin again
        captures.add(some_capture(step=step))
        assert len(captures.files()) <= 3
    assert [load_capture(file).step for file in captures.files()] == [40, 20, 30]


def test_bytes_stay_within_their_bound(tmp_path):
    size = len(some_capture().to_bytes())
    captures = Captures(tmp_path, max_bytes=2 * size + 100)
    for step in range(5):
        captures.add(some_capture(step=step))
        assert sum(file.stat().st_size for file in captures.files()) <= captures.max_bytes
    assert [load_capture(file).step for file in captures.files()] == [3, 4]


def test_capture_beyond_the_byte_limit_is_skipped_with_a_warning(tmp_path):
    captures = Captures(tmp_path, max_bytes=600)
    with pytest.warns(UserWarning, match=r"'layers.0.q_proj' is not captured at step 7: it takes \d+ bytes"):
        assert captures.add(some_capture(m=100)) is None
    assert not captures.files()


def test_a_folder_that_cannot_be_written_ends_no_training(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(UserWarning, match="is not captured at step 7: .*Not a directory"):
        assert Captures(tmp_path / "file" / "captures").add(some_capture()) is None


def test_files_of_others_are_left_alone(tmp_path):
    folder = tmp_path / "captures"
    captures = Captures(folder, max_files=1)
    for step in (1, 2):
        captures.add(some_capture(step=step))
    for name in ("model.safetensors", "00000001-notes.txt"):
        (folder / name).write_bytes(b"somebody's")
    captures.add(some_capture(step=3))
    remove_captures(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["00000001-notes.txt", "model.safetensors"]


def test_an_emptied_folder_is_removed(tmp_path):
    Captures(tmp_path / "captures").add(some_capture())
    remove_captures(tmp_path / "captures")
    assert not list(tmp_path.iterdir())
    remove_captures(tmp_path / "captures")


def torn(file):
    file.write_bytes(file.read_bytes()[:-50])


def garbage(file):
    file.write_bytes(b"\x00" * 100)


def empty(file):
    file.write_bytes(b"")


def foreign(file):
    save_file({"model.weight": torch.zeros(2)}, file)


def other_tensors(file):
    rewritten(file, lambda tensors, metadata: tensors.pop("input"))


def other_shapes(file):
    rewritten(file, lambda tensors, metadata: tensors.update(weight=torch.zeros(3, 9)))


def integers(file):
    rewritten(file, lambda tensors, metadata: tensors.update(weight=torch.zeros(3, 8, dtype=torch.int64)))


def half_a_history(file):
    rewritten(file, lambda tensors, metadata: tensors.update(amax=torch.zeros(3)))


def other_recipe(file):
    rewritten(file, lambda tensors, metadata: metadata.update(recipe="name = 3"))


def other_step(file):
    rewritten(file, lambda tensors, metadata: metadata.update(step="late"))


def rewritten(file, change):
    capture = load_capture(file)
    tensors = dict(capture.tensors)
    metadata = {"format": "octavo-capture-1", "path": "a", "step": "1", "recipe": recipes.to_toml(capture.recipe)}
    change(tensors, metadata)
    save_file(tensors, file, metadata)


DAMAGES = (
    torn, garbage, empty, foreign, other_tensors, other_shapes, integers, half_a_history, other_recipe, other_step,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_file_that_is_no_capture_is_refused_in_one_sentence(tmp_path, damage):
    captures = Captures(tmp_path)
    file = captures.add(some_capture())
    assert file is not None
    damage(file)
    with pytest.raises(DataError, match=re.escape(f"{str(file)!r} is not a capture of the doctor: ")) as raised:
        captures.of("layers.0.q_proj")
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith("; delete it")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="is not a capture of the doctor"):
        load_capture(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("bound", ["max_bytes", "max_files"])
def test_bounds_that_hold_nothing_are_refused(tmp_path, bound):
    with pytest.raises(ConfigError, match=f"captures' {bound} must be at least 1, not 0"):
        Captures(tmp_path, **{bound: 0})


def test_a_killed_writer_leaves_no_half_capture(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.files.sync", killed)
    with pytest.raises(KeyboardInterrupt):
        Captures(tmp_path / "captures").add(some_capture())
    assert not Captures(tmp_path / "captures").files()
    shutil.rmtree(tmp_path / "captures")


def test_captures_warn_of_nothing_else(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Captures(tmp_path).add(some_capture())
