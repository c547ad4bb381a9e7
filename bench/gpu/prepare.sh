# Sourced by check.sh and measure.sh: where compiled kernels are, and a few words on the machine.
# RELATTN_OPTIONS: further options of bench.gpu, such as "--stub --most 2". PYTHON: the interpreter (python3).
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) && cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
export PYTHON=${PYTHON:-python3} PYTHONUNBUFFERED=1
export RELATTN_STATE=${RELATTN_STATE:-/tmp/relattn-gpu}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/relattn-cache} TRITON_STORE_BINARY_ONLY=1
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/relattn-inductor}
[ -f .gpu/commit ] && [ ! -e .git ] && export RELATTN_COMMIT=$(cat .gpu/commit)
if [ ! -d "$TRITON_CACHE_DIR" ]; then
    mkdir -p "$TRITON_CACHE_DIR"
    [ -f .gpu/kernels.tar.xz ] && tar xJf .gpu/kernels.tar.xz -C "$TRITON_CACHE_DIR"
fi
"$PYTHON" -c 'import sys, time; start = time.time(); import torch, triton; torch.cuda.is_available() and torch.ones(1).cuda()
print("python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__, f"imported in {time.time() - start:.0f} s")'
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit,clocks.sm,clocks.mem --format=csv,noheader
fi
run() { # PARTS
    # shellcheck disable=SC2086 # options are words
    "$PYTHON" -m bench.gpu --results "$OUT" --state "$RELATTN_STATE" --parts "$1" --seconds "$((STOP - SECONDS))" $RELATTN_OPTIONS
}
