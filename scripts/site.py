"""What the site of the documentation adds to docs/: README as its first page, and examples/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


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
    if not pages.endswith("/"):
        return pages
    found = sorted((ROOT / "docs" / pages).glob("*.md"), key=lambda p: (p.stem != "README", p.name))
    return [pages + p.name for p in found]


def on_files(files: Files, config: Any) -> Files:
    first = (ROOT / "README.md").read_text().replace("](docs/", "](")
    first = first.replace("](tutorials/)", "](tutorials/waits.md)")  # a folder is no page
    first = re.sub(r"\[docs/([a-z-]+/)?([a-z-]+)(\.md|/)?\]", r"[\2]", first)
    files.append(File.generated(config, "index.md", content=first))
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=_page_of(path)))
    return files


def _page_of(notebook: Path) -> str:
    """A notebook as a page: its texts, its code, and where it can be had."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    parts.append(f"[This page as a notebook]({notebook.name})")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    # examples/ and README.md lie beside docs/ in the repository, and within the site.
    within = markdown.replace("](../../examples/", "](../examples/")
    return within.replace("](../../README.md", "](../index.md")
