"""Image files in their original layouts: idx (MNIST and its kin) and CIFAR-10's binary batches."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sordino.errors import BadInput

Bytes = npt.NDArray[np.uint8]
Labelled = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]

CIFAR_SHAPE = (3, 32, 32)

# Byte k becomes k/255. A table is several times faster here than converting and multiplying.
_SCALED = (np.arange(256) / 255).astype(np.float32)


def read_idx(path: Path) -> Bytes:
    """The array in an idx file of unsigned bytes, gzipped or not."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path} cannot be read: {error}; it is damaged or not gzipped, get it again") from None
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise BadInput(f"{path} is no idx file of unsigned bytes: get it again")
    axes = data[3]
    start = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", data[4:start]) if len(data) >= start else (-1,)
    if len(data) - start != np.prod(shape, dtype=np.int64):
        raise BadInput(
            f"{path} should hold {' × '.join(map(str, shape))} bytes but has {len(data) - start}: get it again"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def read_mnist(folder: Path, part: str) -> Labelled:
    """``part`` is train or t10k: images [N, 1, 28, 28] scaled by the public constant 1/255, labels."""
    images, labels = (
        read_idx(idx_path(folder, f"{part}-{name}")) for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise BadInput(f"{folder}: {part} images {images.shape} and labels {labels.shape} do not belong together")
    return _SCALED[images[:, None]], labels.astype(np.int64)


def idx_path(folder: Path, name: str) -> Path:
    """The gzipped file where there is one, else the plain one."""
    packed = folder / f"{name}.gz"
    return packed if packed.is_file() or not (folder / name).is_file() else folder / name


def read_cifar(folder: Path, batches: Sequence[str]) -> Labelled:
    """CIFAR-10 batches: images [N, 3, 32, 32] scaled by the public constant 1/255, labels.

    A record is one label byte and 3 × 1024 bytes: red, green, blue, each row by row.
    """
    length = 1 + int(np.prod(CIFAR_SHAPE))
    raws = []
    for name in batches:
        path = folder / name
        try:
            raw: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} cannot be read: {error}; get it again") from None
        if len(raw) % length:
            raise BadInput(f"{path} has {len(raw)} bytes, not a multiple of {length}: get it again")
        raws.append(raw.reshape(-1, length))
    images = np.empty((sum(map(len, raws)), *CIFAR_SHAPE), dtype=np.float32)
    at = 0
    for raw in raws:
        images[at : at + len(raw)] = _SCALED[raw[:, 1:]].reshape(-1, *CIFAR_SHAPE)
        at += len(raw)
    return images, np.concatenate([raw[:, 0] for raw in raws]).astype(np.int64)
