"""What one row of a family's table says of one weight."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class WeightRow:
    """`name` and `fused` are within a layer where `layered`.

    A dimension's name gives its size (tensor_layout.sizes), the mesh axis along which the trainer cuts it
    (sharding.RULES), and whether vLLM's workers cut it (tensor_layout.CUT). Matrices of layers are [out, in] in the
    files, as in `dimensions`, and [in, out] in the trainer's tree; any other tensor is the same in both.
    """

    leaf: str  # of the trainer's parameter tree
    name: str  # Hugging Face's
    dimensions: tuple[str, ...]  # as in the files
    initial: str = "normal"  # normal | residual: smaller, the end of a residual branch | ones
    fused: str = ""  # vLLM's parameter that holds it, and others of that name after it; empty: one of its own
    decays: bool = True  # weight decay
    layered: bool = True

    @property
    def transposed(self) -> bool:
        return self.layered and len(self.dimensions) == 2

    @property
    def tree_dimensions(self) -> tuple[str, ...]:
        """In the trainer's tree, the stack of layers first."""
        own = self.dimensions[::-1] if self.transposed else self.dimensions
        return ("layers", *own) if self.layered else own


def norm(leaf: str, name: str, dimension: str = "scale", *, layered: bool = True) -> WeightRow:
    """The scale of an RMSNorm."""
    return WeightRow(leaf, name, (dimension,), "ones", decays=False, layered=layered)
