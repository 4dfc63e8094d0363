"""What text a model may be calibrated and tuned on where nobody names one."""

from octavo.cli.runs import own_source, text_to_train_on
from octavo.training.corpus import Split, library_documents, split_of, topic_documents
from octavo.training.text import LIBRARY_SOURCES


def test_a_runs_is_its_own(finished_run, text):
    assert own_source(finished_run) == text_to_train_on(str(finished_run)) == str(text)


def test_another_models_has_nothing_of_what_it_is_evaluated_on(tmp_path):
    (tmp_path / "tokenizer.json").touch()  # a Hugging Face folder has one, as a run has
    (tmp_path / "config.json").write_text("{}")
    for model in (tmp_path, "model.gguf", "org/name"):
        assert own_source(model) is None
        assert text_to_train_on(model) == LIBRARY_SOURCES
    topics = {document.path for document in topic_documents()}
    assert topics.isdisjoint(document.path for document in library_documents())
    in_training = sum(split_of(path) is Split.TRAIN for path in topics)
    assert in_training > 0.8 * len(topics), "why builtin is no default"
