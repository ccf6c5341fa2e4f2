"""What an install would change in this environment; fails if that is more than may change.

Usage: python check.py REQUIREMENT, e.g. dist/ats_jax-0.3.0-py3-none-any.whl[colab]

Run it with the Python of Colab, or of an environment with Colab's packages (python3.12.txt and
python3.13.txt beside this file). pip resolves; nothing is installed.
"""

import importlib.metadata
import json
import subprocess
import sys

# What the colab extra is there to replace. All else that is installed stays as it is.
MAY_CHANGE = {"jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "flax"}
TOO_OLD = {"numpy": "2.0."}  # of the runtime 2026.07; jax 0.11 needs 2.1


def changes(requirement: str) -> dict[str, tuple[str | None, str]]:
  """Name -> the version here (None = not installed) and the one that pip would install."""
  command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
  report = subprocess.run([*command, requirement], check=True, stdout=subprocess.PIPE).stdout
  found = {}
  for item in json.loads(report)["install"]:
    name = item["metadata"]["name"]
    try:
      here = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      here = None
    found[name.lower().replace("_", "-")] = (here, item["metadata"]["version"])
  return found


def refused(found: dict[str, tuple[str | None, str]]) -> list[str]:
  """Names of what is installed, would change, and may not."""
  return [
    name
    for name, (here, _) in found.items()
    if here is not None
    and name not in MAY_CHANGE
    and not (name in TOO_OLD and here.startswith(TOO_OLD[name]))
  ]


def main() -> str | None:
  """Print what would change; return what is wrong with it."""
  if len(sys.argv) != 2:
    return __doc__
  found = changes(sys.argv[1])
  for name, (here, new) in sorted(found.items()):
    print(f"{name:<24} {here or 'not installed':<16} -> {new}")
  wrong = refused(found)
  return f"error: may not change: {', '.join(wrong)}" if wrong else None


if __name__ == "__main__":
  sys.exit(main())
