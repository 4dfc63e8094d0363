"""MkDocs hook: pages of the site that are generated from the code, and links that leave docs/.

| page                          | generated from                                        |
| ----------------------------- | ----------------------------------------------------- |
| `reference/api/<module>.md`   | ``__all__`` of every public module, by mkdocstrings    |
| `reference/cli/<command>.md`  | the typer application                                  |
| `reference/configuration.md`  | the dataclasses of a run's configuration               |
| `reference/findings.md`       | the doctor's rules, remedies and thresholds            |
| `reference/statistics.md`     | the doctor's catalog of statistics                     |
| `reference/engines.md`        | the profiles of other engines                          |
| `results/<name>.md`           | benchmarks/results                                     |

Links to source files, which are links in the repository, become their text, or lead to the page generated from them.
"""

import ast
import importlib
import inspect
import itertools
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
IMPORTED = re.compile(r"^from (octavo[\w.]*) import ([\w, ]+)", re.MULTILINE)
PAGE_OF_SOURCE = {  # a generated page is not in the repository, so links there lead to its source
    "src/octavo/doctor/findings.py": "reference/findings.md",
    "src/octavo/doctor/statistics.py": "reference/statistics.md",
    "src/octavo/plot/__init__.py": "reference/api/octavo.plot.md",
}
OPTION = re.compile(r"<code>(--[\w-]{1,28})</code>")
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
    pages["reference/findings.md"] = findings_page()
    pages["reference/statistics.md"] = statistics_page()
    pages["reference/engines.md"] = engines_page()
    pages |= {f"results/{path.name}": path.read_text() for path in result_files()}
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Keep an option such as --max-kl from being divided at its hyphens."""
    return OPTION.sub(r'<code class="option">\1</code>', html)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point links to result files at the site's pages of them, and links to other files outside docs/ to their text."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        outside, _, path = posixpath.normpath(posixpath.join("docs", folder, target)).partition("docs/")
        if not outside and path:  # a page of the site
            return match[0]
        if outside in PAGE_OF_SOURCE:
            return f"[{text}]({posixpath.relpath(PAGE_OF_SOURCE[outside], folder or '.')})"
        if outside.startswith("benchmarks/results/") and outside.endswith(".md"):
            return f"[{text}]({posixpath.relpath('results/' + posixpath.basename(outside), folder or '.')})"
        return text

    return markdown if folder == "results" else LINK.sub(link, markdown)


def result_files() -> list[Path]:
    """Result files of the benchmarks, newest names last."""
    return sorted(RESULTS.glob("*.md"))


def public_modules() -> dict[str, list[str]]:
    """Public names by module: packages, top-level modules and those that examples in docs/ import from; no commands."""
    examples = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    found = IMPORTED.findall(examples)
    names = {module for module, _ in found} | {f"{module}.{name}" for module, x in found for name in x.split(", ")}
    imported = {PACKAGE.parent / f"{name.replace('.', '/')}.py" for name in names}
    paths = [*PACKAGE.glob("[a-z]*.py"), *PACKAGE.rglob("__init__.py"), *filter(Path.is_file, imported)]
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
    modules = public_modules()
    return head + "".join(
        shared_name(module, name) if f"{module}.{name}" in modules else f"\n::: {module}.{name}\n" for name in names
    )


def shared_name(module: str, name: str) -> str:
    """Entry of a public name that is also a module with a page: a link, or the function in place of that module."""
    path = f"{module}.{name}"
    value = getattr(importlib.import_module(module), name)
    if inspect.ismodule(value):
        return f"\n## {name}\n\nThe module [{path}]({path}.md).\n"
    return f"\n[](){{ #{path} }}\n\n::: {value.__module__}.{name}\n"


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
    from octavo.training.config import DataConfig, ModelConfig, ParallelConfig, TrainingConfig

    text = "# Configuration\n\nKeys of `config.toml`, for `octavo train --config` and `octavo study --config`.\n"
    classes = (ModelConfig, DataConfig, TrainingConfig, ParallelConfig)
    for section, config in zip(("model", "data", "training", "parallel"), classes, strict=True):
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


def findings_page() -> str:
    """Every finding of the doctor: its cause, when it is found, the statistics that show it, and its remedies."""
    from octavo.doctor import Thresholds
    from octavo.doctor.findings import CAUSES
    from octavo.doctor.statistics_catalog import STATISTIC_OF_CODE
    from octavo.doctor.thresholds import source_of

    text = FINDINGS_HEAD
    rules = rules_by_code()
    for code, cause in CAUSES.items():
        shown_by = ", ".join(f"[`{name}`](statistics.md)" for name in STATISTIC_OF_CODE.get(code, ()))
        text += f"\n## {code}\n\n{cause[0].upper()}{cause[1:]}.\n\n{with_values(rules[code])}\n"
        text += f"\nShown by: {shown_by}.\n" if shown_by else ""
        text += "\nRemedies:\n\n" + "".join(f"- {remedy}\n" for remedy in remedy_texts(code))
    text += "\n## Thresholds\n\nFields of `octavo.doctor.Thresholds`, with their published or measured source.\n\n"
    text += "| field | value | source | reason |\n| --- | --- | --- | --- |\n"
    for field in fields(Thresholds):
        source = source_of(field.name)
        text += f"| `{field.name}` | {getattr(Thresholds(), field.name):g} | {source.kind} | {source.why} |\n"
    return text


FINDINGS_HEAD = """# Findings

Findings that `octavo doctor`, `octavo.doctor.watch` and the autopilot report. Severity *fail*: numbers are wrong or
training breaks; *warn*: it costs accuracy or speed; *note*: worth knowing. Remedies are ordered: the first is the
smallest change that removes the cause. Those that depend on the layer's recipe are listed for every recipe here.
"""


SECTION = re.compile(r"\n\n(?:Args|Returns):")  # of a docstring


def rules_by_code() -> dict[str, str]:
    """Docstring of the rule or preflight check that finds each code, without its arguments."""
    from octavo.doctor.rules import RULES, loss_gap
    from octavo.doctor.rules.modules import slow_layers
    from octavo.experiments.preflight import checkpoint, memory, replayed

    finders = {rule.__name__.replace("_", "-"): rule for rule in (*RULES, loss_gap)}
    checks = {"checkpoint": checkpoint.checkpoint_check, "memory": memory, "nondeterministic": replayed}
    documented = {**finders, "slow-layer": slow_layers, **checks}
    return {code: SECTION.split(inspect.cleandoc(one.__doc__ or ""))[0] for code, one in documented.items()}


def with_values(docstring: str) -> str:
    """Docstring as Markdown, with the value of every threshold that it names."""
    from octavo.doctor import Thresholds

    values = {field.name: f"`{field.name}` ({getattr(Thresholds(), field.name):g})" for field in fields(Thresholds)}
    text = re.sub(r":func:`([^`]+)`", r"``\1``", docstring)
    return re.sub(r"``(\w+)``", lambda match: values.get(match[1], f"`{match[1]}`"), text)


def remedy_texts(code: str) -> list[str]:
    """Remedies of a code under every recipe, each once."""
    from octavo import recipes
    from octavo.doctor import Finding, Severity
    from octavo.doctor.facts import recipe_facts
    from octavo.doctor.remedies import remedies_for
    from octavo.doctor.series import Period, series_of

    custom = recipes.get("tensorwise", gradient_format="E4M3")
    facts = [{}, *(recipe_facts(one) for one in (recipes.get("article"), recipes.get("mxfp8"), custom))]
    role = "grad_output" if code == "gradient-underflow" else "input"
    texts: dict[str, None] = {}
    for ratio, of_layer in itertools.product((8.0, 0.1), facts):
        series = series_of([])
        series.periods["LAYER"] = [Period(0.0, 0, of_layer)]
        finding = Finding(code=code, severity=Severity.FAIL, path="LAYER", role=role, evidence={"stale_ratio": ratio})
        texts |= dict.fromkeys(remedy.text for remedy in remedies_for(finding, series))
    return list(texts)


def statistics_page() -> str:
    """Every statistic of the doctor: name, meaning, formula and healthy range."""
    from octavo.doctor import Thresholds, statistics
    from octavo.doctor.statistics_catalog import MODULES, all_statistics

    formulas = {}
    for line in (statistics.__doc__ or "").splitlines():
        if line.startswith("| ") and not line.startswith("| field"):
            name, formula, _ = re.split(r"\s+\|(?:\s|$)", line.removeprefix("| "))[:3]
            formulas[f"casts.{name}"] = formula
    text = STATISTICS_HEAD
    bar = {ord("|"): "&#124;"}
    for one in all_statistics(Thresholds(), MODULES):
        formula = formulas.get(one.name, "")
        cells = (f"`{one.name}`", one.title, one.meaning, formula, healthy_range(one.low, one.high))
        text += f"| {' | '.join(cell.translate(bar) for cell in cells)} |\n"
    return text


def engines_page() -> str:
    """Every profile: what is proven of its casts, then each property with its source and proof."""
    from octavo.engines import PROFILES, properties_of, source_of

    text = ENGINES_HEAD
    for name, profile in PROFILES.items():
        proofs = (source_of(profile, f"{role}.division").proof for role in ("weight", "input"))
        text += f"| [`{name}`](#{name}) | {profile.engine} | {' | '.join(proofs).replace(f'{ORACLES}/', '')} |\n"
    for name, profile in PROFILES.items():
        text += (
            f"\n## {name}\n\n{profile.engine}.\n\n| property | value | source | proof |\n| --- | --- | --- | --- |\n"
        )
        for prop, value in properties_of(profile).items():
            source = source_of(profile, prop)
            text += f"| `{prop}` | {value} | {source.project} {source.version}, `{source.file}` | {source.proof} |\n"
    return text


ORACLES = "tests/oracle/engines"
ENGINES_HEAD = f"""# Engines

What each engine computes for a linear layer, from `octavo.engines`: casts of weights and inputs, the GEMM, and the
cache. A proof is a test that runs the project's own code on a CPU and compares codes and scales bit for bit, on tensors
that would show any other value of the property (`test_proven_properties.py`); this table names it in `{ORACLES}`.
Triton's interpreter divides and takes logarithms as IEEE 754 says; a GPU's may differ in the last bits.

| engine | | proof of the weights' cast | proof of the inputs' cast |
| --- | --- | --- | --- |
"""

STATISTICS_HEAD = """# Statistics

Numbers that the doctor measures in a sampled step, of every cast to FP8 (`casts`), GEMM (`products`), parameter and
module. x is the tensor in high precision, y its decoded codes; sums run over finite elements, in FP64. Formulas other
than those of amax, scale, saturation and stale ratio use a sample of the rows. *Stale ratio* (g) is the current amax
over the amax that the scale was computed for: 1 for a dynamic scale, between 0.5 and 1 for one rounded up to a power of
two, near 1 for a delayed scale that follows its tensor.

| name | title | meaning | formula | healthy |
| --- | --- | --- | --- | --- |
"""


def healthy_range(low: float | None, high: float | None) -> str:
    """Healthy range of a statistic; empty without limits."""
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else "" if high is None else f"at most {high:g}"
