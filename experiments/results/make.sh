#!/usr/bin/env bash
# The runs of PROTOCOL.md: starts what is missing, one process per core, and goes on where it was stopped.
#
#   experiments/results/make.sh STAGE [WORKERS]     epochs | rates | knobs | runs
#
# From the environment, the choices of the stages before: EPOCHS ("--local-epochs 4 --flip --crop"), and for knobs
# RATE (0.02). METHODS limits knobs and runs to some; runs also has DATASET (cifar10, or cifar100) and SEEDS ("0").
# Files go to runs/evidence; CIFAR comes from the user's cache or is fetched.
set -euo pipefail
cd "$(dirname "$0")/../.."
stage=${1:?stage: epochs, rates, knobs or runs} workers=${2:-$(nproc)}
out=runs/evidence
common="--config hetero_cifar10 --rounds 60 --validation-fraction 0.1 --eval-every 60"
common="$common --devices 1 --checkpoint-every 20 --drop-checkpoints"
methods="pfedafm fedrep fedproto fedper fd standalone lg_fedavg fedapen fml fedkd"
[ "$stage" = epochs ] || : "${EPOCHS:?the choice of the first stage}"
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
      echo "$common $EPOCHS --method $method --grid learning_rate=0.005,0.01,0.02,0.04,0.08 --run-dir $out/rates/$method"
    done ;;
  knobs)
    for method in ${METHODS:-$methods}; do
      case $method in
      pfedafm) knob=pfedafm.mix_learning_rate=0.1,1,10 ;;
      fedproto) knob=fedproto.lambda_mse=0.1,1,10 ;;
      fd) knob=fd.gamma=0.1,1,10 ;;
      fml) knob=fml.alpha=0.25,0.5,0.75 ;;
      fedkd) knob=fedkd.t_start=0.9,0.95,0.98 ;;
      fedapen) knob=fedapen.lambda_start=0.25,0.5,0.75 ;;
      fedrep) knob=fedrep.head_epochs=2,5,10 ;;
      *) knob=weight_decay=0.0001,0.001,0.01 ;;
      esac
      echo "$common $EPOCHS --method $method --learning-rate ${RATE:-0.02} --grid $knob --run-dir $out/knobs/$method"
    done ;;
  runs) # without --learning-rate, the rates of the configuration: 0.005 for FML and FedAPEN, 0.01 for FedKD
    config=hetero_${DATASET:-cifar10} rounds=500
    [ $config = hetero_cifar10 ] || rounds=200
    for seed in ${SEEDS:-0}; do
      for method in ${METHODS:-$methods}; do
        echo "--config $config --rounds $rounds $EPOCHS --eval-every 20 --devices 1 --checkpoint-every 25" \
          "--method $method --seed $seed --run-dir $out/full/$config-n100/$method-seed$seed"
      done
    done ;;
  *) echo "stage $stage is not known" >&2; exit 2 ;;
  esac
}

# PJRT_NPROC keeps XLA to one thread in each process.
[ "$stage" = runs ] && export COMMAND=run || export COMMAND=sweep
jobs_of | PJRT_NPROC=1 xargs -P "$workers" -I{} bash -c \
  'name=$(sed "s/.*--run-dir //; s/ .*//" <<<"{}"); mkdir -p "$(dirname "$name")"; python experiments/$COMMAND.py {} >>"$name.log" 2>&1'
