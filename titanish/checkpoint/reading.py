"""Reading DCP folders without running anything that is in them.

`torch.distributed.checkpoint` keeps its index, `.metadata`, as a pickle, and a pickle can name any function
to call. Here it may name only the plain classes that an index is made of.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

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


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"its .metadata names {module}.{name}, which has no place in a checkpoint's index"
        )


class SafeReader(FileSystemReader):
    """A `FileSystemReader` whose index cannot run code; tensors are read with `weights_only` by torch."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as stream:
                metadata = _IndexUnpickler(stream).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} is not a checkpoint's index")
        if metadata.storage_meta is None:
            raise CheckpointError(f"{path} lacks the index's storage part")
        metadata.storage_meta.load_id = self.load_id
        return metadata
