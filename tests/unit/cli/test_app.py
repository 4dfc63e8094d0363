"""The boundary around every command, its help, and the way in as a process."""

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest
import typer

from octavo.cli.app import app
from octavo.cli.console import Terminated
from octavo.errors import ConfigError
from octavo.files import claimed_folder, replacing_folder

MAIN_ROAD = ["demo", "train", "study", "doctor", "eval", "calibrate", "export", "serve"]
COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(octavo, command):
    result = octavo(command, "--help")
    assert result.exit_code == 0
    assert f"Example: octavo {command}" in " ".join(result.stdout.split())


def test_command_list_fits_80_columns(octavo, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = octavo("--help").stdout.splitlines()
    listed = [line.split() for line in lines[lines.index("Commands:") + 1 :] if line.startswith("  ")][: len(COMMANDS)]
    assert [words[0] for words in listed[: len(MAIN_ROAD)]] == MAIN_ROAD
    assert sorted(words[0] for words in listed) == COMMANDS
    assert all(words[-1].endswith(".") and "..." not in words[-1] for words in listed)
    assert all(len(line) <= 80 for line in lines)


def test_command_list_has_four_groups(octavo):
    lines = octavo("--help").stdout.splitlines()
    after = lines[lines.index("Commands:") :]
    headings = [line for line in after if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Commands:", "More on models:", "Before renting GPUs:", "Data, formats and serving:"]
    assert [line.split()[0] for line in after[1 : after.index("")]] == MAIN_ROAD


@pytest.mark.parametrize("arguments", [["data", "--json", "--data"], ["train", "--out"], ["eval"]])
def test_a_word_that_is_not_utf_8_is_refused_in_one_sentence(octavo, arguments):
    result = octavo(*arguments, "caf\udce9.txt")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(r"error: 'caf\udce9.txt' is not UTF-8")
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("demo", "runs/demo, runs/demo-quick with --quick"),
        ("train", "tensorwise"),
        ("eval", "test of a run's own data, all of other data"),
    ],
)
def test_help_shows_the_defaults_it_describes(octavo, command, default):
    words = " ".join(re.sub("[│|]", " ", octavo(command, "--help").stdout).split())
    assert f"[default: {default}]" in words


def test_no_command_prints_help(octavo):
    result = octavo()
    assert all(command in result.output for command in COMMANDS)


@pytest.fixture
def failing(monkeypatch):
    """Make ``octavo formats`` raise."""

    def install(error):
        def fail():
            raise error

        monkeypatch.setattr("octavo.cli.formats.errata", fail)

    return install


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("steps must be 1, not 0"), "steps must be 1, not 0"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x"),
            "runs/x: no space left on device; free some space or choose another disk; existing files",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "runs/x"), "permission denied; choose a path"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.txt"), "use a.txt: no such file"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", b"a.txt"), "use a.txt: no such file"),
    ],
)
def test_error_is_one_sentence_and_exit_code_2(octavo, failing, error, words):
    failing(error)
    result = octavo("formats", "--errata")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--debug", "formats", "--errata"], ["formats", "--errata", "--debug"]])
def test_debug_shows_the_traceback(octavo, failing, arguments):
    failing(ConfigError("steps must be 1, not 0"))
    assert isinstance(octavo(*arguments).exception, ConfigError)


def test_ctrl_c_ends_with_130(octavo, failing):
    failing(KeyboardInterrupt())
    result = octavo("formats", "--errata")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


def test_sigterm_unwinds_and_ends_with_143(octavo, monkeypatch, tmp_path):
    def told_to_end():
        with claimed_folder(tmp_path / "new" / "out"), replacing_folder(tmp_path / "new" / "out") as temporary:
            (temporary / "half").touch()
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("octavo.cli.formats.errata", told_to_end)
    result = octavo("formats", "--errata")
    assert result.exit_code == 143
    assert "interrupted; nothing is half-written" in result.stderr
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_that_is_ignored_stays_so(octavo, monkeypatch):
    def told_to_end():
        os.kill(os.getpid(), signal.SIGTERM)
        return ()

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        monkeypatch.setattr("octavo.cli.formats.errata", told_to_end)
        assert octavo("formats", "--errata").exit_code == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_unexpected_exception_has_a_traceback(octavo, failing):
    failing(ZeroDivisionError("ours"))
    assert isinstance(octavo("formats", "--errata").exception, ZeroDivisionError)


@pytest.mark.long
def test_the_module_is_the_command():
    command = [sys.executable, "-m", "octavo", "train", "--out", "nowhere", "--recipe", "fp9"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: training.recipe must be one of")
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_converted_by_a_library_keeps_its_exit_code(octavo, monkeypatch, number, code):
    """As where an import is broken off while torch's exporter traces a graph."""

    def told_to_end():
        try:
            os.kill(os.getpid(), number)
        except (KeyboardInterrupt, Terminated):
            raise ImportError(
                "cannot import name 'a' from partially initialized module 'b' (circular import)"
            ) from None

    monkeypatch.setattr("octavo.cli.formats.errata", told_to_end)
    before = signal.getsignal(number)
    result = octavo("formats", "--errata")
    assert result.exit_code == code
    assert "interrupted; nothing is half-written" in result.stderr
    assert "circular" not in result.stderr
    assert signal.getsignal(number) is before


def test_version_is_printed(octavo):
    result = octavo("--version")
    assert (result.exit_code, result.stdout) == (0, f"octavo {version('octavo')}\n")


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "module"),
    [(["-c", "from octavo_command.__main__ import main; main()"], "torch"), (["-m", "octavo"], "typer")],
    ids=["the script", "the module"],
)
def test_ctrl_c_during_import_is_one_sentence(tmp_path, command, module):
    """In that of a library; ``python -m octavo`` imports the package ``octavo`` before anything can be installed."""
    (tmp_path / f"{module}.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    raise ImportError('circular import') from None\n"
    )
    done = subprocess.run(
        [sys.executable, *command, "formats"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "error: interrupted before anything was begun\n"


def test_script_entry_point_handles_ctrl_c():
    (script,) = (one for one in entry_points(group="console_scripts") if one.name == "octavo")
    assert script.value == "octavo_command.__main__:main"


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        (("formats",), ["a warning", "an error"]),
        (("-v", "formats"), ["what was done", "a warning", "an error"]),
        (("formats", "--verbose"), ["what was done", "a warning", "an error"]),
        (("formats", "-q"), ["an error"]),
        (("--quiet", "formats"), ["an error"]),
        (("-v", "formats", "-q"), ["an error"]),  # the last one counts
    ],
)
def test_verbosity_chooses_the_log_records_printed(octavo, monkeypatch, line, printed):
    def log():
        logger = logging.getLogger("octavo.anything")
        logger.info("what was done")
        logger.warning("a warning")
        logger.error("an error")
        return ()

    monkeypatch.setattr("octavo.cli.formats.errata", log)
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    result = octavo(*line, "--errata")
    assert result.exit_code == 0, result.output
    assert [text.split(": ")[-1] for text in result.stderr.splitlines()] == printed
    assert (root.level, root.handlers) == before


@pytest.fixture(params=[logging.StreamHandler, logging.NullHandler])
def library_handler(request):
    """Handler that a library gives its logger, which also has a level, as huggingface_hub's has."""
    library, handler = logging.getLogger("some_library"), request.param()
    library.addHandler(handler)
    library.setLevel(logging.WARNING)
    yield handler
    library.removeHandler(handler)
    library.setLevel(logging.NOTSET)


@pytest.mark.parametrize(("level", "count"), [((), 1), (("-v",), 1), (("-q",), 0)])
def test_a_library_s_records_are_printed_once_or_hidden(octavo, monkeypatch, library_handler, level, count):

    def log():
        if isinstance(library_handler, logging.StreamHandler):
            library_handler.setStream(sys.stderr)  # that of the command's runner
        logging.getLogger("some_library.part").warning("connection lost")
        return ()

    monkeypatch.setattr("octavo.cli.formats.errata", log)
    result = octavo(*level, "formats", "--errata")
    assert result.stderr.count("connection lost") == count
    assert logging.root.manager.disable == logging.NOTSET


@pytest.mark.parametrize(("level", "is_shown"), [((), False), (("-v",), True), (("-q",), False)])
@pytest.mark.parametrize("name", ["torchao", "torch.utils._pytree"])
def test_warnings_of_imports_are_shown_to_the_verbose_only(octavo, monkeypatch, name, level, is_shown):
    logger, shown = logging.getLogger(name), []
    before = logger.level

    def errata():
        shown.append(logger.isEnabledFor(logging.WARNING))
        return ()

    monkeypatch.setattr("octavo.cli.formats.errata", errata)
    assert octavo(*level, "formats", "--errata").exit_code == 0
    assert (shown, logger.level) == ([is_shown], before)


def test_quiet_hides_progress_but_not_the_result(octavo, setting, tmp_path):
    result = octavo("train", *setting, "--out", tmp_path / "run", "-q", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert json.loads(result.stdout)["steps"] == 4


def test_verbose_prints_the_conversion_report(octavo, setting, tmp_path):
    result = octavo("-v", "train", *setting, "--out", tmp_path / "run")
    assert "INFO octavo: 7 layers run tensorwise" in result.stderr


def test_words_after_two_dashes_are_no_options(octavo):
    result = octavo("eval", "--", "-v")
    assert result.exit_code == 2
    assert "-v" in result.stderr


@pytest.mark.long
def test_shell_completion_names_the_commands():
    words = {"COMP_WORDS": "octavo ca", "COMP_CWORD": "1", "_OCTAVO_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "octavo"]
    done = subprocess.run(command, env=os.environ | words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["calibrate"])


@pytest.mark.long
def test_shell_completion_is_installed_in_the_users_home(tmp_path):
    command = [sys.executable, "-m", "octavo", "--install-completion", "bash"]
    environment = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "_OCTAVO_COMPLETE=complete_bash" in (tmp_path / ".bash_completions" / "octavo.sh").read_text()
