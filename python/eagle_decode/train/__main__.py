"""`python -m eagle_decode.train --target smollm2-135m --out my_head --minutes 100`: `eagle-cuda train`."""

from __future__ import annotations

import sys

from eagle_decode.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
