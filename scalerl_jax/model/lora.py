"""Low-rank adapters (LoRA, arXiv 2106.09685): a frozen policy, and two small matrices for each of some of its weights.

    W_eff = round(W + alpha / rank * B A)      A [rank, in], B [out, rank] trained, float32; W frozen, in the sync dtype

A begins uniform in +-1/sqrt(in) and B at 0, so the first policy is the frozen one. Every use of a weight is of this
merged one, which is also what is sent: a generator receives weights, or their changes, and knows nothing of adapters.

In a parameter tree a weight with an adapter is a `LowRank`, in the layout of its leaf: a matrix of a layer is [in, out]
= a b with a [in, rank] and b [rank, out]; experts and tables are [.., out, in] = b a. The gradient of a layer's matrix
goes through the rank: no dW is computed (decoder.project). That of experts and of the head is the merged weight's,
projected, one layer at a time.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.families.dense import WeightRow
from scalerl_jax.model.sharding import abstract_weight
from scalerl_jax.model.tensor_layout import layout, rows, sizes
from scalerl_jax.system import files
from scalerl_jax.system.files import read_object

ALL_LINEAR = "all-linear"  # every matrix of the layers except routers
TABLES = ("embed", "head")

BASE = "frozen_parameters"  # the fingerprint of the frozen parameters, in a checkpoint's manifest and an adapter's file

Tree = dict[str, Any]  # like a parameter tree


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "left", "right"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class LowRank:
    """A weight with an adapter: base [.., m, n] in the sync dtype; left [.., m, rank], right [.., rank, n] float32."""

    base: jax.Array
    left: jax.Array
    right: jax.Array
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def __getitem__(self, index: Any) -> "LowRank":
        """One weight of a stack."""
        return jax.tree.map(lambda part: part[index], self)

    def merged(self) -> jax.Array:
        """[.., m, n] float32, not yet rounded. The base has no gradient."""
        return self._add(self.base, self.left)

    def merged_rows(self, index: jax.Array) -> jax.Array:
        """merged()[index] of a table [m, n]."""
        return self._add(self.base[index], self.left[index])

    def astype(self, dtype: Any) -> jax.Array:
        """merged(), rounded to the dtype; a stack of weights is merged one after another."""
        if self.base.ndim == 2:
            return self.merged().astype(dtype)
        return jax.lax.map(lambda one: one.merged().astype(dtype), self)

    def _add(self, base: jax.Array, left: jax.Array) -> jax.Array:
        # A single addition, so that no compiler can round it differently elsewhere.
        added = jnp.matmul(left, self.right * self.scale, precision=jax.lax.Precision.HIGHEST)
        return jax.lax.stop_gradient(base).astype(jnp.float32) + added


def merged(weight: Any) -> Any:
    """The merged weight; the weight itself if it has no adapter."""
    return weight.merged() if isinstance(weight, LowRank) else weight


def in_dtype(policy: Mapping[str, Any], dtype: Any) -> Tree:
    """The policy with every weight merged, rounded to the dtype."""
    return jax.tree.map(
        lambda weight: weight.astype(dtype), dict(policy), is_leaf=lambda node: isinstance(node, LowRank)
    )


def check_base(what: str, found: str | None, base: str) -> None:
    """Raises ValueError if an adapter does not belong to the frozen parameters with the fingerprint `base`."""
    if found != base:
        raise ValueError(f"{what} is of another policy than config.model.path")


def starts_frozen(lora: "Lora | None") -> bool:
    """Whether the initial policy of a run is the frozen one, so that it need not be kept a second time."""
    return lora is not None and not lora.folder


@dataclasses.dataclass(frozen=True)
class Lora:
    """The weights of a model that have an adapter. `leaves` in the order of the family's rows."""

    decoder: DecoderConfig
    rank: int
    alpha: float
    leaves: tuple[str, ...]
    folder: str = ""  # of the adapter to start from; empty: a new one
    seed: int = 0

    @classmethod
    def of(cls, decoder: DecoderConfig, *, rank: int, alpha: float, targets: str, folder: str, seed: int) -> "Lora":
        """targets: as config.lora has them. Raises ValueError, one line, if a target does not exist or the rank is too
        high."""
        leaves, size, own = _targets(targets, decoder), sizes(decoder), rows(decoder)
        for leaf in leaves:
            least = min(size[dimension] for dimension in own[leaf].dimensions[-2:])
            if rank > least:
                raise ValueError(f"config.lora.rank={rank}: {module(own[leaf])} has a dimension of {least}")
        return cls(decoder, rank, alpha, leaves, folder, seed)

    @property
    def has_files(self) -> bool:
        """Whether PEFT's files can hold it: they have no form for experts stored in one tensor with others."""
        return not any(row.columns for row in self._rows())

    def adapter(self, mesh: Mesh | None) -> Tree:
        """The trained tree, as ShapeDtypeStructs with shardings: {"layers": {leaf: {"a", "b"}}, "head": ...}."""
        size, tree = sizes(self.decoder) | {"rank": self.rank}, {"layers": {}}
        for row in self._rows():
            *before, m, n = row.tree_dimensions
            left, right = (*before, m, "rank"), (*before, "rank", n)
            a, b = (left, right) if row.side == -1 else (right, left)
            place = tree["layers"] if row.layered else tree
            place[row.leaf] = {
                name: abstract_weight([size[dimension] for dimension in dimensions], dimensions, mesh, jnp.float32)
                for name, dimensions in (("a", a), ("b", b))
            }
        return tree

    def start(self, mesh: Mesh | None = None, *, base: str = "") -> Tree:
        """The adapter to start from. base: fingerprint of the frozen parameters. Raises ValueError as read_adapter."""
        return self.new(mesh) if not self.folder else read_adapter(self.folder, self, mesh, base=base)

    def new(self, mesh: Mesh | None = None) -> Tree:
        """A new adapter."""
        like = self.adapter(mesh)
        inputs = {row.leaf: -2 if row.side == -1 else -1 for row in self._rows()}

        def make(key: jax.Array) -> Tree:
            def one(path: Any, struct: jax.ShapeDtypeStruct) -> jax.Array:
                leaf, name = path[-2].key, path[-1].key
                if name == "b":
                    return jnp.zeros(struct.shape, jnp.float32)
                bound = 1 / math.sqrt(struct.shape[inputs[leaf]])
                own = jax.random.fold_in(key, self.leaves.index(leaf))
                return jax.random.uniform(own, struct.shape, jnp.float32, -bound, bound)

            return jax.tree_util.tree_map_with_path(one, like)

        shardings = None if mesh is None else jax.tree.map(lambda struct: struct.sharding, like)
        return jax.jit(make, out_shardings=shardings)(jax.random.key(self.seed))

    def join(self, adapter: Mapping[str, Any], frozen: Mapping[str, Any]) -> Tree:
        """The policy: the frozen parameters, with a LowRank for each adapter."""
        tree: Tree = {**frozen, "layers": dict(frozen["layers"])}
        for row in self._rows():
            place, own = (tree["layers"], adapter["layers"]) if row.layered else (tree, adapter)
            a, b = own[row.leaf]["a"], own[row.leaf]["b"]
            left, right = (a, b) if row.side == -1 else (b, a)
            place[row.leaf] = LowRank(place[row.leaf], left, right, self.alpha / self.rank)
        return tree

    def _rows(self) -> Iterator[WeightRow]:
        own = rows(self.decoder)
        return (own[leaf] for leaf in self.leaves)


def module(row: WeightRow) -> str:
    """Hugging Face's name of a weight's module, within its layer if it is in one; {}: an expert's number."""
    return (row.stored or row.name).removesuffix(".weight")


def _targets(text: str, decoder: DecoderConfig) -> tuple[str, ...]:
    """The leaves that these names mean, as in PEFT: a module's name, or the end of it."""
    own = {leaf: row for leaf, row in rows(decoder).items() if len(row.dimensions) > 1}
    linear = [leaf for leaf, row in own.items() if row.layered and "router" not in row.dimensions]
    found: set[str] = set()
    for name in map(str.strip, text.split(",")):
        leaves = [leaf for leaf, row in own.items() if f".{module(row)}".endswith(f".{name}") and name]
        leaves = linear if name == ALL_LINEAR else leaves
        if not leaves:
            names = sorted({module(row).rpartition(".")[2] for row in own.values()})
            raise ValueError(
                f"config.lora.targets: {name!r} is no matrix of this model; choose from {[ALL_LINEAR, *names]}"
            )
        found.update(leaves)
    if decoder.tied_embeddings and "embed" in found:
        raise ValueError("config.lora.targets: the model's head is its embedding, which has no adapter of its own")
    return tuple(leaf for leaf in own if leaf in found)


# ---- Folders as PEFT writes and reads them ---------------------------------------------------------------------------

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Options that would make another function of the same matrices.
_ONLY = {
    "peft_type": "LORA", "bias": "none", "fan_in_fan_out": False, "use_rslora": False, "use_dora": False,
    "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
}  # fmt: skip


def _places(lora: Lora) -> Iterator[tuple[str, WeightRow, str, tuple[int, ...], bool]]:
    """For each array in the file: (its name, row, "a" | "b", its place in the leaf, whether it is transposed there)."""
    for name, tensor in layout(lora.decoder).items():
        row = tensor.row
        if row.leaf not in lora.leaves:
            continue
        if row.columns:
            raise ValueError(f"an adapter of {module(row)} has no form in PEFT's files; export it merged")
        prefix = _PREFIX + name.removesuffix(row.name) + module(row)
        layer = () if tensor.layer is None else (tensor.layer,)
        for expert in range(lora.decoder.experts) if row.stored else [None]:
            of = prefix if expert is None else prefix.format(expert)
            place = layer if expert is None else (*layer, expert)
            if row.leaf == "embed":  # [V, D] = b a there, and (B A)^T in the file
                yield f"{of}.lora_embedding_A", row, "b", place, True
                yield f"{of}.lora_embedding_B", row, "a", place, True
            else:
                yield f"{of}.lora_A.weight", row, "a", place, row.side == -1
                yield f"{of}.lora_B.weight", row, "b", place, row.side == -1


def write_adapter(
    out: str, adapter: Mapping[str, Any], lora: Lora, *, model: str, base: str, replace: bool = False
) -> None:
    """Makes the folder `out`, whole or not at all, which PEFT loads.

    model: the folder of the frozen policy. base: fingerprint of its parameters.
    Raises ValueError if `out` exists (and is not to be replaced), and for experts stored in one tensor with others.
    """
    if os.path.exists(out) and not replace:
        raise ValueError(f"{out}: exists already")
    tensors = {}
    for name, row, part, place, turned in _places(lora):
        leaf = np.asarray((adapter["layers"] if row.layered else adapter)[row.leaf][part])[place]
        tensors[name] = np.ascontiguousarray(leaf.T if turned else leaf)
    own = rows(lora.decoder)
    config = {
        **_ONLY, "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0,
        "base_model_name_or_path": model, "inference_mode": True, "init_lora_weights": True,
        "target_modules": sorted({module(own[leaf]).rpartition(".")[2] for leaf in lora.leaves}),
    }  # fmt: skip
    with files.whole_folder(os.path.abspath(out), replace=replace) as folder:
        save_file(tensors, os.path.join(folder, _WEIGHTS), metadata={"format": "pt", BASE: base})
        with open(os.path.join(folder, _CONFIG), "w") as file:
            file.write(json.dumps(config, indent=2) + "\n")


def read_adapter(path: str, lora: Lora, mesh: Mesh | None = None, *, base: str = "") -> Tree:
    """The adapter in a folder, float32, laid out as Lora.adapter; without a mesh on the host.

    base: fingerprint of the frozen parameters, compared if the file has one. Raises ValueError, one line, if the
    adapter is missing or broken, has another form than config.lora, or belongs to another policy.
    """
    about, weights = (os.path.join(path, name) for name in (_CONFIG, _WEIGHTS))
    try:
        config = read_object(about)
        with safe_open(weights, "np") as file:
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
            of = (file.metadata() or {}).get(BASE, base)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"config.lora.adapter={path}: {getattr(error, 'strerror', None) or error}") from error
    if base:
        check_base(f"config.lora.adapter={path}", of, base)
    for key, wanted in {**_ONLY, "r": lora.rank, "lora_alpha": lora.alpha}.items():
        if (found := config.get(key, wanted)) != wanted and (found or wanted):
            asked = {"r": "config.lora.rank", "lora_alpha": "config.lora.alpha"}.get(key)
            raise ValueError(f"{about}: {key} is {found!r}, " + (f"{asked}={wanted:g}" if asked else f"not {wanted!r}"))
    like = lora.adapter(mesh)
    out = jax.tree.map(lambda struct: np.empty(struct.shape, np.float32), like)
    for name, row, part, place, turned in _places(lora):
        if name not in tensors:
            raise ValueError(f"config.lora.targets: {weights} has no {name}")
        leaf = (out["layers"] if row.layered else out)[row.leaf][part]
        value = tensors.pop(name)
        value = value.T if turned else value
        if value.shape != leaf[place].shape:
            raise ValueError(f"{weights}: {name} does not fit this model")
        leaf[place] = value
    if tensors:
        raise ValueError(f"config.lora.targets: {weights} has {min(tensors)} too")
    if mesh is None:
        return out
    return jax.tree.map(
        lambda struct, value: jax.make_array_from_callback(struct.shape, struct.sharding, value.__getitem__), like, out
    )
