"""`python -m gpu.run_cases cuda`: one call of every op on the device, compared with the CPU backend. Short
enough for compute-sanitizer."""

from __future__ import annotations

import sys

import torch

from gpu.op_cases import CASES


def main() -> int:
    device = sys.argv[1]
    wrong = 0
    for name, (arrays, call) in CASES.items():
        expected = arrays(1)
        given = {key: value.to(device) for key, value in expected.items()}
        call(given)
        got = {key: value.cpu() for key, value in given.items()}
        call(expected)
        differ = [key for key, value in expected.items() if not same(got[key], value)]
        print(f"{name}: {'ok' if not differ else 'differs in ' + ', '.join(differ)}", flush=True)
        wrong += bool(differ)
    return wrong


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


if __name__ == "__main__":
    sys.exit(main())
