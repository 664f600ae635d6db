// run/help.h -- the sizes that --model knows by name, and what --help says above the flags.
#pragma once

#include "config.h"
#include "program.h"

inline const std::vector<ModelSize> gpt2_sizes = {      // name, L, NH, C
    {"tiny", 6, 8, 512}, {"small", 12, 12, 768}, {"medium", 24, 16, 1024}, {"large", 36, 20, 1280},
    {"xl", 48, 25, 1600}, {"d6", 6, 6, 384}, {"d12", 12, 12, 768}, {"d24", 24, 16, 1024}, {"d36", 36, 20, 1280},
    {"d48", 48, 25, 1600}, {"d60", 60, 30, 1920}, {"d72", 72, 30, 2880}, {"d84", 84, 36, 3456}};

inline const std::vector<ModelSize> bert_sizes = {      // name, L, NH, C
    {"tiny", 2, 2, 128}, {"mini", 4, 4, 256}, {"small", 4, 8, 512}, {"base", 12, 12, 768}};

inline std::string gpt2_help() {
    return "Trains, evaluates and samples a GPT-2 with any of these positional encodings (--pos):\n" + position_help() +
           "\n" + sizes_help(gpt2_sizes) + "\n"
           "Train on your own text, and save every 500 steps; --resume 1 continues an interrupted run:\n"
           "  ./train_gpt2 --train_files a.txt --val_files b.txt --model 4,4,128 --T 256 --steps 2000 --lr 1e-3 \\\n"
           "               --warmup 100 --final_lr 0.1 --pos cable --out run/cable --checkpoint_every 500\n"
           "Measure how far it extrapolates beyond the length it was trained at:\n"
           "  ./train_gpt2 --load run/cable/step_00002000 --val_files b.txt --eval_lengths 256,512,1024,2048\n"
           "Write text:\n"
           "  ./train_gpt2 --load run/cable/step_00002000 --generate \"Once upon a time\" --tokens 200 --top_k 40\n";
}

inline std::string bert_help() {
    return "Trains a BERT with any of these positional encodings (--pos), and evaluates it:\n" + position_help() +
           "\n" + sizes_help(bert_sizes) + "\n"
           "Train on your own text, and save every 500 steps; --resume 1 continues an interrupted run:\n"
           "  ./train_bert --train_files a.txt --val_files b.txt --model 2,4,64 --T 128 --B 16 --steps 1000 \\\n"
           "               --lr 2e-3 --warmup 100 --final_lr 0.1 --pos cable --out run/bert --checkpoint_every 500\n"
           "Measure how far it extrapolates beyond the length it was trained at:\n"
           "  ./train_bert --load run/bert/step_00001000 --val_files b.txt --eval_lengths 128,256,512\n"
           "Fill in the blanks:\n"
           "  ./train_bert --load run/bert/step_00001000 --predict \"the [MASK]at sat on the mat\"\n";
}

inline int print_help(const char* program, const std::string& description, Program flags) {
    printf("%s\n%s\n", help_text(program, description, flags).c_str(), version_text().c_str());
    return 0;
}
