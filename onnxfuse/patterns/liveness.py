"""Which values of what has grown are needed outside of a region, and which nodes nothing needs any more.

A value that is read outside of a region, or is an output of the graph, lives out of it: the one rule for intermediates.
Shape arithmetic is no reader, where it is a constant or dies with the region; nor is a Shape of scores, which what
their product multiplies tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxfuse.errors import NotFusable
from onnxfuse.graph.constant_propagation import is_complete
from onnxfuse.graph.graph import node_label
from onnxfuse.graph.told_shape import ToldShape
from onnxfuse.patterns.fallback_shape import only_feeding
from onnxfuse.patterns.match import Columns
from onnxfuse.patterns.region import Region
from onnxfuse.patterns.region_growth import GrownRegion
from onnxfuse.patterns.told_shapes import told_shape
from onnxfuse.patterns.views import extent


@dataclass(frozen=True)
class GrownValue:
    """One value of what has grown: who makes it, and who reads it.

    Attributes:
        name: the value's name.
        columns: None for what is no epilogue value.
        maker: position of the node that makes it.
        readers: those that have grown.
        outside: the other ones.
        escapes: whether it is an output of the graph, or a subgraph reads it.
    """

    name: str
    columns: Columns | None
    maker: int
    readers: Region
    outside: tuple[gs.Node, ...]
    escapes: bool


class Liveness:
    """Makers and readers of all that has grown.

    Attributes:
        grown: what has.
        values: what each node makes, by position.
        foldable: shape arithmetic that is a constant, and nodes that nothing needs: no readers of the product.
    """

    def __init__(self, grown: GrownRegion) -> None:
        self.grown = grown
        self._positions = {id(node): position for position, node in enumerate(grown.nodes)}
        self.values = [
            [self._value(position, tensor) for tensor in grown.made_by(node)]
            for position, node in enumerate(grown.nodes)
        ]
        self._by_name = {value.name: value for values in self.values for value in values}
        self.foldable = self._find_foldable()
        self._reshaped = grown.those(lambda node: grown.graph.index(node) in grown.shapes)
        self._spared_by: dict[Region, frozenset[int]] = {}
        self._told = dict(self._find_told()) if grown.of_scores else {}

    def position(self, node: gs.Node) -> int:
        """Where a node stands in what has grown."""
        return self._positions[id(node)]

    def region(self, indices: Iterable[int]) -> Region:
        """The region of some nodes of the graph."""
        return Region.of(self.position(self.grown.graph.nodes[index]) for index in indices)

    def value(self, name: str) -> GrownValue:
        """A value by its name."""
        return self._by_name[name]

    def live_out(self, region: Region) -> Iterator[GrownValue]:
        """The values of a region that are needed outside of it."""
        for position in region - self.foldable:
            yield from (value for value in self.values[position] if self.is_live_out(value, region))

    def is_live_out(self, value: GrownValue, region: Region) -> bool:
        """Whether somebody needs a value of a region whom its fusion leaves in the model."""
        if value.escapes:
            return True
        if not self.spared(region) and not self._told:
            return bool(value.outside or value.readers - region - self.foldable)
        return bool(self.readers_outside(value, region))

    def readers_outside(self, value: GrownValue, region: Region) -> list[gs.Node]:
        """The readers of a value that a fusion of the region leaves in the model."""
        others = (self.grown.nodes[position] for position in value.readers - region - self.foldable)
        spared, index = self.spared(region), self.grown.graph.index
        return [
            reader
            for reader in (*value.outside, *others)
            if index(reader) not in spared and index(reader) not in self._told
        ]

    def told(self, region: Region) -> dict[int, ToldShape]:
        """By node of the graph, the shapes of values of a region that others read."""
        values = (value for position in region for value in self.values[position])
        readers = (reader for value in values for reader in self.grown.graph.readers(value.name))
        inside = {*self.folded(region), *self.grown.indices(region)}
        found = dict.fromkeys(map(self.grown.graph.index, readers))
        return {index: self._told[index] for index in found if index in self._told and index not in inside}

    def spared(self, region: Region) -> frozenset[int]:
        """The nodes of the graph that only make shapes which views of the region take from elsewhere."""
        views = region & self._reshaped
        if views not in self._spared_by:
            self._spared_by[views] = only_feeding(self.grown.graph, list(self.grown.indices(views)))
        return self._spared_by[views]

    def folded(self, region: Region) -> tuple[int, ...]:
        """The nodes of the graph that a fusion of the region makes needless."""
        return tuple(sorted({*self.spared(region), *self.grown.indices(self._folded(region))}))

    def constants(self, region: Region) -> tuple[str, ...]:
        """What others read of the folded nodes."""
        values = (value for position in self._folded(region) for value in self.values[position])
        return tuple(value.name for value in values if self.readers_outside(value, region))

    def refusal(self, value: GrownValue, why: str, region: Region) -> NotFusable:
        """Why a region is no match: a value lives out of it."""
        readers, label = self.readers_outside(value, region), node_label(self.grown.nodes[value.maker])
        if not readers:
            return NotFusable("graph_output", label, f"{value.name!r} is a graph output, {why}")
        reader = min(readers, key=lambda node: node.op == "Shape")  # who needs the data says more
        detail = f"{value.name!r} is also read by {node_label(reader)!r} ({reader.op}) outside the fusion, {why}"
        return NotFusable("several_readers", label, detail)

    def _value(self, maker: int, tensor: gs.Tensor) -> GrownValue:
        readers = Region.of(self._positions[id(node)] for node in tensor.outputs if id(node) in self._positions)
        outside = tuple(node for node in tensor.outputs if id(node) not in self._positions)
        escapes = self.grown.graph.is_escaping(tensor.name)
        return GrownValue(tensor.name, self.grown.values[tensor.name], maker, readers, outside, escapes)

    def _find_told(self) -> Iterator[tuple[int, ToldShape]]:
        (product,), graph = self.grown.products, self.grown.graph
        for name, columns in self.grown.values.items():
            if columns is not None:
                sizes = [extent(dim) for dim in columns.view]
                found = ((each, told_shape(graph, product, each, sizes)) for each in graph.readers(name))
                yield from ((graph.index(reader), shape) for reader, shape in found if shape is not None)

    def _find_foldable(self) -> Region:
        foldable = Region()
        for position in reversed(range(len(self.values))):
            if all(self._is_foldable(value, foldable) for value in self.values[position]):
                foldable |= Region.of((position,))
        return foldable

    def _is_foldable(self, value: GrownValue, foldable: Region) -> bool:
        if value.escapes:
            return False
        if not value.outside and value.readers <= foldable:
            return True
        graph = self.grown.graph
        return value.columns is None and is_complete(graph.known_value(graph.tensor(value.name)))

    def _folded(self, region: Region) -> Iterator[int]:
        return (position for position in self.foldable if self.grown.needs[position] & region)
