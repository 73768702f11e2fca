"""The order of the packages, their sizes, and that the pure ones hold only values."""

import ast
from pathlib import Path

import ferrum_jax

ROOT = Path(ferrum_jax.__file__).parent
ORDER = [
    "contract", "errors", "config", "progress", "sharding", "kvcache", "ops", "models", "weights", "compile",
    "executor", "loading", "factory", "generate", "conversion", "integrations", "planning", "cli_options",
    "serve", "conversation", "cli",
]  # fmt: skip
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
PURE = ("models", "ops", "kvcache/state.py", "weights/assemble.py")
LONGEST = 500  # lines


def _package(path: Path) -> str:
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


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_package_imports_only_from_those_above_it():
    for path in FILES:
        above = set(ORDER[: ORDER.index(_package(path)) + 1])
        assert _imports(path) - above - {"errors", "contract"} == set(), _name(path)


def test_no_module_has_more_than_500_lines():
    lengths = {_name(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_only_the_settings_read_the_environment():
    readers = [path for path in FILES if "os.environ" in path.read_text() or "getenv" in path.read_text()]
    assert [path.name for path in readers] == ["engine.py", "build.py"]  # the latter runs when the package is installed


def test_the_pure_packages_hold_only_functions_and_values():
    for path in FILES:
        if _name(path).startswith(PURE) and path.name != "__init__.py":
            _check_pure(path)


def _check_pure(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).split("[")[0] for base in node.bases}
            decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            frozen = "dataclass" in decorators and ("flax" in decorators or "frozen=True" in decorators)
            assert frozen or bases & {"Protocol", "NamedTuple"}, f"{_name(path)}: {node.name} can change itself"
        if isinstance(node, ast.Assign):
            kinds = (ast.List, ast.Set)
            assert not isinstance(node.value, kinds), f"{_name(path)}: a module-level container: {ast.unparse(node)}"
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), _name(path)
