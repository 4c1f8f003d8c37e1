"""How ranks are started: by us, by torchrun, or as Slurm or ModelArts say in their variables."""

from __future__ import annotations

from dataclasses import dataclass

from lctrain.config.checks import require


@dataclass(kw_only=True)
class LaunchConfig:
    """How ranks are started: by us on this machine or on `nnodes` of them, or as torchrun or accelerate did.

    default_ranks: what a recipe was written for. nproc_per_node: yours; null takes default_ranks over
    the nodes, 1 for parallel=single, or what torchrun, accelerate, Slurm or ModelArts started.
    nnodes: null is one, or as many as whoever started this process says. rdzv_endpoint: host:port of the first node.
    timeout_s: how long a collective may wait for the others. prepare_timeout_s: how long the other
    ranks wait for the first to tokenise.
    """

    kind: str = "launch"
    default_ranks: int = 1
    nproc_per_node: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    timeout_s: int = 1800
    prepare_timeout_s: int = 86400

    def __post_init__(self) -> None:
        for name in ("default_ranks", "timeout_s", "prepare_timeout_s"):
            value = getattr(self, name)
            require(value >= 1, f"launch.{name}", value, "must be at least 1", "give a whole number")
        for name, otherwise in (("nproc_per_node", "the recipe's"), ("nnodes", "the launcher's, or one")):
            value = getattr(self, name)
            require(
                value is None or value >= 1, f"launch.{name}", value, "must be at least 1", f"or null for {otherwise}"
            )
        require(
            self.rdzv_endpoint is None or _is_endpoint(self.rdzv_endpoint),
            "launch.rdzv_endpoint",
            self.rdzv_endpoint,
            "is not host:port",
            "give the first node's, e.g. node0:29500",
        )
        self._check_nodes()

    @property
    def nodes(self) -> int:
        """Nodes of a job whose ranks are ours to start."""
        return self.nnodes or 1

    def _check_nodes(self) -> None:
        if self.nnodes is None:
            for name in ("node_rank", "rdzv_endpoint"):
                value = getattr(self, name)
                mend = "give launch.nnodes=N on every node, or leave it out"
                require(value is None, f"launch.{name}", value, "has no effect without launch.nnodes", mend)
        if self.nodes == 1:
            return
        require(
            self.rdzv_endpoint is not None,
            "launch.rdzv_endpoint",
            self.rdzv_endpoint,
            f"must be set with launch.nnodes={self.nnodes}",
            "give the first node's host:port on every node",
        )
        require(
            self.node_rank is not None and 0 <= self.node_rank < self.nodes,
            "launch.node_rank",
            self.node_rank,
            f"must be 0 to {self.nodes - 1}",
            "give each node its own number",
        )


@dataclass(kw_only=True)
class TorchrunConfig(LaunchConfig):
    """torchrun started the ranks; nproc_per_node and nnodes, where given, must be what it was given."""

    kind: str = "torchrun"

    def _check_nodes(self) -> None:
        for name in ("node_rank", "rdzv_endpoint"):
            value = getattr(self, name)
            require(value is None, f"launch.{name}", value, "has no effect with launch=torchrun", "give it to torchrun")


@dataclass(kw_only=True)
class PlatformConfig(LaunchConfig):
    """A platform's variables say which nodes there are; nnodes and node_rank, where given, must be theirs."""

    def _check_nodes(self) -> None:
        """Compared with the platform's variables when ranks start (lctrain/launch): they alone know."""


@dataclass(kw_only=True)
class SlurmConfig(PlatformConfig):
    """srun started one task a rank, or one a node that starts nproc_per_node ranks; its variables say which and where.

    rdzv_endpoint: null is the job's first host, at a port that follows from the job's number.
    """

    kind: str = "slurm"


@dataclass(kw_only=True)
class ModelArtsConfig(PlatformConfig):
    """ModelArts started one process a host, or one a card; its variables say which and where.

    nproc_per_node, where given, must be ModelArts'. rdzv_endpoint: null is the job's first host, at port 29500.
    """

    kind: str = "modelarts"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """(host, port) of host:port; an IPv6 host stands in brackets."""
    host, _, port = endpoint.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536
