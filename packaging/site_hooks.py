"""Hooks of mkdocs for the documentation site: files outside of docs/ become pages, and formulas become MathML.

Pages of docs/ link to sources, results and pages elsewhere in the repository by relative paths, as GitHub shows them.
The site has a page for each file that is linked (a Markdown page as it is, a source with its lines, a folder as a list)
below repository/, and a copy of each other file. Links of all pages are rewritten to these.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ELSEWHERE = "repository"
# the target of a link or picture; blocks of code are matched first, and left alone
LINK = re.compile(r"^```.*?^```|(?P<before>\]\()(?P<target>[^)\s]+)(?P<after>\))", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">(?:\\\(|\\\[)(?P<latex>.*?)(?:\\\)|\\\])</(?P=tag)>', re.DOTALL
)
# "Returns: ..." in the docstring of a function, at the start of a paragraph or behind another such sentence
SECTION = re.compile(r"(?P<start><p>|\s)(?P<name>Returns|Raises|Source): ")
# `**unknown: Any` in a signature, which help() leaves out, too (onepass/api/keywords.py)
UNKNOWN = re.compile(r'\n[^\n]*<span class="o">\*\*</span><span class="n">unknown</span>[^\n]*')
# "q, k, v: ..." among the attributes of a class, of which the parser takes "(k, v)" for a type
SEVERAL = re.compile(
    r"<b><code>(?P<first>(?:<[^>]*>)*\w+,(?:<[^>]*>)*)</code></b>\s*\(<code>\(?(?P<rest>.*?)\)?</code>\)"
)
# what mkdocs.yml names
IN_NAVIGATION = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md", "tests/peers/README.md")
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml"}

_sources: dict[str, Path] = {}  # where a generated page of the site comes from


def linked_files(page: Path) -> set[Path]:
    """What a Markdown page links to in the repository outside of docs/."""
    found = set()
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        target = (match["target"] or "").partition("#")[0]
        if not target or ":" in target:
            continue
        path = (page.parent / target).resolve()
        if path.exists() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS):
            found.add(path)
    return found


def place_of(path: Path) -> str:
    """Where a file of the repository is in the site's sources."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"{ELSEWHERE}/{name}.md" if path.is_dir() or path.suffix == ".py" else f"{ELSEWHERE}/{name}"


def page_of(path: Path) -> str:
    """The Markdown of a page for a file or folder outside of docs/."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        rows = [f"- [{each.name}]({path.name}/{each.name})" for each in listed(path)]
        return f"# {name}/\n\n" + "\n".join(rows) + "\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    fence = "`" * 6
    language = LANGUAGES.get(path.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n{fence}{language}\n{text}{fence}\n"


def listed(folder: Path) -> list[Path]:
    """The files that the page of a folder names."""
    return sorted(each for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))


def on_files(files: Files, config) -> Files:
    """Add a page or a copy for each file outside of docs/ that a page links to, and that those pages link to."""
    _sources.clear()
    waiting = [ROOT / name for name in IN_NAVIGATION]
    for page in DOCS.rglob("*.md"):
        waiting += linked_files(page)
    while waiting:
        path = waiting.pop()
        place = place_of(path)
        if place in _sources:
            continue
        _sources[place] = path
        if place.endswith(".md"):
            file = File.generated(config, place, content=page_of(path))
        else:
            file = File.generated(config, place, abs_src_path=str(path))
        if path.relative_to(ROOT).as_posix() not in IN_NAVIGATION:
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
        if path.is_dir():
            waiting += listed(path)
        elif path.suffix == ".md":
            waiting += linked_files(path)
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Let links lead to where the site has a file."""
    place = page.file.src_uri
    source = _sources.get(place, DOCS / place)

    def rewritten(match: re.Match) -> str:
        if match["target"] is None:
            return match[0]
        target, hash_sign, anchor = match["target"].partition("#")
        if not target or ":" in target:
            return match[0]
        path = (source.parent / target).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            return match[0]  # mkdocs says that it is broken
        to = os.path.relpath(place_of(path), os.path.dirname(place) or ".")
        return f"{match['before']}{to}{hash_sign}{anchor}{match['after']}"

    return LINK.sub(rewritten, markdown)


def on_page_content(content: str, page, config, files) -> str:
    """Write formulas as MathML, which browsers show by themselves, and give sections of docstrings their headings."""

    def mathml(match: re.Match) -> str:
        display = "block" if match["tag"] == "div" else "inline"
        latex = html.unescape(match["latex"]).strip().replace("{aligned}", "{align*}")  # the converter knows this one
        return convert(latex, display=display)

    def section(match: re.Match) -> str:
        start = "<p>" if match["start"] == "<p>" else "</p>\n<p>"
        return f"{start}<strong>{match['name']}:</strong> "

    def paragraph(match: re.Match) -> str:
        return SECTION.sub(section, match[0])

    if page.file.src_uri.startswith("reference/"):
        content = UNKNOWN.sub("", content)
        content = SEVERAL.sub(r"<b><code>\g<first> \g<rest></code></b>", content)
        content = re.sub(r"<p>.*?</p>", paragraph, content, flags=re.DOTALL)
    return FORMULA.sub(mathml, content)
