#!/bin/sh
# Checks and times the Triton attention kernels on this machine's NVIDIA GPU, in under 8 minutes, then the trainer
# and the inference engine (device, TF32 on and off, compiled and not), in a few more; ONLY=attention or
# ONLY=backbone runs one of the two.
#
#   benchmarks/gpu.sh [options of benchmarks/gpu_attention.py]
#
# Needs PyTorch with CUDA and Triton in .venv, or in the python3 on PATH (or PYTHON=...); the project itself need
# not be installed, but the trainer wants pydantic, numpy and safetensors. Writes tables and JSON under
# ${OUT:-bench-out}; the status is not 0 where a check fails.
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
export PYTHONUNBUFFERED=1
status=0
if [ "${ONLY:-attention}" = attention ]; then
    "$PYTHON" benchmarks/gpu_attention.py --out "${OUT:-bench-out}" "$@" || status=$?
fi
if [ "${ONLY:-backbone}" = backbone ]; then
    "$PYTHON" benchmarks/gpu_backbone.py --out "${OUT:-bench-out}" || status=$?
fi
exit "$status"
