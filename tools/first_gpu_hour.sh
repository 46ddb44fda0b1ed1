#!/bin/sh
# The first hour on real GPUs: what to run, in which order, what to look at. Results go to first_gpu_hour/, to attach to an issue.
#
#     sh tools/first_gpu_hour.sh             with the python of an environment that has lightning-3d and a CUDA build of torch
#     PYTHON=.venv/bin/python ONLY="doctor selftest" sh tools/first_gpu_hour.sh
#
# A step that fails does not end the others. The table at the end has the exit code of each.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
OUT=first_gpu_hour
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
if [ "$GPUS" -eq 0 ]; then
    echo "nvidia-smi lists no GPU. Run this on a machine with GPUs." >&2
    exit 2
fi
mkdir -p "$OUT"
: >"$OUT/summary.txt"

# step NAME MINUTES "what to look at" COMMAND...
step() {
    name=$1 minutes=$2 look=$3
    shift 3
    case " ${ONLY:-$name} " in *" $name "*) ;; *) return ;; esac
    printf '\n== %s (at most %s min)\n   look at: %s\n   %s\n' "$name" "$minutes" "$look" "$*"
    started=$(date +%s)
    timeout $((minutes * 60)) "$@" >"$OUT/$name.txt" 2>&1
    code=$?
    printf '%-14s exit code %-4s %5s s   %s\n' "$name" "$code" "$(($(date +%s) - started))" "$OUT/$name.txt" | tee -a "$OUT/summary.txt"
}

# Two GPUs can show every axis alone, four every pair, eight all three.
case $GPUS in
    1) LAYOUT=dp1 DEVICES=0 ;;
    2 | 3) LAYOUT=tp2 DEVICES=0,1 ;;
    4 | 5 | 6 | 7) LAYOUT=tp2_pp2 DEVICES=0,1,2,3 ;;
    *) LAYOUT=tp2_pp2_dp2 DEVICES=0,1,2,3,4,5,6,7 ;;
esac
export CUDA_VISIBLE_DEVICES="$DEVICES"
RUN="parallelism=$LAYOUT precision=fp32"

step machine 1 "driver, clocks, other processes on the GPUs" nvidia-smi -L
step doctor 5 "verdicts 'wrong': repair them before anything else" \
    "$PYTHON" -m lightning_3d doctor "parallelism=$LAYOUT" --json "$OUT/doctor.json"
step selftest 8 "cells that are WRONG or FAILED; selftest.json has the details" \
    "$PYTHON" -m lightning_3d selftest --minutes 6 --output "$OUT/selftest.json"
if [ "$GPUS" -eq 1 ]; then
    step shared 10 "the same, of 4 ranks that share the GPU: NCCL through sockets" \
        "$PYTHON" -m lightning_3d selftest --ranks 4 --minutes 8 --output "$OUT/shared.json"
fi
step tests 20 "failures; one GPU is enough, ranks share it" "$PYTHON" -m pytest tests/gpu -m gpu
# shellcheck disable=SC2086  # RUN is several words
{
    step train 5 "no warning, a falling loss" "$PYTHON" train.py $RUN trainer.max_steps=20 "hydra.run.dir=$OUT/train"
    step train_cpu 8 "the losses of 'train': the comparison at the end" \
        "$PYTHON" train.py cluster=local_cpu $RUN trainer.max_steps=20 "hydra.run.dir=$OUT/train_cpu"
    step resume 3 "goes on at step 21" \
        "$PYTHON" train.py $RUN trainer.max_steps=30 "hydra.run.dir=$OUT/train" trainer.auto_resume=true
}
step profile 5 "bandwidths beside the datasheet" \
    "$PYTHON" -m lightning_3d profile model=llama3_8b "parallelism=$LAYOUT" --out "$OUT/profile.json"
step single 12 "MFU, and the ratio to a plain loop" "$PYTHON" benchmarks/gpu_single.py --output "$OUT/gpu_single.md"
if [ "$GPUS" -ge 8 ]; then
    step multi 15 "tokens/s and memory beside torchtitan's" "$PYTHON" benchmarks/gpu_multi.py --output "$OUT/gpu_multi.md"
fi

printf '\n'
cat "$OUT/summary.txt"
if [ -f "$OUT/train/metrics.csv" ] && [ -f "$OUT/train_cpu/metrics.csv" ]; then
    printf '\nstep, loss on GPUs, loss on the CPU:\n'
    "$PYTHON" - "$OUT" <<'END'
import csv, sys
gpu, cpu = (list(csv.DictReader(open(f"{sys.argv[1]}/{run}/metrics.csv"))) for run in ("train", "train_cpu"))
for one, other in zip(gpu, cpu):
    print(one["step"], one["loss"], other["loss"])
END
fi
printf '\nReport: the folder %s, and what surprised you.\n' "$OUT"
