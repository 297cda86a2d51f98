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
write() { # FILE COUNT SEED [--exclude FILE ...]
    file=$1 count=$2 seed=$3
    shift 3
    [ -e "$out/$file" ] || python "$here/prompts.py" --count "$count" --seed "$seed" --out "$out/$file" "$@"
}
train() { # METHOD FOLDER [OPTIONS]
    method=$1 folder=$2
    shift 2
    outrider train "$model" --method "$method" --out "$out/$folder" --max-length 1024 --learn-questions "$@"
}
write prompts.jsonl "$prompts" 1 "$@"
if [ "$model" = smollm2-135m ]; then
    write more.jsonl 5600 5 "$@"
    train eagle3 first --data "$out/prompts.jsonl" --answer-tokens 320 --draft-vocab 6144 --intermediate-size 1024 --epochs 3
    # The answers are written once; the others learn from the same.
    train mtp mtp --data "$out/first/answers.jsonl" --draft-vocab 6144
    train medusa medusa --data "$out/first/answers.jsonl" --draft-vocab 6144 --num-heads 4
    # Three passes have learned the answers by heart; others are worth more than a fourth.
    train eagle3 eagle3 --init-from "$out/first" --data "$out/more.jsonl" --answer-tokens 224 --epochs 2 \
        --learning-rate 0.005 --weight-decay 0.1
else
    # As large as fits into 60 MB.
    train eagle3 eagle3 --data "$out/prompts.jsonl" --answer-tokens 256 --draft-vocab 6000 --intermediate-size 1024 --epochs 3
fi
