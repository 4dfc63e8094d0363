"""Data sets by name, read by the real ``datasets`` from folders in place of the Hub: no network."""

import json
import sys

import pytest

from octavo.errors import ConfigError, DataError
from octavo.text.corpus import Document, Split
from octavo.text.named_datasets import hub_access
from octavo.text.source_settings import parse_source, with_column
from octavo.text.sources import divide, load_documents

NAME = "someone/rows"
CONFIGS = """---
configs:
- config_name: english
  data_files: english/*.jsonl
- config_name: german
  data_files: german/*.jsonl
---
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder that ``datasets`` reads as the data set of that name."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed; octavo[hf]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub"
    paths = {NAME: str(folder), "Salesforce/wikitext": str(folder)}
    for function in ("load_dataset", "get_dataset_config_names"):
        real = getattr(datasets, function)
        monkeypatch.setattr(
            datasets, function, lambda path, *rest, _of=real, **options: _of(paths[path], *rest, **options)
        )
    with hub_access():
        yield folder


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, columns):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed; parquet cannot be written for the test")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)


def test_splits_of_a_data_set_are_kept(hub):
    columns: dict[str, list[str | None]] = {"train": [None, "t", ""], "validation": ["v"], "test": ["x"]}
    for split, texts in columns.items():
        write_parquet(hub / f"{split}.parquet", {"content": texts, "id": list(range(len(texts)))})
    documents = load_documents(NAME)
    assert documents[0] == Document("train:1", "t", Split.TRAIN)
    assert {split: [d.text for d in held] for split, held in divide(documents, by_file=False).items()} == {
        Split.TRAIN: ["t"], Split.VALIDATION: ["v"], Split.TEST: ["x"],
    }  # fmt: skip
    assert load_documents(f"{NAME}?split=test") == [Document("test:0", "x")]


def test_column_is_asked_for_or_named(hub):
    write_jsonl(hub / "train.jsonl", [{"question": "q", "answer": "a", "id": 1}])
    with pytest.raises(DataError, match=r"its columns of text are question, answer: choose one, such as --data '"):
        load_documents(NAME)
    assert load_documents(with_column(NAME, "answer")) == [Document("train:0", "a")]


def test_configuration_is_asked_for_or_named(hub):
    (hub / "english").mkdir(parents=True)
    (hub / "README.md").write_text(CONFIGS)
    for language in ("english", "german"):
        write_jsonl(hub / language / "train.jsonl", [{"text": language}])
    with pytest.raises(
        DataError, match=rf"configurations english, german; choose one, such as '{NAME}\?config=english'"
    ):
        load_documents(NAME)
    assert load_documents(f"{NAME}?config=german&column=text") == [Document("train:0", "german")]
    (hub / "README.md").write_text(CONFIGS.replace("german\n", "wikitext-2-raw-v1\n"))
    assert load_documents("wikitext-2-raw-v1") == [Document("train:0", "german")]


def test_rows_beyond_the_megabytes_are_not_read(hub, monkeypatch):
    write_jsonl(hub / "train-0.jsonl", [{"text": f"{number:05d}" * 100} for number in range(3000)])
    (hub / "train-1.jsonl").write_text("{ is read only if the first file is not enough")
    texts = [document.text for document in load_documents(f"{NAME}?mb=0.1")]
    assert texts == [f"{number:05d}" * 100 for number in range(200)]
    monkeypatch.setattr("octavo.text.named_datasets.MOST_MEGABYTES", 1)
    with pytest.raises(DataError, match=r"more than 1 MB of text in its split 'train'; .*\?mb=100'"):
        load_documents(NAME)


def test_name_without_hub_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import would fail
    with pytest.raises(DataError, match=r"'wikitext-103-raw-v1' is not an existing path; .* pass --hub"):
        load_documents("wikitext-103-raw-v1")
    with hub_access(), pytest.raises(DataError, match=r"'wikitext-103-raw-v1' is not an existing path.*octavo\[hf\]"):
        load_documents("wikitext-103-raw-v1")


def test_unreachable_hub_is_reported_in_one_sentence(hub, monkeypatch):
    def load(*_name, **_options):
        raise ConnectionError("no route to host\nand more lines")

    monkeypatch.setattr("datasets.get_dataset_config_names", load)
    with pytest.raises(DataError, match=r"the hub could not load it: no route to host$"):
        load_documents(NAME)


@pytest.mark.parametrize("query", ["", "columns=a", "column=", "mb=0", "mb=many", "column=a&column=b"])
def test_settings_that_are_not_allowed_are_refused(query):
    with pytest.raises(ConfigError, match=r"settings after|mb must be"):
        parse_source(f"{NAME}?{query}")
