#!/usr/bin/env bash
# bash bench/gpu/check.sh OUT SECONDS [PARTS]: are the kernels right on this GPU? Files in OUT, a summary at the end. measure.sh does
# not time what is wrong.
OUT=${1:?a folder} STOP=$((SECONDS + ${2:-230}))
source "$(dirname "$0")/prepare.sh"
run "${3:-repeats,correctness,kinds}"
