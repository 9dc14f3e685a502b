#!/bin/sh
# Checks and times the Triton attention kernels on this machine's NVIDIA GPU, in under 8 minutes.
#
#   benchmarks/gpu.sh [options of benchmarks/gpu_attention.py]
#
# Needs PyTorch with CUDA and Triton in .venv, or in the python3 on PATH (or PYTHON=...); the project itself need
# not be installed. Writes a table and JSON under ${OUT:-bench-out}.
set -eu
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "gpu.sh: no NVIDIA GPU that $PYTHON's PyTorch can use; this benchmark needs one" >&2
    exit 2
fi

shim=$(mktemp -d)
trap 'rm -rf "$shim"' EXIT
if ! "$PYTHON" -c 'import ernie5.kernels' 2>/dev/null; then
    # The folders as the installed namespace package would show them.
    mkdir "$shim/ernie5"
    for folder in protocol kernels corpora tokenizers backbone services; do
        ln -s "$PWD/$folder" "$shim/ernie5/$folder"
    done
    PYTHONPATH="$shim${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONPATH
fi
PYTHONUNBUFFERED=1 "$PYTHON" benchmarks/gpu_attention.py --out "${OUT:-bench-out}" "$@"
