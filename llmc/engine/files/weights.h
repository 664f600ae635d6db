// files/weights.h -- views, which map the tensors of a file to the model's, and config.json, the model's shape.
#pragma once

#include "../../base/tensor.h"
#include "safetensors.h"

// Where a FileTensor's elements are in an allocation of the table's layout: (rows,cols) from `offset` on, in elements
struct FileView {
    size_t offset, rows, cols;
    bool is_vector, transposed;         // in the file

    size_t size() const { return rows * cols; }
    // the shape in the file
    Shape shape() const {
        if (is_vector) { return {rows}; }
        return transposed ? Shape{cols, rows} : Shape{rows, cols};
    }
};

// the place of a FileTensor in the table's layout; an error if it is not inside its tensor
inline FileView file_view(const TensorTable& table, const FileTensor& f) {
    const size_t i = (size_t)table.index(f.tensor);
    const TensorSpec& s = table.specs[i];
    const bool inside = f.layer >= 0 && f.layer < std::max(s.layers, 1) && f.row0 <= s.rows &&
        f.rows <= s.rows - f.row0;
    // a vector cannot be transposed
    check(inside && !(f.transposed && s.cols == 0), "file tensor %s is not inside tensor %s", f.name.c_str(),
          s.name.c_str());
    return {table.offset(i, f.layer) + f.row0 * s.row_size(), f.rows, s.row_size(), s.cols == 0, f.transposed};
}

// out (cols,rows) = in (rows,cols)^T, in tiles that keep both sides in the cache: row by row, every write would touch a
// new cache line
inline void transpose_matrix(float* out, const float* in, size_t rows, size_t cols) {
    const size_t tile = 32;
    for (size_t r0 = 0; r0 < rows; r0 += tile) {
        for (size_t c0 = 0; c0 < cols; c0 += tile) {
            for (size_t c = c0; c < std::min(cols, c0 + tile); c++) {
                for (size_t r = r0; r < std::min(rows, r0 + tile); r++) { out[c * rows + r] = in[r * cols + c]; }
            }
        }
    }
}

constexpr size_t COPY_BLOCK = (size_t)1 << 20;      // elements that pass through host memory at a time

// out (count): elements first .. first + count - 1 of a tensor, in the order of the file
using ReadElements = std::function<void(float* out, size_t first, size_t count)>;

// Fills the view from a tensor of a file, through read(), if data (part) holds it. A matrix that is transposed must be
// in host memory as a whole. path, name: of the tensor, for messages. Weights that are not finite have no use.
inline void load_view(float* data, Slice part, const FileView& view, const ReadElements& read, const std::string& path,
                      const std::string& name) {
    if (view.offset < part.begin || view.offset >= part.end) { return; }
    const bool transposed = view.transposed;
    const size_t block = transposed ? view.size() : std::min(view.size(), COPY_BLOCK);
    std::vector<float> host(block);                         // in the file's order
    std::vector<float> turned(transposed ? block : 0);      // in the device's order
    for (size_t at = 0; at < view.size(); at += block) {
        const size_t n = std::min(block, view.size() - at);
        read(host.data(), at, n);
        for (size_t i = 0; i < n; i++) {
            if (std::isfinite(host[i])) { continue; }
            die(EXIT_DIVERGED, "%s: %s: element %zu: expected a finite weight, got %g (of a run that diverged?)",
                path.c_str(), name.c_str(), at + i, host[i]);
        }
        if (transposed) { transpose_matrix(turned.data(), host.data(), view.cols, view.rows); }     // (cols,rows) in
        const float* from = transposed ? turned.data() : host.data();
        copy_to_device(data + (view.offset - part.begin) + at, from, n * sizeof(float), Stream(0));
    }
}

// ----------------------------------------------------------------------------------------------------------
// config.json

// transformers' names for the extents of a model, and for its type.
// type: "model_type" with learned positions, which transformers itself computes, and in old checkpoints;
// cable: "model_type" with every other encoding, which HF_FILE computes by these of its classes
struct ConfigKeys { const char *type, *cable, *L, *NH, *C, *V, *T, *config_class, *base_class, *head, *head_class; };
constexpr ConfigKeys GPT2_KEYS = {
    .type = "gpt2", .cable = "cable",
    .L = "n_layer", .NH = "n_head", .C = "n_embd", .V = "vocab_size", .T = "n_positions",
    .config_class = "CableConfig", .base_class = "CableModel",
    .head = "AutoModelForCausalLM", .head_class = "CableForCausalLM"};
constexpr ConfigKeys BERT_KEYS = {
    .type = "bert", .cable = "cable_bert",
    .L = "num_hidden_layers", .NH = "num_attention_heads", .C = "hidden_size", .V = "vocab_size",
    .T = "max_position_embeddings", .config_class = "CableBertConfig", .base_class = "CableBertModel",
    .head = "AutoModelForMaskedLM", .head_class = "CableBertForMaskedLM"};

// The models in Python, which are written beside the weights. config.json's auto_map names the classes, so that
// transformers runs this file with trust_remote_code=True, and refuses the model otherwise.
constexpr const char* HF_FILE = "cable_hf.py";
inline const char* hf_code() {
    static const char text[] =
#include "../../../dev/hf/cable_encodings.py"
#include "../../../dev/hf/cable_hf.py"
        ;
    return text + 1;        // without the first quote, which makes R"py( a string in Python
}

// Adds our keys to transformers' configuration: "position" (null: left out), and the keys of `mask`.
inline Json with_encoding(Json j, const ConfigKeys& keys, const Json& position, const Json& mask) {
    j.update(mask);
    if (!position.is_null()) { j["position"] = position; }
    const bool learned = position.is_null() || position.value("name", "") == "learned";
    if (learned && mask.empty()) { return j; }              // transformers itself computes this model
    const std::string module = std::string(HF_FILE, strlen(HF_FILE) - strlen("py"));        // "cable_hf."
    j["model_type"] = keys.cable;
    j["architectures"] = Json::array({keys.head_class});
    j["auto_map"] = {{"AutoConfig", module + keys.config_class}, {"AutoModel", module + keys.base_class},
                     {keys.head, module + keys.head_class}};
    return j;
}

// transformers' configuration of a GPT-2, with our "position" (null: left out) and the keys of `mask`, as "window"
inline Json gpt2_config(int V, int n_positions, int n_embd, int n_layer, int n_head, const Json& position,
                        const Json& mask = Json::object()) {
    const Json j = {{"model_type", "gpt2"}, {"architectures", Json::array({"GPT2LMHeadModel"})}, {"vocab_size", V},
              {"n_positions", n_positions}, {"n_ctx", n_positions}, {"n_embd", n_embd}, {"n_layer", n_layer},
              {"n_head", n_head}, {"n_inner", nullptr}, {"activation_function", "gelu_new"},
              {"layer_norm_epsilon", 1e-5}, {"initializer_range", 0.02}, {"resid_pdrop", 0.0}, {"embd_pdrop", 0.0},
              {"attn_pdrop", 0.0}, {"scale_attn_weights", true}, {"use_cache", true}, {"tie_word_embeddings", true},
              {"bos_token_id", nullptr}, {"eos_token_id", nullptr}, {"torch_dtype", "float32"}};
    return with_encoding(j, GPT2_KEYS, position, mask);
}

// the same for a BERT for masked language modelling; pad: the id of [PAD]
inline Json bert_config(int V, int T, int C, int L, int NH, int pad, const Json& position,
                        const Json& mask = Json::object()) {
    const Json j = {{"model_type", "bert"}, {"architectures", Json::array({"BertForMaskedLM"})}, {"vocab_size", V},
              {"max_position_embeddings", T}, {"hidden_size", C}, {"num_hidden_layers", L}, {"num_attention_heads", NH},
              {"intermediate_size", 4 * C}, {"hidden_act", "gelu"}, {"type_vocab_size", 2}, {"layer_norm_eps", 1e-12},
              {"initializer_range", 0.02}, {"hidden_dropout_prob", 0.0}, {"attention_probs_dropout_prob", 0.0},
              {"pad_token_id", pad}, {"tie_word_embeddings", true}, {"position_embedding_type", "absolute"},
              {"torch_dtype", "float32"}};
    return with_encoding(j, BERT_KEYS, position, mask);
}

// An error unless the configuration is of this trainer's models, with any encoding.
inline void check_model_type(const Json& j, const ConfigKeys& keys, const std::string& what) {
    if (!j.contains("model_type")) { return; }
    const Json& type = j["model_type"];
    check(type == keys.type || type == keys.cable, "%s: model_type: expected \"%s\" or \"%s\", got %s (a model of the "
          "other trainer?)", what.c_str(), keys.type, keys.cable, json_excerpt(type).c_str());
}

// Every key of config.json is in one of these lists; any other key is refused, because it may change what the model
// computes. The lists cover what GPT2Config, BertConfig and PretrainedConfig of transformers 2 to 5 write.
//
// 1 keys that change the result, with the values for which transformers computes what our kernels compute
inline const Json& computed_values() {
    static const Json table = parse_json(R"json({
        "activation_function": ["gelu_new", "gelu_pytorch_tanh"],   "hidden_act": ["gelu"],
        "layer_norm_epsilon": [1e-5],                               "layer_norm_eps": [1e-12],
        "scale_attn_weights": [true],                               "scale_attn_by_inverse_layer_idx": [false],
        "position_embedding_type": ["absolute"],                    "tie_word_embeddings": [true],
        "is_decoder": [false],                                      "is_encoder_decoder": [false],
        "add_cross_attention": [false],                             "causal": [true],
        "pruned_heads": [{}, null],                                 "per_layer_config": [{}, null],
        "type_vocab_size": [2],
        "quantization_config": [null],                              "cross_attention_hidden_size": [null]
    })json", "computed_values");
    return table;
}
// 2 keys that do not. The tensors' shapes decide about extents; dropout matters only in training, which has none here.
constexpr const char* HARMLESS_KEYS =
    // extents, files, types of numbers, and the history of the model
    " n_ctx n_inner intermediate_size model_type architectures transformers_version _name_or_path"
    " name_or_path _commit_hash torch_dtype dtype use_bfloat16 reorder_and_upcast_attn chunk_size_feed_forward"
    " attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset"
    " gradient_checkpointing torchscript xla_device tf_legacy_loss tie_encoder_decoder built_from cable_version"
    " n_special predict_special_tokens"
    // training
    " initializer_range resid_pdrop embd_pdrop attn_pdrop hidden_dropout_prob attention_probs_dropout_prob"
    // the results of a call
    " use_cache output_past output_attentions output_hidden_states output_scores return_dict return_dict_in_generate"
    // tokens
    " bos_token_id eos_token_id eos_token_ids pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix"
    // the heads of other tasks
    " summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj classifier_dropout"
    " directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type"
    " id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params"
    // generation
    " do_sample early_stopping max_length min_length num_beams num_beam_groups num_return_sequences temperature top_k"
    " top_p typical_p diversity_penalty repetition_penalty length_penalty exponential_decay_length_penalty"
    " no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens"
    " forced_bos_token_id forced_eos_token_id remove_invalid_values ";
// 3 keys of ours, checked by their readers; a file without "position" is not ours
constexpr const char* OUR_KEYS =
    " position encoding_version rope_scaling rope_theta window sinks document_mask vocab_softmax vocab_used pooling"
    " auto_map ";

// An error if transformers would compute something from this configuration that this program does not.
inline void check_computed(const Json& j, const ConfigKeys& keys, const std::string& what) {
    std::string free = HARMLESS_KEYS;
    for (const char* key : {keys.L, keys.NH, keys.C, keys.V, keys.T}) { free += key + std::string(" "); }
    if (j.contains("position")) { free += OUR_KEYS; }
    check_keys(j, computed_values(), free, std::string("a ") + keys.type, "what the model computes", what);
}

// Rope's base is not compared: no tensor depends on it, and --rope_theta may change it (run/config.h decides).
inline Json without_theta(Json position) {
    if (position.is_object()) { position.erase("theta"); }
    if (position.is_structured()) { for (Json& item : position) { item = without_theta(item); } }
    return position;
}

// An error unless the configuration `found` fits `wanted`. Other software writes no "position", which fits any.
inline void check_config(const Json& found, const Json& wanted, const std::string& what) {
    const ConfigKeys& keys = wanted.contains(BERT_KEYS.C) ? BERT_KEYS : GPT2_KEYS;
    check_model_type(found, keys, what);
    for (const char* key : {keys.L, keys.NH, keys.C, keys.V}) {
        const int64_t have = json_int(found, key, 1, INT32_MAX, what);
        const int64_t want = json_int(wanted, key, 1, INT32_MAX, "the model");
        check(have == want, "%s: %s: expected %lld, got %lld (--model)", what.c_str(), key, (long long)want,
              (long long)have);
    }
    check_computed(found, keys, what);
    if (!found.contains("position") || !wanted.contains("position")) { return; }
    // the encoding: its name and all hyperparameters
    const Json have = without_theta(found["position"]), want = without_theta(wanted["position"]);
    check(have.is_object() && want.is_object(), "%s: position: expected an object, got %s", what.c_str(),
          json_excerpt(have).c_str());
    // a file without a hyperparameter predates it, and means the value that was fixed then (run/config.h)
    check(have.contains("name"), "%s: position: expected a name, got %s", what.c_str(), json_excerpt(have).c_str());
    for (const auto& item : have.items()) {
        const std::string key = item.key();
        const std::string w = want.contains(key) ? json_excerpt(want[key]) : "absent";
        check(want.contains(key) && item.value() == want[key], "%s: position.%s: expected %s, got %s (--pos)",
              what.c_str(), key.c_str(), w.c_str(), json_excerpt(item.value()).c_str());
    }
}
