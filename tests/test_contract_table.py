"""`docs/contract.md` has a row for every public name of the contract, and every row names a test that is there."""

import ast
import re
from pathlib import Path

import ferrum_jax
from ferrum_jax import LlmExecutor, LlmExecutorFactory, LlmExecutorRegistry, ModelRunner, contract

ROOT = Path(ferrum_jax.__file__).parents[1]
PAGE = ROOT / "docs" / "contract.md"
ROW = re.compile(r"^\| `(\w+(?:\.\w+)?)` \| (.+) \| \[(\w+)\]\(\.\./(tests/\S+\.py)\) \|$", flags=re.MULTILINE)
ROWS = {row[1]: row for row in ROW.finditer(PAGE.read_text())}
INTERFACES = [
    contract.DecoderOnlyLLM,
    contract.KvCacheHandle,
    contract.ModelExecutor,
    contract.BatchModelExecutor,
    contract.SpeculativeExecutor,
    contract.ModelExecutorFactory,
    contract.ExecutorRegistry,
]
IMPLEMENTATIONS = [ModelRunner, LlmExecutor, LlmExecutorFactory, LlmExecutorRegistry]


def _public(kind: type) -> set[str]:
    return {f"{kind.__name__}.{name}" for name in vars(kind) if not name.startswith("_")}


def _own(kind: type) -> set[str]:
    """Public names, of its own or of bases beside it, that no interface above has."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("ferrum_jax") and base not in INTERFACES]
    inherited = {name for base in INTERFACES if issubclass(kind, base) for name in vars(base)}
    names = {name for base in ours for name in vars(base) if not name.startswith("_")}
    return {f"{kind.__name__}.{name}" for name in names - inherited}


def test_every_public_name_of_the_contract_has_a_row():
    names = {*contract.__all__, "IOError", "TimeoutError"}
    names |= set().union(*map(_public, INTERFACES))
    names |= {kind.__name__ for kind in IMPLEMENTATIONS}.union(*map(_own, IMPLEMENTATIONS))
    assert names - ROWS.keys() == set()
    assert ROWS.keys() - names == set()


def _tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_a_row_links_to_a_test_that_is_there():
    found = {path: _tests(path) for path in {row[4] for row in ROWS.values()}}
    assert [row[0] for row in ROWS.values() if row[3] not in found[row[4]]] == []


def test_no_row_is_written_twice_or_in_another_form():
    lines = [line for line in PAGE.read_text().splitlines() if "](../tests/" in line and line.startswith("| `")]
    assert len(lines) == len(ROWS)
