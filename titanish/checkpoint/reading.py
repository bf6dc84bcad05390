"""Reading DCP folders without running anything that is in them.

`torch.distributed.checkpoint` keeps its index, `.metadata`, as a pickle, and a pickle can name any function
to call. Here it may name only the plain classes that an index is made of.
"""

from __future__ import annotations

import errno
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanish.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}


class DamagedError(CheckpointError):
    """The checkpoint's files are there but their content is none; an older one may be sound."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise DamagedError(f"its .metadata names {module}.{name}, which has no place in a checkpoint's index")


class SafeReader(FileSystemReader):
    """A `FileSystemReader` whose index cannot run code; tensors are read with `weights_only` by torch."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as stream:
                metadata = _IndexUnpickler(stream).load()
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # a damaged pickle ends in any of them
            raise DamagedError(f"{path} cannot be read: {damage(error)}") from error
        if not isinstance(metadata, Metadata):
            raise DamagedError(f"{path} is not a checkpoint's index")
        storage_meta = getattr(metadata, "storage_meta", None)  # a damaged index may lack any attribute
        if storage_meta is None:
            raise DamagedError(f"{path} lacks the index's storage part")
        storage_meta.load_id = self.load_id
        return metadata

    def sizes(self) -> dict[str, torch.Size]:
        """The whole size of every tensor, by its name in the index."""
        try:
            entries = self.read_metadata().state_dict_metadata
            return {
                name: torch.Size(entry.size)
                for name, entry in entries.items()
                if isinstance(entry, TensorStorageMetadata)
            }
        except CheckpointError:
            raise
        except Exception as error:
            raise DamagedError(f"{Path(self.path) / '.metadata'} cannot be read: {damage(error)}") from error


def damage(error: BaseException) -> str:
    """What is said of content that ends in `error`: its name alone; torch's text advises unsafe reading."""
    return f"its data is damaged ({type(error).__name__})"


def load_failure(path: Path, error: CheckpointException) -> CheckpointError:
    """What to raise, on all ranks alike, for a load from `path` that ended in `error`."""
    rank, cause = first_failure(error)
    where = f"{path} could not be read: rank {rank}: "
    refused = isinstance(cause, OSError) and cause.errno != errno.EINVAL  # that is an offset from the index
    if refused or isinstance(cause, (MemoryError, torch.OutOfMemoryError)):
        return CheckpointError(f"{where}{type(cause).__name__}: {in_one_line(cause)}")
    return DamagedError(where + damage(cause))


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """The lowest failing rank and its cause."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return rank, cause


def in_one_line(error: BaseException) -> str:
    """The text of `error`, or its name if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
