"""The `.ninfer` container, version 3: a checked, mapped reader and a streaming, all-or-nothing writer."""

from ninfer_torch.artifact.reader import Artifact, open_artifact
from ninfer_torch.artifact.schema import (
    ACTIVATION_POLICIES,
    Binding,
    Component,
    Directory,
    FileRecord,
    Part,
    Proposal,
    ResourceObject,
    TensorObject,
    Use,
)
from ninfer_torch.artifact.writer import ArtifactWriter, rewrite

__all__ = [
    "ACTIVATION_POLICIES",
    "Artifact",
    "ArtifactWriter",
    "Binding",
    "Component",
    "Directory",
    "FileRecord",
    "Part",
    "Proposal",
    "ResourceObject",
    "TensorObject",
    "Use",
    "open_artifact",
    "rewrite",
]
