"""Data sets of the Hugging Face hub: ORG/NAME[@CONFIG][#SPLIT].

`datasets` fetches and prepares them, in the folders that it and the hub's own tools use (HF_HOME). If the hub cannot be
reached or must not be used (HF_HUB_OFFLINE, HF_DATASETS_OFFLINE), rows come from the data that `datasets` prepared
before, or from files of `hf download`, which `datasets` alone would not find. If there are none, the error names the
command that fetches them. Whether the hub can be reached is tested once, with a short timeout: `datasets` would try for
half a minute, also for a mistyped path such as `data/trian`, which looks like a name.
"""

import contextlib
import dataclasses
import functools
import glob
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from scalerl_jax.environments.data.columns import MalformedRows
from scalerl_jax.environments.data.row_files import NamedColumns, files_of, kind_of, read_batch, read_file

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w.-]+))?(?:#([\w.-]+))?")
_ROWS = 256  # rows held as Python objects at a time
_PATIENCE_SECONDS = 5.0  # for the hub's first answer


@dataclasses.dataclass(frozen=True)
class HubName:
    """A data set of the hub, or a part of one."""

    repository: str
    config: str = ""  # "": the only or default one
    split: str = ""  # "": the first existing one of the splits given to read_rows

    def __str__(self) -> str:
        return f"{self.repository}{'@' * bool(self.config)}{self.config}{'#' * bool(self.split)}{self.split}"

    def download(self, files: Sequence[str] = ()) -> str:
        """The command that fetches the data set, or only some files of it (names or patterns)."""
        wanted = [f"--include='{file}'" if glob.has_magic(file) else file for file in files]
        return " ".join(("hf download --repo-type=dataset", self.repository, *wanted))


def parse(where: str) -> HubName | None:
    """The name of a data set on the hub; None if `where` exists here, or looks like a file or a path in a folder."""
    found = _NAME.fullmatch(where)
    if found is None or os.path.exists(where):
        return None
    name = HubName(found[1], found[2] or "", found[3] or "")
    if name.config or name.split:
        return name
    folder = os.path.isdir(where.partition("/")[0]) and not _here(name.repository)
    return None if kind_of(where) or folder else name


def _here(repository: str) -> bool:
    """Whether the cache folder of the hub's client or of `datasets` has anything of a data set. It does not import
    either of them, which takes seconds."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    fetched = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    prepared = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    if os.path.isdir(os.path.join(os.path.expanduser(fetched), f"datasets--{repository.replace('/', '--')}")):
        return True
    with contextlib.suppress(OSError):
        there = os.listdir(os.path.expanduser(prepared))
        return _plain(repository) in map(_plain, there)  # which are "org___its_name"
    return False


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def read_rows(
    name: HubName, splits: Sequence[str], *, given: str, files: Sequence[str], malformed: MalformedRows
) -> Iterator[NamedColumns]:
    """Yields every row of the split in `name`, else of the first of `splits` that the data set has.

    given: the user's text, for messages. files: files or patterns to read directly; empty: load with `datasets`.
    Raises ValueError, one line.
    """
    if files:
        with _quiet():
            folder = _folder(name, files, given)
        for pattern in files:
            for path in files_of(os.path.join(glob.escape(folder), pattern), given):
                yield from read_file(path, malformed)
        return
    with _quiet():
        dataset = _dataset(name, [name.split] if name.split else splits, given)
    named, number = dataclasses.replace(name, split=str(dataset.split)), 0
    for table in dataset.with_format("arrow").iter(batch_size=_ROWS):
        yield from read_batch(table, lambda n, first=number + 1: f"{named} row {first + n}", malformed)  # type: ignore[misc]
        number += table.num_rows


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the hub's client, which logs each attempt to connect."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@functools.cache
def _answers(repository: str) -> bool:
    """Whether the hub can be reached; if not, sets its client to offline mode. Raises ImportError."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE or os.environ.get("HF_DATASETS_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    try:
        HfApi().dataset_info(repository, timeout=_PATIENCE_SECONDS)
    except Exception as error:  # noqa: BLE001  of the network, by the package that the hub's client uses for HTTP
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
            return True  # the hub responds; reading rows will report this error
        constants.HF_HUB_OFFLINE = True
        return False
    return True


def _dataset(name: HubName, splits: Sequence[str], given: str) -> Any:
    try:
        if not _answers(name.repository) and not _here(name.repository):
            raise ValueError(_not_here(name, given))
        import datasets
    except ImportError as error:
        raise ValueError(_no_package(given)) from error
    datasets.disable_progress_bars()
    datasets.config.HF_HUB_OFFLINE |= not _answers(name.repository)
    try:
        return _split(datasets, name.repository, name, splits, given)
    except ConnectionError as error:
        snapshot = _snapshot(name.repository)
        if not snapshot:
            raise ValueError(_not_here(name, given)) from error
    try:
        return _split(datasets, snapshot, name, splits, given)
    except ConnectionError as error:
        raise ValueError(_not_here(name, given)) from error


def _split(datasets: Any, where: str, name: HubName, splits: Sequence[str], given: str) -> Any:
    """Loads the first existing split. Raises ConnectionError if that needs the hub and it cannot be reached."""
    for split in splits:
        try:
            return datasets.load_dataset(where, name.config or None, split=split)
        except ConnectionError:
            raise
        except datasets.exceptions.DatasetNotFoundError as error:
            raise ValueError(
                f"{given}: is no file or folder here, and no data set of the hub that can be read: {_line(error)}"
            ) from error
        except Exception as error:  # the library raises ValueError, RuntimeError and its own for a data set's faults
            if split != splits[-1] and "nknown split" in str(error):
                continue
            hint = " (ORG/NAME@CONFIG names one)" if "onfig" in str(error) else ""
            hint = f" (wanted: {', '.join(splits)}; ORG/NAME#SPLIT names one)" if "nknown split" in str(error) else hint
            raise ValueError(f"{given}: {_line(error)}{hint}") from error
    raise AssertionError("no split was asked for")


def _folder(name: HubName, files: Sequence[str], given: str) -> str:
    """The local folder of a repository's files, which contains all of `files`. Raises ValueError."""
    try:
        import huggingface_hub

        _answers(name.repository)
    except ImportError as error:
        raise ValueError(_no_package(given)) from error
    try:
        folder = huggingface_hub.snapshot_download(name.repository, repo_type="dataset", allow_patterns=list(files))
    except Exception as error:  # the hub's client raises errors of the network, of HTTP, for a missing repository
        folder = _snapshot(name.repository)
        if not folder:
            raise ValueError(_not_here(name, given, files)) from error
    if not all(glob.glob(os.path.join(glob.escape(folder), file)) for file in files):
        raise ValueError(_not_here(name, given, files))
    return folder


def _snapshot(repository: str) -> str:
    """The folder with the fetched files of a repository; "" if there are none."""
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(repository, repo_type="dataset", local_files_only=True)
    except (OSError, ValueError):
        return ""


def _no_package(given: str) -> str:
    return f"{given}: is no file or folder; data sets of the hub need: pip install 'scalerl-jax[environments]'"


def _not_here(name: HubName, given: str, files: Sequence[str] = ()) -> str:
    offline = [variable for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(variable)]
    why = f"{offline[0]} is set" if offline else "the hub cannot be reached"
    return f"{given}: is no file or folder here, and is not in the hub's cache ({why}): {name.download(files)}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
