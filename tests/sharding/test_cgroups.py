"""Limits of control groups, as Linux tells them in files."""

from pathlib import Path

import pytest

from ferrum_jax.sharding.devices import allowed_bytes

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
NO_LIMIT_V1 = 2**63 - 4096


def write_group(folder: Path, names: tuple[str, str, str], limit: object, used: int, reclaimable: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {reclaimable}\n")


def allowed(tmp_path: Path, membership: str) -> int | None:
    (tmp_path / "membership").write_text(membership)
    return allowed_bytes(tmp_path / "membership", tmp_path / "mount")


def test_version_2_tells_a_limit_less_what_is_used_and_cannot_be_given_back(tmp_path: Path):
    write_group(tmp_path / "mount" / "a" / "b", V2, 1000, 300, 50)
    assert allowed(tmp_path, "0::/a/b\n") == 750
    write_group(tmp_path / "mount" / "a", V2, 900, 700)
    assert allowed(tmp_path, "0::/a/b\n") == 200
    write_group(tmp_path / "mount" / "a", V2, "max", 700)
    assert allowed(tmp_path, "0::/a/b\n") == 750


def test_version_1_tells_the_same_in_other_words(tmp_path: Path):
    membership = "9:name=systemd:/\n4:memory:/pod/x\n3:cpuset:/\n0::/\n"
    write_group(tmp_path / "mount" / "memory" / "pod" / "x", V1, 1000, 300, 50)
    write_group(tmp_path / "mount" / "memory", V1, NO_LIMIT_V1, 500)
    assert allowed(tmp_path, membership) == 750


@pytest.mark.parametrize("line", ["0::/kubepods/pod7/abc\n", "0::/../../abc\n", "0::/\n"])
def test_in_a_container_the_mount_itself_may_be_the_group(tmp_path: Path, line: str):
    write_group(tmp_path / "mount", V2, 1000, 400)
    assert allowed(tmp_path, line) == 600


def test_a_group_past_its_limit_leaves_nothing(tmp_path: Path):
    write_group(tmp_path / "mount", V2, 1000, 1400)
    assert allowed(tmp_path, "0::/\n") == 0


def test_without_limits_or_groups_nothing_is_said(tmp_path: Path):
    write_group(tmp_path / "mount", V2, "max", 400)
    assert allowed(tmp_path, "0::/\n") is None
    assert allowed(tmp_path, "0::/elsewhere\n") is None
    assert allowed(tmp_path, "") is None
    assert allowed_bytes(tmp_path / "nowhere", tmp_path / "mount") is None
