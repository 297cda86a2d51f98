#!/bin/sh
# Make the drafters of a model: prompts, the model's answers to them, training.
#
#   sh training/make.sh OUT [MODEL] [--exclude FILE ...]
#
# MODEL: smollm2-135m (eagle3, mtp and medusa; the default) or qwen2.5-coder-1.5b (eagle3). --exclude: files of prompts that
# the drafters will be measured on, none of which may be trained on. OUT/<method>/ then holds each drafter, ready for
# src/outrider/heads/shipped/MODEL. Interrupted, it goes on.
set -eu
out=${1:?usage: sh training/make.sh OUT [MODEL] [--exclude FILE ...]}
shift
model=smollm2-135m
case ${1:-} in
    '' | --exclude) ;;
    *)
        model=$1
        shift
        ;;
esac
case $model in
    smollm2-135m) prompts=3648 ;;
    qwen2.5-coder-1.5b) prompts=1480 ;;
    *)
        echo "there is no recipe for $model; see 'outrider train --help'" >&2
        exit 2
        ;;
esac
here=$(dirname "$0")
mkdir -p "$out"
[ -e "$out/prompts.jsonl" ] || python "$here/prompts.py" --count "$prompts" --seed 1 --out "$out/prompts.jsonl" "$@"
train() {
    method=$1
    shift
    outrider train "$model" --method "$method" --out "$out/$method" --max-length 1024 --learn-questions "$@"
}
if [ "$model" = smollm2-135m ]; then
    train eagle3 --data "$out/prompts.jsonl" --answer-tokens 320 --draft-vocab 6144 --intermediate-size 1024 --epochs 3
    # The answers are written once; the others learn from the same.
    train mtp --data "$out/eagle3/answers.jsonl" --draft-vocab 6144
    train medusa --data "$out/eagle3/answers.jsonl" --draft-vocab 6144 --num-heads 4
else
    # As large as fits into 60 MB.
    train eagle3 --data "$out/prompts.jsonl" --answer-tokens 256 --draft-vocab 6000 --intermediate-size 1024 --epochs 3
fi
