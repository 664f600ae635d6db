// test_stand_in.cu -- what users have in place of a file, given to every reader of a format.
#include "test/files.h"
#include "llmc/engine/import.h"
#include "llmc/engine/data.h"
#include "llmc/engine/vocabulary.h"

namespace {

const std::string ZIP = "PK\x03\x04" + std::string(26, 'x'), ZEROS(600, '\0');
const std::pair<std::string, const char*> FILES[] = {
    {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5481\n", "a Git LFS pointer; git lfs pull"},
    {"<!DOCTYPE html><html>" + ZEROS, "page of a server; curl -L"}, {"\xEF\xBB\xBF \r\n<HTML>" + ZEROS, "page of"},
    {"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>", "page of"}, {"Entry not found", "page of"},
    {"{\"error\":\"Invalid credentials\"}", "page of"}, {"Found. Redirecting to https://cdn", "page of"},
    {ZIP + "archive/data.pkl" + ZEROS, "torch.save() writes weights; docs/checkpoints.md"},
    {ZIP + "the_name_of_a_run/.format_version" + ZEROS, "torch.save()"},
    {"\x80\x02\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19." + ZEROS, "torch.save()"},
    {"\x80\x04\x95\x80\x19" + ZEROS, "torch.save()"}, {ZIP + "wte.npy" + ZEROS, "arrays (.npz)"},
    {ZIP + "readme" + ZEROS, "a zip archive"}, {"\x93NUMPY" + ZEROS, "NumPy"},
    {"GGUF\x03" + ZEROS, "a GGUF"}, {"\x89HDF\r" + ZEROS, "HDF5"}, {"PAR1\x15" + ZEROS, "data/text.py makes shards"},
    {"\x1f\x8b\x08" + ZEROS, "compressed"}, {"\x28\xb5\x2f\xfd" + ZEROS, "compressed"},
    {"\xfd" "7zXZ" + ZEROS, "compressed"}, {"BZh91AY&SY" + ZEROS, "compressed"}};

template <class Read> void refused(const std::string& path, Read read) {
    for (const auto& [bytes, said] : FILES) {
        write_file(path, bytes);
        INFO(path << ": " << printable(bytes.substr(0, 40)));
        CHECK(throws_with([&] { read(path); }, path + ": expected the file itself, got ") == EXIT_BAD_INPUT);
        throws_with([&] { read(path); }, said);
    }
}

TEST_CASE("stand-in: every reader says what the file is", "[data][import][tokenizer]") {
    TempDir dir, nano;
    refused(dir / "a.bin", [](const std::string& p) { inspect_shard(p); });
    for (const char* name : {"model.safetensors", "ckpt.pt", "m.safetensors.index.json", "pytorch_model.bin"}) {
        refused(dir / name, [](const std::string& p) { open_weights(p, true); });
    }
    refused(nano / "ckpt.pt", [&](const std::string&) { open_weights(nano.path, true); });
    refused(dir / "config.json", [](const std::string& p) { read_json(p); });
    for (const char* name : {"vocab.txt", "vocab.json", "tokenizer.json"}) {
        TempDir of;                                 // what lies beside a vocabulary is read, too
        refused(of / name, [](const std::string& p) { Tokenizer::load(p); });
    }
    for (const auto& [bytes, said] : FILES) {       // as text, all but a pointer are data
        write_file(dir / "a.txt", bytes);
        if (&bytes != &FILES[0].first) { CHECK(inspect_shard(dir / "a.txt").tokens == bytes.size()); continue; }
        CHECK(throws_with([&] { inspect_shard(dir / "a.txt"); }, said) == EXIT_BAD_INPUT);
    }
}

TEST_CASE("stand-in: a header that is as long as a pickle begins is a header", "[import]") {
    TempDir dir;
    for (const size_t length : {0x280, 0x480, 0x580, 0x10280}) {
        std::string header = "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", size(8, '\0');
        header.resize(length, ' ');
        for (size_t i = 0; i < 4; i++) { size[i] = (char)(length >> 8 * i); }
        write_file(dir / "m.safetensors", size + header + std::string(4, '\0'));
        CHECK(Safetensors(dir / "m.safetensors").entries.size() == 1);
    }
}

TEST_CASE("stand-in: names on the hub, and the root of its cache", "[import][tokenizer]") {
    const auto refused = [](const std::string& path, const std::string& text) {
        CHECK(throws_with([&] { find_weights(path); }, path + ": " + text) == EXIT_BAD_INPUT);
        CHECK(throws_with([&] { Tokenizer::load(path); }, path + ": " + text) == EXIT_BAD_INPUT);
    };
    const std::string way = "there is no such file or directory; a model on the hub: pip install huggingface_hub; hf "
                            "download ";
    for (const char* name : {"openai-community/gpt2", "https://huggingface.co/openai-community/gpt2"}) {
        refused(name, way + "openai-community/gpt2 --local-dir gpt2");
    }
    refused("Qwen2.5-0.5B", way + "Qwen2.5-0.5B ");
    for (const char* name : {"model.safetensors", "llmc/none", "./none/x", "/none/x", "../none", "none/a/b", ""}) {
        CHECK(find_weights(name) == name);          // a file that is missing here is not looked for on the hub
    }
    TempDir dir;
    const std::string root = dir / "models--openai-community--gpt2", found = root + "/snapshots/607a30d783";
    for (const std::string& path : {root, root + "/snapshots", found}) { io_mkdirs(path); }
    refused(root, "expected a model, got the root of its cache; give " + found);
    refused(root + "/snapshots", "expected a model, got the root of its cache; give " + found);
}

}  // namespace
