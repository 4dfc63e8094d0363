"""Run a command in this process, as a user's shell would see it."""

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from octavo.cli.app import app


@pytest.fixture
def octavo() -> Callable[..., Result]:
    def run(*args: object) -> Result:
        return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="octavo")

    return run
