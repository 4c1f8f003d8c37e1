"""The rank table of an Ascend job (RANK_TABLE_FILE): which device of which host is which rank.

Two schemas are in use: `server_list` with `device` lists that number the ranks, and the older `group_list` with
`instance_list` and `devices`, whose order numbers them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lctrain.errors import ConfigError


@dataclass(frozen=True)
class Server:
    """A host of the job. host: its address; devices: its devices' numbers in the order of their ranks."""

    host: str
    devices: tuple[int, ...]


@dataclass(frozen=True)
class RankTable:
    """Servers in the order of their ranks, all with the same number of devices."""

    servers: tuple[Server, ...]

    @property
    def size(self) -> int:
        """All ranks."""
        return sum(len(server.devices) for server in self.servers)


def read_table(path: Path) -> RankTable:
    """Read RANK_TABLE_FILE. Raises ConfigError for one that cannot be read, is unfinished or of another schema."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot be read ({error})", "give the JSON file the platform wrote") from error
    if isinstance(raw, dict) and raw.get("status", "completed") != "completed":
        raise _refused(path, f"has status {raw['status']}", "start once the platform has completed it")
    if not isinstance(raw, dict) or not ({"server_list", "group_list"} & set(raw)):
        keys = ", ".join(map(str, raw)) if isinstance(raw, dict) else type(raw).__name__
        raise _refused(
            path,
            f"has neither server_list nor group_list but {keys or 'nothing'}",
            "this schema is not known; start one process a host instead, without RANK_ID and RANK_SIZE",
        )
    try:
        servers = _servers(raw["server_list"]) if "server_list" in raw else _instances(raw["group_list"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refused(
            path, f"lacks or misspells a field ({type(error).__name__}: {error})", "give the file the platform wrote"
        ) from error
    return _in_order(path, servers)


# A host, and its devices' numbers by rank.
_Found = tuple[str, dict[int, int]]


def _servers(servers: list[dict[str, Any]]) -> list[_Found]:
    return [
        (_host(server), {int(device["rank_id"]): int(device["device_id"]) for device in server["device"]})
        for server in servers
    ]


def _instances(groups: list[dict[str, Any]]) -> list[_Found]:
    found: list[_Found] = []
    rank = 0
    for instance in (instance for group in groups for instance in group["instance_list"]):
        devices = [int(device["device_id"]) for device in instance["devices"]]
        found.append((_host(instance), dict(enumerate(devices, rank))))
        rank += len(devices)
    return found


def _host(server: dict[str, Any]) -> str:
    """The address other hosts reach it at: server_id, unless the table has the container's or the host's as well."""
    said = [server[key] for key in ("container_ip", "host_ip", "server_ip") if server.get(key)]
    return str(said[0] if said else server["server_id"])


def _in_order(path: Path, found: list[_Found]) -> RankTable:
    found = sorted((f for f in found if f[1]), key=lambda f: min(f[1]))
    ranks = [rank for _, devices in found for rank in sorted(devices)]
    if not ranks or ranks != list(range(len(ranks))):
        raise _refused(
            path,
            f"gives its hosts the ranks {[sorted(devices) for _, devices in found]}",
            "ranks of a host must follow each other, from 0 on the first host",
        )
    if len({len(devices) for _, devices in found}) > 1:
        numbers = ", ".join(str(len(devices)) for _, devices in found)
        raise _refused(path, f"gives its hosts {numbers} devices", "take as many of every host")
    return RankTable(tuple(Server(host, tuple(devices[r] for r in sorted(devices))) for host, devices in found))


def _refused(path: Path, what: str, mend: str) -> ConfigError:
    return ConfigError(f"RANK_TABLE_FILE={path} {what}; {mend}")
