#!/usr/bin/env bash
# bash bench/gpu/cache.sh: compile what check.sh and measure.sh need for an H100, on a machine without a GPU, into one archive that
# prepare.sh unpacks there. Triton's keys have no paths, but its files have: the folder is the same on both machines. PYTHON needs
# the Triton and the Python version of that machine, and any torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
export TRITON_CACHE_DIR=/tmp/relattn-cache TRITON_STORE_BINARY_ONLY=1
RESULTS=$(mktemp -d)
trap 'rm -rf "$RESULTS"' EXIT
rm -rf "$TRITON_CACHE_DIR" .gpu/before
if [ -n "${BEFORE:-}" ]; then # a commit to compare with
    mkdir -p .gpu/before
    git archive "$BEFORE" triton_relattn | tar x -C .gpu/before
fi
jobs=()
for parts in repeats,correctness kinds speed,host,layers,flex,baselines,memory,graphs,before tune; do
    "${PYTHON:-python3}" -m bench.gpu --stub --results "$RESULTS/${parts%%,*}" --seconds 3600 --parts "$parts" &
    jobs+=($!)
done
failed=0
for job in "${jobs[@]}"; do
    wait "$job" || failed=1
done
[ "$failed" = 0 ]
mkdir -p .gpu
echo "$(git rev-parse --short=12 HEAD)$(git status --porcelain | sed -n "1s/.*/+/p")" >.gpu/commit # for a machine without git
tar cJf .gpu/kernels.tar.xz -C "$TRITON_CACHE_DIR" .
echo "$(find "$TRITON_CACHE_DIR" -name '*.cubin' | wc -l) kernels, $(du -h .gpu/kernels.tar.xz | cut -f1)"
