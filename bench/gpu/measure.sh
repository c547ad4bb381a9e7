#!/usr/bin/env bash
# bash bench/gpu/measure.sh OUT SECONDS [PARTS]: speed and memory on this GPU, after check.sh; without it the kernels are checked first.
OUT=${1:?a folder} STOP=$((SECONDS + ${2:-520}))
source "$(dirname "$0")/prepare.sh"
first=
[ -f "$RELATTN_STATE/wrong.txt" ] || first=correctness,
run "$first${3:-speed,host,layers,flex,graphs,memory,before,tune}"
