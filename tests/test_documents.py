"""What the documents say is run: code blocks of the README, and every example."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import ferrum_jax

ROOT = Path(ferrum_jax.__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_readmes_python_runs_from_top_to_bottom(smollm2_path: Path, tmp_path: Path):
    assert smollm2_path.exists()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) >= 3
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_is_short(path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]):
    assert smollm2_path.exists()
    assert len(path.read_text().splitlines()) <= 60
    runpy.run_path(str(path))
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_of_a_document_leads_somewhere(path: Path):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    for link in links:
        if "://" not in link:
            assert (path.parent / link).exists(), link
