# SPDX-License-Identifier: Apache-2.0
"""Several nodes made of one machine: hosts with names of their own, between which MPI shares no memory.

PBLASMP_RANKS_PER_NODE also makes nodes, but inside the library, and of neighboring ranks only. Here the ranks of a
node may be far apart, as ``srun --distribution=cyclic`` places them.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest

from pblasmp.launch import Launcher, find_launcher

_ON_HOST = 'hostname "$1" && shift && exec "$@"'
_AT_RANK = """\
nodes=$1 together=$2; shift 2
least=$((PMI_SIZE / nodes)) larger=$((PMI_SIZE % nodes))
if [ -z "$together" ]; then node=$((PMI_RANK % nodes))
elif [ $PMI_RANK -lt $((larger * (least + 1))) ]; then node=$((PMI_RANK / (least + 1)))
else node=$(((PMI_RANK - larger) / least)); fi
exec unshare --uts sh -c "$0" sh "node$node" "$@"
"""


@dataclass(frozen=True)
class Nodes(Launcher):
    """MPICH's launcher, whose ranks it puts on simulated nodes.

    Attributes:
        nodes: how many.
        together: whether a node has neighboring ranks ("blocks"), or each rank is on another node than the one before
            it ("interleaved").
    """

    nodes: int = 2
    together: bool = True

    @classmethod
    @functools.cache
    def of(cls, form: str) -> Nodes:
        """Return those of "blocks:2" or "interleaved:2", say; skip the test where there can be none. Local.

        In continuous integration, which is root, no test is skipped because of host names.
        """
        kind, _, number = form.partition(":")
        if kind not in ("blocks", "interleaved") or not number.isdecimal():
            raise ValueError(f'nodes: expected "blocks:2" or "interleaved:2", say, got {form!r}')
        found = find_launcher()
        if found.kind != "mpich":
            pytest.skip(f"nodes are made of ranks of MPICH, not of {found.kind}")
        if (why_not := _without_host_names()) and not os.environ.get("CI"):
            pytest.skip(f"ranks cannot have host names of their own: {why_not}")
        return cls(found.path, found.kind, found.version, int(number), kind == "blocks")

    def command(self, nranks: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on ``nranks`` ranks. Local."""
        together = "1" if self.together else ""
        return super().command(nranks, ["sh", "-c", _AT_RANK, _ON_HOST, str(self.nodes), together, *argv])

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return ``environ`` with what has MPICH see these nodes. Local."""
        cliques = {"MPIR_CVAR_NUM_CLIQUES": str(self.nodes)}
        if self.together:
            cliques["MPIR_CVAR_CLIQUES_BY_BLOCK"] = "1"
        return {**super().environment(environ), **cliques}


def ranks_of_nodes(form: str, nranks: int) -> list[list[int]]:
    """Return the ranks that these nodes have, by node. Local."""
    made = Nodes.of(form)
    if not made.together:
        return [list(range(node, nranks, made.nodes)) for node in range(made.nodes)]
    least, larger = divmod(nranks, made.nodes)  # the first ones have one rank more, as MPICH has it
    starts = [node * least + min(node, larger) for node in range(made.nodes + 1)]
    return [list(range(start, stop)) for start, stop in pairwise(starts)]


def _without_host_names() -> str:
    """Return why this user cannot give processes host names, "" if they can."""
    tried = subprocess.run(["unshare", "--uts", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else ""
