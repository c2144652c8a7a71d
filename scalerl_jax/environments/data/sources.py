"""Sources of rows: [LAYOUT:]WHERE[*WEIGHT], separated by commas.

    data/train.jsonl                  a file, a folder of files or a pattern (row_files.py)
    gsm8k:data/train.jsonl            a file in the layout of a known data set (layouts.py)
    ORG/NAME[@CONFIG][#SPLIT]         a data set of the hub (hub.py); the default split is train, or for validation
                                      test or else validation
    gsm8k[@CONFIG][#SPLIT]            the hub's data set of that layout; CONFIG of livecodebench: release_v2
    gsm8k*3,math/*.parquet*1          sampled three to one

Sources without weights are pooled: every row has the same weight. If one has a weight, those without have 1. A pattern
that ends like a weight is written with brackets: data/*[2] for data/*2. A name with a comma is written as a pattern:
data/a?b.jsonl for data/a,b.jsonl.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterator

from scalerl_jax.environments.data import hub, row_files
from scalerl_jax.environments.data.columns import MalformedRows
from scalerl_jax.environments.data.hub import HubName
from scalerl_jax.environments.data.layouts import LAYOUTS, DatasetLayout
from scalerl_jax.environments.data.row_files import NamedColumns

_WEIGHT = re.compile(r"(.+)\*([0-9]+\.?[0-9]*|\.[0-9]+)")
_LAYOUT = re.compile(r"(\w+):(.+)")
_PART = re.compile(r"(\w+)(?:@([\w.-]+))?(?:#([\w.-]+))?")
_HELD_OUT_SPLITS = ("test", "validation")  # for a data set of the hub without a known layout


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of rows that a config names."""

    text: str  # as written in the config, without its weight
    field: str  # the config field, for messages
    layout: str = ""  # one of LAYOUTS; "": the config's columns
    where: str = ""  # a file, a folder or a pattern; "": a data set of the hub
    hub: HubName | None = None
    weight: float | None = None

    @property
    def given(self) -> str:
        return f"{self.field}={self.text}"

    @property
    def place(self) -> str:
        """A canonical location, equal for sources that are only written differently."""
        return str(self.hub) if self.hub is not None else os.path.realpath(self.where)

    def read(self, *, held_out: bool, malformed: MalformedRows) -> Iterator[NamedColumns]:
        """("FILE row N", columns) of every row; columns are JSON values.

        Raises ValueError naming the config's field, or the file and row, at fault.
        """
        if not self.hub:
            for path in row_files.files_of(self.where, self.field):
                yield from row_files.read_file(path, malformed)
            return
        splits = _HELD_OUT_SPLITS if held_out else ("train",)
        names, patterns = [self.hub], list[str]()
        if self.layout:
            layout = LAYOUTS[self.layout]
            splits = (layout.held_out if held_out else layout.train,)
            if self.hub.repository == layout.hub and layout.files is not None:
                patterns += layout.files(self.hub.config)
            elif self.hub.repository == layout.hub and not self.hub.config:
                configs = layout.configs
                if layout.held_out_configs and (self.hub.split or splits[0]) == layout.held_out:
                    configs = layout.held_out_configs
                names = [dataclasses.replace(self.hub, config=config) for config in configs]
        for name in names:
            yield from hub.read_rows(name, splits, given=self.given, files=patterns, malformed=malformed)


def parse(text: str, field: str) -> list[Source]:
    """The sources in a config field; none if it is empty. Raises ValueError naming the field."""
    found: list[Source] = []
    if not text.strip():
        return found
    if "," in text and os.path.exists(text):
        raise ValueError(
            f"{field}={text}: commas stand between sources, and a name with one is written as a pattern: "
            f"{text.replace(',', '?')}"
        )
    for part in text.split(","):
        given = part.strip()
        if not given:
            raise ValueError(f"{field}={text}: there is nothing between two of its commas")
        weighted = _WEIGHT.fullmatch(given)
        weight = None
        if weighted is not None and not os.path.exists(given):
            given, weight = weighted[1].strip(), float(weighted[2])
            if not 0 < weight < math.inf:
                raise ValueError(f"{field}={text}: the weight of {given} is {weighted[2]}, and must be above 0")
        source = dataclasses.replace(_source(given, field), weight=weight)
        if source.place in [other.place for other in found]:
            raise ValueError(f"{field}={text}: {given} is there twice")
        found.append(source)
    return found


def _source(given: str, field: str) -> Source:
    layout, where = "", given
    prefixed = _LAYOUT.fullmatch(given)
    if prefixed is not None and not os.path.exists(given):
        layout, where = prefixed[1], prefixed[2]
        if layout not in LAYOUTS:
            raise ValueError(f"{field}={given}: {layout} is not one of the known layouts, {', '.join(LAYOUTS)}")
    alone = _PART.fullmatch(where)
    name: HubName | None
    if alone is not None and not os.path.exists(where) and alone[1] in LAYOUTS and layout in ("", alone[1]):
        layout, name = alone[1], HubName(LAYOUTS[alone[1]].hub, alone[2] or "", alone[3] or "")
    else:
        name = hub.parse(where)
    if name is None:
        return Source(given, field, layout, where)
    if layout and name.repository == LAYOUTS[layout].hub:
        _check_files(name, LAYOUTS[layout], f"{field}={given}")
    return Source(given, field, layout, hub=name)


def _check_files(name: HubName, layout: DatasetLayout, given: str) -> None:
    """Raises ValueError if the data set is read as files and @CONFIG or #SPLIT does not select any of them."""
    if layout.files is None:
        return
    if name.split:
        raise ValueError(f"{given}: #{name.split} says nothing of it: it has one split")
    try:
        layout.files(name.config)
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from error


def weights(sources: list[Source]) -> dict[str, float]:
    """The weight of each source, by its text; {} if no source has one."""
    if all(source.weight is None for source in sources):
        return {}
    return {source.text: 1.0 if source.weight is None else source.weight for source in sources}
