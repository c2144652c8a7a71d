"""One row of a family's table: the properties of one weight."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class WeightRow:
    """`name` and `fused` are names within a layer if `layered`.

    A dimension's name gives its size (tensor_layout.sizes), the mesh axes that shard it in the trainer
    (sharding.RULES), and whether vLLM's workers split it (tensor_layout.CUT). Matrices of layers are [out, in] in the
    contract, as in `dimensions`, and [in, out] in the trainer's tree; any other tensor is the same in both, so experts
    are [experts, out, in] everywhere. Files may hold each expert separately: then `stored` is its name, with {} for the
    expert's number; or all of them transposed, with several weights side by side: then there are `columns`.
    """

    leaf: str  # of the trainer's parameter tree
    name: str  # Hugging Face's
    dimensions: tuple[str, ...]  # as in the files
    initial: str = "normal"  # normal | residual: smaller, the end of a residual branch | ones | zeros
    fused: str = ""  # vLLM's parameter that holds it and the next weights with this name; empty: a separate one
    decays: bool = True  # weight decay
    layered: bool = True
    stored: str = ""  # name in the files, if those hold it in another form; empty: as `name`
    # (n, of): the n-th of so many parts of `stored`'s last dimension, [experts, in, of * out]
    columns: tuple[int, int] | None = None

    @property
    def transposed(self) -> bool:
        return self.layered and len(self.dimensions) == 2

    @property
    def tree_dimensions(self) -> tuple[str, ...]:
        """The dimensions in the trainer's tree, the stack of layers first."""
        own = self.dimensions[::-1] if self.transposed else self.dimensions
        return ("layers", *own) if self.layered else own

    @property
    def side(self) -> int:
        """The axis of the outputs in the trainer's tree, along which weights that share a product are concatenated."""
        return -1 if self.transposed or len(self.dimensions) < 2 else -2


def norm(leaf: str, name: str, dimension: str = "scale", *, layered: bool = True) -> WeightRow:
    """The scale of an RMSNorm."""
    return WeightRow(leaf, name, (dimension,), "ones", decays=False, layered=layered)


def bias(leaf: str, name: str, dimension: str, *, fused: str) -> WeightRow:
    """The bias of the outputs of a product."""
    return WeightRow(leaf, name, (dimension,), "zeros", fused=fused, decays=False)
