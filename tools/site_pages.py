"""A hook of MkDocs: adds pages that lie outside `docs/`, and notebooks, which become Markdown.

Links are written for readers of the repository; here those between such pages are changed.
"""

import json
import os
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Where the site has files of the root. The licence is not a page.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "LICENSE": "LICENSE.txt",
}


def markdown_of(notebook: str) -> str:
    """A notebook as a page; cells of code become blocks of Python, their text outputs follow."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            if printed := "".join(output.get("text", ())):
                parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_files(files, config):
    from mkdocs.structure.files import File  # the tests, which have no MkDocs, use `markdown_of`

    def add(page, text, source):
        files.append(File.generated(config, page, content=_with_links(text, source, page)))

    for source, page in PAGES.items():
        add(page, (ROOT / source).read_text(), source)
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        page = _page_of(f"docs/{file.src_uri}")
        add(page, markdown_of(pathlib.Path(file.abs_src_path).read_text()), f"docs/{file.src_uri}")
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.generated_by is None:
        return _with_links(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
    return markdown


def on_page_content(html, page, config, files):
    """Docstrings name pages by their path, which `help` shows; here these become links."""

    def link(match):
        target = files.get_file_from_path(match[1])
        if target is None:
            raise ValueError(f"{page.file.src_uri} names a page that is missing: docs/{match[1]}")
        return f'<a href="{target.url_relative_to(page.file)}">{target.page.title}</a>'

    if not page.file.src_uri.startswith("reference/"):
        return html
    return re.sub(r"(?:<code>)?\bdocs/([\w/]+\.md)\b(?:</code>)?", link, html)


def _page_of(source):
    """Path in the site of a file of the repository; None if it is not there."""
    if source.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", source.removeprefix("docs/"))
    return PAGES.get(source)


def _with_links(markdown, source, page):
    def link(match):
        target = os.path.normpath(os.path.join(os.path.dirname(source), match[1]))
        place = _page_of(target)
        if place is None:  # a web address, or a mistake that MkDocs reports
            return match[0]
        return f"]({os.path.relpath(place, os.path.dirname(page) or '.')}"

    return re.sub(r"\]\(([^)\s#:]+)(?=[)#])", link, markdown)
