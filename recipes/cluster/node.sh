#!/bin/bash
# One step of training a head on a cluster: node.sh requests|answers|collect|states|train. slurm.sh and skypilot.yaml run
# it with MODEL, LAYERS, PROMPTS, PARTS, GPUS, RECIPES, and PART (from 1), which is SLURM's number in an array of jobs.
set -euo pipefail
part=${SLURM_ARRAY_TASK_ID:-${PART:-1}}

# Run every PARTS-th request of a file with vLLM, unless that is finished: run_part FILE REPLIES [options of vLLM].
run_part() {
    local file=$1 replies=$2
    shift 2
    if [ -s "$replies" ]; then return; fi
    split --number="r/$part/$PARTS" "$file" >"$replies.requests"
    vllm run-batch -i "$replies.requests" -o "$replies.partial" --model "$MODEL" --tensor-parallel-size "$GPUS" "$@"
    mv "$replies.partial" "$replies"
}

case $1 in
requests) # one round: dialogues with several user turns need as many (docs/data.md)
    draftwing data regenerate --data "$PROMPTS" --out answers.jsonl -T 0,1 --served-model "$MODEL" --write-batch requests.jsonl
    ;;
answers)
    run_part requests.jsonl "replies-$part.jsonl"
    ;;
collect)
    options=()
    for file in replies-*.jsonl; do options+=(--read-batch "$file"); done
    draftwing data regenerate --data "$PROMPTS" --out answers.jsonl "${options[@]}"
    python "$RECIPES/dialogue_requests.py" answers.jsonl "$MODEL" >dialogues.jsonl
    ;;
states)
    mkdir -p "states/$part"
    run_part dialogues.jsonl "scored-$part.jsonl" --no-enable-chunked-prefill --no-enable-prefix-caching \
        --speculative-config "{\"method\": \"extract_hidden_states\", \"num_speculative_tokens\": 1,
            \"draft_model_config\": {\"hf_config\": {\"eagle_aux_hidden_state_layer_ids\": [$LAYERS]}}}" \
        --kv-transfer-config "{\"kv_connector\": \"ExampleHiddenStatesConnector\", \"kv_role\": \"kv_producer\",
            \"kv_connector_extra_config\": {\"shared_storage_path\": \"states/$part\"}}"
    ;;
train)
    draftwing data import-states states --from vllm -t "$MODEL" --data answers.jsonl --layer-ids "$LAYERS" --out features
    accelerate launch --num_processes "$GPUS" -m draftwing \
        train eagle3 -t "$MODEL" --cache features --ends-only --draft-vocab-size 32000 --minutes 600 --out head
    ;;
*)
    echo "expected requests, answers, collect, states or train, found $1" >&2
    exit 2
    ;;
esac
