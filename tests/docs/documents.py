"""Reads the documents: code blocks, links, file names they mention, entries of the reference."""

import dataclasses
import importlib.util
import os
import pathlib
import re

from tools import site_pages

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for folder, pattern in [
        (ROOT, "*.md"),
        (ROOT / ".github", "**/*.md"),
        (ROOT / "docs", "**/*.md"),
        (ROOT / "docs", "**/*.ipynb"),
    ]
    for path in folder.glob(pattern)
)

# `<!-- snippet: alone, ranks 1 and 2 -->` on the line before a block of Python: it runs by itself,
# on each of these numbers of ranks. A block without it joins the others of its document.
_MARK = re.compile(r"<!-- snippet: alone(?:, ranks ([\d and]+))? -->")
# `<!-- snippet: needs optuna -->`: the block is left out where that library is missing.
_NEEDS = re.compile(r"<!-- snippet: needs ([\w ]+) -->")
# A folder of the repository, a slash, and what may follow in a path.
_TOP = "benchmarks|cmake|cpp|docs|examples|requirements|sok_like|tests|tools"
_PATH = re.compile(rf"`((?:{_TOP})/[\w./*-]*)`")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block."""

    document: str  # its path from the root
    language: str  # the word behind the fence, "" where there is none
    line: int  # number of its first line of content, counting from 1
    text: str
    ranks: tuple[int, ...]  # numbers to run it on by itself; empty: together with the others

    @property
    def name(self):
        """`README.md:42`."""
        return f"{self.document}:{self.line}"


def text_of(document):
    """A document as Markdown."""
    text = (ROOT / document).read_text()
    return site_pages.markdown_of(text) if document.endswith(".ipynb") else text


def blocks(document):
    """All fenced blocks of a document, in order."""
    lines = text_of(document).splitlines()
    found, start, language = [], None, ""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start, language = number, line.strip()[3:].strip()
            continue
        mark = _MARK.fullmatch(lines[start - 1].strip()) if start else None
        ranks = tuple(map(int, re.findall(r"\d+", mark[1] or "1"))) if mark else ()
        text = "\n".join(lines[start + 1 : number]) + "\n"
        found.append(Block(document, language, start + 2, text, ranks))
        start = None
    if start is not None:
        raise ValueError(f"{document}: the block of line {start + 1} is not closed")
    return found


def output_of(block):
    """What a document says that a block prints: the next one, behind `<!-- printed -->`; or ""."""
    following = [each for each in blocks(block.document) if each.line > block.line]
    lines = text_of(block.document).splitlines()
    marked = following and lines[following[0].line - 3].strip() == "<!-- printed -->"
    return following[0].text if marked else ""


def python_blocks(document):
    """Its blocks of Python, without those that need a library that is not installed."""
    lines = text_of(document).splitlines()
    needs = {block.line: _NEEDS.fullmatch(lines[block.line - 3]) for block in blocks(document)}
    return [
        block
        for block in blocks(document)
        if block.language == "python"
        and (not needs[block.line] or importlib.util.find_spec(needs[block.line][1]))
    ]


def program(parts):
    """One program of blocks of one document, each at the line where the document has it."""
    lines = []
    for block in parts:
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n"


def programs():
    """Lists of documents whose blocks run together: one document, or an index and its folder.

    `docs/semantics.md` is the index of `docs/semantics/`; its links give the order.
    """
    pages = {document: [document] for document in DOCUMENTS}
    for document in DOCUMENTS:
        folder = os.path.splitext(document)[0]
        parts = [path for path in DOCUMENTS if path.startswith(folder + "/")]
        linked = [os.path.join(os.path.dirname(document), link) for link in links(document)]
        if sorted(part for part in linked if part in parts) != parts:
            raise ValueError(f"{document} must link once to each of {parts}. Received: {linked}")
        for part in sorted(parts, key=linked.index):
            pages[document] += pages.pop(part)
    return list(pages.values())


def prose(document):
    """The document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(document), flags=re.M | re.S)


def links(document):
    """Targets of Markdown links that are not web addresses."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(document))
    return [target for target in targets if not re.match(r"\w+:", target)]


def paths(document):
    """Files of the repository that the prose names in backquotes."""
    return _PATH.findall(prose(document))


def entries(document):
    """Names of the API that a page of the reference describes."""
    return re.findall(r"^::: (\S+)$", prose(document), flags=re.M)


def members(document):
    """By entry that lists members of a class: their names."""
    listed = re.findall(
        r"^::: (\S+)\n    options:\n      members:(.*(?:\n        - .*)*)",
        prose(document),
        flags=re.M,
    )
    return {path: re.findall(r"\w+", names) for path, names in listed}


def anchors(document):
    """What `#...` may name: a heading in lower case, without signs, with dashes for blanks.

    In the site's reference also the names of its entries.
    """
    headings = re.findall(r"^#+ (.*)$", prose(document), flags=re.M)
    return entries(document) + [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    ]
