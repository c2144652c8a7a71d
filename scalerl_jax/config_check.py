"""Whether a config is valid: every leaf against its annotation, and the constraints between fields."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from scalerl_jax.config import Config, EnvironmentConfig

# The two ends of a range, each a separate field.
_RANGES = (
    ("objective.icepop_low", "objective.icepop_high"),
    ("objective.min_ratio", "objective.max_ratio"),
    ("rollout.thinking_budget_min", "rollout.thinking_budget_max"),
)


class ConfigError(ValueError):
    """A user's mistake in a config file or flag; the message is one line that names it."""


def no_field(where: str, name: str, names: Sequence[str]) -> str:
    """The message for a name that is not a field of `where`."""
    return f"{where} has no field {name!r} (it has: {', '.join(names) or 'none'})"


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every value under its dotted name; "mixture.NAME.train" for an environment of a mixture."""
    out = {}
    fields = (
        config if isinstance(config, dict) else {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    )
    for name, value in fields.items():
        if dataclasses.is_dataclass(value) or prefix + name == "mixture":
            out.update(leaves(value, f"{prefix}{name}."))
        else:
            out[prefix + name] = value
    return out


def saved_leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Likewise for the contents of a config.json, which may hold anything."""
    out = {}
    for name, value in values.items():
        full = prefix + name
        if isinstance(value, dict) and as_environment(full) not in annotations():
            out.update(saved_leaves(value, f"{full}."))
        else:
            out[full] = value
    return out


def check(config: Config) -> None:
    """Raises ConfigError if a field does not exist, a value has the wrong type, or values do not fit together."""
    check_types(config, Config(), "config")
    for name in config.mixture:
        if not name.isidentifier():
            raise ConfigError(f"config.mixture: {name!r} is not a name of letters, digits and _")
        if name == "all":
            raise ConfigError("config.mixture: 'all' is what all of its environments together are called: another name")
    given, alone = leaves(config.environment), leaves(EnvironmentConfig())
    if config.mixture and (unread := [name for name in given if given[name] != alone[name]]):
        raise ConfigError(
            f"config.environment.{unread[0]}: is not read beside config.mixture, whose environments have their own: "
            f"config.mixture.{next(iter(config.mixture))}.{unread[0]}"
        )
    values = leaves(config)
    for name, value in values.items():
        _check_leaf(name, value)
    for low, high in _RANGES:
        if values[low] > values[high]:
            raise ConfigError(f"config.{low}={values[low]}: must not be above config.{high}, {values[high]}")
    if config.rollout.max_turns > 1 and config.rollout.length_control == "penalty":
        raise ConfigError(
            "config.rollout.length_control=penalty: is of completions of one turn, and "
            f"config.rollout.max_turns={config.rollout.max_turns}"
        )
    if config.objective.credit == "turn" and config.objective.advantage_normalization == "maxrl":
        raise ConfigError(
            "config.objective.credit=turn: looks at the rewards of turns, and "
            "config.objective.advantage_normalization=maxrl at what is correct, which is of whole episodes"
        )
    if config.objective.loss == "gspo" and config.objective.aggregation != "sample":
        raise ConfigError("config.objective.loss=gspo: requires config.objective.aggregation=sample")
    if config.objective.loss == "dro" and config.objective.tis_cap > 0:
        raise ConfigError("config.objective.tis_cap: config.objective.loss=dro has no ratio to put a cap on")
    if config.objective.loss == "cispo" and config.objective.tis_cap > 0:
        raise ConfigError(
            f"config.objective.tis_cap={config.objective.tis_cap:g}: config.objective.loss=cispo has a "
            f"cap on the ratio already, config.objective.max_ratio={config.objective.max_ratio:g}: lower that"
        )
    last = config.optimizer.warmup_steps + config.optimizer.decay_steps
    if config.optimizer.decay_steps and config.max_steps > last:
        raise ConfigError(
            f"config.max_steps={config.max_steps}: from step {last} on the learning rate is 0, by "
            f"config.optimizer.warmup_steps={config.optimizer.warmup_steps} and "
            f"config.optimizer.decay_steps={config.optimizer.decay_steps}"
        )
    if config.lora.adapter and not config.lora.rank:
        raise ConfigError("config.lora.adapter: requires config.lora.rank, the adapter's")
    if config.objective.reward_weight == 0 and config.objective.distill == "none":
        raise ConfigError(
            "config.objective.reward_weight=0: leaves nothing to learn from: set config.objective.distill"
        )
    _check_teachers(config)
    _check_bitwise(config)
    # The other way round is allowed: the policy is the rounded one, computed in float32.
    if config.model.compute_dtype == "bfloat16" and config.model.sync_dtype == "float32":
        raise ConfigError(
            "config.model.sync_dtype=float32: the trainer computes in bfloat16, so it would train another policy"
        )


def _check_bitwise(config: Config) -> None:
    """Raises ConfigError for a setting that does not support config.numerics=bitwise."""
    if config.numerics != "bitwise":
        return
    order = "sums over devices have another order"
    for name, allowed, why in (
        ("learner.context", (1,), order),
        ("learner.tensor", (1,), order),
        ("learner.expert", (1,), order),
        ("fleet.engine", ("jax",), "its kernels are not the trainer's"),
        ("lora.rank", (0,), "an adapter is merged in two places"),
        ("model.attention", ("auto", "blocks"), "has its own"),
        ("model.head_precision", ("default", "highest"), "is not there"),
    ):
        if (value := leaves(config)[name]) not in allowed:
            raise ConfigError(f"config.{name}={value}: not with config.numerics=bitwise: {why}")
    if config.fleet.compute_dtype not in ("auto", config.model.compute_dtype) and config.model.compute_dtype != "auto":
        raise ConfigError(
            f"config.fleet.compute_dtype={config.fleet.compute_dtype}: config.numerics=bitwise requires that of the "
            f"trainer, {config.model.compute_dtype}"
        )


def _check_teachers(config: Config) -> None:
    teachers, form, column = config.distill.teachers, config.objective.distill, config.distill.column
    for name, where in teachers.items():
        if not name.isidentifier() or not isinstance(where, str) or not where:
            raise ConfigError(
                f"config.distill.teachers: {name!r}: {where!r} is not a name of letters, digits and _ with its servers "
                "or a folder"
            )
    if bool(teachers) != (form != "none"):
        raise ConfigError(
            f"config.objective.distill={form}: "
            + ("makes no use of config.distill.teachers" if teachers else "requires config.distill.teachers")
        )
    if len(teachers) > 1 and not column:
        raise ConfigError("config.distill.column: is empty; with several teachers it names the column that has a row's")


def leaf_fault(name: str, value: Any) -> str:
    """The fault of a leaf ("model.path") as config.json holds it: its type, its choice or its bounds; "" if it has
    none, or there is no such leaf."""
    default = leaves(Config()).get(as_environment(name))
    try:
        if default is not None:
            check_types(value, default, f"config.{name}")
            _check_leaf(name, value)
    except ConfigError as error:
        return str(error)
    return ""


def _check_leaf(name: str, value: Any) -> None:
    """Checks a value against the field's annotation."""
    annotation = annotations()[as_environment(name)]
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    if choices and value not in choices:
        raise ConfigError(f"config.{name}={value!r}: is not one of {', '.join(choices)}")
    for bound in getattr(annotation, "__metadata__", ()):
        if not bound.holds(value):
            raise ConfigError(f"config.{name}={value}: must {bound}")


def as_environment(name: str) -> str:
    """The leaf's name, with a mixture's environment replaced by `environment`: the fields are the same."""
    group, _, rest = name.partition(".")
    return f"environment.{rest.partition('.')[2]}" if group == "mixture" else name


@functools.cache
def annotations() -> dict[str, Any]:
    """The annotation of every leaf under its dotted name."""

    def below(kind: type, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, annotation in get_type_hints(kind, include_extras=True).items():
            if name == "mixture":  # as `environment`, by as_environment
                continue
            if dataclasses.is_dataclass(annotation):
                yield from below(annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
            else:
                yield prefix + name, annotation

    return dict(below(Config, ""))


def check_types(node: Any, default: Any, where: str) -> None:
    """Checks the type of every value of `node` against that of `default`; a config file may set names that are not
    fields."""
    kind = type(default)
    if type(node) is not kind and not (kind is float and type(node) is int):
        raise ConfigError(f"{where}={node!r}: is not of type {kind.__name__}")
    if kind is float and not math.isfinite(node):
        raise ConfigError(f"{where}={node}: is not a finite number")
    if dataclasses.is_dataclass(node):
        names = [field.name for field in dataclasses.fields(kind)]
        for name, value in vars(node).items():
            if name not in names:
                raise ConfigError(no_field(where, name, names))
            check_types(value, getattr(default, name), f"{where}.{name}")
    elif kind is dict and where == "config.mixture":
        for name, environment in node.items():
            check_types(environment, EnvironmentConfig(), f"{where}.{name}")
    elif kind is dict:
        try:
            same = json.loads(json.dumps(node, allow_nan=False)) == node
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ConfigError(f"{where}={node}: is not what JSON can hold")
