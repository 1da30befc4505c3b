"""Lint, format, the order of imports, types and links are part of the tests."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "lint": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "imports": ["lint-imports", "--no-cache"],
    "types": ["basedpyright", "--pythonpath", sys.executable],
}


def test_files_are_opened_by_what_refuses_pipes():
    """By `files.reading`; others would wait for a pipe or device, which strangers may put there."""
    other = r"\.read_(text|bytes)\(|open\([^)]*\"rb?\"|(np\.load|tarfile\.open)\(path"
    own = ("__file__", "CONFIGS", "SOURCE", "PROGRAM", "/proc/", "library.read_bytes()")
    for path in (ROOT / "pfedafm_jax").rglob("*.py"):
        for line in path.read_text().splitlines() if path.name != "files.py" else []:
            assert not re.search(other, line) or any(word in line for word in own), line


def test_links_between_pages_lead_somewhere():
    """To a file, and to a heading of it: its words in lower case, joined by hyphens."""

    def headings(page: Path) -> set[str]:
        titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    tops = ("docs", "experiments", "notebooks", "benchmarks")
    pages = [*ROOT.glob("*.md"), *(page for top in tops for page in (ROOT / top).rglob("*.md"))]
    lost = []
    for page in pages:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            name, _, heading = link.partition("#")
            target = page.parent / name if name else page
            if not target.exists() or (heading and heading not in headings(target)):
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert len(pages) > 20 and lost == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_code_is_clean(name):
    tool = shutil.which(COMMANDS[name][0], path=str(Path(sys.executable).parent)) or shutil.which(
        COMMANDS[name][0]
    )
    assert tool, f"{COMMANDS[name][0]} is not installed: pip install -e '.[dev]'"
    result = subprocess.run(
        [tool, *COMMANDS[name][1:]], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
