"""How much memory the control groups of this process still allow: a container's limit is not the host's.

The interfaces are those of Linux: `memory.max` of cgroup v2 and `memory.limit_in_bytes` of v1, see `cgroups(7)`.
"""

from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def allowed_bytes(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> int | None:
    """Gives the bytes that the tightest group leaves, or None where no group has a limit.

    Pages of files that were not used lately count as free: they are given back when memory runs short.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    left = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, names = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A limit above holds below as well. In a container the path may be the host's: then the mount is the group.
        path = Path(group.lstrip("/"))
        left += [_left(root / place, *names) for place in (path, *path.parents)]
    return min((found for found in left if found is not None), default=None)


def _left(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        most = (group / limit).read_text(encoding="utf-8").strip()
        used = int((group / usage).read_text(encoding="utf-8"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    except OSError:
        return None
    return None if most == "max" else max(0, int(most) - used + int(counts.get(reclaimable, 0)))
