"""The boundary between Python and C++: which objects are taken as tensors, which are refused, in which words.

The rules are those of csrc/bindings/tensor_caster.h. `rms_norm` stands for every op with plain tensors,
`compact_kv` for ops with lists of tensors; one test walks through every argument of every native function.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys

import numpy as np
import pytest
import torch

from eagle_cuda._extension import _C
from eagle_cuda.kv_cache import compact_kv
from eagle_cuda.linear import pack_weight, rms_norm
from eagle_cuda.tree import TreeShape

X = torch.arange(12, dtype=torch.float32).reshape(3, 4) - 5
WEIGHT = torch.tensor([1.0, 2.0, 0.5, -1.0])
WANT = rms_norm(X, WEIGHT, 1e-5)


def check(x=X, weight=WEIGHT, out=None):
    """The op on replaced arguments, as a torch tensor; equal to WANT where the replacement is a good one."""
    out = torch.full((3, 4), float("nan")) if out is None else out
    rms_norm(x, weight, 1e-5, out=out)
    return torch.as_tensor(out)


# ---- what is taken -------------------------------------------------------------------------------


def test_inputs_may_require_grad():
    assert torch.equal(check(x=X.clone().requires_grad_()), WANT)
    assert torch.equal(check(weight=torch.nn.Parameter(WEIGHT.clone())), WANT)


def test_numpy_inputs_and_outputs():
    out = np.full((3, 4), np.nan, np.float32)
    assert torch.equal(check(X.numpy(), WEIGHT.numpy(), out), WANT)
    assert torch.equal(torch.from_numpy(out), WANT)


def test_read_only_numpy_input():
    x = X.numpy().copy()
    x.flags.writeable = False
    assert torch.equal(check(x=x), WANT)


def test_numpy_views_with_strides():
    wide = np.zeros((3, 9), np.float32)
    wide[:, 3:7] = X.numpy()
    assert torch.equal(check(x=wide[:, 3:7]), WANT)
    out = np.full((3, 9), 7, np.float32)
    rms_norm(X, WEIGHT, 1e-5, out=out[:, 2:6])
    assert np.array_equal(out[:, 2:6], WANT.numpy())
    assert (out[:, :2] == 7).all()
    assert (out[:, 6:] == 7).all()


class CapsulesOnly(torch.Tensor):
    """A torch tensor of a framework without the exchange table."""

    __dlpack_c_exchange_api__ = None


def test_a_framework_with_capsules_only():
    hidden = X.clone().as_subclass(CapsulesOnly)
    assert torch.equal(check(x=hidden), WANT)
    assert torch.equal(check(x=hidden.requires_grad_()), WANT)
    out = torch.empty(3, 4).as_subclass(CapsulesOnly)
    rms_norm(X, WEIGHT, 1e-5, out=out)
    assert torch.equal(out.as_subclass(torch.Tensor), WANT)


def test_empty_batch():
    out = torch.empty(0, 4)
    rms_norm(torch.empty(0, 4), WEIGHT, 1e-5, out=out)


# ---- what is refused -----------------------------------------------------------------------------


def negative_view(like: torch.Tensor) -> torch.Tensor:
    """A view whose elements torch would still have to negate, of the shape of `like`."""
    view = torch.complex(torch.zeros_like(like), -like).conj().imag
    assert view.is_neg()
    return view


BAD_INPUTS = {
    "list": ([1.0, 2.0], TypeError, "expected a tensor, got list"),
    "number": (3.0, TypeError, "expected a tensor, got float"),
    "text": ("cpu", TypeError, "expected a tensor, got str"),
    "none": (None, ValueError, "expected a tensor, got None"),
    "float64": (X.double(), ValueError, "float64"),
    "complex": (torch.complex(X, X), ValueError, "got complex64"),
    "conjugated": (torch.complex(X, X).conj(), ValueError, "got complex64"),
    "negated": (negative_view(X), ValueError, "negative view"),
    "negated, by capsule": (negative_view(X).as_subclass(CapsulesOnly), ValueError, "negative view"),
    "backwards": (X.numpy()[::-1], ValueError, "expected strides of 0 or more, got -4 in dimension 0"),
    "other byte order": (X.numpy().astype(">f4"), ValueError, ""),
    "objects": (np.array([[None] * 4] * 3), ValueError, ""),
    "seven dimensions": (X.reshape(3, 4, 1, 1, 1, 1, 1), ValueError, "expected at most 6 dimensions, got 7"),
    "zero dimensions": (torch.tensor(1.0), ValueError, "got 0"),
    "without memory": (torch.empty(3, 4, device="meta"), ValueError, ""),
    "sparse": (X.to_sparse(), ValueError, ""),
    "int32": (X.int(), ValueError, "int32"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input(case):
    value, error, words = BAD_INPUTS[case]
    with pytest.raises(error, match="^x: ") as caught:
        check(x=value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_resolved_negation_is_taken():
    assert torch.equal(check(x=negative_view(X).resolve_neg()), WANT)


BAD_OUTPUTS = {
    "expanded": (torch.zeros(4).expand(3, 4), "overlapping"),
    "folded": (torch.zeros(12).as_strided((3, 4), (3, 1)), "overlapping"),
    "one element": (torch.zeros(1).expand(3, 4), r"got strides \[0, 0\]"),
    "wrong shape": (torch.zeros(3, 5), r"expected shape \[3, 4\], got \[3, 5\]"),
    "wrong dtype": (torch.zeros(3, 4, dtype=torch.int32), "int32"),
}


@pytest.mark.parametrize("case", BAD_OUTPUTS)
def test_bad_output(case):
    value, words = BAD_OUTPUTS[case]
    before = value.clone()
    with pytest.raises(ValueError, match=f"^out: .*{words}"):
        check(out=value)
    assert torch.equal(value, before)


def test_read_only_output():
    out = np.zeros((3, 4), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="^out: expected a writable tensor, got a read-only one"):
        check(out=out)
    assert (out == 0).all()


# ---- capsules made by hand: what no installed framework sends ------------------------------------


class Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Handmade:
    """An exporter of X's memory whose every DLPack field can be set."""

    def __init__(
        self, *, version=None, flags=0, device=(1, 0), dtype=(2, 32, 1), data=None, offset=0, strides=None
    ):
        self.shape = (ctypes.c_int64 * 2)(3, 4)
        self.strides = None if strides is None else (ctypes.c_int64 * 2)(*strides)
        tensor = Tensor()
        tensor.data = X.data_ptr() - offset if data is None else data
        tensor.device, tensor.ndim, tensor.dtype = Device(*device), 2, DataType(*dtype)
        tensor.shape, tensor.byte_offset = self.shape, offset
        if self.strides is not None:
            tensor.strides = self.strides
        if version is None:
            self.name, self.managed = b"dltensor", Managed(tensor, None, DELETER())
        else:
            self.name = b"dltensor_versioned"
            self.managed = ManagedVersioned(*version, None, DELETER(), flags, tensor)
        self.asked = []

    def __dlpack__(self, **options):
        self.asked.append(options)
        if self.name == b"dltensor" and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return new_capsule(ctypes.addressof(self.managed), self.name, None)


@pytest.mark.parametrize("version", [None, (1, 0), (1, 3)])
def test_handmade_capsule(version):
    source = Handmade(version=version)
    assert torch.equal(check(x=source), WANT)
    assert source.asked[0] == {"max_version": (1, 0)}
    assert len(source.asked) == (2 if version is None else 1)


def test_byte_offset_and_missing_strides():
    assert torch.equal(check(x=Handmade(offset=64)), WANT)
    assert torch.equal(check(x=Handmade(offset=64, strides=(4, 1))), WANT)


BAD_CAPSULES = {
    "future version": (Handmade(version=(2, 0)), "expected DLPack version 1, got 2"),
    "null": (Handmade(data=0), "expected data, got a null pointer for 12 elements"),
    "vector elements": (Handmade(dtype=(2, 32, 4)), "got float32 with 4 lanes"),
    "float8_e5m2": (Handmade(dtype=(12, 8, 1)), "got DLPack type 12"),
    "other device": (Handmade(device=(7, 0)), "DLPack device type 7"),
    "cuda": (Handmade(device=(2, 1)), None),
    "negative stride": (Handmade(strides=(-4, 1)), "expected strides of 0 or more, got -4 in dimension 0"),
}


@pytest.mark.parametrize("case", BAD_CAPSULES)
def test_bad_capsule(case):
    value, words = BAD_CAPSULES[case]
    if words is None:  # the tensor itself is fine, but it does not lie where the others do
        with pytest.raises(ValueError, match=r"^(weight|out): expected device cuda:1, got cpu"):
            check(x=value)
        with pytest.raises(ValueError, match=r"^weight: .*"):
            check(weight=value)
        return
    with pytest.raises(ValueError, match="^x: ") as caught:
        check(x=value)
    assert words in str(caught.value)


def test_read_only_flag_of_an_output():
    with pytest.raises(ValueError, match="^out: expected a writable tensor, got a read-only one"):
        rms_norm(X, WEIGHT, 1e-5, out=Handmade(version=(1, 0), flags=1))


def test_an_exporter_that_fails():
    class Broken:
        def __dlpack__(self, **options):
            raise BufferError("the memory is somewhere else")

    class Wrong:
        def __dlpack__(self, **options):
            return 7

    with pytest.raises(ValueError, match="^x: the memory is somewhere else$"):
        check(x=Broken())
    with pytest.raises(ValueError, match="^x: "):
        check(x=Wrong())


class Watched:
    """Exports a copy of X that is freed together with the capsule, and notes when."""

    def __init__(self):
        self.alive = 0

    def __dlpack__(self, **options):
        class Owner(np.ndarray):
            pass

        copy = X.numpy().copy().view(Owner)
        self.alive += 1
        watched = self

        class Token:
            def __del__(self):
                watched.alive -= 1

        copy.token = Token()
        return copy.__dlpack__(**options)


def test_memory_of_a_capsule_lives_until_the_call_returns():
    source = Watched()
    assert torch.equal(check(x=source), WANT)
    gc.collect()
    assert source.alive == 0
    with pytest.raises(ValueError, match="^out: "):
        check(x=source, out=torch.empty(2, 2))
    gc.collect()
    assert source.alive == 0


def test_no_reference_is_kept():
    x, weight, out = X.numpy().copy(), WEIGHT.clone(), torch.empty(3, 4)
    before = [sys.getrefcount(t) for t in (x, weight, out)]
    for _ in range(10):
        check(x, weight, out)
        with pytest.raises(ValueError):
            check(x, weight, out[:2])
    gc.collect()
    assert [sys.getrefcount(t) for t in (x, weight, out)] == before


# ---- names in errors -----------------------------------------------------------------------------


def test_element_of_a_list_is_named():
    cache = torch.zeros(1, 4, 1, 64)
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"k_caches\[1\]: expected a tensor, got int"):
        _C.compact_kv(
            k_caches=[cache, 3],
            v_caches=[cache, cache],
            k_scales=[],
            v_scales=[],
            page_table=None,
            path=torch.zeros(1, 2, dtype=torch.int32),
            num_accepted=one,
            seq_lens=one,
            max_nodes=2,
        )
    assert callable(compact_kv)


def test_wrong_arguments_are_listed_by_type_not_by_content():
    with pytest.raises(TypeError) as caught:
        _C.rms_norm(torch.full((3, 4), 12345.0), WEIGHT, "small", torch.empty(3, 4))
    words = str(caught.value)
    assert words.startswith("rms_norm: expected (")
    assert words.endswith("got (Tensor, Tensor, str, Tensor)")
    assert "12345" not in words


SAMPLES = {"int": 1, "float": 1.0, "bool": False, "str": "path", "object": None}


def native_functions() -> dict[str, list[tuple[str, str]]]:
    """Name -> (argument, type) of every native function that takes tensors, from its signature."""
    found = {}
    for name, function in vars(_C).items():
        if not callable(function) or isinstance(function, type):
            continue
        signature = (function.__doc__ or "").splitlines()[0]
        arguments = re.match(r"\w+\((.*)\) ->", signature)
        parts = re.findall(r"([\w.]+): ((?:[^,\[]|\[[^\]]*\])+)", arguments.group(1)) if arguments else []
        if any("Tensor" in kind for _, kind in parts):
            found[name] = [(argument, kind.split(" = ")[0].strip()) for argument, kind in parts]
    return found


FUNCTIONS = native_functions()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_tensor_argument_of_every_op_is_named(function):
    arguments = FUNCTIONS[function]
    plain = {}
    for argument, kind in arguments:
        if kind.startswith("Tensor"):
            plain[argument] = None
        elif "Sequence[Tensor" in kind:
            plain[argument] = []
        else:
            plain[argument] = sample(kind)
    checked = 0
    for argument, kind in arguments:
        if "Tensor" not in kind:
            continue
        bad = [object()] if "Sequence" in kind else object()
        name = f"{argument}\\[0\\]" if "Sequence" in kind else argument
        with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got object$"):
            getattr(_C, function)(**{**plain, argument: bad})
        checked += 1
    assert checked > 0


def sample(kind: str):
    """A value that converts to the native type `kind`."""
    if "Sequence[" in kind:
        return []
    for name, value in SAMPLES.items():
        if re.search(rf"\b{name}\b|Supports{name.capitalize()}", kind):
            return value
    if kind.endswith(".PackedWeight"):
        return pack_weight(torch.zeros(4, 4))
    if kind.endswith(".TreeShape"):
        return TreeShape.chain(2)
    assert kind.endswith(".DraftHead"), f"no sample of the type {kind}"
    from draft_rig import Rig

    return Rig.random(("eagle3", {}), torch.float32).head


def test_the_walk_sees_the_ops():
    assert {"linear", "rms_norm", "lm_head_topk", "build_tree", "expand_tree", "retrieve_indices"} <= set(
        FUNCTIONS
    )
    assert {"append_kv", "tree_attention", "sample_tokens", "verify", "compact_kv", "draft"} <= set(FUNCTIONS)
