#!/bin/sh
# Make the drafters of smollm2-135m: prompts, the model's answers to them, training.
#
#   sh training/make.sh OUT
#
# OUT/<method>/ then holds each drafter, ready for src/outrider/heads/shipped/smollm2-135m. Interrupted, it goes on.
set -eu
out=${1:?usage: sh training/make.sh OUT}
here=$(dirname "$0")
mkdir -p "$out"
[ -e "$out/prompts.jsonl" ] || python "$here/prompts.py" --count 3648 --seed 1 --out "$out/prompts.jsonl"
train() {
    method=$1
    shift
    outrider train smollm2-135m --method "$method" --out "$out/$method" --max-length 1024 --draft-vocab 6144 \
        --answer-tokens 320 --learn-questions "$@"
}
train eagle3 --data "$out/prompts.jsonl" --intermediate-size 1024 --epochs 3
# The answers are written once; the others learn from the same.
train mtp --data "$out/eagle3/answers.jsonl"
train medusa --data "$out/eagle3/answers.jsonl" --num-heads 4
