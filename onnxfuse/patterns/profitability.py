"""What pays: which nodes are work that a kernel spares, and which intermediates are worth a store."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxfuse.graph.operators import qualified_op
from onnxfuse.patterns.liveness import GrownValue, Liveness
from onnxfuse.patterns.match import Match
from onnxfuse.patterns.pointwise_table import pointwise_row
from onnxfuse.patterns.region import Region
from onnxfuse.patterns.region_growth import COLUMN_OPS
from onnxfuse.patterns.view_ops import VIEWS
from onnxfuse.patterns.views import columns_dim

COPIES = frozenset({"Identity", "Dropout"})
REGROUPING = COPIES | {"Cast"}  # with these alone after it, an intermediate is not worth an output

MOVING = frozenset({"Transpose", "Concat"})  # data, which a kernel stores where they belong
ENDS = frozenset(VIEWS) | MOVING

COMPUTING = frozenset({"com.microsoft::BiasSplitGelu"})  # changes the columns and computes, all in one


def is_arithmetic(node: gs.Node) -> bool:
    """Whether a node by itself would read and write every element, and compute something of it."""
    return pointwise_row(node) is not None and node.op not in REGROUPING


class Profitability:
    """Which nodes of what has grown are worth a kernel."""

    def __init__(self, live: Liveness) -> None:
        self.live = live
        self.grown = live.grown
        self._data = self.grown.those(self._makes_data)
        self._computed = self.grown.those(self._is_computed) & self._data
        self._work = self.grown.those(self._is_work) & self._data
        self._moves = self.grown.those(lambda node: node.op in MOVING)
        self._apart = self.grown.those(lambda node: qualified_op(node) in COLUMN_OPS)

    def may_end(self, position: int, region: Region) -> bool:
        """Whether a node's value lives out of the region, which computes something or spares a move of data."""
        value, is_computed = self.live.values[position][0], position in self._computed
        if value.columns is None or not (is_computed or self._is_end(position, region)):
            return False
        saves = is_computed or bool(region & self._work) or self._takes_apart(position)
        return saves and self.live.is_live_out(value, region)

    def moves_alone(self, region: Region) -> bool:
        """Whether nodes move data, which a kernel may not be able to store so, and compute nothing."""
        return bool(region & self._moves) and not region & self._computed

    def _is_end(self, position: int, region: Region) -> bool:
        """Whether a view ends there, a move of data, or a range of what no kernel stores whole, or need store so.

        An attention, or another product, may have taken all views behind such a range: of q, keys and values that one
        Transpose moves together, that and three copies were left.
        """
        node = self.grown.nodes[position]
        if node.op in ENDS or self._takes_apart(position):
            return True
        whole = self.grown.values.get(node.inputs[0].name) if position in self._apart else None
        return whole is not None and columns_dim(whole.view) is None and bool(region & self._moves)

    def _takes_apart(self, position: int) -> bool:
        """Whether a node makes ranges of what is read as ranges alone."""
        return position in self._apart and self.is_read_as_ranges(self.grown.nodes[position].inputs[0].name)

    def is_read_as_ranges(self, name: str) -> bool:
        """Whether nothing but equal ranges of a value is read, and nothing that has grown computes on these.

        Stored range by range it is as many bytes as it is whole, and the copy of each is saved.
        """
        if self.grown.values.get(name) is None:
            return False
        whole = self.live.value(name)
        readers = whole.readers - self.live.foldable
        if not readers or not readers <= self._apart or self.live.is_live_out(whole, readers):
            return False
        ranges = [value for reader in readers for value in self.live.values[reader]]
        widths = {value.columns and value.columns.length for value in ranges}
        behind = Region.union(value.readers for value in ranges) - self.live.foldable
        return len(widths) == 1 and not any(self.grown.needs[position] & behind for position in self._work)

    def check(self, match: Match, region: Region) -> None:
        """An intermediate becomes an output when work after it is saved.

        A Transpose that is saved pays for a store that somebody needs, not for one whose shape alone is read. A range
        beside others that nothing inside reads is stored instead of the value that it is taken from.

        A value that a reduction reads stays outside: it is the first step of a normalisation, which the runtime
        computes in one kernel if it finds it whole.

        Raises:
            NotFusable: it saves too little.
        """
        leaving = [self.live.value(out.name) for out in match.live_outs[:-1]]
        tensor = self.grown.graph.nodes[match.nodes[-1]].outputs[0]
        if any(reader.op.startswith("Reduce") for reader in tensor.outputs):
            raise self.live.refusal(leaving[0], "and a reduction follows", region)
        intermediates = [value for value in leaving if value.readers & region]
        if intermediates and not self._saves_work(match, region, leaving, intermediates):
            raise self.live.refusal(leaving[0], "and no arithmetic would be saved", region)

    def _saves_work(
        self, match: Match, region: Region, leaving: list[GrownValue], intermediates: list[GrownValue]
    ) -> bool:
        """Whether what follows the intermediates is arithmetic, or a Transpose of what is stored anyway."""
        without = Region.union(self.grown.needs[value.maker] for value in intermediates)
        gained = region - without
        if any(is_arithmetic(self.grown.nodes[position]) for position in gained & self._data):
            return True
        is_stored = any(value.escapes or self._reads_data(value, region) for value in leaving)
        return is_stored and bool(gained & self._work) and all(len(out.refs) == 1 for out in match.live_outs)

    def _reads_data(self, value: GrownValue, region: Region) -> bool:
        """Whether a reader outside of a region asks for more than a value's shape."""
        return any(reader.op != "Shape" for reader in self.live.readers_outside(value, region))

    def _is_quantized(self, node: gs.Node) -> bool:
        """Whether a node is a product that kernels may make faster than the runtime even where nothing follows it."""
        return any(product.node is node and product.quantized is not None for product in self.grown.products)

    def _is_computed_by_product(self, node: gs.Node) -> bool:
        """Whether a product's own node does arithmetic, for which the runtime has another kernel."""
        own = next((product for product in self.grown.products if product.node is node), None)
        if own is None:
            return False
        return own.activation is not None or own.is_biased_gemm or own.is_biased_convolution

    def _makes_data(self, node: gs.Node) -> bool:
        """Whether a node makes values of the epilogue: what computes on their shapes moves and computes no data."""
        return any(columns is not None for columns in self.grown.values_of(node))

    def _is_work(self, node: gs.Node) -> bool:
        """Whether the runtime moves or computes data for a node that a kernel does for nothing."""
        if self._is_quantized(node):
            return True
        return qualified_op(node) in MOVING or (self._is_computed(node) and node.op not in REGROUPING)

    def _is_computed(self, node: gs.Node) -> bool:
        """Whether a node does arithmetic beside a plain product, or is one with a weight of few bits."""
        if self._is_quantized(node):
            return True
        if self._is_computed_by_product(node):
            return True
        return qualified_op(node) in COMPUTING or (pointwise_row(node) is not None and node.op not in COPIES)
