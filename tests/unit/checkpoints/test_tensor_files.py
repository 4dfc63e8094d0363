import errno
import json

import pytest
import torch
from safetensors import SafetensorError

from octavo.checkpoints.tensor_files import INDEX, TensorFiles, write_tensors
from octavo.errors import CheckpointError, ConfigError

TENSORS = {f"layer.{i}.weight": torch.full((10, 10), float(i)) for i in range(5)}
BF16 = dict.fromkeys(TENSORS, torch.bfloat16)  # 200 bytes each


@pytest.fixture
def sharded(tmp_path):
    write_tensors(tmp_path, TENSORS, BF16, 450)
    return tmp_path


def test_one_file(tmp_path):
    write_tensors(tmp_path, TENSORS, {}, 10**6)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    files = TensorFiles(tmp_path)
    assert set(files.names) == set(TENSORS)
    assert all(torch.equal(files[name], tensor) for name, tensor in TENSORS.items())


def test_shards(sharded):
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(path.name for path in sharded.iterdir()) == [*names, INDEX]
    index = json.loads((sharded / INDEX).read_text())
    assert index["metadata"]["total_size"] == 5 * 200
    assert list(index["weight_map"].values()) == [names[0]] * 2 + [names[1]] * 2 + [names[2]]
    files = TensorFiles(sharded)
    assert files["layer.3.weight"].dtype == torch.bfloat16
    assert files.shape("layer.3.weight") == (10, 10)


def test_a_tensor_above_the_limit_has_a_shard_of_its_own(tmp_path):
    write_tensors(tmp_path, TENSORS, {}, 1)
    assert len(list(tmp_path.glob("*.safetensors"))) == 5


def test_a_part_of_another_tensor(tmp_path):
    whole = torch.arange(20.0).view(2, 10)
    write_tensors(tmp_path, {"a": whole[0], "b": whole[1]}, {}, 10**6)
    assert torch.equal(TensorFiles(tmp_path)["b"], whole[1])


def test_a_truncated_shard(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"00002-of-00003.*cannot be read"):
        TensorFiles(sharded)


def test_a_missing_shard(sharded):
    (sharded / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00003-of-00003.*cannot be read"):
        TensorFiles(sharded)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda index: index["weight_map"].pop("layer.0.weight"), "disagree about layer.0.weight"),
        (lambda index: index.pop("weight_map"), "no weight_map"),
        (lambda index: index["weight_map"].update({"x": "../elsewhere.safetensors"}), "not in its folder"),
    ],
)
def test_an_index_that_is_not_theirs(sharded, change, match):
    index = json.loads((sharded / INDEX).read_text())
    change(index)
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=match):
        TensorFiles(sharded)


def test_full_disk_raises_os_error_with_its_errno(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("octavo.checkpoints.tensor_files.save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_tensors(tmp_path, TENSORS, {}, 10**6)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "model.safetensors")


def test_a_finite_number_that_a_dtype_has_not(tmp_path):
    tensor = torch.tensor([1.0, 65519.0, -65520.0])
    with pytest.raises(ConfigError, match="b holds 65520, and float16 ends at 65504; write it in fp32"):
        write_tensors(tmp_path, {"a": torch.ones(2), "b": tensor}, {"b": torch.float16}, 10**6)
    write_tensors(tmp_path, {"b": tensor[:2]}, {"b": torch.float16}, 10**6)
    assert TensorFiles(tmp_path)["b"].tolist() == [1, 65504]


def test_infinite_values_are_written_and_read_back_as_infinite(tmp_path):
    """Whether a model may hold that is not for a file to say."""
    write_tensors(tmp_path, {"mask": torch.tensor([0.0, -torch.inf])}, {"mask": torch.float16}, 10**6)
    assert TensorFiles(tmp_path)["mask"].tolist() == [0, -torch.inf]
