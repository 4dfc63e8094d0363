"""The environment of ``octavo triton setup``, for tests that need Triton or its clients; else they skip.

It is looked for where the command makes it, or where OCTAVO_TRITON_ENV says.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from octavo.cli.serve_triton import default_environment
from octavo.errors import ConfigError
from octavo.server.triton.environment import find_environment

CLIENT = Path(__file__).with_name("triton_client.py")


def triton_environment():
    """The environment; skips where there is none."""
    folder = Path(os.environ.get("OCTAVO_TRITON_ENV", default_environment()))
    try:
        return find_environment(folder)
    except ConfigError as error:
        pytest.skip(f"Triton is not there: {error}")


def ask(environment, **asked):
    """What triton_client.py answers, run by the environment's Python: tritonclient and octavo want other NumPys."""
    done = subprocess.run(
        [environment.python, CLIENT], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
