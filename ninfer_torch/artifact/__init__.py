"""The `.ninfer` container: a checked, mapped reader and a streaming, all-or-nothing writer of version 3.

Files of versions 1 and 2 are read, and rewritten as version 3 by `upgrade`.
"""

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
from ninfer_torch.artifact.upgrade import upgrade
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
    "upgrade",
]
