# SPDX-License-Identifier: Apache-2.0
"""Models: the layers of transformers in descriptors/models, as the products of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError, LayoutError
from ..layout.schemes import Form
from .files import find, load_table

__all__ = ["Layer", "load_model"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer that is split over ranks.

    Attributes:
        name: its name in the model.
        product: the tensor-parallel product that it is, by its name in ``FORMS``.
        outputs, inputs: sizes of the whole layer.
    """

    name: str
    product: Form
    outputs: int
    inputs: int

    def shape(self, tokens: int, ranks: int) -> tuple[int, int, int]:
        """Return tokens, outputs (per rank if these are split) and inputs. Local.

        Raises:
            LayoutError: outputs or inputs cannot be split evenly over the ranks.
        """
        splits = self.product in ("allgather_matmul", "matmul_allgather")
        extent = self.outputs if splits else self.inputs
        if extent % ranks:
            what = "outputs" if splits else "inputs"
            raise LayoutError(f"{self.name}: {extent} {what} cannot be split evenly over {ranks} ranks")
        return tokens, self.outputs // ranks if splits else self.outputs, self.inputs


def load_model(name: str) -> list[Layer]:
    """Return the layers of a model that comes with pblasmp. Local.

    Raises:
        ArgumentError: there is no such model.
    """
    files = {path.stem: path for path in find("models")}
    if name not in files:
        raise ArgumentError(f"model: expected one of {', '.join(files)}, got {name!r}")
    return [Layer(**layer) for layer in load_table(files[name])["layers"]]
