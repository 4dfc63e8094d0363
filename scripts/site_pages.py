"""MkDocs hook: pages of the site that are generated from the code, and links that leave docs/.

| page                          | generated from                                        |
| ----------------------------- | ----------------------------------------------------- |
| `reference/api/<module>.md`   | ``__all__`` of every public module, by mkdocstrings    |
| `reference/cli/<command>.md`  | the typer application                                  |
| `reference/configuration.md`  | the dataclasses of a run's configuration               |
| `results/<name>.md`           | benchmarks/results                                     |

Links to source files, which are links in the repository, become their text.
"""

import ast
import posixpath
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "octavo"
RESULTS = ROOT / "benchmarks" / "results"
HIDDEN = ("show_root_heading: false", "show_root_toc_entry: false")  # the page has a heading of its own
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Add the generated pages to the navigation's Reference."""
    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    reference += [
        {"Python API": [{module: f"reference/api/{module}.md"} for module in public_modules()]},
        {"Command line": [{name: f"reference/cli/{slug(name)}.md"} for name, _ in commands()]},
    ]
    config.nav.append({"Results": [{path.stem: f"results/{path.name}"} for path in result_files()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Generate pages."""
    pages = {f"reference/api/{module}.md": api_page(module, names) for module, names in public_modules().items()}
    pages |= {f"reference/cli/{slug(name)}.md": text for name, text in commands()}
    pages["reference/configuration.md"] = configuration_page()
    pages |= {f"results/{path.name}": path.read_text() for path in result_files()}
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point links to result files at the site's pages of them, and links to other files outside docs/ to their text."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        outside, _, path = posixpath.normpath(posixpath.join("docs", folder, target)).partition("docs/")
        if not outside and path:  # a page of the site
            return match[0]
        if outside.startswith("benchmarks/results/") and outside.endswith(".md"):
            return f"[{text}]({posixpath.relpath('results/' + posixpath.basename(outside), folder or '.')})"
        return text

    return markdown if folder == "results" else LINK.sub(link, markdown)


def result_files() -> list[Path]:
    """Result files of the benchmarks, newest names last."""
    return sorted(RESULTS.glob("*.md"))


def public_modules() -> dict[str, list[str]]:
    """Public names by module: packages and top-level modules with an ``__all__``, except the commands."""
    paths = [*PACKAGE.glob("[a-z]*.py"), *PACKAGE.rglob("__init__.py")]
    modules = {module_name(path): exported(path) for path in paths}
    return {name: names for name, names in sorted(modules.items()) if names and not name.startswith("octavo.cli")}


def module_name(path: Path) -> str:
    """Dotted name of a source file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def exported(path: Path) -> list[str]:
    """Names in a file's literal ``__all__``; none if there is no such list."""
    for node in ast.parse(path.read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__all__"
            and isinstance(node.value, ast.List)
        ):
            return list(ast.literal_eval(node.value))
    return []


def api_page(module: str, names: list[str]) -> str:
    """Page of one module: its docstring, then every public name."""
    options = "".join(f"      {option}\n" for option in ("members: []", *HIDDEN))
    head = f"# {module}\n\n::: {module}\n    options:\n{options}"
    return head + "".join(f"\n::: {module}.{name}\n" for name in names)


def commands() -> list[tuple[str, str]]:
    """Every command of ``octavo`` with its page."""
    from octavo.cli.app import app

    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="octavo")
    return [
        (f"octavo {name}", get_docs_for_click(obj=command, ctx=context, call_prefix="octavo"))
        for name, command in group.commands.items()
    ]


def slug(command: str) -> str:
    """File name of a command's page."""
    return command.removeprefix("octavo ")


def configuration_page() -> str:
    """Tables of the keys of ``config.toml``: name, type, default and meaning."""
    from octavo.training.config import DataConfig, ModelConfig, TrainingConfig

    text = "# Configuration\n\nKeys of `config.toml`, for `octavo train --config` and `octavo study --config`.\n"
    for section, config in (("model", ModelConfig), ("data", DataConfig), ("training", TrainingConfig)):
        meanings = attributes(config.__doc__ or "")
        text += f"\n## [{section}]\n\n| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
        for field in fields(config):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            kind = str(getattr(field.type, "__name__", field.type)).replace("|", "or")
            text += f"| `{field.name}` | {kind} | `{default!r}` | {meanings.get(field.name, '')} |\n"
    return text


def attributes(docstring: str) -> dict[str, str]:
    """Descriptions in a Google-style "Attributes:" section."""
    _, _, section = docstring.partition("Attributes:\n")
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
