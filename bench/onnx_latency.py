"""What an adapter costs in ONNX Runtime: exports of one backbone with each adapter and without,
measured in turns by the script that also runs on a board.

    python bench/onnx_latency.py --widths 128 256 512 1024
    python bench/onnx_latency.py --widths 512 --methods himalaya lora-qv --pairs 30 --out /tmp/onnx.json
    python bench/onnx_latency.py --widths 512 --keep exports   # folders for a board; see nbs/onnx/02_session.ipynb

Backbones are Llamas with random weights (4 layers; width 128 has the mini backbone's shape). Each
adapter has learned --tasks tasks of random rows through the hooks of a stream, as in
bench/torch_overhead.py, and is exported by export_onnx; `lora-bank-float` keeps
its vectors unpacked. The measurement is himalaya_hest/onnx/session.py in a process of its own,
which imports onnxruntime and numpy alone: rounds in which every export does the same work once, in
an order drawn anew; process time.
"""
import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from torch_overhead import LAYERS, Contestant, backbone

import himalaya_hest.onnx.session
from himalaya_hest.onnx.export import export_onnx
from himalaya_hest.workshop.measuring import circumstances

EXPORTS = {"himalaya": ("himalaya", {}),
    "lora-qv": ("lora-qv", {}), "lora-all": ("lora-all", {}), "lora-bank": ("lora-bank", {}),
    "lora-bank-float": ("lora-bank", dict(packed=False)), "reft": ("reft", {}),
    "lilac": ("lilac", {}), "bare-again": ("bare", {})}
# the bare backbone a second time: what two sessions of the same work differ by; only where it is
# asked for
CONTROL = "bare-again"
INT8 = ("bare", "himalaya", "lora-qv") # also over an int8 backbone, with --int8


def export_all(width, names, a, folder):
    "One folder an export, the bare backbone first."
    sizes, out = SimpleNamespace(device="cpu", layers=a.layers, tasks=a.tasks, train_tokens=32), []
    base = backbone(width, sizes)
    for name in ["bare", *names]:
        out.append(folder / name)
        if (folder / name / "onnx.json").exists(): continue
        method, options = EXPORTS.get(name, (name, {}))
        export_onnx(base if method == "bare" else Contestant(method, base, sizes).adapter.model,
            folder / name, int8=a.int8, **options)
    return out


def measured(folders, a, out):
    "What session.py finds, as a board would."
    command = [sys.executable, himalaya_hest.onnx.session.__file__, *map(str, folders), "--pairs",
        str(a.pairs), "--threads", *map(str, a.threads), "--tokens", *map(str, a.tokens), "--out",
        str(out)]
    if subprocess.run(command).returncode: raise SystemExit("the measurement failed")
    return json.loads(out.read_text(encoding="utf-8"))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=sorted(LAYERS))
    parser.add_argument("--methods", nargs="+", default=[n for n in EXPORTS if n != CONTROL],
        choices=list(EXPORTS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128])
    parser.add_argument("--layers", type=int, default=0, help="0: by width")
    parser.add_argument("--tasks", type=int, default=25)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--int8", action="store_true", help="over an int8 backbone")
    parser.add_argument("--keep", type=Path,
        help="folder of the exports, which stay; those that it has are not made again")
    parser.add_argument("--out", type=Path, default=Path("records/bench/onnx_latency.json"))
    a = parser.parse_args()
    names = [n for n in a.methods if not a.int8 or n in INT8]
    found = json.loads(a.out.read_text(encoding="utf-8")) if a.out.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        for width in a.widths:
            start = time.perf_counter()
            folder = ((a.keep or Path(temporary))
                / f"{width}{f'x{a.layers}' * (a.layers > 0)}{'-int8' * a.int8}")
            folders = export_all(width, names, a, folder)
            print(
                f"width {width}: {len(folders)} exports in " f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
            entry = measured(folders, a, Path(temporary) / "found.json")
            command = (
                f"python bench/onnx_latency.py --widths {width} --tokens "
                f"{' '.join(map(str, a.tokens))} --pairs {a.pairs}"
                + f" --layers {a.layers}" * (a.layers > 0)
                + " --int8" * a.int8
                + f" --methods {CONTROL} --out {a.out}" * (names == [CONTROL])
            )
            found[folder.name] = (
                dict(width=width, layers=a.layers or LAYERS[width], int8=a.int8, tasks=a.tasks,
                    circumstances=circumstances(command, "cpu")) | entry)
            a.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__": main()
