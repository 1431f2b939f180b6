#!/usr/bin/env bash
# Brings the wheels that a machine without a network needs to run check.py, besides what machine.txt says it has:
#   bash test/gpu/wheels.sh DIR [PYTHON]      (PYTHON of that machine, 3.12 by default)
# and there, in the root of this repository:
#   pip install --no-index --no-deps DIR/*.whl && python test/gpu/check.py --budget-s 420 --out OUT
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
python=${2:-3.12}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -f "$out"/*.whl

# The only dependency without a wheel; it is pure Python.
pip wheel -q --no-deps -w "$out" antlr4-python3-runtime==4.9.3

# What is there already is an empty package to pip's resolver, of a version that no index has.
python3 - "$here" "$work" > "$work/wanted.txt" <<'PY'
import pathlib, sys, tomllib, zipfile

here, work = map(pathlib.Path, sys.argv[1:])
(work / "have").mkdir()
lines = (here / "machine.txt").read_text().splitlines()
pins = [line for line in lines if line and not line.startswith("#")]
for pin in pins:
    name, version = pin.split("==")
    stem = f"{name.replace('-', '_')}-{version}+here"
    with zipfile.ZipFile(work / "have" / f"{stem}-py3-none-any.whl", "w") as wheel:
        about = f"{stem}.dist-info"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}+here\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
(work / "pins.txt").write_text("".join(f"{pin}+here\n" for pin in pins))
project = tomllib.loads((here.parents[1] / "pyproject.toml").read_text())["project"]
# The other sides of the comparisons; TorchRL's LLM modules import requests.
print(*project["dependencies"], "trl==1.16.0", "datasets>=4", "requests", sep="\n")
PY
pip download -q --dest "$work/all" --only-binary=:all: --implementation cp --python-version "$python" \
    --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform linux_x86_64 \
    --find-links "$work/have" --find-links "$out" --constraint "$work/pins.txt" --requirement "$work/wanted.txt"
find "$work/all" -name '*.whl' ! -name '*+here-*' ! -name 'antlr4*' -exec mv -t "$out" {} +

ls "$out"
megabytes=$(du -sm "$out" | cut -f1)
echo "$(find "$out" -name '*.whl' | wc -l) wheels, $megabytes MB"
[ "$megabytes" -le 40 ] || { echo "more than 40 MB"; exit 1; }
