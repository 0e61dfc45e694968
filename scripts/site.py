"""What the site of the documentation adds to docs/: README as its first page, examples/ and deploy/,
and a page of each public module, with the whole docstrings of its names."""

from __future__ import annotations

import json
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def _reference() -> ModuleType:
    """scripts/reference, which knows the public names."""
    loader = SourceFileLoader("reference", str(ROOT / "scripts" / "reference"))
    module = ModuleType("reference")
    module.__file__ = loader.path
    loader.exec_module(module)
    return module


REFERENCE = _reference()


def on_config(config: Any) -> None:
    """A folder in the navigation stands for its pages; each page ends with the version."""
    version = re.search(r'"(.+)"', (ROOT / "python/nostall/_version.py").read_text())
    config.copyright = f"nostall {version[1] if version else ''}"
    for entry in config.nav:
        for name, pages in entry.items():
            if isinstance(pages, list):
                entry[name] = [_pages(p) for p in pages]
            else:
                entry[name] = _expand(pages)


def _pages(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {name: _expand(pages) for name, pages in entry.items()}
    return entry


def _expand(pages: str) -> Any:
    if pages == "reference/":
        return [f"reference/{module}.md" for module in REFERENCE.MODULES]
    if not pages.endswith("/"):
        return pages
    found = sorted((ROOT / "docs" / pages).glob("*.md"), key=lambda p: (p.stem != "README", p.name))
    return [pages + p.name for p in found]


def on_files(files: Files, config: Any) -> Files:
    first = (ROOT / "README.md").read_text().replace("](docs/", "](")
    first = first.replace("](tutorials/)", "](tutorials/waits.md)")  # a folder is no page
    first = re.sub(r"\[docs/([a-z-]+/)?([a-z-]+)(\.md|/)?\]", r"[\2]", first)
    files.append(File.generated(config, "index.md", content=first))
    beside = [*(ROOT / "examples").glob("*.py"), *(ROOT / "deploy").glob("*/*")]
    for path in sorted(beside):
        place = str(path.relative_to(ROOT))
        files.append(File.generated(config, place, abs_src_path=str(path)))
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=_page_of(path)))
    for module in REFERENCE.MODULES:
        place = f"reference/{module}.md"
        files.append(File.generated(config, place, content=_page_of_module(module)))
    return files


def _page_of_module(module: str) -> str:
    """What mkdocstrings makes of each name that has a docstring."""
    tree = REFERENCE.parsed(module)
    names = sorted(REFERENCE.exported(tree), key=str.lower)
    parts = [f"# {module}", REFERENCE.ast.get_docstring(tree)]
    parts += [f"::: {module}.{n}" for n in names if REFERENCE.definition(module, n)]
    return "\n\n".join(parts) + "\n"


def _page_of(notebook: Path) -> str:
    """A notebook as a page: its texts, its code, and where it can be had."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    parts.append(f"[This page as a notebook]({notebook.name})")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    # examples/, deploy/ and README.md lie beside docs/ in the repository, and within the site.
    within = re.sub(r"\]\(\.\./\.\./(examples|deploy)/", r"](../\1/", markdown)
    if page.file.src_uri == "reference.md":
        within = _linked(within)
    return within.replace("](../../README.md", "](../index.md")


def _linked(index: str) -> str:
    """The index of all names, each with a link to its place in the page of its module."""
    parts = re.split(r"^## (\S+)$", index, flags=re.M)
    for at in range(1, len(parts), 2):
        module = parts[at]
        parts[at] = f"## [{module}](reference/{module}.md)"
        parts[at + 1] = re.sub(
            r"^\| `(\w+)\(",
            rf"| [`\1`](reference/{module}.md#{module}.\1)`(",
            parts[at + 1],
            flags=re.M,
        )
    return "".join(parts)
