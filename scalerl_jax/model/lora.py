"""Low-rank adapters (LoRA, arXiv 2106.09685): a frozen policy, and two small matrices for each of some of its weights.

    W_eff = round(W + alpha / rank * B A)      A [rank, in], B [out, rank] trained, float32; W frozen, in the sync dtype

A begins uniform in +-1/sqrt(in) and B at 0, so the first policy is the frozen one. Every use of a weight is of this
merged one, which is also what is sent: a generator receives weights, or their changes, and knows nothing of adapters.

In a parameter tree a weight with an adapter is a `LowRank`, in the layout of its leaf: a matrix of a layer is [in, out]
= a b with a [in, rank] and b [rank, out]; experts and tables are [.., out, in] = b a. The gradient of every weight goes
through the rank: no dW is computed (decoder.project, experts.grouped_product, head._logits).
"""

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from safetensors import SafetensorError, safe_open

from scalerl_jax.model import safetensors_folder
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.families.dense import WeightRow
from scalerl_jax.model.sharding import abstract_weight
from scalerl_jax.model.tensor_layout import layout, rows, sizes
from scalerl_jax.system import files
from scalerl_jax.system.files import read_object

_log = logging.getLogger(__name__)

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

    def factors(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """left and right for products of the backward pass, each multiplied by the scale."""
        return (self.left * self.scale).astype(dtype), (self.right * self.scale).astype(dtype)

    def of_factors(self, left: Any, right: Any) -> "LowRank":
        """Likewise without the base: of other factors, their cotangents or their partitions."""
        return LowRank(None, left, right, self.scale)  # type: ignore[arg-type]

    def _add(self, base: jax.Array, left: jax.Array) -> jax.Array:
        # A single addition, so that no compiler can round it differently elsewhere.
        added = jnp.matmul(left, self.right * self.scale, precision=jax.lax.Precision.HIGHEST)
        return jax.lax.stop_gradient(base).astype(jnp.float32) + added


def merged(weight: Any) -> Any:
    """The merged weight; the weight itself if it has no adapter."""
    return weight.merged() if isinstance(weight, LowRank) else weight


def split(weight: Any) -> tuple[jax.Array, LowRank | None]:
    """The merged weight without a gradient, and a LowRank of the factors alone; (weight, None) without an adapter."""
    if not isinstance(weight, LowRank):
        return weight, None
    return jax.lax.stop_gradient(weight.merged()), weight.of_factors(weight.left, weight.right)


def partition_of_factors(adapter: LowRank | None, whole: PartitionSpec) -> Any:
    """Like `adapter`, the partition of each factor of a weight with the partition `whole`."""
    *before, m, n = whole
    left, right = PartitionSpec(*before, m, None), PartitionSpec(*before, None, n)
    return None if adapter is None else adapter.of_factors(left, right)


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
    def fused(self) -> bool:
        """Whether it adapts experts that published folders hold in one parameter."""
        return any(row.columns for row in self._rows())

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
    "modules_to_save": None,
}  # fmt: skip
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that change the frozen policy


def _views(tree: Tree, lora: Lora, *, experts: bool) -> dict[str, np.ndarray]:
    """The arrays of a tree under their names in the file, in the file's form; views. experts: each expert's too."""
    out = {}
    for name, tensor in layout(lora.decoder).items():
        row = tensor.row
        if row.leaf not in lora.leaves or (row.stored and not experts):
            continue
        own = (tree["layers"] if row.layered else tree)[row.leaf]
        a, b = (own[part] if tensor.layer is None else own[part][tensor.layer] for part in ("a", "b"))
        of = _PREFIX + name.removesuffix(row.name) + module(row)
        if row.leaf == "embed":  # [V, D] = b a there, and (B A)^T in the file
            out |= {f"{of}.lora_embedding_A": b.T, f"{of}.lora_embedding_B": a.T}
        elif row.stored:
            for expert in range(lora.decoder.experts):
                one = of.format(expert)
                out |= {f"{one}.lora_A.weight": a[expert], f"{one}.lora_B.weight": b[expert]}
        else:
            a, b = (a.T, b.T) if row.side == -1 else (a, b)
            out |= {f"{of}.lora_A.weight": a, f"{of}.lora_B.weight": b}
    return out


def _fused_arrays(tree: Tree, lora: Lora) -> tuple[dict[str, np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
    """Experts as transformers 5 holds them, all of a layer in one parameter, gate and up side by side.

    Returns zeros in the file's form, A [E rank, in] and B [out, rank E], and views (of the tree, of its place in them).
    Two weights in a parameter have twice the rank, and each its own block of B.
    """
    out, pairs, size = dict[str, np.ndarray](), [], sizes(lora.decoder)
    own = [row for row in rows(lora.decoder).values() if row.stored]
    for layer, fused in itertools.product(range(lora.decoder.layers), dict.fromkeys(row.fused for row in own)):
        mine = [row for row in own if row.fused == fused]
        experts, m, n = (size[dimension] for dimension in mine[0].dimensions)
        rank, x, y = lora.rank * len(mine), n, m * len(mine)
        x, y = (y, x) if mine[0].columns else (x, y)  # the parameter is transposed
        of = f"{_PREFIX}model.layers.{layer}.{fused.rpartition('.')[0]}" + (".base_layer" if len(mine) > 1 else "")
        a = out[f"{of}.lora_A.weight"] = np.zeros((experts * rank, x), np.float32)
        b = out[f"{of}.lora_B.weight"] = np.zeros((y, rank * experts), np.float32)
        a, b = a.reshape(experts, rank, x), b.reshape(y, rank, experts).transpose(2, 0, 1)
        a, b = (b.swapaxes(1, 2), a.swapaxes(1, 2)) if mine[0].columns else (a, b)
        for i, row in enumerate(mine):
            if row.leaf in lora.leaves:
                leaf, ranks = tree["layers"][row.leaf], slice(i * lora.rank, (i + 1) * lora.rank)
                pairs += [(leaf["a"][layer], a[:, ranks]), (leaf["b"][layer], b[:, i * m : (i + 1) * m, ranks])]
    return out, pairs


def _patterns(lora: Lora, fused: bool) -> dict[str, dict[str, float]]:
    """PEFT's exceptions from `r` and `lora_alpha`: two weights in one parameter have twice of both."""
    twice = {"rank_pattern": 2 * lora.rank, "alpha_pattern": 2 * lora.alpha}
    return {key: {r".*\.gate_up_proj": value} if fused else {} for key, value in twice.items()}


def write_adapter(
    out: str, adapter: Mapping[str, Any], lora: Lora, *, model: str, base: str, replace: bool = False
) -> None:
    """Makes the folder `out`, whole or not at all, which PEFT loads.

    model: the folder of the frozen policy. base: fingerprint of its parameters.
    Raises ValueError if `out` exists (and is not to be replaced).
    """
    if os.path.exists(out) and not replace:
        raise ValueError(f"{out}: exists already")
    tree: Tree = jax.tree.map(np.asarray, dict(adapter))
    tensors, own = _views(tree, lora, experts=not lora.fused), rows(lora.decoder)
    if lora.fused:
        fused, pairs = _fused_arrays(tree, lora)
        for ours, place in pairs:
            place[...] = ours
        tensors |= fused
    modules = {module(own[leaf]) for leaf in lora.leaves if not own[leaf].columns}
    config = {
        **_ONLY, **_patterns(lora, lora.fused), "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha,
        "lora_dropout": 0.0, "base_model_name_or_path": model, "inference_mode": True, "init_lora_weights": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "target_parameters": sorted({module(row) for row in own.values() if row.columns}) if lora.fused else None,
    }  # fmt: skip
    with files.whole_folder(os.path.abspath(out), replace=replace) as folder:
        arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
        safetensors_folder.save(os.path.join(folder, _WEIGHTS), arrays, {BASE: base})
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
            of = (file.metadata() or {}).get(BASE)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"config.lora.adapter={path}: {getattr(error, 'strerror', None) or error}") from error
    if base and of is None:
        named = config.get("base_model_name_or_path")
        _log.warning("config.lora.adapter=%s: does not prove for which policy it was made; it names %s", path, named)
    elif base:
        check_base(f"config.lora.adapter={path}", of, base)
    fused = any(".experts.lora_" in name or ".experts.base_layer." in name for name in tensors)
    own = {**_ONLY, "alora_invocation_tokens": None, "r": lora.rank, "lora_alpha": lora.alpha}
    for key, wanted in {**own, **_patterns(lora, fused)}.items():
        if (found := config.get(key, wanted)) != wanted and (found or wanted):
            asked = {"r": "config.lora.rank", "lora_alpha": "config.lora.alpha"}.get(key)
            raise ValueError(f"{about}: {key} is {found!r}, " + (f"{asked}={wanted:g}" if asked else f"not {wanted!r}"))
    if (began := str(config.get("init_lora_weights")).lower()).startswith(_OTHER_BASE):
        raise ValueError(
            f"{about}: init_lora_weights is {began!r}, so it belongs to a policy that PEFT changed: save_pretrained "
            "with path_initial_model_for_weight_conversion writes one of the policy as it was"
        )

    def take(name: str, like: np.ndarray) -> np.ndarray:
        if name not in tensors:
            raise ValueError(f"config.lora.targets: {weights} has no {name}")
        if (value := tensors.pop(name)).shape != like.shape:
            raise ValueError(f"{weights}: {name} does not fit this model")
        return value

    out = jax.tree.map(lambda struct: np.empty(struct.shape, np.float32), lora.adapter(None))
    joint, pairs = _fused_arrays(out, lora) if fused else ({}, [])
    for name, view in {**_views(out, lora, experts=not fused), **joint}.items():
        view[...] = take(name, view)
        tensors.pop(f"{name.partition('.lora_')[0]}.base_layer.weight", None)  # PEFT's copy of a frozen table
    for ours, place in pairs:
        ours[...], place[...] = place, 0
    for name, rest in joint.items():
        if np.any(rest):
            raise ValueError(f"config.lora.targets: {name} in {weights} adapts more than them, or gate and up together")
    if tensors:
        raise ValueError(f"config.lora.targets: {weights} has {min(tensors)} too")
    if mesh is None:
        return out
    return jax.tree.map(
        lambda struct, value: jax.make_array_from_callback(struct.shape, struct.sharding, value.__getitem__),
        lora.adapter(mesh), out,
    )  # fmt: skip
