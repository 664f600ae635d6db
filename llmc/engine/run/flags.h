// run/flags.h -- the only list of the trainers' flags. A new flag is one row; flag_parser.h derives the rest from it.
#pragma once

#include "../../base/parse.h"

// SAME: the flag decides what is computed, so a resumed run must have the value of the run that wrote the checkpoint,
// unless --allow_change names it. FREE: it decides only speed, output, or the work after training.
enum OnResume { FREE, SAME };

// Which trainers have a flag; the other one refuses it.
enum Program { GPT2_FLAG = 1, BERT_FLAG = 2, BOTH = 3 };

constexpr int MOST_WINDOW = 1 << 30;

// X(type, name, alias, default, range, on resume, help); a bool takes 0 or 1, or no value when it is a switch.
// Validation and samples are rare by default: in one pass over tiny Shakespeare, 74 steps, they take less than 5 % of
// the time.
#define OPTIONS(X, GROUP) \
    GROUP("Data", BOTH) \
    X(Text, train_files, "-i", "data/tinyshakespeare/tiny_shakespeare_train.bin", any(), SAME, \
      "training shards: a file or a quoted glob; .txt files are read as bytes") \
    X(Text, val_files, "-j", "data/tinyshakespeare/tiny_shakespeare_val.bin", any(), FREE, \
      "validation shards: a file or a quoted glob, as for --train_files") \
    X(Text, tokenizer, "", "", any(), FREE, "vocabulary file, to read and print text instead of token ids") \
    GROUP("Model", BOTH) \
    X(Text, model, "", "small", any(), SAME, "a size by name, or L,NH,C: layers, heads, channels") \
    X(Text, pos, "--layers", "cable", any(), SAME, \
      "positional encoding: NAME[:key=value,...]; A+B: both in every layer; A,A,B: the layers take turns") \
    X(Text, load, "-e", "", any(), FREE, \
      "initial weights: a checkpoint, a safetensors directory or llm.c's .bin; -e d12 means --model d12") \
    X(Text, rope_scaling, "", "none", one_of("none|pi[:s]|ntk[:s]|yarn[:s]|longrope[:FILE]"), SAME, \
      "how rope is stretched; a run's checkpoints keep it. s = new length / old length, by default from --T; FILE: " \
      "JSON with LongRoPE's factors") \
    X(double, rope_theta, "", 0, at_least(0), FREE, \
      "rope's base, in place of the checkpoint's, and kept by new checkpoints; 0 = the checkpoint's or the default") \
    X(Ints, window, "", {0}, between(0, MOST_WINDOW), SAME, \
      "a query sees its own key and the W - 1 before it (BERT: also after it); 0 = all; W,W,0: the layers take " \
      "turns. Checkpoints keep it; an evaluation may use another one") \
    X(int, sinks, "", 0, between(0, MOST_WINDOW), SAME, \
      "with --window: every query also sees the first S tokens of its sequence") \
    GROUP("Batches and steps", BOTH) \
    X(int, B, "-b", 4, minus_one_or(1), FREE, \
      "sequences in a micro-batch; -1 = the most that divide --total_batch and fit in memory") \
    X(int, T, "-t", 1024, at_least(1), SAME, "tokens in a sequence") \
    X(int64_t, total_batch, "-d", -1, minus_one_or(1), SAME, \
      "tokens in an update: a multiple of B x T x the number of ranks; -1 = exactly B x T x ranks") \
    X(int64_t, steps, "-x", -1, minus_one_or(0), SAME, "number of updates; -1 = one pass over the data") \
    X(bool, overfit, "-a", false, any(), SAME, "1 = train on one batch over and over") \
    X(int64_t, seed, "", 42, at_least(0), SAME, "seed of the initial weights, the order of samples and generation") \
    GROUP("Learning rate and AdamW", BOTH) \
    X(double, lr, "-l", 3e-4, between(0, 1e30), SAME, "peak learning rate") \
    X(Text, schedule, "-k", "cosine", one_of("cosine|linear|constant|wsd"), SAME, "course of the learning rate") \
    X(int64_t, warmup, "-u", 0, at_least(0), SAME, "steps of linear warm-up") \
    X(double, final_lr, "-q", 1.0, between(0, 1), SAME, \
      "learning rate at the end, as a fraction of the peak; 1 = it stays constant") \
    X(double, weight_decay, "-c", 0.0, at_least(0), SAME, "weight decay of matrices and embeddings") \
    X(double, beta1, "", 0.9, between(0, 0.999999), SAME, "AdamW's decay of the first moment") \
    X(double, beta2, "", 0.95, between(0, 0.999999), SAME, "AdamW's decay of the second moment") \
    X(double, eps, "", 1e-8, at_least(1e-30), SAME, "AdamW's epsilon") \
    X(double, clip, "", 1.0, at_least(0), SAME, "largest norm of the gradient; 0 = no clipping") \
    X(double, skip_loss_z, "-sl", 0.0, at_least(0), SAME, "skip updates whose loss has a higher z-score; 0 = off") \
    X(double, skip_norm_z, "-sg", 0.0, at_least(0), SAME, \
      "skip updates whose gradient norm has a higher z-score; 0 = off") \
    GROUP("Speed and memory", BOTH) \
    X(int, recompute, "-r", -1, between(-1, 2), FREE, \
      "recompute in backward: 0 nothing, 1 GELU, 2 GELU and layernorm, -1 nothing if it fits, else GELU") \
    X(int, threads, "", 0, at_least(0), FREE, "CPU threads; 0 = all that the machine and the control group allow") \
    X(Text, tile_skip, "", "default", one_of("exact|default|off"), FREE, \
      "cable and alibi: skip tiles whose weights the bias makes 0, for T >= 2048 and in generation (BERT: GPU " \
      "only); exact changes no bit") \
    X(int, ranks, "--gpus", 1, at_least(1), FREE, \
      "start this many processes on this machine (GPU build: one per GPU), which share the work; all end if one " \
      "fails. With --check: start none, and print what each would need and send") \
    X(int, collective_timeout, "", 600, at_least(1), FREE, \
      "several ranks: seconds a rank waits for another before the run ends") \
    X(int, profile, "", 0, at_least(0), FREE, \
      "print the time of each kernel of step N, which gets a little slower; 0 = off") \
    GROUP("Logs and checkpoints", BOTH) \
    X(Text, out, "-o", "", any(), FREE, "directory of logs and checkpoints; without it nothing is written") \
    X(Text, config, "", "", any(), FREE, \
      "JSON with flags, {\"flags\": {\"lr\": 1e-3, ...}}, as in scripts/paper.json; the command line's override it") \
    X(int, resume, "-y", 0, between(0, 2), FREE, \
      "1 = continue from the newest good checkpoint in --out, if any; 2 = there must be one") \
    X(int, checkpoint_every, "-n", 0, at_least(0), FREE, "save every N steps; 0 = never") \
    X(int, keep, "-nk", 0, at_least(0), FREE, "keep the last N checkpoints; 0 = all") \
    X(Names, allow_change, "", {}, any(), FREE, "flags that may differ from those of the resumed run") \
    GROUP("Validation while training", BOTH) \
    X(int, val_every, "-v", 250, at_least(0), FREE, "validate every N steps and at the end; 0 = never") \
    X(int, val_batches, "-m", 5, minus_one_or(1), FREE, "validation batches of B*T tokens; -1 = the whole split") \
    GROUP("Samples while training", GPT2_FLAG) \
    X(int, sample_every, "-s", 250, at_least(0), FREE, "print a sample every N steps and at the end; 0 = never") \
    GROUP("Evaluation, instead of training", BOTH) \
    X(Ints, eval_lengths, "", {}, at_least(1), FREE, "perplexity at these lengths") \
    X(int64_t, eval_tokens, "", 0, at_least(0), FREE, "evaluate at most this many tokens; 0 = all") \
    X(int, stride, "", 0, at_least(0), FREE, \
      "evaluate windows S apart and score the last S tokens of each; 0 = they do not overlap") \
    X(bool, curve, "", false, a_switch(), FREE, "also the loss at each position") \
    X(bool, heads, "", false, a_switch(), FREE, \
      "also where each head looks: the weight of sinks, entropy, distance, the window with 90 % of the weight") \
    GROUP("Causal language model", GPT2_FLAG) \
    X(bool, token_losses, "", false, a_switch(), FREE, \
      "with --eval_lengths: write the loss of each token into --out, for scripts/longppl.py") \
    X(bool, document_mask, "", false, any(), SAME, \
      "1 = a query sees only its own document, from the end-of-text token that begins it") \
    X(Text, vocab_softmax, "", "used", one_of("used|padded"), SAME, \
      "the softmax covers the vocabulary, or also the rows that pad it to a multiple of 128") \
    X(Text, hellaswag, "", "", any(), FREE, \
      "multiple-choice file of data/hellaswag.py: scored at each validation, or after --load") \
    X(Text, tasks, "", "", any(), FREE, \
      "test files of data/tasks.py, a quoted glob: share of the examples whose whole answer is right, per file") \
    X(Text, generate, "", "", any(), FREE, "continue this text, which may be empty") \
    X(int64_t, tokens, "-g", 64, at_least(1), FREE, "tokens to generate, in samples too") \
    X(double, temperature, "", 1.0, at_least(0), FREE, "temperature of sampling; 0 = always the likeliest token") \
    X(int, top_k, "", 0, at_least(0), FREE, "sample among the K likeliest tokens; 0 = all") \
    X(double, top_p, "", 1.0, between(1e-6, 1), FREE, \
      "sample among the likeliest tokens whose probabilities sum to this") \
    X(Text, dump_bias, "", "", any(), FREE, \
      "LAYER,HEAD[,TEXT]: write that head's bias matrix to --out; also LAYER all, HEAD all or mean, or parts: what " \
      "attention is made of, for scripts/explorer.py; no TEXT = the first --T tokens of --val_files") \
    GROUP("Masked language model", BERT_FLAG) \
    X(double, mask_share, "", 0.15, between(0.001, 0.999), SAME, "share of the tokens that are masked and predicted") \
    X(Text, predict, "", "", any(), FREE, "print the likeliest tokens for each [MASK] in this text") \
    GROUP("Contrastive fine-tuning", BERT_FLAG) \
    X(Text, pairs, "", "", any(), SAME, \
      "train on groups instead of masked tokens: shards, or .txt lines of QUERY tab PASSAGE, or tab NEGATIVE too") \
    X(double, tau, "", 0.05, at_least(1e-6), SAME, "temperature of the cosine similarities") \
    X(Text, pooling, "", "mean", one_of("mean|cls"), SAME, "embedding of a text: the mean of its tokens, or [CLS]") \
    X(Text, encode, "", "", any(), FREE, \
      "write the embeddings of these documents into --out, for scripts/retrieve.py: shards, or .txt with one per " \
      "line; they are cut to the first of --eval_lengths, or to --T tokens") \
    GROUP("Looking", BOTH) \
    X(bool, check, "", false, a_switch(), FREE, "check flags, data and memory, print the tensors, and stop") \
    X(bool, help, "-h", false, a_switch(), FREE, "print this, and the commit and precision of this program, and stop")
