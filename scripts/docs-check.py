#!/usr/bin/env python3
"""Checks what can be checked of the documents without running them (scripts/docs-lab.sh runs them).

Every relative link of every Markdown file leads to a file of the repository and, with a "#", to a
heading in it. In the documents that the documentation lab runs, every block says what it is.
Prints what is wrong; exit status 1 if anything is.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN_BY_THE_LAB = ["README.md", "docs/attach.md", "docs/operations.md"]
KINDS = {"sh", "ini", "xml", "text", "json", "mermaid"}


def prose(text):
    """The text without its code blocks."""
    return re.sub(r"(?ms)^\s*```.*?^\s*```\s*$", "", text)


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    found = {}
    for heading in re.findall(r"(?m)^#+ +(.*?) *$", prose(path.read_text())):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = found.get(anchor, -1) + 1
        found[anchor] = count
        if count:
            found[f"{anchor}-{count}"] = 0
    return set(found)


def wrong_links(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(path.read_text()))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            yield f"leads nowhere: {target}"
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            yield f"there is no such heading: {target}"


def wrong_blocks(path):
    open_at = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := re.fullmatch(r"\s*```(\w*)\s*", line):
            if open_at:
                open_at = None
            else:
                open_at = number
                if match[1] not in KINDS:
                    yield f"line {number}: the block is marked {match[1]!r}, not one of {', '.join(sorted(KINDS))}"
    if open_at:
        yield f"line {open_at}: the block does not end"


def main():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    wrong = []
    for name in listed.stdout.split():
        path = ROOT / name
        if not path.exists():
            continue
        wrong += [f"{name}: {what}" for what in wrong_links(path)]
        if name in RUN_BY_THE_LAB:
            wrong += [f"{name}: {what}" for what in wrong_blocks(path)]
    print("\n".join(wrong) or f"{len(listed.stdout.split())} documents are in order")
    sys.exit(1 if wrong else 0)


main()
