"""Write the pages that are made from the code, or with --check say which ones are out of date."""

import sys
from pathlib import Path

from evener import settings
from evener.bench.train import command as bench_train

BENCH_TRAIN = Path("docs/bench-train.md")
PAGES = {
    Path("docs/settings.md"): settings.markdown,
    Path("crates/engine/src/settings_generated.rs"): settings.rust,
    # Prose by hand, the options below it from the code.
    BENCH_TRAIN: lambda: bench_train.documented(BENCH_TRAIN.read_text(encoding="utf-8")),
}


def main() -> int:
    stale = []
    for path, make in PAGES.items():
        text = make()
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
    for path in stale:
        print(f"{path} is out of date: run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
