#!/usr/bin/env bash
# The runs of PROTOCOL.md: starts what is missing, one process per core, and goes on where it was stopped.
#
#   experiments/results/make.sh STAGE [WORKERS]     epochs | rates | knobs | runs | mixes | mixing | table2 | figures | newcomers | controls
#
# From the environment: EPOCHS, the choice of the first stage ("--local-epochs 4 --flip --crop"); METHODS limits rates,
# knobs, runs, table2 and newcomers to some; runs, table2 and controls have DATASET (cifar10, or cifar100), runs and controls have SEEDS ("0"), mixes and controls have ROUNDS. Rates are those of the configuration.
# Files go to runs/evidence; CIFAR comes from DATA_DIR, the user's cache, or is fetched. experiments/choices.py makes the tables of
# rates and knobs, experiments/full_length.py and margins.py those of the runs, experiments/mixes.py those of mixes and mixing, experiments/newcomers.py those of newcomers, and experiments/reproduce.py the paper's
# (`reproduce.py table2 --scale full --rounds 200`, `fig-… --scale full --rounds 100`, with --datasets cifar10 --only-finished --run-dir). Its
# figures also have points of the runs: mkdir -p runs/evidence/full && cp -r experiments/results/full_length/hetero* runs/evidence/full.
set -euo pipefail
cd "$(dirname "$0")/../.."
stage=${1:?stage: epochs, rates, knobs, runs, mixes, mixing, table2, figures, newcomers or controls} workers=${2:-$(nproc)}
out=runs/evidence
defaults="--fml.alpha 0.5 --fedkd.t-start 0.95 --fedproto.lambda-mse 1"
methods=${METHODS:-pfedafm fedrep fedproto fedper fd standalone lg_fedavg fedapen fml fedkd}
[ "$stage" = epochs ] || : "${EPOCHS:?the choice of the first stage}"
mkdir -p $out

# A sweep over one setting, METHOD FOLDER SETTING VALUES MORE…: a job for each value, in one folder.
sweep() {
  local method=$1 folder=$2 setting=$3 values=$4
  shift 4
  for value in ${values//,/ }; do
    echo "sweep.py --config hetero_cifar10 --rounds 60 --validation-fraction 0.1 --devices 1 --checkpoint-every 20" \
      "--drop-checkpoints ${DATA_DIR:+--data-dir $DATA_DIR} --method $method $* --grid $setting=$value --run-dir $out/$stage/$folder"
  done
}

# One run, METHOD SEED FOLDER MORE…
run() {
  local method=$1 seed=$2 folder=$3
  shift 3
  echo "run.py --config $config --rounds $rounds $EPOCHS --eval-every 20 --devices 1 --checkpoint-every 25" \
    "--method $method --seed $seed ${DATA_DIR:+--data-dir $DATA_DIR} $* --run-dir $out/full/$folder/$method-seed$seed"
}

# Points of the paper's figures, in the folders where reproduce.py looks for them.
classes() { for method in pfedafm fedrep fedproto; do run $method 0 "$config-n100-classes$1" --classes-per-client "$1"; done; }
gamma() { for method in pfedafm fedrep fedproto; do run $method 0 "$config-n100-gamma$1" --partition dirichlet --gamma "$1"; done; }
mix_rate() { run pfedafm "$1" "$config-n100-mixlr$2" --pfedafm.mix-learning-rate "$2"; }

jobs_of() {
  local config=hetero_${DATASET:-cifar10} rounds=500
  [ "$config" = hetero_cifar10 ] || rounds=200
  case $stage in
  epochs) # this stage and the next have the knobs' defaults, not the configuration's
    for method in pfedafm fedproto fedrep; do
      sweep "$method" "$method-augmented" local_epochs 1,4 --flip --crop $defaults
      sweep "$method" "$method-plain" local_epochs 1,4 $defaults
    done ;;
  rates)
    for method in $methods; do
      sweep "$method" "$method" learning_rate 0.005,0.01,0.02,0.04,0.08 "$EPOCHS" $defaults
    done ;;
  knobs) # beside the default, which the stage before has run
    for method in $methods; do
      case $method in
      pfedafm) knob="pfedafm.mix_learning_rate 0.1,10" ;;
      fedproto) knob="fedproto.lambda_mse 0.1,10" ;;
      fd) knob="fd.gamma 0.1,10" ;;
      fml) knob="fml.alpha 0.25,0.75" ;;
      fedkd) knob="fedkd.t_start 0.9,0.98" ;;
      fedapen) knob="fedapen.lambda_start 0.25,0.75" ;;
      fedrep) knob="fedrep.head_epochs 2,5" ;;
      *) knob="weight_decay 0.0001,0.01" ;;
      esac
      sweep "$method" "$method" $knob "$EPOCHS"
    done ;;
  runs)
    for seed in ${SEEDS:-0}; do
      for method in $methods; do run "$method" "$seed" "$config-n100"; done
    done ;;
  mixes)
    rounds=${ROUNDS:-200}
    for mix in 0 0.5 1; do run pfedafm 0 "$config-n100-mix$mix" --pfedafm.mix-fixed "$mix"; done
    run pfedafm 0 "$config-n100-start0.5" --pfedafm.mix-start 0.5 ;;
  mixing) # what decides whether mixing helps: images of a class, augmentation
    for mix in "" 0; do
      run pfedafm 0 "$config-n500${mix:+-mix$mix}" --num-clients 500 --participation 0.02 ${mix:+--pfedafm.mix-fixed $mix}
    done
    rounds=100
    for mix in "" 0; do
      run pfedafm 0 "$config-n100-plain${mix:+-mix$mix}" --no-flip --no-crop ${mix:+--pfedafm.mix-fixed $mix}
    done ;;
  table2)
    config=homo_${DATASET:-cifar10} rounds=200
    for method in $methods; do run "$method" 0 "$config-n100"; done ;;
  figures) # of CIFAR-10, the ends of each axis first
    rounds=100
    run pfedafm 0 "$config-n100-end_to_end" --pfedafm.training end_to_end
    classes 10
    run pfedafm 0 "$config-n100-classes10-mix0" --classes-per-client 10 --pfedafm.mix-fixed 0 # for mixes.py
    gamma 0.1; gamma 0.5; mix_rate 0 0.001; mix_rate 0 0.1
    classes 6; gamma 0.3; mix_rate 0 0.01; classes 4; classes 8; gamma 0.2; gamma 0.4
    for seed in 1 2; do mix_rate $seed 0.001; mix_rate $seed 0.1; mix_rate $seed 0.01; done ;;
  controls) # what could refute pFedAFM; CLASSES: classes per client; SERVER: "" for plain averages, or momentum
    rounds=${ROUNDS:-$rounds}
    for seed in ${SEEDS:-0}; do
      for method in ${METHODS:-fedavg_priors fedavg ditto fedavg_finetuned}; do
        run "$method" "$seed" "$config-n100${CLASSES:+-classes$CLASSES-t$rounds}${SERVER:+-$SERVER}" \
          ${CLASSES:+--classes-per-client $CLASSES} \
          ${SERVER:+--server-optimizer $SERVER --server-momentum 0.5 --server-mean 0.8}
      done
    done ;;
  newcomers) # ten clients are kept out; Standalone's receive nothing, whatever its length
    for method in $methods; do
      rounds=$([ "$method" = standalone ] && echo 1 || echo 100)
      run "$method" 0 "$config-n90" --num-clients 90 --held-out-clients 10
    done ;;
  *) echo "stage $stage is not known" >&2; exit 2 ;;
  esac
}

# PJRT_NPROC keeps XLA to one thread in each process.
jobs_of | PJRT_NPROC=1 xargs -P "$workers" -I{} bash -c \
  'name=$(sed "s/.*--run-dir //" <<<"{}"); mkdir -p "$(dirname "$name")"; python experiments/{} >>"$name.log" 2>&1'
