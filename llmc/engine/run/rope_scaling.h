// run/rope_scaling.h -- rope's base and stretch (rope.cuh): in the flags --rope_theta and --rope_scaling, in
// config.json under Hugging Face's names, and in log.jsonl:
//
//   --rope_theta 500000 --rope_scaling yarn:4
//   "rope_theta": 500000,
//   "rope_scaling": {"rope_type": "yarn_paper", "factor": 4, "original_max_position_embeddings": 1024}
//
// (Older files say "yarn". But transformers' YaRN has a ramp over the numbers of the pairs, and the paper's is over
// their turns.)
//
//   --rope_scaling longrope:FILE
//   "rope_scaling": {"rope_type": "longrope", "factor": 4, "original_max_position_embeddings": 1024,
//                    "short_factor": [1, ...], "long_factor": [1.03, ...]}
// FILE has such an object. It may leave out rope_type, factor (then T / the original length) and
// original_max_position_embeddings (then the model's).
#pragma once

#include "../json.h"
#include "../../position/encoding.cuh"

struct RopeScalingName { RopeScaling scaling; const char *flag, *file; };
constexpr RopeScalingName rope_scaling_names[] = {{RopeScaling::None, "none", "default"},
                                                  {RopeScaling::PI, "pi", "linear"},
                                                  {RopeScaling::NTK, "ntk", "ntk"},
                                                  {RopeScaling::YaRN, "yarn", "yarn_paper"},
                                                  {RopeScaling::LongRoPE, "longrope", "longrope"}};

inline const RopeScalingName& rope_scaling_name(RopeScaling scaling) {
    for (const RopeScalingName& n : rope_scaling_names) { if (n.scaling == scaling) { return n; } }
    die(EXIT_BAD_INPUT, "rope_scaling: there is no kind %d", (int)scaling);
}

// "yarn:4", as in --rope_scaling; "longrope:4#5d3a9c01", whose last part is a checksum of the factors
inline std::string rope_scaling_text(const PositionConfig& position) {
    std::string text = rope_scaling_name(position.scaling).flag;
    if (position.scaling_factor > 0) { text += strprintf(":%.9g", position.scaling_factor); }
    if (position.scaling != RopeScaling::LongRoPE) { return text; }
    uint64_t sum = 0;
    for (const std::vector<double>* factors : {&position.short_factor, &position.long_factor}) {
        sum = checksum(factors->data(), sizeof(double) * factors->size(), sum);
    }
    return text + strprintf("#%08x", (unsigned)sum);
}

// The object for T tokens; null: no stretch
inline Json rope_scaling_json(const PositionConfig& position, int T) {
    if (position.scaling == RopeScaling::None) { return Json(); }
    Json j = {{"rope_type", rope_scaling_name(position.scaling).file}, {"factor", position.stretch(T)},
              {"original_max_position_embeddings", position.original_length()}};
    if (position.scaling == RopeScaling::LongRoPE) {
        j["short_factor"] = position.short_factor;
        j["long_factor"] = position.long_factor;
    }
    return j;
}

// The factors of LongRoPE under `key`; rope.cuh checks their number
inline std::vector<double> rope_factors(const Json& j, const char* key, const std::string& what) {
    const Json& list = json_at(j, key, what);
    check(list.is_array(), "%s: %s: expected a list of numbers, got %s", what.c_str(), key, json_excerpt(list).c_str());
    std::vector<double> factors;
    for (const Json& item : list) {
        const double factor = item.is_number() ? item.get<double>() : NAN;
        check(std::isfinite(factor) && factor >= 1e-290,        // so that position / factor, an angle, is finite
              "%s: %s: expected numbers of at least 1e-290, got %s as number %zu", what.c_str(), key,
              json_excerpt(item).c_str(), factors.size() + 1);
        factors.push_back(factor);
    }
    return factors;
}

// Sets the stretch of `position` from the "rope_scaling" of a config.json, which may be null.
inline void rope_scaling_from_json(const Json& j, PositionConfig& position, const std::string& what) {
    if (j.is_null()) { return; }
    check(j.is_object(), "%s: rope_scaling: expected an object, got %s", what.c_str(), json_excerpt(j).c_str());
    std::string type = json_string(j, j.contains("rope_type") ? "rope_type" : "type", what);
    if (type == "yarn") { type = "yarn_paper"; }
    for (const auto& item : j.items()) {
        const std::string& key = item.key();
        const bool factors = type == "longrope" && (key == "short_factor" || key == "long_factor");
        check(key == "rope_type" || key == "type" || key == "factor" || key == "original_max_position_embeddings" ||
              factors, "%s: rope_scaling: expected rope_type, factor and original_max_position_embeddings, and for "
              "longrope short_factor and long_factor, got '%s'", what.c_str(), printable(key).c_str());
    }
    const auto* end = std::end(rope_scaling_names);
    const auto* found = std::find_if(std::begin(rope_scaling_names), end, [&](auto& n) { return type == n.file; });
    check(found != end, "%s: rope_scaling: expected rope_type linear, ntk, yarn_paper or longrope, got '%s'",
          what.c_str(), printable(type).c_str());
    position.scaling = found->scaling;
    if (position.scaling == RopeScaling::None) { return; }
    check(position.has("rope"), "%s: rope_scaling: only rope can be stretched, and the encoding is %s", what.c_str(),
          position.name.c_str());
    position.scaling_factor = json_number(j, "factor", what);
    check(position.scaling_factor >= 1, "%s: rope_scaling: expected a factor of at least 1, got %g", what.c_str(),
          position.scaling_factor);
    if (j.contains("original_max_position_embeddings")) {
        position.T_original = (int)json_int(j, "original_max_position_embeddings", 1, INT32_MAX, what);
    }
    if (position.scaling != RopeScaling::LongRoPE) { return; }
    position.short_factor = rope_factors(j, "short_factor", what);
    position.long_factor = rope_factors(j, "long_factor", what);
}

// --rope_scaling longrope:FILE -> the factor of each pair, s, and the original length if the file has it
inline void read_longrope(const std::string& path, PositionConfig& position) {
    Json j = read_json(path);
    check(j.is_object(), "%s: expected an object with short_factor and long_factor, got %s", path.c_str(),
          json_excerpt(j).c_str());
    const bool has_factor = j.contains("factor");
    if (!has_factor) { j["factor"] = 1; }
    if (!j.contains("rope_type") && !j.contains("type")) { j["rope_type"] = "longrope"; }
    rope_scaling_from_json(j, position, path);
    check(position.scaling == RopeScaling::LongRoPE, "%s: expected rope_type longrope", path.c_str());
    if (!has_factor) { position.scaling_factor = 0; }
}

// --rope_scaling ntk:4 -> the kind, and the factor s (0: T / T_original at each length)
inline void parse_rope_scaling(const std::string& text, PositionConfig& position) {
    const size_t colon = text.find(':');
    const std::string kind = text.substr(0, colon), rest = colon == std::string::npos ? "" : text.substr(colon + 1);
    for (const RopeScalingName& n : rope_scaling_names) { if (kind == n.flag) { position.scaling = n.scaling; } }
    check(position.scaling == RopeScaling::None || position.has("rope"),
          "--rope_scaling %s: only rope can be stretched, and the encoding is %s", text.c_str(), position.name.c_str());
    const bool longrope = position.scaling == RopeScaling::LongRoPE;
    position.scaling_factor = longrope ? 0.0 : strtod(rest.c_str(), nullptr);
    if (longrope && !rest.empty()) { read_longrope(rest, position); }
    const bool known = !rest.empty() || !position.long_factor.empty();
    check(!longrope || known, "--rope_scaling longrope: expected longrope:FILE, with the factors of each pair, as the "
          "model has none");
}

// ----------------------------------------------------------------------------------------------------------
// the base theta. It is a hyperparameter of rope, which config.json has with the encoding, and once more as
// "rope_theta", where other programs look for it.

// The base of all ropes of `position`; 0 if there is no rope, or if their bases differ
inline double rope_theta(const PositionConfig& position) {
    double theta = 0;
    bool same = true;
    for (const EncodingConfig& c : position.parts) {
        if (c.name != "rope") { continue; }
        same = same && (theta == 0 || theta == c.value("theta"));
        theta = c.value("theta");
    }
    return same ? theta : 0;
}

// Gives each rope of `position` the base theta. Returns whether any changed.
inline bool set_rope_theta(PositionConfig& position, double theta) {
    bool changed = false;
    for (EncodingConfig& c : position.parts) {
        for (Hyperparameter& h : c.values) {
            if (c.name != "rope" || h.key != "theta" || h.value == theta) { continue; }
            h.value = theta;
            changed = true;
        }
    }
    return changed;
}

// The "rope_theta" of a config.json, if any, must be the base that its encoding has.
inline void check_rope_theta(const Json& config, const PositionConfig& position, const std::string& what) {
    const double theta = rope_theta(position);
    if (theta == 0 || !config.contains("rope_theta")) { return; }
    const double found = json_number(config, "rope_theta", what);
    check(found == theta, "%s: rope_theta: expected %.9g, which position has, got %.9g; --rope_theta changes both",
          what.c_str(), theta, found);
}

// The entries of config.json for rope in addition to the encoding
inline void set_rope_json(Json& config, const PositionConfig& position, int T) {
    const double theta = rope_theta(position);
    const Json scaling = rope_scaling_json(position, T);
    if (theta > 0) { config["rope_theta"] = theta; }
    if (!scaling.is_null()) { config["rope_scaling"] = scaling; }
}
