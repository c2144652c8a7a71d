"""The safetensors of a model folder: a slice of a tensor costs the bytes of the slice, on the disk and in memory.

    file     8 bytes n, little-endian; n bytes of JSON {name: {"dtype", "shape", "data_offsets"}}; the data
    folder   the files that model.safetensors.index.json names; without it model.safetensors. No other file is read:
             others have different layouts (consolidated.safetensors), or are left from an older export

Bytes are read and not mapped: mapped pages count as this process's memory while the map exists, and truncating the file
meanwhile would end the process instead of raising.
"""

import dataclasses
import io
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.tensor_layout import layout, stored
from scalerl_jax.system.files import read_object

_BESIDE_IMAGES = "language_model."  # prefix of the names of a text model that is part of another
_OF_IMAGES = ("vision_model.", "multi_modal_projector.")  # tensors of that one that are not read
_BUFFER = re.compile(r"\.rotary_emb\.(inv_freq|(cos|sin)_cached)$")  # made from config.json; old files have them
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_INFINITY = {
    np.dtype(kind): int(np.array(np.inf, kind).view(f"u{np.dtype(kind).itemsize}")) for kind in _DTYPES.values()
}
_BLOCK_BYTES = 16 * 2**20
_MOST_HEADER = 10**8  # bytes, the format's limit
# Shorter pieces are read together with the bytes between them: a disk reads at least a page.
_PAGE = 4096


def save(path: str, arrays: dict[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a file, for all who may read its folder: the library writes it for its owner alone."""
    save_file(arrays, path, metadata={"format": "pt", **(metadata or {})})
    os.chmod(path, os.stat(os.path.dirname(path)).st_mode & 0o666)


@dataclasses.dataclass(frozen=True)
class _Stored:
    file: io.FileIO
    begin: int  # in the file
    shape: tuple[int, ...]
    dtype: str  # as the format calls it


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a folder by name; the files stay open.

    config: of the folder's model; then the names are those of tensor_layout, and experts stored one by one are one
    tensor. Raises ValueError, one line that names folder or file, if there are no weights, a file or an expert is
    missing, or a file is broken; with a config also if a tensor is not part of that model, and so would be left out of
    the policy, or if there is a head that differs from the embeddings to which the config ties it.
    """

    def __init__(self, path: str, config: DecoderConfig | None = None):
        self._where: dict[str, _Stored] = {}
        for name, wanted in _files(path).items():
            file = os.path.join(path, name)
            found = _read_header(file)
            for tensor in found if wanted is None else wanted:
                if tensor not in found:
                    raise ValueError(f"{os.path.join(path, INDEX)}: tensor {tensor} is not in {name}")
                self._where[tensor] = found[tensor]
        beside_images = any(name.startswith(_BESIDE_IMAGES) for name in self._where)
        if beside_images:
            self._where = {name.removeprefix(_BESIDE_IMAGES): one for name, one in self._where.items()}
        # The contract's name -> the stored names if there are several, or the stored tensor that it is part of.
        self._parts: dict[str, list[str]] = {}
        self._columns: dict[str, tuple[str, int, int]] = {}
        for name, parts in {} if config is None else stored(config).items():
            columns = layout(config)[name].row.columns
            if columns is not None:
                self._columns[name] = (parts[0], *columns)
            elif parts != [name]:
                self._parts[name] = parts
            for part in parts if parts != [name] or columns else ():
                if part not in self._where:
                    raise ValueError(f"{path}: tensor {part} is missing")
        if config is not None:
            self._check_no_others(config, beside_images)
            if config.tied_embeddings and _HEAD in self._where and _EMBED in self._where:
                self._check_tied()

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read(name, (slice(None),) * len(self.shape(name)))

    def __contains__(self, name: object) -> bool:
        return name in self._parts or name in self._columns or name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._where, *self._parts, *self._columns]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises ValueError if its experts have different shapes."""
        if name in self._columns:
            whole, _, of = self._columns[name]
            found = self._where[whole].shape
            if len(found) < 2:
                return found
            *before, rows, columns = found
            return (*before, columns // of, rows)
        if name not in self._parts:
            return self._where[name].shape
        first, *others = parts = self._parts[name]
        for part in others:
            if self.shape(part) != self.shape(first):
                raise ValueError(f"tensor {part} has shape {self.shape(part)}, not {self.shape(first)}")
        return (len(parts), *self.shape(first))

    def _check_no_others(self, config: DecoderConfig, beside_images: bool) -> None:
        known = {part for name, parts in stored(config).items() for part in (name, *parts)} | {_HEAD}
        for name, one in self._where.items():
            of_images = beside_images and name.startswith(_OF_IMAGES)
            if name not in known and not of_images and not _BUFFER.search(name):
                raise ValueError(
                    f"{one.file.name}: tensor {name} does not belong to a {config.family} of {config.layers} "
                    "layers, and would be left out of the policy"
                )

    def _check_tied(self) -> None:
        """Raises ValueError if head and embeddings differ: transformers 5 then ties nothing; transformers 4 and vLLM
        ignore the head."""
        head, embed = self._where[_HEAD], self._where[_EMBED]
        step = max(1, _BLOCK_BYTES // max(1, math.prod(head.shape[1:]) * 8))

        def equal(start: int) -> bool:
            rows = (slice(start, start + step), *(slice(None) for _ in head.shape[1:]))
            one, other = self._stored(_HEAD, rows), self._stored(_EMBED, rows)
            # Comparing bytes is faster, but zero has two forms.
            return one.tobytes() == other.tobytes() or np.array_equal(one.astype(float), other.astype(float))

        if head.shape != embed.shape or not all(map(equal, range(0, head.shape[0], step))):
            raise ValueError(
                f"{head.file.name}: tensor {_HEAD} differs from {_EMBED}, and config.json has "
                "tie_word_embeddings=true: libraries do not agree which of them the head is; tie_word_embeddings=false "
                "takes this one"
            )

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """Part of a tensor, one slice of step 1 per dimension, in its own dtype and memory.

        Raises ValueError naming the tensor and its file, if the file has become shorter, or the tensor holds no floats
        or one that is not finite.
        """
        if name in self._parts:
            names = self._parts[name][index[0]]
            first = self.read(names[0], index[1:])
            # Each is read into its place: with a stack all would be held twice.
            experts = np.empty((len(names), *first.shape), first.dtype)
            for number, part in enumerate(names):
                if self._where[part].dtype != self._where[names[0]].dtype:
                    raise ValueError(
                        f"{self._where[part].file.name}: tensor {part} is of another dtype than {names[0]}"
                    )
                experts[number] = self.read(part, index[1:]) if number else first
            return experts
        if name in self._columns:
            whole, number, of = self._columns[name]
            size = self._where[whole].shape[-1] // of
            start, stop, _ = index[1].indices(size)
            part = self._stored(whole, (index[0], index[2], slice(number * size + start, number * size + stop)))
            return np.swapaxes(part, 1, 2)
        return self._stored(name, index)

    def _stored(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """The stored tensor's part, as in the file."""
        one = self._where[name]
        if one.dtype not in _DTYPES:
            raise ValueError(f"{one.file.name}: tensor {name} is of {one.dtype}, not of {', '.join(_DTYPES)}")
        parts = [range(*part.indices(size)) for part, size in zip(index, one.shape, strict=True)]
        dtype = np.dtype(_DTYPES[one.dtype])
        # Dimensions after the last sliced one are contiguous.
        last = max((i for i, part in enumerate(parts) if len(part) < one.shape[i]), default=0)
        inner = math.prod(one.shape[last + 1 :]) * dtype.itemsize
        if last and len(parts[last]) * inner < _PAGE:
            cut = [slice(None)] * len(parts)
            cut[last] = slice(parts[last].start, parts[last].stop)
            whole = [slice(None) if i == last else slice(part.start, part.stop) for i, part in enumerate(parts)]
            return np.ascontiguousarray(self._stored(name, whole)[tuple(cut)])
        out = np.empty([len(part) for part in parts], dtype)
        into = memoryview(out.reshape(-1).view(np.uint8))
        piece = len(parts[last]) * inner if parts else dtype.itemsize
        for number, place in enumerate(itertools.product(*parts[:last]) if piece else ()):
            row = 0
            for position, size in zip(place, one.shape):
                row = row * size + position
            start = (row * one.shape[last] + parts[last].start) * inner if parts else 0
            _fill(one, name, into[number * piece : (number + 1) * piece], one.begin + start)
        if not _finite(out):
            raise ValueError(f"{one.file.name}: tensor {name} has a NaN or an infinity")
        return out


def _finite(array: np.ndarray) -> bool:
    """Whether all are finite, by their bits, which is cheaper than reading them was: infinities and NaNs are the
    largest of each sign."""
    infinity, bits = _INFINITY[array.dtype], 8 * array.dtype.itemsize
    signed, unsigned = array.view(f"i{array.dtype.itemsize}"), array.view(f"u{array.dtype.itemsize}")
    return not array.size or (int(signed.max()) < infinity and int(unsigned.max()) < infinity + 2 ** (bits - 1))


def _fill(one: _Stored, name: str, into: memoryview, offset: int) -> None:
    while into:
        try:
            count = os.preadv(one.file.fileno(), [into], offset)
        except OSError as error:
            raise ValueError(f"{one.file.name}: tensor {name}: {error.strerror}") from error
        if not count:
            raise ValueError(f"{one.file.name}: ends inside of tensor {name}")
        into, offset = into[count:], offset + count


def _files(path: str) -> dict[str, list[str] | None]:
    """File -> the tensors to be read from it; None: all of them."""
    index = os.path.join(path, INDEX)
    there = sorted(f for f in os.listdir(path) if f.endswith(".safetensors")) if os.path.isdir(path) else []
    if not os.path.isfile(index):
        if SINGLE in there:
            return {SINGLE: None}
        others = f"; {there[0]} is not read without {INDEX}" if there else ""
        raise ValueError(f"{path}: no weights there (*.safetensors){others}")
    where = read_object(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to file names")
    files: dict[str, list[str] | None] = {}
    for tensor, file in where.items():
        if os.path.basename(file) != file:
            raise ValueError(f"{index}: {file!r} is no file of this folder")
        (files.setdefault(file, []) or files[file]).append(tensor)  # type: ignore[union-attr]
    for file in files:
        if not os.path.isfile(os.path.join(path, file)):
            raise ValueError(f"{index}: {file} is missing (of {len(files)} files)")
    if SINGLE in there and SINGLE not in files:
        raise ValueError(f"{path}: {SINGLE} and {INDEX} are two sets of weights: one of them is left over")
    return files


def _read_header(path: str) -> dict[str, _Stored]:
    try:
        file = io.FileIO(path)
        length, size = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        if not 8 <= size + 8 <= length or size > _MOST_HEADER:
            raise ValueError("is cut short, or no safetensors")
        header = json.loads(file.read(size))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is no safetensors ({error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: is no safetensors")
    header.pop("__metadata__", None)
    return {name: _stored(file, name, of, data=size + 8, length=length) for name, of in header.items()}


def _stored(file: io.FileIO, name: str, of: Any, *, data: int, length: int) -> _Stored:
    fields = of if isinstance(of, dict) else {}
    shape, dtype, ends = fields.get("shape"), fields.get("dtype"), fields.get("data_offsets")
    numbers = [*shape, *ends] if isinstance(shape, list) and isinstance(ends, list) and len(ends) == 2 else [None]
    if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{file.name}: tensor {name} is described as {str(of)[:80]}")
    begin, end = ends
    if data + end > length:
        raise ValueError(f"{file.name}: is cut short: tensor {name} ends at byte {data + end} of {length}")
    if dtype in _DTYPES and end - begin != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
        raise ValueError(f"{file.name}: tensor {name} of shape {shape} and {dtype} has {end - begin} bytes")
    return _Stored(file, data + begin, tuple(shape), dtype)
