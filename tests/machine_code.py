"""What the machine code of each kernel does, and what it must show of kernels which stream weights, keys or
values (test_nvcc.py).

A listing tells from which line of the source an instruction comes (nvcc -lineinfo), so that what the products
take from shared memory is not mixed up with what the same kernel does behind them."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from tools.ptxas_report import demangle, without_parameters

# (file of the source, instruction) -> how often it stands in the kernel.
Code = Counter[tuple[str, str]]


def kernels(listing: str) -> dict[str, Code]:
    """By kernel, from the output of `nvdisasm -g -c`. What is never executed (@!PT) is left out."""
    found: dict[str, Code] = {}
    for part in re.split(r"^(?=\s*\.section\s+\.text\.)", listing, flags=re.M)[1:]:
        name = re.match(r"\s*\.section\s+\.text\.([^\s,]+)", part).group(1)
        code, file = Counter(), ""
        for line in part.splitlines():
            if source := re.search(r'//## File "(?:[^"]*/)?([^"/]+)", line', line):
                file = source.group(1)
            elif operation := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([A-Z][\w.]*)", line):
                code[file, operation.group(1)] += 1
        found[without_parameters(demangle([name])[0])] = code
    return found


def count(code: Code, pattern: str) -> int:
    return sum(n for (_, op), n in code.items() if re.fullmatch(pattern, op))


# ---- what must be there --------------------------------------------------------------------------

# A warp's part of a step: row tiles, and tiles of 8 tokens (the kernels' Stream<...>).
WARPS = {
    "linear_kernel": (1, 4),
    "linear_many_kernel": (2, 8),
    "lm_head_topk_kernel": (1, 4),
    "lm_head_topk_many_kernel": (2, 8),
    "persistent_draft_kernel": (1, 8),
}
STREAMING = {*WARPS, "common_pass_kernel", "finish_kernel"}


class Format(NamedTuple):
    pieces: int  # of 16 bytes that a lane has of a row tile's step (linear/layout.cuh)
    scales: int = 0  # of 16 bits that it reads besides


FORMATS = {
    "TensorProducts": Format(4),
    "IntegerProducts": Format(4),
    "Int8Code": Format(2),
    "Float8Code": Format(2),
    "Int4Codes": Format(1, scales=2),
}
# The persistent kernel learns the format when it runs.
ANY_FORMAT = ("TensorProducts", "Int8Code", "Float8Code", "Int4Codes")
ANY = 1 << 30

WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}  # of a load; 4 without a suffix


def width(op: str) -> int:
    return WIDTHS.get(op.rpartition(".")[2], 4)


class Expected(NamedTuple):
    """At least so many of each; of narrow loads at most so many."""

    products: int  # matrix instructions
    matrices: int = 0  # ldmatrix of four: tokens, or queries and keys
    transposed: int = 0  # the same of values
    bulk: int = 0
    weight_bytes: int = 0  # in a lane's loads of one step
    scales: int = 0  # loads of 16 bits
    narrow: dict[str, int] | None = None  # the products' loads below 16 bytes


def of_stream(name: str) -> Expected:
    """Each piece of weights once, by 16 bytes; each tile of tokens twice by ldmatrix, and two products with
    each. The first steps' bulk copies, and the loop's."""
    rows, tokens = WARPS[name.partition("<")[0]]
    if "FloatProducts" in name:  # two rows of a tile against two tokens of each, 16 bytes of all
        return Expected(0, bulk=2, weight_bytes=16 * (2 * rows + 2 * tokens))
    formats = [FORMATS[f] for f in FORMATS if f in name] or [FORMATS[f] for f in ANY_FORMAT]
    scales = rows * sum(f.scales for f in formats)
    if name.endswith(", float> >"):  # no tensor cores; weights and tokens by words of 4 and 8 bytes
        return Expected(0, bulk=2, narrow={"LDS.U16": scales, "LDS": ANY, "LDS.64": ANY})
    return Expected(
        products=4 * rows * tokens * len(formats),
        matrices=2 * tokens * len(formats),
        bulk=2,
        weight_bytes=16 * rows * sum(f.pieces for f in formats),
        scales=scales,
        narrow={"LDS.U16": scales},
    )


def of_common_pass(head_dim: int, steps: int) -> Expected:
    """Of 32 positions: `steps` times 16 dimensions of the scores at a time, and all of the sums of values."""
    return Expected(4 * steps + head_dim // 4, matrices=3 * steps, transposed=head_dim // 8)


def expected(name: str) -> Expected:
    kernel = name.partition("<")[0]
    if kernel == "finish_kernel":  # rows of few keys: no matrices
        return Expected(0)
    if kernel in WARPS and kernel != "persistent_draft_kernel":
        return of_stream(name)
    head_dim = int(re.search(r"(\d+)>$", name).group(1))
    attention = of_common_pass(head_dim, 2 if "float8_t" in name else 4)
    if kernel == "common_pass_kernel":
        return attention
    stream = of_stream(name)
    return stream._replace(
        products=stream.products + attention.products,
        matrices=stream.matrices + attention.matrices,
        transposed=attention.transposed,
    )


def product(name: str) -> str:
    if "IntegerProducts" in name:
        return r"IMMA\.16832\.S8\.S8"
    return r"HMMA\.16816\.F32" if "half_t" in name else r"HMMA\.16816\.F32\.BF16"


def faults(name: str, code: Code) -> list[str]:
    """What is amiss in a kernel of STREAMING, a sentence each."""
    wants, found = expected(name), []
    allowed = wants.narrow or {}
    reads: Counter[str] = Counter()
    for (file, op), n in code.items():
        if file in ("products.cuh", "codes.cuh") and re.fullmatch(r"LD[SGL]?(\..*)?", op):
            reads[op] += n

    def at_least(wanted: int, number: int, what: str) -> None:
        if number < wanted:
            found.append(f"{name}: {number} {what}, expected {wanted}")

    at_least(wants.products, count(code, product(name)), "matrix products")
    at_least(wants.matrices, count(code, r"LDSM\.16\.M88\.4"), "ldmatrix")
    at_least(wants.transposed, count(code, r"LDSM\.16\.MT88\.4"), "transposed ldmatrix")
    at_least(wants.bulk, count(code, r"UBLKCP\b.*"), "bulk copies")
    at_least(1, count(code, r"LDGSTS\..*\.128\b.*"), "copies of 16 bytes")
    at_least(
        wants.weight_bytes,
        sum(width(op) * n for op, n in reads.items() if op != "LDS.U16"),
        "bytes of a step read by a lane",
    )
    at_least(wants.scales, count(code, r"LDS\.U16"), "reads of scales")  # of any file: nvcc mixes lines
    for op, n in sorted(reads.items()):
        if op != "LDS.128" and n > allowed.get(op, 0):
            found.append(f"{name}: the products read by {n} {op}, expected at most {allowed.get(op, 0)}")
    if narrow := count(code, r"LDGSTS\b.*") - count(code, r"LDGSTS\..*\.128\b.*"):
        found.append(f"{name}: {narrow} copies of less than 16 bytes, expected none")
    if name.startswith("common_pass_kernel") and (narrow := count(code, r"LDS\.[US](8|16)")):
        found.append(f"{name}: {narrow} loads of shared memory of less than 4 bytes, expected none")
    return found
