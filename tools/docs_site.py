"""MkDocs hook: take files of the repository that pages link to into the site.

The README becomes the first page. A file outside ``docs/`` becomes a page under its own path: Markdown unchanged,
source in a code block, a notebook as its cells. Links are those of the repository, and are rewritten for the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.M | re.S)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)\s#]+")
LANGUAGES = {".py": "python", ".toml": "toml"}

sources: dict[str, str] = {}  # path in the repository of every page, by its path in the site


def location(path: str) -> str:
    """Return the path within the site of a file of the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.endswith(".md") else f"{path}.md"


def resolved(link: str, path: str) -> str:
    """Return the path in the repository that a link in the file ``path`` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def content(path: str) -> str:
    """Return a file as Markdown."""
    text, suffix = (ROOT / path).read_text(), Path(path).suffix
    if suffix == ".md":
        return text
    if suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return "\n\n".join(body if kind == "markdown" else f"```python\n{body}\n```" for kind, body in cells)
    return f"# {path}\n\n```{LANGUAGES.get(suffix, 'text')}\n{text}```\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    sources.update((page.src_uri, f"docs/{page.src_uri}") for page in files.documentation_pages())
    waiting = ["README.md", *sources.values()]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        text = content(path)
        if not path.startswith("docs/"):
            level = InclusionLevel.INCLUDED if path == "README.md" else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, location(path), content=text, inclusion=level))
            sources[location(path)] = path
        if path.endswith(".md"):
            links = {resolved(link, path) for link in LINK.findall(CODE.sub("", text))}
            fresh = [other for other in sorted(links - seen) if (ROOT / other).is_file() and other[:5] != "docs/"]
            seen.update(fresh)
            waiting += fresh
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path, folder = sources[page.file.src_uri], posixpath.dirname(page.file.src_uri) or "."

    def rewritten(match: re.Match[str]) -> str:
        target = resolved(match[0], path)
        return posixpath.relpath(location(target), folder) if (ROOT / target).is_file() else match[0]

    parts = CODE.split(markdown)  # code has odd numbers
    return "".join(part if number % 2 else LINK.sub(rewritten, part) for number, part in enumerate(parts))


def on_page_content(html: str, **_: object) -> str:
    return html.replace('<span class="gp">$ </span>', '<span class="gp"></span>')  # see site.css
