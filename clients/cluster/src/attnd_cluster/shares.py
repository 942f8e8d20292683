"""A daemon's part of quotas over the whole cluster, in its file of tenants (listen.tenants)."""

from __future__ import annotations

import os
import pathlib
import re


def apply(path: str, shares: dict[str, dict[str, int]]) -> bool:
    """Writes quotas into the sections of their tenants, leaving all other lines; whether anything
    changed. The file is replaced as a whole, with its mode. A tenant without a section is left out.
    Raises OSError."""
    file = pathlib.Path(path)
    old = file.read_text()
    lines: list[str] = []
    left: dict[str, int] = {}

    def end_section() -> None:
        at = len(lines)
        while at > 0 and not lines[at - 1].strip():
            at -= 1
        lines[at:at] = [f"{quota} = {n}" for quota, n in left.items()]
        left.clear()

    for line in old.split("\n"):
        section = re.match(r"\s*\[(.*)\]\s*$", line)
        if section:
            end_section()
            left.update(shares.get(section[1], {}))
        quota = line.partition("=")[0].strip()
        if quota in left and "=" in line:
            line = f"{quota} = {left.pop(quota)}"
        lines.append(line)
    end_section()
    new = "\n".join(lines)
    if new == old:
        return False
    beside = file.with_name(file.name + ".new")
    stat = file.stat()
    with open(
        os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, stat.st_mode & 0o777), "w"
    ) as f:
        f.write(new)
        f.flush()
        os.fsync(f.fileno())
    if os.geteuid() == 0:
        os.chown(beside, stat.st_uid, stat.st_gid)
    os.replace(beside, file)
    return True
