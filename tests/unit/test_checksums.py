"""Sums of what is written: what they see, and that other programs read them."""

import hashlib
import json
import os
import subprocess

import pytest

from octavo.checksums import SUMS, check_sums, count_listed, sealed, unsealed, write_sums
from octavo.errors import CheckpointError, DataError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)))
    (tmp_path / "deep" / "a name.json").write_text("{}")
    write_sums(tmp_path)
    return tmp_path


def test_the_list_is_one_of_sha256sum(folder):
    head, *lines = (folder / SUMS).read_text().splitlines()
    assert head == "# 2 files; sha256sum -c octavo.sha256"
    assert lines == [
        f"{hashlib.sha256(b'{}').hexdigest()}  deep/a name.json",
        f"{hashlib.sha256(bytes(range(256))).hexdigest()}  model.safetensors",
    ]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=folder, check=True)
    assert check_sums(folder)


def test_every_flipped_bit_is_refused_by_the_name_of_its_file(folder):
    file = folder / "model.safetensors"
    for bit in range(0, 8 * 256, 37):
        content = bytearray(range(256))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors' is damaged or was edited"):
            check_sums(folder)


def test_missing_file_is_refused_and_an_extra_file_is_ignored(folder):
    (folder / "notes.txt").write_text("mine")
    assert check_sums(folder)
    (folder / "deep" / "a name.json").unlink()
    with pytest.raises(CheckpointError, match=r"deep/a name\.json' cannot be read: No such file"):
        check_sums(folder)


@pytest.mark.parametrize("damage", ["a line less", "no head", "half a line", "empty"])
def test_a_damaged_list_is_refused(folder, damage):
    lines = (folder / SUMS).read_text().splitlines(keepends=True)
    kept = {"a line less": lines[:2], "no head": lines[1:], "half a line": [*lines[:2], lines[2][:50]], "empty": []}
    (folder / SUMS).write_text("".join(kept[damage]))
    with pytest.raises(CheckpointError, match=r"octavo\.sha256' is damaged"):
        check_sums(folder)


HOSTILE = {
    "/dev/zero": "not in its folder",
    "../outside.json": "not in its folder",
    "deep/../../outside.json": "not in its folder",
    "/etc/hostname": "not in its folder",
    "pipe": "no regular file",
    "zeros": "no regular file",
    "deep": "no regular file",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_list_leads_to_regular_files_of_its_folder_alone(folder, name, monkeypatch):
    def digest(path):
        raise AssertionError(f"{path} was read")

    (folder.parent / "outside.json").write_text("secret")
    os.mkfifo(folder / "pipe")
    (folder / "zeros").symlink_to("/dev/zero")
    monkeypatch.setattr("octavo.checksums.file_digest", digest)
    (folder / SUMS).write_text(f"# 1 files; sha256sum -c octavo.sha256\n{'0' * 64}  {name}\n")
    with pytest.raises(
        CheckpointError, match=f"octavo.sha256' is damaged: it lists '{name}', which is {HOSTILE[name]}"
    ):
        check_sums(folder)


@pytest.mark.parametrize("target", ["/dev/zero", "pipe", "sparse"])
def test_a_list_that_is_no_small_regular_file_is_refused_unread(folder, target):
    os.mkfifo(folder / "pipe")
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", 1 << 40)
    (folder / SUMS).unlink()
    (folder / SUMS).symlink_to(target)
    with pytest.raises(CheckpointError, match=r"octavo\.sha256' is (no regular file|damaged: it has 1,048,576 MiB)"):
        check_sums(folder)


def test_a_list_that_leaves_a_weight_or_configuration_out_is_no_proof(folder):
    for kept in ([], ["deep/a name.json"], ["model.safetensors"]):
        lines = [line for line in (folder / SUMS).read_text().splitlines() if line[66:] in kept]
        write_sums(folder)
        whole = (folder / SUMS).read_text()
        (folder / SUMS).write_text("\n".join([f"# {len(kept)} files; sha256sum -c octavo.sha256", *lines, ""]))
        with pytest.raises(CheckpointError, match=rf"is not in octavo\.sha256, which lists {len(kept)} files"):
            check_sums(folder)
        (folder / SUMS).write_text(whole)
    assert check_sums(folder)


def test_a_chat_template_and_generation_settings_may_be_added_later(folder):
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text("{}")
    assert check_sums(folder)
    write_sums(folder)
    (folder / "generation_config.json").write_text('{"top_k": 1}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json' is damaged or was edited"):
        check_sums(folder)


def test_listed_files_are_counted(folder):
    (folder / "notes.txt").write_text("mine")
    (folder / ".cache" / "download").mkdir(parents=True)
    (folder / ".cache" / "download" / "other.json").write_text("{}")
    assert check_sums(folder)
    assert count_listed(folder) == (2, 3)
    (folder / SUMS).unlink()
    assert count_listed(folder) is None


def test_links_to_files_are_files_as_in_the_cache_of_the_hub(folder):
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to("../blob")
    assert check_sums(folder)


def test_a_folder_without_a_list_is_not_checked(folder):
    (folder / SUMS).unlink()
    (folder / "model.safetensors").write_bytes(b"other")
    assert not check_sums(folder)


RECORD = {"runs": ({"nats": (1 / 3, -0.0, 1e-300, 10**20)},), "threads": {2: None}, "text": "ü\u2028", "yes": True}


def test_a_record_survives_its_file_and_its_order():
    text = json.dumps(sealed(RECORD))
    read = json.loads(text)
    assert unsealed(read) == json.loads(json.dumps(RECORD))
    assert unsealed(dict(reversed(read.items()))).keys() == RECORD.keys()


def test_every_changed_digit_of_a_record_is_refused():
    text = json.dumps(sealed(RECORD))
    key = text.index('"sha256"')
    digits = [place for place, letter in enumerate(text) if letter.isdigit() and not key < place < key + 8]
    for place in digits:
        changed = json.loads(text[:place] + str(9 - int(text[place])) + text[place + 1 :])
        if changed == json.loads(text):
            continue  # beyond the float's last digit
        with pytest.raises(DataError, match="a value in it was changed"):
            unsealed(changed)


def test_record_without_a_checksum_is_returned_unchanged():
    assert unsealed({"step": 3}) == {"step": 3}
