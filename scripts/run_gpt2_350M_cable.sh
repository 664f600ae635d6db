#!/usr/bin/env bash
# run_gpt2_350M_cable.sh -- the main model of the paper: GPT-2 350M with CABLE on 10 billion tokens of FineWeb-Edu, on 8
# GPUs, then its perplexity at up to 15 times the trained length. It is run_gpt2_124M.sh with other values, and takes
# the same variables (--help lists them).
#
#   scripts/run_gpt2_350M_cable.sh [FLAGS]
#
# What it costs, a PREDICTION: 19,073 steps of 524,288 tokens are 10.0G tokens; 2.27 GFLOP a token make 2.3e19 FLOP,
# or 31.6 GPU hours if a GPU sustains 200 TFLOP/s: 4.0 hours on 8. Validation and HellaSwag are not counted.
# What the paper has (Table 1): perplexity 17.00 at 512 tokens, 16.52 at 1,024, 15.97 at 2,048, 15.34 at 4,096, 15.41
# at 8,192 and at 15,360. Nothing of this has run on a GPU yet.
set -euo pipefail
export MODEL=${MODEL:-medium} POS=${POS:-cable} B=${B:-32} OUT=${OUT:-run/gpt2_350M_cable}
export LENGTHS=${LENGTHS:-512,1024,2048,4096,8192,15360}
exec bash "$(dirname "$0")/run_gpt2_124M.sh" "$@"
