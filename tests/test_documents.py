"""What the documents say is run: code blocks of the README, and every example."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import ferrum_jax
from tests.test_packages import ORDER

ROOT = Path(ferrum_jax.__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ELSEWHERE = {"grpo_tunix"}  # needs the extra `tunix`: tests/integrations/test_tunix.py
QUOTE = "# examples/"  # begins a block that is quoted from the example it names
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_of(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/research.md"])
def test_a_documents_python_runs_from_top_to_bottom(document: str, smollm2_path: Path, tmp_path: Path):
    assert smollm2_path.exists()
    blocks = [block for block in python_of(document) if not block.startswith(QUOTE)]
    assert len(blocks) >= 3
    script = tmp_path / "document.py"
    script.write_text("\n".join(blocks))
    own = os.environ | {
        "JAX_NUM_CPU_DEVICES": "4",  # for the block of several devices
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=900, env=own, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_what_the_research_page_quotes_stands_in_the_example():
    quotes = [block for block in python_of("docs/research.md") if block.startswith(QUOTE)]
    assert quotes
    for quote in quotes:
        first, _, lines = quote.partition("\n")
        assert lines in (ROOT / first.removeprefix("# ")).read_text(), first


@pytest.mark.slow
@pytest.mark.parametrize("path", [one for one in EXAMPLES if one.stem not in ELSEWHERE], ids=lambda path: path.stem)
def test_an_example_runs_and_is_short(path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]):
    assert smollm2_path.exists()
    assert len(path.read_text().splitlines()) <= 60
    runpy.run_path(str(path))
    assert capsys.readouterr().out


def _frozen(node: ast.ClassDef) -> bool:
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    bases = {ast.unparse(base) for base in node.bases}
    return (
        "frozen=True" in decorators
        or "flax.struct" in decorators
        or bool(bases & {"Protocol", "NamedTuple", "enum.Enum"})
    )


def test_the_architecture_names_every_class_that_is_no_frozen_value():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = "".join(line for line in text.splitlines() if line.startswith("|"))
    files = [path for path in (ROOT / "ferrum_jax").rglob("*.py") if "contract" not in path.parts]
    classes = [node for path in files for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes if not _frozen(node) and f"{node.name}`" not in rows] == []


def test_the_documents_name_every_package():
    text = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    assert f": {', '.join(ORDER)}." in text
    tree = (ROOT / "README.md").read_text().partition("## The tree")[2]
    for path in (ROOT / "ferrum_jax").iterdir():
        if path.suffix == ".py" and path.name != "__init__.py":
            assert path.name in tree
        elif (path / "__init__.py").exists():
            assert f"  {path.name}/" in tree


def test_every_link_of_a_document_leads_somewhere():
    for path in DOCUMENTS:
        links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
        missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
        assert missing == [], path.name
