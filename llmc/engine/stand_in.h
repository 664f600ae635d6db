// stand_in.h -- what users have in place of a file: a Git LFS pointer, a web page, weights as PyTorch saves them, an
// archive, a model's name on the Hugging Face hub. Every reader asks here first, so that the error says what is there,
// and what gets the file itself.
#pragma once

#include "../base/common.h"

// Dies if the file begins like one of these. text: it may hold any text, so that only a pointer is wrong
inline void refuse_stand_in(const std::string& path, bool text = false) {
    const File file(path);
    std::string head((size_t)std::min(file.size, (uint64_t)512), '\0');
    file.read(&head[0], head.size(), 0);
    const char *pointer = "a Git LFS pointer; git lfs pull, or on the hub hf download OWNER/NAME, gets the file",
               *page = "the page of a server; curl -L with the address of the file gets it (on the hub /resolve/, not "
                       "/blob/), or hf download OWNER/NAME", *packed = "a compressed file; decompress it",
               *pickle = "a pickle, as torch.save() writes weights; docs/checkpoints.md (Weights of PyTorch) has the "
                         "lines that convert it";
    const std::pair<const char*, const char*> known[] = {       // in lower case
        {"version https://git-lfs", pointer}, {"<!doctype", page}, {"<html", page}, {"<head", page}, {"<?xml", page},
        {"{\"error\":\"", page}, {"entry not found", page}, {"invalid username", page}, {"found. redirect", page},
        {"temporary redirect", page}, {"pk\x03\x04", "a zip archive; unzip it"}, {"\x1f\x8b\x08", packed},
        {"\x28\xb5\x2f\xfd", packed}, {"\xfd" "7zxz", packed}, {"bzh91ay&sy", packed}, {"\x93numpy", "a NumPy array"},
        {"par1\x15", "a Parquet table; data/text.py makes shards of it"}, {"\x89hdf", "an HDF5 file; use safetensors"},
        {"gguf\x03", "a GGUF of llama.cpp; use the safetensors that it was made from"}};
    std::string start = head.substr(std::min(head.find_first_not_of(" \t\r\n\xEF\xBB\xBF"), head.size()));
    for (char& c : start) { c = (char)(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c); }
    const char* found = nullptr;
    for (const auto& [begin, what] : known) { found = starts_with(start, begin) ? what : found; }
    const auto holds = [&](const char* name) { return head.find(name) != std::string::npos; };
    const bool zip = starts_with(head, "PK\x03\x04");           // the name of its first file follows
    if (zip && holds(".npy")) { found = "NumPy arrays (.npz)"; }
    // before PyTorch 1.6 without a zip; a safetensors file, which begins with the length of its header, may look alike
    const bool old = head.size() > 8 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5 &&
                     head.compare(4, 4, std::string(4, '\0')) != 0;
    if (old || (zip && (holds("data.pkl") || holds(".format_version")))) { found = pickle; }
    check(found == nullptr || (text && found != pointer), "%s: expected the file itself, got %s", path.c_str(), found);
}

// Dies if the path of a model or a tokenizer is a name on the hub, or the root of the hub's cache of a model.
inline void refuse_hub_name(const std::string& path) {
    const std::string inside = ends_with(path, "/snapshots") ? path : path + "/snapshots";
    const bool cache = !path.empty() && is_directory(inside) && !list_directory(inside).empty();
    check(!cache, "%s: expected a model, got the root of its cache; give %s/%s", path.c_str(), inside.c_str(),
          cache ? list_directory(inside).back().c_str() : "");
    const std::string hub = "https://huggingface.co/", name = path.substr(path.find(hub) == 0 ? hub.size() : 0);
    const size_t slash = name.find('/');                        // OWNER/NAME, or NAME
    bool local = path_exists(path) || name.empty() || !isalnum((unsigned char)name[0]) || slash != name.rfind('/') ||
                 name_is_taken(name.substr(0, slash));
    for (const char* end : {".safetensors", ".bin", ".json", ".txt"}) { local = local || ends_with(name, end); }
    check(local, "%s: there is no such file or directory; a model on the hub: pip install huggingface_hub; hf download "
          "%s --local-dir %s", path.c_str(), name.c_str(), name.substr(slash + 1).c_str());
}
