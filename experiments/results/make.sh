#!/usr/bin/env bash
# The runs of PROTOCOL.md: starts what is missing, one process a core, and goes on where it was stopped.
#
#   experiments/results/make.sh STAGE [WORKERS]     epochs | rates | knobs | runs
#
# EPOCHS ("--local-epochs 4 --flip --crop") and, for knobs, the rates in rates.txt are the choices of the
# stages before. Files go to runs/evidence; CIFAR comes from the user's cache or is fetched.
set -euo pipefail
cd "$(dirname "$0")/../.."
stage=${1:?stage: epochs, rates, knobs or runs} workers=${2:-$(nproc)}
out=runs/evidence
common="--config hetero_cifar10 --rounds 60 --validation-fraction 0.1 --eval-every 60"
common="$common --devices 1 --checkpoint-every 20 --drop-checkpoints"
methods="pfedafm fedrep fedproto fedper fd standalone lg_fedavg fedapen fml fedkd"
mkdir -p $out

jobs_of() {
  case $stage in
  epochs)
    for method in pfedafm fedproto fedrep; do
      echo "$common --method $method --flip --crop --grid local_epochs=1,4 --run-dir $out/epochs/$method-augmented"
      echo "$common --method $method --grid local_epochs=1,4 --run-dir $out/epochs/$method-plain"
    done ;;
  rates)
    for method in $methods; do
      echo "$common ${EPOCHS:?the choice of the first stage} --method $method" \
        "--grid learning_rate=0.005,0.01,0.02,0.04,0.08 --run-dir $out/rates/$method"
    done ;;
  knobs)
    while read -r method rate knob values; do
      echo "$common ${EPOCHS:?the choice of the first stage} --method $method --learning-rate $rate" \
        "--grid $knob=$values --run-dir $out/knobs/$method"
    done <experiments/results/rates.txt ;;
  runs) # without --learning-rate, the rates of the configuration: 0.005 for FML and FedAPEN, 0.01 for FedKD
    for method in ${METHODS:-$methods}; do
      echo "--config hetero_cifar10 --rounds 500 ${EPOCHS:?the choice of the first stage}" \
        "--eval-every 20 --devices 1 --checkpoint-every 25 --method $method --run-dir $out/full/hetero_cifar10-n100/$method-seed0"
    done ;;
  *) echo "stage $stage is not known" >&2; exit 2 ;;
  esac
}

# One core a process: PJRT_NPROC keeps XLA to one thread.
[ "$stage" = runs ] && export COMMAND=run || export COMMAND=sweep
jobs_of | PJRT_NPROC=1 xargs -P "$workers" -I{} bash -c \
  'name=$(sed "s/.*--run-dir //; s/ .*//" <<<"{}"); mkdir -p "$(dirname "$name")"; python experiments/$COMMAND.py {} >>"$name.log" 2>&1'
