"""The order of the rooms, and that the core holds only values."""

import ast
from pathlib import Path

import pytest

import ferrum_jax

ROOT = Path(ferrum_jax.__file__).parent
ORDER = [
    "contract", "config", "progress", "sharding", "kvcache", "ops", "models", "weights", "compile", "executor",
    "loading", "factory", "generate", "conversion", "integrations", "cli",
]  # fmt: skip
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
CORE = ("models", "ops", "kvcache/state.py", "weights/assemble.py")
LONGEST = 500  # lines


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Modules of this package that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ferrum_jax."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "ferrum_jax":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ferrum_jax.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_from_those_above_it(path: Path):
    room = _room(path)
    above = set(ORDER[: ORDER.index(room) + 1])
    assert _imports(path) - above - {"errors", "contract"} == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_fits_in_a_few_screens(path: Path):
    assert len(path.read_text().splitlines()) <= LONGEST


def test_only_the_settings_read_the_environment():
    readers = [path for path in FILES if "os.environ" in path.read_text() or "getenv" in path.read_text()]
    assert [path.name for path in readers] == ["engine.py"]


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if str(p.relative_to(ROOT)).startswith(CORE) and p.name != "__init__.py"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_core_holds_only_functions_and_values(path: Path):
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).split("[")[0] for base in node.bases}
            decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            frozen = "dataclass" in decorators and ("flax" in decorators or "frozen=True" in decorators)
            assert frozen or bases & {"Protocol", "NamedTuple"}, f"{node.name} can change itself"
        if isinstance(node, ast.Assign):
            assert not isinstance(node.value, (ast.List, ast.Set)), f"a module-level container: {ast.unparse(node)}"
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree))
