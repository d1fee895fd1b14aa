"""Executes the README and the guides as a reader would. CONTRIBUTING.md ("Snippets in the docs") has the markers."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs").glob("*.md"))
# Run by tests/layers/adapters/test_pages.py, each where the package that it is about is installed.
ADAPTER_PAGES = sorted((ROOT / "docs" / "adapters").glob("*.md"))
SHELL_LANGUAGES = ("bash", "console", "sh", "shell")
MARKER = re.compile(r"<!--\s*snippet\s+(file|prepare|run|skip|status)(?::\s*(.*?))?\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A fenced block: its language, the number of its first line of code, and the markers right above it."""

    language: str
    line: int
    code: str
    markers: dict[str, str]

    @property
    def status(self) -> int:
        """What its commands are to end with."""
        return int(self.markers.get("status", 0))

    def commands(self) -> list[str]:
        """A shell block's commands; in a console block, those behind a `$ `."""
        lines = self.code.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line.partition(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


@dataclass(frozen=True)
class Section:
    """What stands between two `##` headings of a page."""

    page: str
    title: str
    snippets: list[Snippet] = field(default_factory=list)


def parse(markdown: str, page: str = "README.md") -> list[Section]:
    sections, lines, number = [Section(page, "introduction")], markdown.splitlines(), 0
    comment = ""  # what stands between the last text, heading or fence and this line
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith("## "):
            sections.append(Section(page, line.removeprefix("## ").strip()))
            comment = ""
        elif fence := re.match(r"(\s*)(`{3,})(\S*)", line):
            indent, ticks, language = fence.groups()
            first = number
            while lines[number].strip() != ticks:
                number += 1
            code = "\n".join(line.removeprefix(indent) for line in lines[first:number])
            markers = {name: argument or "" for name, argument in MARKER.findall(comment)}
            sections[-1].snippets.append(Snippet(language, first + 1, code, markers))
            number += 1
            comment = ""
        elif line.startswith("<!--") or (comment and "-->" not in comment[comment.rindex("<!--") :]):
            comment += line + "\n"
        elif line.strip():
            comment = ""
    return sections


def execute(section: Section, workdir: Path) -> None:
    """Runs a section in `workdir`: its files and preparations, then its Python as one program, then its commands.

    Raises:
        AssertionError: if a program or command fails, or a shell snippet doesn't say how it is to be run.
    """
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def run(argv: list[str], what: str, status: int = 0) -> None:
        done = subprocess.run(
            argv, cwd=workdir, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == status, f"{what} ended with status {done.returncode}:\n{done.stdout}{done.stderr}"

    program, commands = "", []
    for snippet in section.snippets:
        where = f"{section.page}:{snippet.line}"
        if "prepare" in snippet.markers:
            run(["bash", "-euo", "pipefail", "-c", snippet.markers["prepare"]], f"{where}: the preparation")
        if "skip" in snippet.markers:
            assert snippet.markers["skip"], f"{where}: say why: <!-- snippet skip: REASON -->"
        elif "file" in snippet.markers:
            (workdir / snippet.markers["file"]).write_text(snippet.code + "\n")
        elif snippet.language == "python":
            # Each block keeps its line numbers, so that a traceback points into the README.
            program += "\n" * (snippet.line - 1 - program.count("\n")) + snippet.code + "\n"
        elif snippet.language in SHELL_LANGUAGES and not all(c.startswith("make ") for c in snippet.commands()):
            hint = "mark it <!-- snippet run: ARGUMENTS --> or <!-- snippet skip: REASON -->"
            assert "run" in snippet.markers, f"{where}: {hint}"
            arguments = snippet.markers["run"]
            assert not arguments or len(snippet.commands()) == 1, f"{where}: arguments are for a single command"
            commands += [(f"{command} {arguments}", where, snippet.status) for command in snippet.commands()]
    if program:
        script = Path(section.page).with_suffix(".py").name
        (workdir / script).write_text(program)
        run([sys.executable, script], f"the Python of {section.title!r}")
    for command, where, status in commands:
        run(["bash", "-euo", "pipefail", "-c", command], f"{where}: {command}", status)


SECTIONS = parse(README.read_text()) if README.exists() else []
ALL_SECTIONS = SECTIONS + [section for guide in GUIDES for section in parse(guide.read_text(), f"docs/{guide.name}")]
SHELL_COMMANDS = [
    command
    for section in ALL_SECTIONS
    for snippet in section.snippets
    if snippet.language in SHELL_LANGUAGES
    for command in snippet.commands()
]


def test_first_commands_are_make_train_and_make_test():
    assert SHELL_COMMANDS[:2] == ["make train", "make test"]


def test_make_commands_name_real_targets():
    targets = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [word for command in SHELL_COMMANDS if command.startswith("make ") for word in shlex.split(command)[1:]]
    assert [word for word in named if "=" not in word and word not in targets] == []


def test_extras_in_commands_are_declared():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lists = re.findall(r"(?:\.|flax-longcontext)\[([\w,-]+)\]|EXTRAS=([\w,-]+)", "\n".join(SHELL_COMMANDS))
    assert {name for pair in lists for names in pair for name in names.split(",") if name} <= set(extras)


def test_every_snippet_names_its_language():
    unnamed = [(s.page, snippet.line) for s in ALL_SECTIONS for snippet in s.snippets if not snippet.language]
    assert unnamed == []


def test_readme_is_short():
    """It invites; what is longer has a page in docs/."""
    assert len(README.read_text().split()) <= 1300


def headings(page: Path) -> set[str]:
    """What a link into a page can name, as GitHub derives it from the page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", [README, ROOT / "CONTRIBUTING.md", *GUIDES, *ADAPTER_PAGES], ids=lambda page: page.name
)
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("https://") and not (target.exists() and (not heading or heading in headings(target))):
            broken.append(link)
    assert broken == []


def test_every_page_and_picture_can_be_reached():
    linked = {link for page in [README, *GUIDES] for link in re.findall(r"\]\((?:docs/)?([^)\s#]+)", page.read_text())}
    files = [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    assert [path for path in files if str(path.relative_to(ROOT / "docs")) not in linked] == []


def test_the_kernels_that_a_page_names_exist():
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/hopper_kernels.md").read_text())
    paths = [ROOT / name if "/" in name else ROOT / "kernels/backends/mosaic_gpu" / name for name in named]
    assert paths
    assert [path for path in paths if not path.exists()] == []


def needs_libtpu(section: Section) -> bool:
    commands = " ".join(command for snippet in section.snippets for command in snippet.commands())
    return "--topology" in commands or "--target" in commands


@pytest.mark.full
@pytest.mark.parametrize("section", [s for s in ALL_SECTIONS if s.snippets], ids=lambda s: s.title.replace(" ", "-"))
def test_section_runs(section, tmp_path):
    if needs_libtpu(section) and importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the TPU compiler: the `tpu` extra, on Linux x86-64")
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments", ignore=shutil.ignore_patterns("__pycache__"))
    execute(section, tmp_path)


EXAMPLE = """
# Title

## Runs

<!-- snippet prepare: printf 'three' > count.txt -->
```python
number = open("count.txt").read()
```

Text.

<!-- snippet file: check.py -->
```python
import pathlib, sys
assert pathlib.Path("from_python").read_text() == sys.argv[1]
```

```python
open("from_python", "w").write(number)
```

<!-- snippet run: three -->
```bash
python check.py  # a comment
```

## Fails in Python

```python

raise RuntimeError("broken example")
```

## Fails in the shell

<!-- snippet run -->
```console
$ ls no_such_file
```

## Unmarked

```bash
python check.py
```
"""


def test_a_section_runs_in_order_and_its_parts_see_each_other(tmp_path):
    _, section, *_ = parse(EXAMPLE)
    execute(section, tmp_path)
    assert (tmp_path / "from_python").read_text() == "three"


@pytest.mark.parametrize(
    ("title", "message"),
    [
        ("Fails in Python", r'README.py", line 32(.|\n)*broken example'),
        ("Fails in the shell", "no_such_file"),
        ("Unmarked", "mark it <!-- snippet run: ARGUMENTS -->"),
    ],
)
def test_a_section_that_fails_is_caught(tmp_path, title, message):
    (section,) = (section for section in parse(EXAMPLE) if section.title == title)
    with pytest.raises(AssertionError, match=message):
        execute(section, tmp_path)
