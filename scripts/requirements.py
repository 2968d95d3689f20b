"""Print what pyproject.toml asks for: the dependencies, the extras, and the groups named.

With `--only` just the groups, for what builds a wheel and runs nothing.

Not the extra `tensorflow`: the extra `dev` has the build of it that fits beside the tests' torch.

`pip install .` would build the project to learn this; a stamp for dependencies must not depend on
the sources.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
only, groups = "--only" in sys.argv, [name for name in sys.argv[1:] if name != "--only"]
lines = [] if only else list(project["project"]["dependencies"])
for name, extra in project["project"].get("optional-dependencies", {}).items():
    if name != "tensorflow" and not only:
        lines += extra
for group in groups:
    lines += project["dependency-groups"][group]
lines.append("uv")
print("\n".join(lines))
