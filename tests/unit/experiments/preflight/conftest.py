"""An origin small enough for a second a test."""

import pytest

from octavo.experiments import Origin
from tests.unit.training.tiny_runs import tiny_config, tiny_data


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Origin:
    return Origin(config=tiny_config(recipe="delayed"), data=tiny_data(tmp_path_factory.mktemp("data")))
