#!/bin/bash
# Train a head with SLURM: answers and hidden states on PARTS nodes with vLLM, then training on one.
#   MODEL=org/name LAYERS=2,18,33,36 PROMPTS=prompts.jsonl PARTS=8 GPUS=8 recipes/cluster/slurm.sh
# Run it in a folder that all nodes share, in an environment with draftwing[train] and vllm. Run it again after a
# failure: finished parts are kept. LAYERS are vLLM's eagle_aux_hidden_state_layer_ids (docs/data.md).
set -euo pipefail
export MODEL=${MODEL:?} LAYERS=${LAYERS:?} PROMPTS=${PROMPTS:?} PARTS=${PARTS:-8} GPUS=${GPUS:-8}
RECIPES=$(cd "$(dirname "$0")" && pwd)
export RECIPES # SLURM runs a copy of node.sh from another folder
node=$RECIPES/node.sh

"$node" requests
submit() { sbatch --parsable --export=ALL --time=12:00:00 --output=%x-%j.log "$@"; }
answers=$(submit --job-name=answers --array="1-$PARTS" --gpus-per-node="$GPUS" "$node" answers)
collect=$(submit --job-name=collect --dependency="afterok:$answers" "$node" collect)
states=$(submit --job-name=states --dependency="afterok:$collect" --array="1-$PARTS" --gpus-per-node="$GPUS" "$node" states)
submit --job-name=train --dependency="afterok:$states" --gpus-per-node="$GPUS" "$node" train
