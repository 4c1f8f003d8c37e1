#!/usr/bin/env bash
# Usage: MODEL=/models/Llama-2-7b-hf DATA=/data/train.jsonl recipes/llama7b_32k/run.sh [key=value ...]
set -euo pipefail
exec python -m lctrain recipe=llama7b_32k parallel=fsdp_sp \
    model.path="${MODEL:?set MODEL to the model folder}" \
    data=jsonl data.path="${DATA:?set DATA to a .jsonl file or folder}" "$@"
