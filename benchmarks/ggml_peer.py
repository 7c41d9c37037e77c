"""ggml's own matrix products, called through the C interface of an installed llama.cpp: a peer for CPU benchmarks.

`pip install llama-cpp-python` (built for this processor) or `pip install xllamacpp` (a wheel, AVX2 only) brings the library; the first
that is installed is used. Nothing of it is imported: the shared library is opened by path.
"""

from __future__ import annotations

import ctypes
import importlib.util
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ggml", "find_ggml"]

_LIBRARIES = {
    "llama_cpp": ("lib/libggml-base.so", "lib/libggml-cpu.so"),
    "xllamacpp": ("xllamacpp.abi3.so",),
}
_FEATURES = ("avx2", "avx512", "avx512_vnni", "amx_int8", "neon", "dotprod")
_HEADER = 1 << 20  # bytes for the tensor records of one product and its graph
_ONE_ROW_ONLY = ("AMX",)
"""Layouts whose kernels for several activation rows fault in the builds tried: at `ldtilecfg`, on processors that have AMX."""
_POINTERS = (
    "ggml_init",
    "ggml_new_tensor_2d",
    "ggml_mul_mat",
    "ggml_new_graph",
    "ggml_get_data",
    "ggml_backend_cpu_init",
    "ggml_backend_cpu_buffer_type",
    "ggml_backend_alloc_ctx_tensors_from_buft",
    "ggml_backend_cpu_reg",
    "ggml_backend_reg_dev_get",
    "ggml_backend_reg_get_proc_address",
    "ggml_backend_buft_name",
)


class _InitParams(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def _installed(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or not spec.submodule_search_locations else Path(spec.submodule_search_locations[0])


@cache
def find_ggml() -> Ggml | None:
    """The first installed library of `_LIBRARIES`, or None."""
    for package, files in _LIBRARIES.items():
        folder = _installed(package)
        if folder is not None and all((folder / file).is_file() for file in files):
            return Ggml(package, [folder / file for file in files])
    return None


class Ggml:
    """One ggml CPU backend. `name` says which package it is of and for which instructions it was built."""

    def __init__(self, package: str, files: list[Path]) -> None:
        self._libraries = [ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL) for file in files]
        for function in _POINTERS:
            self._call(function).restype = ctypes.c_void_p
        self._call("ggml_quantize_chunk").restype = self._call("ggml_row_size").restype = ctypes.c_size_t
        self._call("ggml_backend_dev_supports_op").restype = ctypes.c_bool
        self._call("ggml_backend_buft_name").restype = ctypes.c_char_p
        self._call("ggml_init").argtypes = [_InitParams]
        features = [name for name in _FEATURES if self._call(f"ggml_cpu_has_{name}")()]
        self.name = f"ggml of {package} ({', '.join(features)})"
        self._silence()
        self._backend = ctypes.c_void_p(self._call("ggml_backend_cpu_init")())
        self._plain = ctypes.c_void_p(self._call("ggml_backend_cpu_buffer_type")())
        registry = ctypes.c_void_p(self._call("ggml_backend_cpu_reg")())
        self._device = ctypes.c_void_p(self._call("ggml_backend_reg_dev_get")(registry, ctypes.c_size_t(0)))
        self._extra = self._extra_buffer_types(registry)

    def _call(self, name: str) -> Any:
        """The C function `name`; its result is an int unless its kind was declared when the library was opened."""
        for library in self._libraries:
            if hasattr(library, name):
                return getattr(library, name)
        raise AttributeError(f"the ggml library has no function {name}")

    def _silence(self) -> None:
        """ggml prints a line for every weight that it repacks."""
        self._log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self._call("ggml_log_set")(self._log, None)

    def _extra_buffer_types(self, registry: ctypes.c_void_p) -> list[ctypes.c_void_p]:
        """Layouts into which llama.cpp repacks weights while it loads them, in the order in which it tries them."""
        address = self._call("ggml_backend_reg_get_proc_address")(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return []
        types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(self._device)
        found = []
        while types[len(found)]:
            found.append(ctypes.c_void_p(types[len(found)]))
        return found

    def set_threads(self, threads: int) -> None:
        self._call("ggml_backend_cpu_set_n_threads")(self._backend, threads)

    def row_bytes(self, type: int, columns: int) -> int:
        """Bytes of a row of K = `columns` weights in ggml type number `type`."""
        return int(self._call("ggml_row_size")(type, ctypes.c_int64(columns)))

    def quantized(self, type: int, rows: int, columns: int, distinct: int = 32) -> NDArray[np.uint8]:
        """Blocks of normal random weights [rows, row bytes]; `distinct` rows are encoded and then repeated."""
        values = np.random.default_rng(0).standard_normal((distinct, columns), np.float32) * np.float32(0.05)
        blocks = np.empty((distinct, self.row_bytes(type, columns)), np.uint8)
        importance = np.ones(columns, np.float32)
        self._call("ggml_quantize_init")(type)
        written = self._call("ggml_quantize_chunk")(
            type,
            values.ctypes.data_as(ctypes.c_void_p),
            blocks.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(0),
            ctypes.c_int64(distinct),
            ctypes.c_int64(columns),
            importance.ctypes.data_as(ctypes.c_void_p),
        )
        if written != blocks.nbytes:
            raise RuntimeError(f"ggml wrote {written} bytes of type {type}, expected {blocks.nbytes}")
        return np.ascontiguousarray(np.tile(blocks, (-(-rows // distinct), 1))[:rows])

    def products(
        self, type: int, blocks: NDArray[np.uint8], columns: int, x: NDArray[np.float32]
    ) -> dict[str, Product]:
        """`x @ W.T` for W of `blocks` [N, row bytes] and float32 x [M, K], by the name of each layout that holds the weight."""
        found = (Product.maybe(self, type, blocks, columns, x, layout) for layout in (*self._extra, self._plain))
        return {product.layout: product for product in found if product is not None}


class Product:
    """A graph of one product in memory of its own; calling it computes `y`. `layout` names the weight's buffer type."""

    def __init__(self, compute: Callable[[], Any], y: NDArray[np.float32], layout: str) -> None:
        self._compute, self.y, self.layout = compute, y, layout

    def __call__(self) -> None:
        if self._compute():
            raise RuntimeError("ggml could not compute a product")

    @classmethod
    def maybe(
        cls,
        ggml: Ggml,
        type: int,
        blocks: NDArray[np.uint8],
        columns: int,
        x: NDArray[np.float32],
        layout: ctypes.c_void_p,
    ) -> Product | None:
        """The product with a weight in a buffer of type `layout`, or None if ggml has no kernel for it there."""
        (rows, _), (m, _), call = blocks.shape, x.shape, ggml._call
        name = call("ggml_backend_buft_name")(layout).decode()
        if m > 1 and name in _ONE_ROW_ONLY:
            return None
        owned: list[Callable[[], Any]] = []  # what frees the memory

        def context() -> ctypes.c_void_p:
            made = ctypes.c_void_p(call("ggml_init")(_InitParams(_HEADER, None, True)))
            owned.append(lambda: call("ggml_free")(made))
            return made

        def tensor(owner: ctypes.c_void_p, kind: int, *extents: int) -> ctypes.c_void_p:
            return ctypes.c_void_p(call("ggml_new_tensor_2d")(owner, kind, *map(ctypes.c_int64, extents)))

        def allocate(owner: ctypes.c_void_p, buffer_type: ctypes.c_void_p) -> None:
            buffer = ctypes.c_void_p(call("ggml_backend_alloc_ctx_tensors_from_buft")(owner, buffer_type))
            if not buffer:
                raise MemoryError(f"ggml could not allocate {blocks.nbytes} bytes")
            owned.append(lambda: call("ggml_backend_buffer_free")(buffer))

        weights, rest, plan = context(), context(), context()
        w = tensor(weights, type, columns, rows)
        allocate(weights, layout)
        activations = tensor(rest, 0, columns, m)
        out = ctypes.c_void_p(call("ggml_mul_mat")(rest, w, activations))
        allocate(rest, ggml._plain)
        graph = ctypes.c_void_p(call("ggml_new_graph")(plan))
        call("ggml_build_forward_expand")(graph, out)
        y = np.ctypeslib.as_array(ctypes.cast(call("ggml_get_data")(out), ctypes.POINTER(ctypes.c_float)), (m, rows))
        product = cls(lambda: call("ggml_backend_graph_compute")(ggml._backend, graph), y, name)
        weakref.finalize(product, lambda: [free() for free in reversed(owned)])
        if not call("ggml_backend_dev_supports_op")(ggml._device, out):
            return None
        call("ggml_backend_tensor_set")(
            w, blocks.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(0), ctypes.c_size_t(blocks.nbytes)
        )
        ctypes.memmove(call("ggml_get_data")(activations), x.ctypes.data, x.nbytes)
        return product
